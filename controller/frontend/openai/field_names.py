"""Names the fields of a request's own API in its errors, because all APIs share the parser of chats."""

import re
from dataclasses import replace

from controller.frontend.errors import ApiError

FIELD_NAMES = {
    "messages": {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
    },
    "responses": {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    },
}
"""By endpoint: the endpoint's own names of the fields of a chat."""


def in_terms_of(endpoint: str, error: ApiError) -> ApiError:
    """Return an error with the field names of this endpoint."""
    own = FIELD_NAMES.get(endpoint, {}).get(error.param or "")
    if own is None:
        return error
    message = re.sub(rf"\b{re.escape(error.param or '')}\b", own, error.message)
    return replace(error, message=message, param=own)
