"""The table of routes: the handler of each method and path. /openapi.json is generated from it."""

from functools import cache

import msgspec
from aiohttp import web

from controller.frontend.http import busy_threshold, status_endpoints, tokenizing
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.openapi import MODEL, Route, document
from controller.frontend.http.responses import JSON, json_answer
from controller.frontend.openai.request_models import (
    BusyThresholdBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from controller.frontend.openai.response_models import Detokenized, ModelEntry, ModelList, Tokenized, Version

EVENTS, TEXT = "text/event-stream", "text/plain"
MODEL_PATH = f"/v1/models/{MODEL}"


@cache
def encoded() -> bytes:
    """Return the OpenAPI document of all routes as JSON."""
    return msgspec.json.encode(document(ROUTES))


async def openapi(endpoints: OpenAiEndpoints, request: web.BaseRequest) -> web.StreamResponse:
    """Handle GET /openapi.json."""
    return json_answer(encoded())


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", OpenAiEndpoints.serve, "Create a chat completion.", (ChatBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/completions", OpenAiEndpoints.serve, "Create a text completion.", (CompletionBody,), media=(JSON, EVENTS)
    ),
    Route("GET", "/v1/models", status_endpoints.models, "List the served models.", answer=ModelList),
    Route("GET", MODEL_PATH, status_endpoints.model, "Describe a served model.", answer=ModelEntry),
    Route(
        "POST", "/tokenize", tokenizing.tokenize, "Return the tokens of a text or a conversation.",
        (TokenizePromptBody, TokenizeChatBody), Tokenized,
    ),
    Route(
        "POST", "/detokenize", tokenizing.detokenize, "Return the text of tokens.", (DetokenizeBody,), Detokenized
    ),
    Route(
        "GET", "/busy_threshold", busy_threshold.thresholds, "Return the busy thresholds of every model.", api=False,
        admin=True,
    ),
    Route(
        "POST", "/busy_threshold", busy_threshold.set_thresholds,
        "Set the busy thresholds of a model on all frontends.", (BusyThresholdBody,), api=False, admin=True,
    ),
    Route("GET", "/openapi.json", openapi, "Return this document.", api=False),
    Route("GET", "/version", status_endpoints.version, "Return the version of Holdfast.", answer=Version, api=False),
    Route("GET", "/ping", status_endpoints.ping, "Return the status of /health, without a body.", media=(), api=False),
    Route("POST", "/ping", status_endpoints.ping, "Return the status of /health, without a body.", media=(), api=False),
    Route("GET", "/health", status_endpoints.health, "Return whether requests can be served.", api=False),
    Route("GET", "/ready", status_endpoints.health, "Return whether requests can be served.", api=False),
    Route("GET", "/live", status_endpoints.live, "Return 200 while the process is alive.", api=False),
    Route("GET", "/metrics", status_endpoints.metrics, "Return the metrics in Prometheus format.", media=(TEXT,), api=False),
)  # fmt: skip
_BY_PATH = {(route.method, route.path): route for route in ROUTES}


def route_of(method: str, path: str) -> Route | None:
    """Return the route for this method and path, if there is one."""
    return _BY_PATH.get((method, path)) or _BY_PATH.get((method, templated(path)))


def templated(path: str) -> str:
    """Return the path template of the route for this path."""
    before, _, _ = MODEL_PATH.partition(MODEL)
    return MODEL_PATH if path.startswith(before) else path
