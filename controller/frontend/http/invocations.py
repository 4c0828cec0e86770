"""POST /invocations: SageMaker's path for every kind of request, as in vLLM.

The fields of the body decide which path handles it:

    messages ──▶ /v1/chat/completions, or what else the model's servers offer
    prompt ──▶ /v1/completions
    input, documents, text_1 … ──▶ the first of the paths without generated tokens that a server of the model offers
"""

import asyncio

import msgspec
from aiohttp import web
from msgspec import UNSET, Raw, UnsetType

from controller.frontend.errors import invalid
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.served_models import chosen_model
from controller.frontend.openai import request_head as heads
from controller.frontend.openai.request_parser import bad_json
from controller.frontend.openai.sse import StreamedResponse
from events.proxied_paths import CHATS, COMPLETIONS

EMBEDDINGS = "/v1/embeddings"
GENERATING = (CHATS, COMPLETIONS)
PATHS = {
    "messages": (CHATS, EMBEDDINGS, "/classify", "/pooling"),
    "prompt": (COMPLETIONS,),
    "input": (EMBEDDINGS, "/classify", "/pooling"),
    "documents": ("/rerank", "/score"),
    "text_1": ("/score",),
    "queries": ("/score",),
    "data_1": ("/score",),
}
"""For each field: the paths that take it, the first one that is offered is used."""


class Invocation(msgspec.Struct):
    """The fields of a body that decide which path handles it."""

    model: str | None = None
    messages: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    documents: Raw | UnsetType = UNSET
    text_1: Raw | UnsetType = UNSET
    queries: Raw | UnsetType = UNSET
    data_1: Raw | UnsetType = UNSET


async def invoke(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Handle a request as its body demands. Raise ApiError (400) if no path of the model takes such a body."""
    director = endpoints.director
    body = bytes((await endpoints.intake.receive(request)).body)
    path = _path(endpoints, body)
    version, keep = (request.version.major, request.version.minor), bool(request.keep_alive)
    head = heads.read_head(path, request.headers, version, director.table.tiers, keep=keep)
    transport = request.transport
    if transport is None:
        raise asyncio.CancelledError  # the client has disconnected
    response = await endpoints.answer(endpoints.with_own_headers(head, request), body, transport)
    return StreamedResponse(keep=head.keep) if response is None else response


def _path(endpoints: OpenAiEndpoints, body: bytes) -> str:
    """Return the path that handles a body."""
    try:
        found = msgspec.json.decode(body, type=Invocation)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_json(str(error)) from error
    director = endpoints.director
    model, table = chosen_model(director, found.model), director.table
    offered = {path for one in table.models.get(model, ()) for path in one.joined.paths or GENERATING}
    for field, paths in PATHS.items():
        if getattr(found, field) is not UNSET:
            for path in paths:
                if path in offered:
                    return path
    raise invalid(f"the body has none of the fields that {model} takes: {', '.join(PATHS)}")
