"""Explains which worker a prompt would be sent to, and why (`holdfast route`). Nothing is sent.

The worker is chosen as for a real request, from this frontend's current state. In round-robin mode, this advances the
rotation.
"""

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from controller.frontend.director import Director
from controller.frontend.errors import invalid, unavailable
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.served_models import chosen_model
from controller.frontend.openai.completion import read_prompts
from controller.frontend.openai.request_models import SALT_CHARS_MAX
from controller.frontend.openai.request_parser import parse_completion, validated
from controller.frontend.request.routing_overrides import RoutingOverrides, overridden
from controller.frontend.request.state import GenerationRequest
from controller.frontend.scheduling.scheduler import explained
from controller.router.endpoints import Endpoint, Lineage
from controller.router.selection.filter import AllBusy, AllClosed, NoneReachable, NotServed, NoWorker
from events.blocks import BlockNames, seed
from events.wire import Sampling

WHY = {
    "kv": "the lowest cost",
    "least-loaded": "the least loaded",
    "power-of-two": "the less loaded of two random workers",
    "round-robin": "next in turn",
    "random": "random choice",
}
WHY_NOT: dict[type[NoWorker], str] = {
    NotServed: "it has a different revision or tokenizer",
    NoneReachable: "this frontend cannot reach it",
    AllBusy: "it has the maximum number of requests",
}


class RoutingQuestion(BaseModel):
    """The body of the request: the prompt as text or as token ids, and the router settings that headers may override."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = ""  # empty: the only served model
    prompt: str | None = None
    tokens: list[int] | None = None
    cache_salt: str = Field(default="", max_length=SALT_CHARS_MAX)
    router: dict[str, str] = Field(default_factory=dict)


async def explain(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> dict[str, object]:
    """Return the worker that would get a prompt, and why: the parts of each candidate's cost.

    Also return why the other workers of the model are not candidates. The request's body is a `RoutingQuestion` as
    JSON. Raise ApiError: 400 if the body is invalid, 404 if no worker serves the model, 503 if no worker can serve the
    prompt now.
    """
    director = endpoints.director
    scheduler, table = director.routing, director.table
    question = validated(RoutingQuestion, await endpoints.intake.parsed("json", request))
    if (question.prompt is None) == (question.tokens is None):
        raise invalid("give either prompt or tokens", "prompt")
    served = chosen_model(director, question.model)
    model, adapter = table.model_of(served), table.adapter_of(served)
    settings = overridden(director.settings.router, tuple(question.router.items()))
    try:
        lineage = scheduler.lineage(served)
        tokens = await endpoints.tokens_of(model, lineage)
        given = question.prompt if question.prompt is not None else question.tokens
        parsed = parse_completion({"model": model, "prompt": given})
        context = scheduler.group(served, lineage).context_tokens
        ((prompt, _),) = await read_prompts(parsed, tokens, context, endpoints.intake)
        plan = GenerationRequest(
            id="",
            model=model,
            lineage=lineage,
            prompt=prompt,
            sampling=Sampling(max_tokens=1),
            deterministic=True,
            names=BlockNames(prompt, seed(lora=adapter, namespace=question.cache_salt)),
            adapter=adapter,
            cache_salt=question.cache_salt,
            overrides=RoutingOverrides(settings, explain=True),
        )
        found = scheduler.shortlist(plan)
    except NoWorker as error:
        raise unavailable(str(error), error.code, 1) from error
    why = WHY[settings.mode]
    if settings.mode == "kv" and settings.temperature > 0:
        why += ", drawn at random with a preference for lower cost"
    others = [endpoint for endpoint in table.models.get(model, ()) if endpoint not in found]
    return explained(scheduler.choose(found, plan)) | {
        "model": served,
        "why": why,
        "known": scheduler.state.known,
        "left_out": [
            {"worker": endpoint.worker, "why": _why_not(director, endpoint, lineage, adapter)}
            for endpoint in others
        ],
    }


def _why_not(director: Director, endpoint: Endpoint, lineage: Lineage, adapter: str) -> str:
    """Return why a worker that serves the model is not a candidate for the prompt."""
    if not endpoint.has(adapter):
        return "it does not have the adapter"
    if not endpoint.routable:
        return f"the fleet took it out of service ({endpoint.status.value})"
    try:
        director.routing.room_at(endpoint, lineage)
    except AllClosed as error:
        return f"its server accepts no new requests for {error.wait_s:.1f} s"
    except NoWorker as error:
        return WHY_NOT.get(type(error), "this frontend's local breaker is open")
    return "other workers were heard from more recently"
