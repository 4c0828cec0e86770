"""Builds the OpenAPI 3.1 document from routes, body models, field tables and error codes.

The models do not describe which fields exclude each other: such a request gets 400.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from controller.frontend.errors import CODES
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.responses import JSON
from controller.frontend.openai.request_models import (
    IGNORED,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    REFUSED_BY_TOKENIZE,
    ChatBody,
    CompletionBody,
    StreamOptions,
    TokenizeChatBody,
    TokenizePromptBody,
)
from controller.frontend.request.routing_overrides import EXPLAIN, OVERRIDABLE, header

Handler = Callable[[OpenAiEndpoints, web.BaseRequest], Awaitable[web.StreamResponse]]
VERSION = version("holdfast")
MODEL = "{model}"  # the rest of a path, with any content
_AT = "#/components/schemas/"
_REFUSED: dict[str, Mapping[str, tuple[Any, ...]]] = {
    ChatBody.__name__: REFUSED_BY_CHAT,
    CompletionBody.__name__: REFUSED_BY_COMPLETIONS,
    TokenizeChatBody.__name__: REFUSED_BY_TOKENIZE,
    TokenizePromptBody.__name__: REFUSED_BY_TOKENIZE,
}
_GENERATES = (ChatBody.__name__, CompletionBody.__name__)
_IGNORE = {"": _GENERATES, "stream_options": (StreamOptions.__name__,)}
_HEADERS = {
    "X-Request-Id": "the client's id of the request",
    "X-Priority": "premium, standard or best_effort",
    "traceparent": "trace of the request (W3C Trace Context)",
    "X-Holdfast-TTFT-Deadline-Ms": "maximum milliseconds to the first token; with admission by deadlines only, like the next two",
    "X-Holdfast-Queue-TTL-Ms": "maximum milliseconds in the queue",
    "X-Holdfast-Client": "client of the request: the clients of a tier share workers fairly",
    EXPLAIN: "1: explain the choice of the worker in the response header of the same name",
    **{header(name): "router setting for this request" for name in OVERRIDABLE},
}


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    handler: Handler
    says: str
    bodies: tuple[type[BaseModel], ...] = ()  # one of these is expected
    answer: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = (JSON,)
    api: bool = True  # served on the shared API port; otherwise on the admin port too
    admin: bool = False  # served on the API port only if that is enabled


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    about = "The OpenAI API, with a part of vLLM's API."
    error = {
        "description": "The request failed. `message` explains it in one sentence; `code` is stable.",
        "content": _json({"$ref": f"{_AT}Error"}),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Holdfast", "version": VERSION, "description": about},
        "paths": paths,
        "components": {"schemas": dict(_schemas(routes)), "responses": {"Error": error}},
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {JSON: {"schema": schema}}


def _operation(route: Route) -> dict[str, Any]:
    failed = (
        {"$ref": "#/components/responses/Error"}
        if route.media
        else {"description": "Requests cannot be served."}
    )
    made: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{route.path.strip('/').replace('/', '_').strip('{}')}",
        "summary": route.says,
        "tags": ["api" if route.api else "operations"],
        "responses": {"200": {"description": "Success.", **_content(route)}, "default": failed},
    }
    if parameters := list(_parameters(route)):
        made["parameters"] = parameters
    if route.bodies:
        refs = [{"$ref": _AT + body.__name__} for body in route.bodies]
        made["requestBody"] = {
            "required": True,
            "content": _json(refs[0] if len(refs) == 1 else {"anyOf": refs}),
        }
    return made


def _content(route: Route) -> dict[str, Any]:
    schema = {"schema": {"$ref": _AT + route.answer.__name__}} if route.answer is not None else {}
    return {"content": dict.fromkeys(route.media, schema)} if route.media else {}


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    text = {"type": "string"}
    if MODEL in route.path:
        yield {"name": MODEL.strip("{}"), "in": "path", "required": True, "schema": text}
    if {body.__name__ for body in route.bodies} & set(_GENERATES):
        for name, says in _HEADERS.items():
            yield {"name": name, "in": "header", "required": False, "schema": text, "description": says}


def _schemas(routes: Sequence[Route]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema that the paths refer to, with its name."""
    bodies = [(body, "validation") for route in routes for body in route.bodies]
    _, found = models_json_schema(bodies, ref_template=f"{_AT}{MODEL}")  # type: ignore[arg-type]
    for name, schema in found["$defs"].items():
        properties = schema["properties"]
        for field, harmless in _REFUSED.get(name, {}).items():
            properties[field] = {"enum": list(harmless), "description": "any other value is refused"}
        for field, why in IGNORED.items():
            whole, _, part = field.rpartition(".")
            if name in _IGNORE.get(whole, ()):
                properties[part] = {"description": f"ignored: {why}"}
        yield name, schema
    answers = [route.answer for route in routes if route.answer is not None]
    yield from msgspec.json.schema_components(answers, ref_template=f"{_AT}{{name}}")[1].items()
    yield "Error", _error()


def _error() -> dict[str, Any]:
    nothing, text = {"type": "null"}, {"type": "string"}
    code = {"type": "string", "description": f"one of {', '.join(sorted(CODES))}"}
    fields = {"message": text, "type": text, "param": {"anyOf": [text, nothing]}, "code": code}
    error = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}
