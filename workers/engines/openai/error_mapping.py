"""Classifies errors of an OpenAI-compatible server: caused by the client's request, or by the server.

vLLM reports a grammar that it cannot compile with HTTP 200 and `{"error": {…, "code": 400}}` in the stream. Any other
server would fail such a request too, and the error is no sign of an unhealthy server.
"""

import json
from typing import Any

from events.refusal import RequestRefusal

ENGINE_GONE = "EngineCore encountered an issue"  # vLLM's error for each request that was lost together with its engine's process
WORDS_MAX = 200  # of a server's message
NAMES_MAX = 100  # of the error type and the field name
NOT_THE_CLIENTS = frozenset((401, 403, 404, 405, 407, 408, 409, 421, 425, 426, 429))
"""Statuses about the caller, the address or the moment, not about the content of the request."""
MISTAKEN_TYPES = frozenset(("invalid_request_error", "BadRequestError", "UnprocessableEntityError"))
"""What OpenAI, vLLM and SGLang call a client's error where they give no number."""


def is_client_error(status: int) -> bool:
    """Return whether an HTTP status means that the request itself is invalid."""
    return 400 <= status < 500 and status not in NOT_THE_CLIENTS


def refusal_of(said: Any, status: int | None = None) -> RequestRefusal | None:
    """Return the refusal in an error object of an OpenAI-compatible server; None if the client did not cause it.

    `status` is the HTTP status of the response. None: the object came in a stream. Then its own `code` or `status` decides, or
    its `type` if it has neither.
    """
    fields = _fields(said)
    kind, param = fields.get("type"), fields.get("param")
    found = status if status is not None else _status(fields)
    if found is None and isinstance(kind, str) and kind in MISTAKEN_TYPES:
        found = 400
    if found is None or not is_client_error(found):
        return None
    return RequestRefusal(
        error_words(said),
        found,
        kind[:NAMES_MAX] if isinstance(kind, str) else "",
        param[:NAMES_MAX] if isinstance(param, str) else None,
    )


def error_of(said: Any, status: int | None = None, *, canary: bool) -> str:
    """Return the `error` of a chunk for an error object, as in `refusal_of`.

    A refused canary is never a client's error: canaries are known to be valid.
    """
    refusal = None if canary else refusal_of(said, status)
    if refusal is not None:
        return refusal.error
    if status == 429 or (status is None and _status(_fields(said)) == 429):
        return f"overloaded: the upstream answers 429: {error_words(said)}"
    reason = "upstream_lost" if ENGINE_GONE in error_words(said) else "engine_error"
    how = "reports an error" if status is None else f"answers {status}"
    return f"{reason}: the upstream {how}: {error_words(said)}"


def _fields(said: Any) -> dict[str, Any]:
    """Return the fields of an error object. OpenAI nests them one level deeper."""
    error = said.get("error", said) if isinstance(said, dict) else said
    return error if isinstance(error, dict) else {}


def _status(fields: dict[str, Any]) -> int | None:
    """Return the HTTP status named in an error object."""
    for name in ("code", "status", "status_code"):
        value = fields.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) == 3:
            value = int(value)
        if type(value) is int and 400 <= value < 600:
            return value
    return None


def error_words(said: Any) -> str:
    """Return the message of an error body, cut to a readable length."""
    if isinstance(said, dict):
        error = said.get("error", said)
        said = error.get("message", error) if isinstance(error, dict) else error
    words = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, default=str)
    return words if len(words) <= WORDS_MAX else words[:WORDS_MAX] + "…"
