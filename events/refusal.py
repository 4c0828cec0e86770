"""Encodes a server's refusal of an invalid request, with the server's own error text.

In a worker's frame, a refusal is the text after `invalid_request:`. The text is a sentence, or one JSON object if the refusal has
further fields. A reader that expects only a sentence can display the JSON object as text, too.
"""

import msgspec

REASON = "invalid_request"
UNSUPPORTED = "unsupported_parameter"


class RequestRefusal(msgspec.Struct, frozen=True):
    """Why a request was refused, and with which HTTP status (4xx).

    `type` and `param` are the values that the server sent, or empty. `code` is sent to the client: REASON or UNSUPPORTED.
    """

    message: str
    status: int = 400
    type: str = ""
    param: str | None = None
    code: str = REASON

    @property
    def error(self) -> str:
        """The text for the `error` field of a chunk: `invalid_request:` followed by the reason."""
        plain = self == RequestRefusal(self.message) and not self.message.startswith("{")
        return f"{REASON}: {self.message if plain else msgspec.json.encode(self).decode()}"


def unsupported(param: str, why: str) -> RequestRefusal:
    """Return the refusal of a request with a field (`param`) that a server does not support."""
    return RequestRefusal(f"{param} is not supported: {why}", param=param, code=UNSUPPORTED)


def read_refusal(detail: str) -> RequestRefusal:
    """Parse the text after `invalid_request:`. If the text is not the JSON of a RequestRefusal with status 4xx, use the whole
    text as the message."""
    words = detail.strip()
    if words.startswith("{"):
        try:
            found = msgspec.json.decode(words, type=RequestRefusal)
        except (msgspec.DecodeError, UnicodeError):
            return RequestRefusal(words)
        if 400 <= found.status < 500:
            return found if found.code == UNSUPPORTED else msgspec.structs.replace(found, code=REASON)
    return RequestRefusal(words or "the worker refused the request")
