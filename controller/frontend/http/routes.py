"""The table of HTTP routes with their handlers, and the OpenAPI document made from the table.

The OpenAPI 3.1 document (/openapi.json) is built from the routes, the body models, the field tables and the error
codes. The models do not describe which fields exclude each other. A request with two such fields gets 400.
"""

from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import NamedTuple

import msgspec
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from controller.frontend.errors import CODES
from controller.frontend.http import messages_endpoints, responses_endpoints, status_endpoints, tokenizing
from controller.frontend.http.docs_page import PAGE_HEADERS, docs_page
from controller.frontend.http.messages_endpoints import CountedTokens
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import JSON, json_answer
from controller.frontend.http.responses_endpoints import DeletedResponse
from controller.frontend.http.served_models import ModelEntry
from controller.frontend.http.status_endpoints import VERSION, ModelList, ServerLoad, Version
from controller.frontend.http.tokenizing import Detokenized, Tokenized
from controller.frontend.openai import request_models as models
from controller.frontend.openai.messages import models as messages
from controller.frontend.openai.request_head import ENDPOINTS
from controller.frontend.openai.responses import models as responses
from controller.frontend.request.routing_overrides import EXPLAIN, OVERRIDABLE, header
from events.proxied_paths import AUDIO, POOLING

Handler = Callable[[OpenAiEndpoints, web.BaseRequest], Awaitable[web.StreamResponse]]
Schema = dict[str, object]
EVENTS, TEXT, HTML = "text/event-stream", "text/plain", "text/html"
MODEL = "{model}"  # stands for the rest of a path, which may be any text
MODEL_PATH = f"/v1/models/{MODEL}"
RESPONSE = "{response_id}"
RESPONSE_PATH = f"{responses_endpoints.PATH}{RESPONSE}"
_AT = "#/components/schemas/"
_REFUSED = {
    models.ChatBody.__name__: models.REFUSED_BY_CHAT,
    models.CompletionBody.__name__: models.REFUSED_BY_COMPLETIONS,
    models.TokenizeChatBody.__name__: models.REFUSED_BY_TOKENIZE,
    models.TokenizePromptBody.__name__: models.REFUSED_BY_TOKENIZE,
    messages.MessagesBody.__name__: messages.REFUSED_BY_MESSAGES,
    messages.CountTokensBody.__name__: messages.REFUSED_BY_MESSAGES,
    responses.ResponsesBody.__name__: responses.REFUSED_BY_RESPONSES,
}
_IN_OPTIONS = "stream_options."
_IGNORED: dict[str, dict[str, str]] = {
    models.ChatBody.__name__: models.IGNORED,
    models.CompletionBody.__name__: models.IGNORED,
    models.StreamOptions.__name__: {
        name.removeprefix(_IN_OPTIONS): why
        for name, why in models.IGNORED.items()
        if name.startswith(_IN_OPTIONS)
    },
    messages.MessagesBody.__name__: messages.IGNORED_BY_MESSAGES,
    messages.CountTokensBody.__name__: messages.IGNORED_BY_COUNT_TOKENS,
    responses.ResponsesBody.__name__: responses.IGNORED_BY_RESPONSES,
}
_HEADERS = {
    "X-Request-Id": "the client's id of the request",
    "X-Holdfast-Mode": "exact or proxied: whether the server behind a worker gets the body unchanged",
    "X-Priority": "premium, standard or best_effort",
    "traceparent": "trace of the request (W3C Trace Context)",
    "X-Holdfast-TTFT-Deadline-Ms": "maximum milliseconds to the first token; with admission by deadlines only, like the next two",
    "X-Holdfast-Queue-TTL-Ms": "maximum milliseconds in the queue",
    "X-Holdfast-Client": "client of the request: the clients of a tier share workers fairly",
    EXPLAIN: "1: explain the choice of the worker in the response header of the same name",
    **{header(name): "router setting for this request" for name in OVERRIDABLE},
}


class Route(NamedTuple):
    """One method of one path, with its handler and its entry in the OpenAPI document."""

    method: str
    path: str
    handler: Handler
    says: str
    bodies: tuple[type[BaseModel], ...] = ()  # the request body must match one of these models
    answer: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = (JSON,)
    api: bool = True  # served on the shared API port; if false, also on the admin port
    admin: bool = False  # served on the API port only if that is enabled


async def openapi(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Handle GET /openapi.json."""
    return json_answer(document())


async def docs(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Handle GET /docs."""
    page = docs_page(msgspec.json.decode(document()))
    return web.Response(text=page, content_type=HTML, headers=PAGE_HEADERS)


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", OpenAiEndpoints.serve, "Create a chat completion.", (models.ChatBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/completions", OpenAiEndpoints.serve, "Create a text completion.", (models.CompletionBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/invocations", OpenAiEndpoints.serve,
        "Create a chat completion from a body with messages, or a text completion from one with a prompt (SageMaker).",
        (models.ChatBody, models.CompletionBody), media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/messages", OpenAiEndpoints.serve, "Create a message (Anthropic's API).", (messages.MessagesBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/messages/count_tokens", messages_endpoints.count_tokens, "Count the tokens of a message's prompt.",
        (messages.CountTokensBody,), CountedTokens,
    ),
    Route(
        "POST", "/v1/responses", OpenAiEndpoints.serve, "Create a response.", (responses.ResponsesBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "GET", RESPONSE_PATH, responses_endpoints.retrieve, "Return a stored response, or one in progress.",
    ),
    Route(
        "DELETE", RESPONSE_PATH, responses_endpoints.delete, "Delete a stored response.", answer=DeletedResponse,
    ),
    Route(
        "POST", f"{RESPONSE_PATH}/cancel", responses_endpoints.cancel,
        "Cancel a response in progress; one that has ended is returned unchanged.",
    ),
    *(
        Route("POST", path, OpenAiEndpoints.serve, "Pass the request on to a server of the model.", (models.PoolingBody,))
        for path in POOLING
    ),
    *(Route("POST", path, OpenAiEndpoints.serve, "Pass the request on to a server of the model.") for path in AUDIO),
    Route("GET", "/v1/models", status_endpoints.models, "List the served models.", answer=ModelList),
    Route("GET", MODEL_PATH, status_endpoints.model, "Describe a served model.", answer=ModelEntry),
    Route(
        "POST", "/tokenize", tokenizing.tokenize, "Return the tokens of a text or a conversation.",
        (models.TokenizePromptBody, models.TokenizeChatBody), Tokenized,
    ),
    Route(
        "POST", "/detokenize", tokenizing.detokenize, "Return the text of tokens.", (models.DetokenizeBody,), Detokenized
    ),
    Route(
        "GET", "/busy_threshold", status_endpoints.thresholds, "Return the busy thresholds of every model.", api=False,
        admin=True,
    ),
    Route(
        "POST", "/busy_threshold", status_endpoints.set_thresholds,
        "Set the busy thresholds of a model on all frontends.", (models.BusyThresholdBody,), api=False, admin=True,
    ),
    Route("GET", "/openapi.json", openapi, "Return this document.", api=False),
    Route("GET", "/docs", docs, "Return this document as a page.", media=(HTML,), api=False),
    Route("GET", "/load", status_endpoints.load, "Return the number of requests in progress.", answer=ServerLoad, api=False),
    Route("GET", "/version", status_endpoints.version, "Return the version of Holdfast.", answer=Version, api=False),
    Route("GET", "/ping", status_endpoints.ping, "Return the status of /health, without a body.", media=(), api=False),
    Route("POST", "/ping", status_endpoints.ping, "Return the status of /health, without a body.", media=(), api=False),
    Route("GET", "/health", status_endpoints.health, "Return whether requests can be served.", api=False),
    Route("GET", "/ready", status_endpoints.health, "Return whether requests can be served.", api=False),
    Route("GET", "/live", status_endpoints.live, "Return 200 while the process is alive.", api=False),
    Route("GET", "/metrics", status_endpoints.metrics, "Return the metrics in Prometheus format.", media=(TEXT,), api=False),
)  # fmt: skip
ROUTE_OF = {(route.method, route.path): route for route in ROUTES}


def templated(path: str) -> str:
    """Return the path template that a path matches, or the path itself if it matches none."""
    before, _, _ = MODEL_PATH.partition(MODEL)
    if path.startswith(before):
        return MODEL_PATH
    if path.startswith(responses_endpoints.PATH):
        id, slash, rest = path.removeprefix(responses_endpoints.PATH).partition("/")
        return RESPONSE_PATH + slash + rest if id else path
    return path


@cache
def document() -> bytes:
    """Return the OpenAPI document of all routes as JSON."""
    paths: dict[str, Schema] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    about = "The OpenAI API, with a part of vLLM's API."
    error = {
        "description": "The request failed. `message` explains it in one sentence; `code` is stable.",
        "content": _json({"$ref": f"{_AT}Error"}),
    }
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": VERSION, "description": about},
        "paths": paths,
        "components": {"schemas": dict(_schemas()), "responses": {"Error": error}},
    }
    return msgspec.json.encode(whole)


def _json(schema: Schema) -> Schema:
    return {JSON: {"schema": schema}}


def _operation(route: Route) -> Schema:
    schema = {"schema": {"$ref": _AT + route.answer.__name__}} if route.answer is not None else {}
    content = {"content": dict.fromkeys(route.media, schema)} if route.media else {}
    error, unservable = "#/components/responses/Error", "Requests cannot be served."
    failed = {"$ref": error} if route.media else {"description": unservable}
    made: Schema = {
        "operationId": f"{route.method.lower()}_{route.path.strip('/').replace('/', '_').strip('{}')}",
        "summary": route.says,
        "tags": ["api" if route.api else "operations"],
        "responses": {"200": {"description": "Success.", **content}, "default": failed},
    }
    if parameters := list(_parameters(route)):
        made["parameters"] = parameters
    if route.bodies:
        refs: list[Schema] = [{"$ref": _AT + body.__name__} for body in route.bodies]
        made["requestBody"] = {
            "required": True,
            "content": _json(refs[0] if len(refs) == 1 else {"anyOf": refs}),
        }
    return made


def _parameters(route: Route) -> Iterator[Schema]:
    text = {"type": "string"}
    for name in (MODEL, RESPONSE):
        if name in route.path:
            yield {"name": name.strip("{}"), "in": "path", "required": True, "schema": text}
    if route.path in ENDPOINTS:
        for name, says in _HEADERS.items():
            yield {"name": name, "in": "header", "required": False, "schema": text, "description": says}


def _schemas() -> Iterator[tuple[str, Schema]]:
    """Yield the name and content of each schema that the paths refer to."""
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (body, "validation") for route in ROUTES for body in route.bodies
    ]
    _, found = models_json_schema(bodies, ref_template=f"{_AT}{MODEL}")
    for name, schema in found["$defs"].items():
        properties = schema["properties"]
        for field, harmless in _REFUSED.get(name, {}).items():
            properties[field] = {"enum": list(harmless), "description": "any other value is refused"}
        for field, why in _IGNORED.get(name, {}).items():
            if "." not in field:
                properties[field] = {"description": f"ignored: {why}"}
        yield name, schema
    answers = [route.answer for route in ROUTES if route.answer is not None]
    yield from msgspec.json.schema_components(answers, ref_template=f"{_AT}{{name}}")[1].items()
    yield "Error", _error()


def _error() -> Schema:
    nothing, text = {"type": "null"}, {"type": "string"}
    code = {"type": "string", "description": f"one of {', '.join(sorted(CODES))}"}
    fields = {"message": text, "type": text, "param": {"anyOf": [text, nothing]}, "code": code}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
