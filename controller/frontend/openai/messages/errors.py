"""Errors in the form of Anthropic's API."""

from controller.frontend.errors import ApiError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types by HTTP status. Other statuses below 500 are `invalid_request_error`, above `api_error`."""


def error_body(error: ApiError, request: str) -> dict[str, object]:
    """Return an error as a body. `code` and `param` are Holdfast's additions. `request` is the id of the request."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    shown = {"type": kind, "message": str(error), "code": error.code, "param": error.param}
    return {"type": "error", "error": shown, "request_id": request}
