"""Parses the headers of completion requests, and builds the headers of their responses.

Request headers are the request id, tier, trace, routing overrides and admission headers. The admission headers are read only if
requests are admitted by deadlines:

    X-Holdfast-TTFT-Deadline-Ms, x-llm-d-slo-ttft-ms             milliseconds from the request's arrival to its first token
    X-Holdfast-Queue-TTL-Ms, x-llm-d-inference-ttl (1.5s)        the longest wait in the queue
    X-Holdfast-Client, x-llm-d-inference-fairness-id             the client: the clients of a tier share workers fairly
    X-Stainless-Retry-Count                                      number of previous attempts, set by OpenAI's client

If two headers with the same meaning are given, Holdfast's own has precedence. An invalid header is refused, not
silently ignored.
"""

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from hashlib import blake2b

import msgspec
from aiohttp import web
from aiohttp.http import HttpRequestParser
from multidict import CIMultiDictProxy

from controller.deciders.tiers import Tiers
from controller.frontend.errors import invalid
from controller.frontend.openai.choice import Choice
from controller.frontend.openai.request_parser import ParsedRequest
from controller.frontend.request.routing_overrides import (
    EXPLAIN,
    NO_OVERRIDES,
    RoutingOverrides,
    read_overrides,
)
from controller.frontend.settings import FairnessKey, RouterSettings
from controller.router.endpoints import EndpointTable
from events.proxied_paths import AUDIO, POOLING

INVOCATIONS = "invocations"  # a chat or a completion, by the request's body
ENDPOINTS = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/invocations": INVOCATIONS,
    "/v1/messages": "messages",
    "/v1/responses": "responses",
    **{path: path.strip("/").replace("/", "_") for path in (*POOLING, *AUDIO)},
}
"""By path: the endpoint's name in metrics, and the kind of its bodies."""
MODES = ("", "exact", "proxied")
KEPT_MAX = 256  # number of heads in the cache
READ_AHEAD = 2**16  # read-ahead limit that aiohttp's parser requires; the parser receives no body here
REQUEST_ID_MAX = 128
SHOWN_MAX = 8  # unknown fields that are listed, and characters of each name
NAME_MAX = 40
ID_BYTES = 16  # random bytes of a generated id, which consists of their hex digits
SUSPECT = "X-Holdfast-Suspect"
MODE = "X-Holdfast-Mode"  # exact or proxied
EXACT = "X-Holdfast-Exact"
API_KEY = "x-api-key"
EXPLAINED_MAX = 8  # number of candidates in a header, because many clients accept at most 8 KB of headers
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MS_MAX = 86_400_000.0
CLIENT_CHARS_MAX = 128
_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)")
_PARTS = re.compile(f"(?:{_PART.pattern})+")


class AdmissionHeaders(msgspec.Struct, frozen=True):
    """The admission headers of a request. Times are in seconds."""

    header: str = ""  # the client's name in its header
    api_key: str = ""  # a digest of the client's API key
    deadline_s: float | None = None
    line_s: float | None = None
    retries: int = 0

    def client(self, by: Iterable[FairnessKey], user: str) -> str:
        """Return the client of a request for fair queueing: the first of the keys in `by` that the request has.

        All requests without any of these keys share one client, the empty string.
        """
        given: Mapping[FairnessKey, str] = {"header": self.header, "api_key": self.api_key, "user": user}
        return next((f"{kind}:{given[kind]}" for kind in by if given[kind]), "")


NOTHING = AdmissionHeaders()


class Head(msgspec.Struct, frozen=True):
    """The parsed head of a completion request."""

    endpoint: str  # one of the values of ENDPOINTS
    id: str  # the client's request id; empty if none was given, or if it is not usable
    tier: str
    warning: str  # value of the Warning header of the response; empty if there is no warning
    trace: str  # the request's trace as a traceparent; empty if there is none
    version: tuple[int, int] = (1, 1)
    keep: bool = True  # keep the connection open after the response
    chunked: bool = True  # whether the response stream may be chunked
    overrides: RoutingOverrides = NO_OVERRIDES
    credentials: str = ""  # the header Authorization, or x-api-key in its form
    origin: str = ""  # the header Origin
    asked: AdmissionHeaders = NOTHING  # empty without admission by deadlines
    path: str = ""
    media: str = ""  # media type of the body; empty: JSON
    mode: str = ""  # the header X-Holdfast-Mode
    end: int = 0  # number of bytes of the head, including the empty line
    whole: int = 0  # number of bytes of head and body


class Call(msgspec.Struct):
    """A parsed completion request: head, body, and the data for its response."""

    id: str  # request id: the client's, or generated
    head: Head
    parsed: ParsedRequest
    headers: dict[str, str]  # headers of every response to this request
    arrived: float  # by the frontend's monotonic clock
    transport: asyncio.Transport | None  # None if the client has disconnected


def read_head(
    path: str, headers: "CIMultiDictProxy[str]", version: tuple[int, int], tiers: Tiers, *, keep: bool
) -> Head:
    """Return a request's head, with default values for the routing overrides and the admission headers.

    The headers of these two groups are not read, because their values may be invalid. Every value of any other header
    is accepted. `keep` states that the client wants to keep its connection open after the response.
    """
    priority = headers.get("X-Priority")
    tier, known = tiers.tier_of(priority)
    warning = "" if known else f'299 - "unknown X-Priority {_printable(priority or "")}: served as {tier}"'
    id, trace, chunked = own_id(headers.get("X-Request-Id")), traceparent(headers), version >= (1, 1)
    key, origin = credentials(headers), headers.get("Origin", "")
    return Head(
        ENDPOINTS[path], id, tier, warning, trace, version, keep and chunked, chunked, credentials=key, origin=origin,
        path=path, media=headers.get("Content-Type", ""), mode=headers.get(MODE, ""),
    )  # fmt: skip


def credentials(headers: "CIMultiDictProxy[str]") -> str:
    """Return the header `Authorization`. Without it, return `x-api-key`, which Anthropic's clients send, in its form."""
    given = headers.get("Authorization", "")
    if not given and (key := headers.get(API_KEY)):
        return f"Bearer {key}"
    return given


class HeadCache:
    """Caches the last KEPT_MAX parsed request heads by their bytes. A lookup takes 0.06 µs, parsing a head takes 20 µs."""

    def __init__(self, ours: RouterSettings, table: EndpointTable, *, by_deadline: bool = False) -> None:
        """Start empty. The cache is cleared when the tiers of the table change.

        `ours` are this frontend's router settings. With `by_deadline`, the admission headers are read.
        """
        self._table = table
        self._tiers: Tiers | None = None
        self._read_plain = partial(read_plain, ours, by_deadline)

    def read(self, raw: bytes) -> Head | None:
        """Return the parsed head of a request: from the cache, or parsed by `read_plain`.

        Return None if anything in the head is unusual or invalid.
        """
        if self._table.tiers is not self._tiers:
            self._tiers = self._table.tiers
            self._read = lru_cache(KEPT_MAX)(partial(self._read_plain, self._tiers))
        return self._read(raw)


def read_plain(ours: RouterSettings, by_deadline: bool, tiers: Tiers, raw: bytes) -> Head | None:
    """Parse a head. Return None if anything in the head is unusual or invalid.

    `ours` are this frontend's router settings. With `by_deadline`, the admission headers are read. `raw` ends with the
    empty line after the headers.
    """
    if raw.count(b"\n") != raw.count(b"\r\n"):
        return None  # parsers disagree on where such a head ends
    parser = HttpRequestParser(None, None, READ_AHEAD, response_with_body=False)
    try:
        messages, upgraded, _ = parser.feed_data(raw)
        [(message, _)] = messages
        headers = message.headers
        length = int(headers["Content-Length"])
        overrides = read_overrides(message.raw_headers, ours)
        asked = read_admission(message.raw_headers) if by_deadline else NOTHING
    except Exception:  # aiohttp will find the same error and answer the request
        return None
    known = message.method == "POST" and message.path in ENDPOINTS
    odd = message.version != (1, 1) or message.should_close or message.upgrade or upgraded
    special = length < 1 or message.chunked or message.compression or "Expect" in headers
    if not known or odd or special:
        return None
    plain = read_head(message.path, headers, (1, 1), tiers, keep=True)
    end = len(raw)
    return msgspec.structs.replace(plain, overrides=overrides, asked=asked, end=end, whole=end + length)


def read_admission(headers: Iterable[tuple[bytes, bytes]]) -> AdmissionHeaders:
    """Return the parsed admission headers. If a header is invalid, raise ApiError (400) that names the header."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = _SHOWN.get(raw.decode("latin-1").lower(), "")
        if name in found and name not in _KEYS:
            raise invalid(f"the header {name} is given more than once", name)
        if name:
            found[name] = value.decode("latin-1").strip()
    asked: dict[str, object] = {}
    for name, (field, parse, wanted) in _ADMISSION.items():
        if name not in found or field in asked:
            continue
        try:
            parsed = parse(found[name])
        except ValueError as error:
            text = "".join(c for c in found[name][:40] if c.isprintable())
            raise invalid(f"the header {name} is {text!r}: expected {wanted}", name) from error
        if parsed is not None:
            asked[field] = parsed
    key = found.get("authorization", "").partition(" ")[2].strip() or found.get(API_KEY, "")
    if key:
        asked["api_key"] = blake2b(key.encode(), digest_size=8).hexdigest()
    return msgspec.convert(asked, AdmissionHeaders)


def _client(given: str) -> str | None:
    if len(given) > CLIENT_CHARS_MAX:
        raise ValueError
    return given or None


def _milliseconds(given: str) -> float:
    value = float(given)
    if not 0 < value <= MS_MAX:
        raise ValueError
    return value / 1000


def _duration(given: str) -> float | None:
    """Return the seconds of a duration in Go's format (`1m30s`, `1.5s`, `250ms`). Raise ValueError if it is invalid."""
    if given != "0" and not _PARTS.fullmatch(given):
        raise ValueError
    seconds = sum(float(part[1]) * _UNITS_S[part[2]] for part in _PART.finditer(given))
    if seconds > MS_MAX / 1000:
        raise ValueError
    return seconds or None  # in llm-d, 0 means no limit


def _retries(given: str) -> int:
    if not given.isascii() or not given.isdigit():
        raise ValueError
    return min(int(given[:9]), 1_000_000)


_Row = tuple[str, Callable[[str], str | float | None], str]
_CLIENT: _Row = ("header", _client, f"a name of at most {CLIENT_CHARS_MAX} characters")
_WITHIN = f"milliseconds above 0 and at most {MS_MAX:.0f}"
_ADMISSION: dict[str, _Row] = {
    "X-Holdfast-Client": _CLIENT,
    "x-llm-d-inference-fairness-id": _CLIENT,
    "X-Holdfast-TTFT-Deadline-Ms": ("deadline_s", _milliseconds, _WITHIN),
    "x-llm-d-slo-ttft-ms": ("deadline_s", _milliseconds, _WITHIN),
    "X-Holdfast-Queue-TTL-Ms": ("line_s", _milliseconds, _WITHIN),
    "x-llm-d-inference-ttl": ("line_s", _duration, "a duration such as 1.5s or 1500ms"),
    "X-Stainless-Retry-Count": ("retries", _retries, "a number"),
}
"""For each header: the field of AdmissionHeaders that it sets, its parser, and the values that the parser accepts.

Of two headers for one field, the first here wins.
"""
_KEYS = ("authorization", API_KEY)
_SHOWN = {name.lower(): name for name in (*_ADMISSION, *_KEYS)}


def worker_headers(answers: Sequence[Choice]) -> dict[str, str]:
    """Return the response headers about the workers of a request's answers.

    The headers name the worker of the first answer. If an answer was continued inexactly, `X-Holdfast-Exact` is false. If a
    worker of these answers is under suspicion, and serves only as the last worker of its model, `X-Holdfast-Suspect` gives
    the reason. On request, the headers explain why the worker of the first answer was chosen.
    """
    endpoint = answers[0].endpoint if answers else None
    headers = {"X-Holdfast-Worker": _of_worker(endpoint.worker)} if endpoint is not None else {}
    for answer in answers:
        if answer.endpoint is not None and (suspect := answer.endpoint.suspect):
            headers[SUSPECT] = _of_worker(suspect)
        if not answer.exact:
            headers[EXACT] = "false"
    if answers and (why := answers[0].explained) is not None:
        every, chosen = why["candidates"], why["chosen"]
        best = every[:EXPLAINED_MAX]
        best += [one for one in every[EXPLAINED_MAX:] if chosen.items() <= one.items()]
        headers[EXPLAIN] = json.dumps(why | {"of": len(every), "candidates": best})
    return headers


def _of_worker(name: str) -> str:
    """Return a worker's name in a form that is valid in a header, because workers may register any name."""
    return name if name.isprintable() else ascii(name)


def id_header(request: web.BaseRequest) -> dict[str, str]:
    """Return the X-Request-Id header for a response to this request."""
    return request_ids(own_id(request.headers.get("X-Request-Id")), messages=is_messages(request.path))


def request_ids(own: str, *, messages: bool) -> dict[str, str]:
    """Return the headers with the id of a request: the client's own id, or a new one. `messages` is its API.

    Clients of the Messages API read the id from `request-id`.
    """
    id = own or fresh_id()
    return {"X-Request-Id": id, "request-id": id} if messages else {"X-Request-Id": id}


def is_messages(path: str) -> bool:
    """Return whether a path belongs to the Messages API, which has its own form of errors."""
    return path.partition("?")[0].startswith("/v1/messages")


def traceparent(headers: "CIMultiDictProxy[str]") -> str:
    """Return the request's trace as a version 00 traceparent (W3C Trace Context).

    Return an empty string if the header is missing or malformed (§3.2.2: a malformed header is ignored).
    """
    given = headers.getall("traceparent", ())
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None:
        return ""
    version, trace, parent, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(parent, 16):
        return ""
    return f"00-{trace}-{parent}-{flags}"


def unknown_fields(names: Sequence[str]) -> str:
    """Return the value of a Warning header (RFC 9111 §5.5) that lists these unknown fields of a body."""
    shown = [printable for name in names[:SHOWN_MAX] if (printable := _printable(name))]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f'299 - "unknown fields, ignored: {", ".join(shown)}{more}"'


def no_effect(name: str) -> str:
    """Return the value of a Warning header that names a field which the model's chat template does not read."""
    return f'299 - "no effect, because the chat template does not read it: {name}"'


def add_warning(headers: dict[str, str], warning: str) -> None:
    """Add a value to the Warning header of a response."""
    before = headers.get("Warning")
    headers["Warning"] = f"{before}, {warning}" if before else warning


def _printable(name: str) -> str:
    return "".join(c for c in name[:NAME_MAX] if c.isascii() and c.isprintable() and c not in '"\\')


def own_id(given: str | None) -> str:
    """Return the client's request id if it is printable ASCII and not too long, otherwise an empty string."""
    if given and len(given) <= REQUEST_ID_MAX and given.isascii() and given.isprintable():
        return given
    return ""


def fresh_id() -> str:
    """Return a new random request id."""
    return os.urandom(ID_BYTES).hex()
