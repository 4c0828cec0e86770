"""The table of paths that a frontend answers, for the dispatch of requests and for /openapi.json."""

from typing import NamedTuple

import msgspec
from pydantic import BaseModel

from controller.frontend.openai.request_models import (
    BusyThresholdBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeChatBody,
    TokenizePromptBody,
)
from controller.frontend.openai.response_models import Detokenized, ModelEntry, ModelList, Tokenized, Version

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
MODEL = "{model}"  # the rest of a path, whatever it is


class Route(NamedTuple):
    """One method of one path."""

    method: str
    path: str
    name: str  # of its handler
    says: str
    bodies: tuple[type[BaseModel], ...] = ()  # one of these is expected
    answer: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = (JSON,)
    api: bool = True  # on the port that frontends share; else on the admin port as well
    admin: bool = False  # on the former only where that is wished


ROUTES = (
    Route(
        "POST", "/v1/chat/completions", "chat_completions", "Go on with a conversation.", (ChatBody,),
        media=(JSON, EVENTS),
    ),
    Route(
        "POST", "/v1/completions", "completions", "Go on with a text.", (CompletionBody,), media=(JSON, EVENTS)
    ),
    Route("GET", "/v1/models", "models", "List the models that are served.", answer=ModelList),
    Route("GET", f"/v1/models/{MODEL}", "model", "Describe a model that is served.", answer=ModelEntry),
    Route(
        "POST", "/tokenize", "tokenize", "Return the tokens of a text or a conversation.",
        (TokenizePromptBody, TokenizeChatBody), Tokenized,
    ),
    Route(
        "POST", "/detokenize", "detokenize", "Return the text of tokens.", (DetokenizeBody,), Detokenized
    ),
    Route(
        "GET", "/busy_threshold", "thresholds", "Return from where on workers are busy, of every model.", api=False,
        admin=True,
    ),
    Route(
        "POST", "/busy_threshold", "set_thresholds", "Set from where on a model's workers are busy, on all frontends.",
        (BusyThresholdBody,), api=False, admin=True,
    ),
    Route("GET", "/openapi.json", "openapi", "Return this document.", api=False),
    Route("GET", "/version", "version", "Say which Holdfast this is.", answer=Version, api=False),
    Route("GET", "/ping", "ping", "200 where /health says 200, and nothing else.", media=(), api=False),
    Route("POST", "/ping", "ping", "200 where /health says 200, and nothing else.", media=(), api=False),
    Route("GET", "/health", "health", "Say whether a request could be served now.", api=False),
    Route("GET", "/ready", "health", "Say whether a request could be served now.", api=False),
    Route("GET", "/live", "live", "Say that the process lives.", api=False),
    Route("GET", "/metrics", "metrics", "Metrics, as Prometheus reads them.", media=(TEXT,), api=False),
)  # fmt: skip


def templated(path: str) -> tuple[str, str]:
    """Return the path of a route that answers this one, and the rest of it that the route leaves open."""
    for route in ROUTES:
        if route.path.endswith(MODEL):
            before = route.path.removesuffix(MODEL)
            if path.startswith(before):
                return route.path, path.removeprefix(before)
    return path, ""
