"""The table of routes: what answers which method of which path, for the dispatch of requests and for /openapi.json."""

from functools import cache

import msgspec
from aiohttp import web

from controller.frontend.http import busy_threshold, status_endpoints, tokenizing
from controller.frontend.http.answers import JSON, json_answer
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.http.openapi import MODEL, Route, document
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
    """Answer GET /openapi.json."""
    return json_answer(encoded())


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", OpenAiEndpoints.serve, "Go on with a conversation.", (ChatBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/completions", OpenAiEndpoints.serve, "Go on with a text.", (CompletionBody,), media=(JSON, EVENTS)
    ),
    Route("GET", "/v1/models", status_endpoints.models, "List the models that are served.", answer=ModelList),
    Route("GET", MODEL_PATH, status_endpoints.model, "Describe a model that is served.", answer=ModelEntry),
    Route(
        "POST", "/tokenize", tokenizing.tokenize, "Return the tokens of a text or a conversation.",
        (TokenizePromptBody, TokenizeChatBody), Tokenized,
    ),
    Route(
        "POST", "/detokenize", tokenizing.detokenize, "Return the text of tokens.", (DetokenizeBody,), Detokenized
    ),
    Route(
        "GET", "/busy_threshold", busy_threshold.thresholds, "Return from where on workers are busy, of every model.", api=False,
        admin=True,
    ),
    Route(
        "POST", "/busy_threshold", busy_threshold.set_thresholds,
        "Set from where on a model's workers are busy, on all frontends.", (BusyThresholdBody,), api=False, admin=True,
    ),
    Route("GET", "/openapi.json", openapi, "Return this document.", api=False),
    Route("GET", "/version", status_endpoints.version, "Say which Holdfast this is.", answer=Version, api=False),
    Route("GET", "/ping", status_endpoints.ping, "200 where /health says 200, and nothing else.", media=(), api=False),
    Route("POST", "/ping", status_endpoints.ping, "200 where /health says 200, and nothing else.", media=(), api=False),
    Route("GET", "/health", status_endpoints.health, "Say whether a request could be served now.", api=False),
    Route("GET", "/ready", status_endpoints.health, "Say whether a request could be served now.", api=False),
    Route("GET", "/live", status_endpoints.live, "Say that the process lives.", api=False),
    Route("GET", "/metrics", status_endpoints.metrics, "Metrics, as Prometheus reads them.", media=(TEXT,), api=False),
)  # fmt: skip
_BY_PATH = {(route.method, route.path): route for route in ROUTES}


def route_of(method: str, path: str) -> Route | None:
    """Return the route that answers this method of this path, if there is one."""
    return _BY_PATH.get((method, path)) or _BY_PATH.get((method, templated(path)))


def templated(path: str) -> str:
    """Return the path of a route that answers this one."""
    before, _, _ = MODEL_PATH.partition(MODEL)
    return MODEL_PATH if path.startswith(before) else path
