"""Client errors for requests that cannot be served, in OpenAI's format with one clear sentence."""

import json
from dataclasses import KW_ONLY, dataclass
from math import ceil

from events.errors import HoldfastError

RETRY_AFTER_SHED_S = 30
QUOTED_MAX = 200  # characters of client input quoted in an error
NO_WORKER = frozenset(("no_worker", "no_routable_worker", "no_reachable_worker"))
OVERLOAD = frozenset(  # workers exist, but none of them has room
    ("queue_full", "queue_timeout", "all_workers_busy", "upstream_overloaded", "deadline", "retry_budget")
)
REFUSALS = NO_WORKER.union(  # of requests rejected before dispatch for a reason other than lack of room
    ("capacity_shed", "not_accepting", "draining", "starting", "tokenizer_missing"),
    ("request_poisonous", "deadline_unattainable"),
)
CODES = OVERLOAD.union(  # codes that programs may rely on; docs/reference/api.md lists each
    REFUSALS,
    # the request is invalid
    ("invalid_http", "invalid_json", "invalid_value", "unsupported_parameter", "context_length_exceeded"),
    ("no_chat_template", "invalid_request", "model_not_found", "unknown_url", "method_not_allowed"),
    ("invalid_api_key", "admin_refused"),
    ("response_not_found", "response_frontend_gone", "response_unreachable"),
    # the request exceeds a limit
    ("body_too_large", "body_timeout", "head_timeout", "headers_too_large", "too_many_connections"),
    # the request was started and failed
    ("internal", "engine_error", "non_finite", "invalid_output", "corrupt_output", "stream_incomplete"),
    ("disconnected", "cannot_connect", "not_serving", "overloaded", "engine_shutdown", "unhealthy"),
    ("stalled", "upstream_lost", "all_workers_failed", "first_token_timeout", "cancelled"),
)
ERROR_TYPES = dict.fromkeys((400, 405, 408, 413, 431), "validation") | {
    401: "unauthorized",
    404: "not_found",
    499: "cancelled",
    502: "backend_error",
    503: "unavailable",
    504: "response_timeout",
}
FAULTS = ("internal", "backend_error", "unavailable", "response_timeout", "first_token_timeout")
"""The `error_type`s that are a fault of the fleet, not a client's mistake or a refusal."""


@dataclass(eq=False, repr=False)
class ApiError(HoldfastError):
    """A request that ends with an error. `code` is stable and meant for programs, `message` for people."""

    status: int
    message: str
    _: KW_ONLY
    code: str
    param: str | None = None
    kind: str = ""  # OpenAI's error type; by default the type for this status
    retry_after_s: float | None = None
    allow: str = ""  # the methods that the path supports
    should_retry: bool = True  # False: a retry cannot succeed

    def __post_init__(self) -> None:
        super().__init__(self.message)
        assert self.reason in CODES, self.code
        server_error = "service_unavailable_error" if self.status == 503 else "server_error"
        self.kind = self.kind or ("invalid_request_error" if self.status < 500 else server_error)

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def reason(self) -> str:
        """The part of `code` before the first colon. What follows are details."""
        return self.code.partition(":")[0]

    @property
    def refusal(self) -> str:
        """Why the request was not started on any worker: `overload`, or a code of `REFUSALS`.

        Empty if the request was started or is invalid.
        """
        reason = self.reason
        return "overload" if reason in OVERLOAD else reason if reason in REFUSALS else ""

    @property
    def error_type(self) -> str:
        """The error's label in the metrics.

        It is NVIDIA Dynamo's label for this kind of error, or Holdfast's own if Dynamo has none.
        """
        refusal = self.refusal
        if refusal and refusal not in NO_WORKER:
            return refusal
        if self.code == "first_token_timeout":
            return self.code
        return ERROR_TYPES.get(self.status, "internal")

    def encoded(self) -> bytes:
        """Return the JSON body as bytes."""
        return json.dumps(self.body(), ensure_ascii=False).encode()

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:  # OpenAI's client reads retry-after-ms first
            headers["Retry-After"] = str(max(1, ceil(self.retry_after_s)))
            headers["retry-after-ms"] = str(ceil(self.retry_after_s * 1000))
        if self.refusal:
            headers["X-Holdfast-Refused"] = self.reason
        if not self.should_retry:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = self.allow
        return headers


def quoted(text: str) -> str:
    """Return client input for use in an error message, cut to QUOTED_MAX characters."""
    return text if len(text) <= QUOTED_MAX else text[: QUOTED_MAX - 1] + "…"


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return a 400 error that names the invalid field."""
    return ApiError(400, message, code=code, param=param)


def too_long(tokens: int, context: int, param: str, *, least: bool = False) -> ApiError:
    """Return the 400 error for a prompt that leaves no tokens for an answer.

    `least` states that `tokens` is a lower bound.
    """
    shown = f"at least {tokens}" if least else tokens
    message = f"the prompt has {shown} tokens, the model's context is {context}"
    return invalid(message, param, "context_length_exceeded")


def unsupported(param: str, why: str = "") -> ApiError:
    """Return the 400 error for a field that this frontend does not support."""
    return invalid(f"{param} is not supported{': ' + why if why else ''}", param, "unsupported_parameter")


def unknown_model(model: str) -> ApiError:
    """Return the 404 error for a model that no worker serves or is about to serve."""
    why = f"the model {quoted(model)!r} does not exist: /v1/models lists the available models"
    return ApiError(404, why, code="model_not_found", param="model")


def starting() -> ApiError:
    """Return the 503 error of a frontend that does not know yet which models exist."""
    return unavailable("this frontend is starting and does not know the fleet yet", "starting", 1)


def shutting_down() -> ApiError:
    """Return the 503 error of a frontend that accepts no more requests."""
    return unavailable("this frontend is shutting down", "draining", 1)


def internal() -> ApiError:
    """Return the 500 error for an internal error."""
    return ApiError(500, "internal error", code="internal")


def unavailable(message: str, code: str, retry_after_s: int) -> ApiError:
    """Return a 503 error with a time in seconds after which to retry."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def shed(tier: str) -> ApiError:
    """Return the 503 error for a request of a tier that the current degradation level sheds."""
    message = f"the fleet is short of capacity and does not serve tier {tier} at the moment"
    return ApiError(503, message, code=f"capacity_shed: tier={tier}", retry_after_s=RETRY_AFTER_SHED_S)
