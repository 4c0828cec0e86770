"""What a server says to a request that it finds wrong: the client's own mistake, in the server's words.

On the wire it is the detail of the reason `invalid_request`: a sentence, or where there is more to say than a sentence, one JSON
object. Either is understood by who knows only sentences.
"""

import msgspec

REASON = "invalid_request"
UNSUPPORTED = "unsupported_parameter"


class RequestRefusal(msgspec.Struct, frozen=True):
    """Why a request was refused, and under which HTTP status (4xx). `type`, `param`: as the server gave them, or nothing. `code`
    is what the client is told: REASON, or UNSUPPORTED."""

    message: str
    status: int = 400
    type: str = ""
    param: str | None = None
    code: str = REASON

    @property
    def error(self) -> str:
        """The `error` of a chunk that says so."""
        plain = self == RequestRefusal(self.message) and not self.message.startswith("{")
        return f"{REASON}: {self.message if plain else msgspec.json.encode(self).decode()}"


def unsupported(param: str, why: str) -> RequestRefusal:
    """Return the refusal of a field that a server does not obey."""
    return RequestRefusal(f"{param} is not supported: {why}", param=param, code=UNSUPPORTED)


def read_refusal(detail: str) -> RequestRefusal:
    """Return what stands behind `invalid_request:`. Whatever is no RequestRefusal's JSON is a sentence."""
    words = detail.strip()
    if words.startswith("{"):
        try:
            found = msgspec.json.decode(words, type=RequestRefusal)
        except (msgspec.DecodeError, UnicodeError):
            return RequestRefusal(words)
        if 400 <= found.status < 500:
            return found if found.code == UNSUPPORTED else msgspec.structs.replace(found, code=REASON)
    return RequestRefusal(words or "the worker refused the request")
