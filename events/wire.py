"""The frames of the request plane, between frontends and workers.

One TCP connection per frontend-worker pair carries every stream between them. A frame is four bytes of length
(little endian), then one msgpack value. A worker sends one frame per engine step, with the new tokens of all streams
of that frontend.

A stream number belongs to one *attempt* of one request and is never reused on a connection. So late output of a
revived worker for an old attempt is recognised and dropped.
"""

import re
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from events.errors import HoldfastError
from events.json_types import Json

VERSION = 1
Why: TypeAlias = Literal[
    "gone", "elsewhere", "drained", "complete"
]  # why a frontend stopped reading a stream
FRAME_BYTES_MAX = 16 * 1024 * 1024
_HEADER = 4
_SIZE = struct.Struct("<I")


class BadFrame(HoldfastError):
    """The peer on the request plane sent something that is not a frame. The connection is closed."""


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """Sampling parameters and stop conditions. `seed` keys the random numbers together with the position."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = 0  # top-k logprobs requested with each token; 0: none
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one are not drawn; 0: all may be
    logit_bias: dict[int, float] = {}  # by token: added to its logit
    prompt_logprobs: int | None = None  # top-k logprobs requested for the prompt's own tokens; None: none
    unset: list[str] = []  # fields above that the client omitted: not sent to a server with its own defaults


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """A frontend (or prober) opens a connection."""

    frontend: str
    version: int = VERSION
    nonce: bytes = b""  # fresh, from a frontend with the fleet's key: see `fleet_key`


class Proof(msgspec.Struct, tag="proof", array_like=True):
    """The frontend's answer to a Challenge."""

    proof: bytes


class Generate(msgspec.Struct, tag="gen", array_like=True):
    """Continue `tokens`. The first `prompt_tokens` of them are the prompt. The rest was generated elsewhere and is
    replayed: penalties count it, and `max_tokens` and `min_tokens` are already reduced by it."""

    stream: int
    request: str
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    canary: bool = False  # bypass the prefix cache, and count in no request metric
    cache_salt: str = ""
    prompt_text: str = ""  # for engines that accept only text
    guided: Json | None = None
    traceparent: str = ""  # the client's trace, for engines that can continue it
    rank: int = 0  # the chosen DP rank
    # Names the prefix cache to use, where caches outlive the worker. Every conviction starts a new cache.
    cache_epoch: int = 0
    priority: int = 0  # the lowest waiting request is scheduled first: the urgency of its tier


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Stop this stream. The reason: its client is gone, it continues on another worker, or its answer is complete.

    `drained` means that it continues elsewhere because the fleet drains this worker, which may not have been notified yet."""

    stream: int
    why: str = "gone"  # a Why; an unknown one is treated as gone


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """To the target of a planned move: reserve room for a request that will arrive with its KV cache, and start nothing.

    `request` is what a replay from here would be: the prompt and every token accepted so far, its limits reduced by
    them. `room_tokens` is the length expected at the commit, with a margin. Cancel frees the reservation."""

    stream: int
    request: Generate
    room_tokens: int


class Ship(msgspec.Struct, tag="ship", array_like=True):
    """To the source of a planned move: send this stream's KV cache to the target that issued these grants, one per shard,
    and continue decoding meanwhile. Grants are opaque to everything between source and target; they say from which
    block to send."""

    stream: int
    grants: list[bytes]


class Stay(msgspec.Struct, tag="stay", array_like=True):
    """To the source: abort the shipment and continue decoding here, even if the stream has stopped for it."""

    stream: int


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The worker's first frame: its identity."""

    worker: str
    instance: str
    model: str
    version: int = VERSION
    alike: bool = False  # canaries need no mark: the worker handles them as it handles users' requests


class Logprob(msgspec.Struct, array_like=True):
    """One generated position: the chosen token's logprob, and the top-k as (token, logprob), best first."""

    chosen: float
    top: list[tuple[int, float]] = []


class Chunk(msgspec.Struct, array_like=True):
    """One step's output for one stream. `finish`: stop, length, or another finish_reason of the engine; or None. `error` ends the
    stream: see `Fault`.

    If `prompt_logprobs` were requested, the first chunk with tokens has one more logprob per token of the prompt, before
    those of its own tokens. The one of the prompt's first token is meaningless."""

    stream: int
    tokens: list[int]
    finish: str | None = None
    error: str | None = None  # one of ERRORS, followed by ": detail"
    logprobs: list[Logprob] | None = None
    text: str | None = None  # from engines that return text and no tokens
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; with the first chunk


def finish_reason(given: object) -> str:
    """Return an engine's own finish_reason as sent to clients; `stop` for a value that cannot be one."""
    if given == "length" or given == "stop":
        return given
    return given if isinstance(given, str) and _finish_reason(given) else "stop"


_finish_reason = re.compile(r"[a-z_]{1,40}").fullmatch


def join(earlier: Chunk, later: Chunk) -> bool:
    """Append a stream's later chunk to its earlier one, and return True.

    Return False, and change nothing, where one chunk cannot carry both: the earlier one is the stream's last, one of them is text
    and the other tokens, or logprobs would no longer match their tokens."""
    if earlier.finish is not None or earlier.error is not None:
        return False
    details = later.logprobs or later.text is not None or earlier.text is not None
    if details and not _join_details(earlier, later):
        return False
    earlier.tokens.extend(later.tokens)
    if later.finish is not None:  # setting a struct's field takes longer than this check
        earlier.finish = later.finish
    if later.error is not None:
        earlier.error = later.error
    if earlier.cached_tokens is None and later.cached_tokens is not None:
        earlier.cached_tokens = later.cached_tokens
    return True


def _join_details(earlier: Chunk, later: Chunk) -> bool:
    """Append the logprobs and the text, unless one chunk cannot carry both."""
    if (later.tokens and earlier.text is not None) or (earlier.tokens and later.text is not None):
        return False
    if later.logprobs:
        known = earlier.logprobs or []
        if len(known) != len(earlier.tokens):
            return False
        earlier.logprobs = known + later.logprobs
    if later.text is not None:
        earlier.text = (earlier.text or "") + later.text
    return True


ERRORS = (
    "engine_error",  # the engine raised; the request may be tried elsewhere
    "engine_shutdown",  # the worker is shutting down; try another
    "overloaded",  # this worker is full; try another
    "upstream_lost",  # the server behind the worker is gone, or its engine is
    "stream_incomplete",  # the upstream ended without a finish reason
    "non_finite",  # NaN or infinity in the logits
    "invalid_request",  # a client error; no other worker would answer better
    "not_serving",  # this worker does not serve this model or instance
)


_QUOTING = re.compile(
    r"(: the upstream(?:'s connection broke| answers \d+| reports an error| sent what is not JSON"
    r"| sent an event that makes no sense| calls|'s logprobs (?:of a prompt )?cannot be read| ended the request itself))\W.*",
    re.DOTALL,
)


def without_quotes(error: str) -> str:
    """Return an engine's error in a form that may be stored: without text from the server behind it.

    That text may quote a prompt, or the key that authenticates us to the server. The request's client receives the full error.
    """
    return _QUOTING.sub(r"\1 …", error)


class Load(msgspec.Struct, array_like=True, frozen=True):
    """A worker's load, as the worker reports it."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # blocks
    kv_total: int = 0
    active_tokens: int = 0
    canaries: int = 0  # of the running and waiting requests; canaries use no capacity of users' requests
    batch: int = 0  # the current batch limit of an adaptive worker; 0: the registered one
    closed_s: float = 0.0  # seconds without new requests of users: the Retry-After of the server behind it


class Step(msgspec.Struct, tag="step", array_like=True):
    """One engine step's output for one frontend."""

    chunks: list[Chunk]


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The worker's heartbeat: sent every second, and while streams are open every 0.25 s, or 0.1 s after the last step.

    `phase` is idle, prefill or decode. `step_age_ms` is how long the engine has been in its current step.
    `prefill_tokens` is how many prompt tokens that step processes: a long prefill gets a longer allowance.
    """

    phase: str
    step_age_ms: float
    prefill_tokens: int = 0
    load: Load = Load()  # of all ranks together
    draining: bool = False
    ranks: list[Load] = []  # of each DP rank, where there are several


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """The target has reserved the room. `cached_tokens` (whole blocks) are in its prefix cache and need not be sent."""

    stream: int
    grants: list[bytes]
    cached_tokens: int = 0


class Declined(msgspec.Struct, tag="declined", array_like=True):
    """The move is impossible. From the target it ends the stream; at the source the stream continues decoding."""

    stream: int
    reason: str


class Committed(msgspec.Struct, tag="committed", array_like=True):
    """The target has the whole KV cache and decodes. `tokens` follow those of the reserved request: the source generated them
    during the transfer. The frontend compares them with the tokens that it accepted, before it accepts the next chunk."""

    stream: int
    tokens: list[int]
    bytes: int = 0  # transferred, over all shards
    blocks: int = 0
    link: str = ""  # of the transfer: shm, unix, tcp, nixl
    stopped_ms: float = 0.0  # from the tail's first byte until the target decodes


class Challenge(msgspec.Struct, tag="challenge", array_like=True):
    """Sent before a Welcome by a worker with the fleet's key: proves that it knows the key, and requests the frontend's proof."""

    nonce: bytes
    proof: bytes = b""


ToWorker = Hello | Proof | Generate | Cancel | Reserve | Ship | Stay
ToFrontend = Challenge | Welcome | Step | Beat | Reserved | Declined | Committed

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def encode(frame: ToWorker | ToFrontend) -> bytes:
    """Return a frame as bytes, preceded by its length."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(_HEADER, "little") + body


class Splitter:
    """Cuts a byte stream into frame bodies. One per connection and direction."""

    __slots__ = ("_rest", "_wanted", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._wanted = 0  # bytes needed before parsing can continue

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the body of every frame that `data` completes. Raise BadFrame if a length exceeds the limit."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data = bytes(self._rest)
            self._rest.clear()
        start, end, wanted = 0, len(data), _HEADER
        try:
            while start + _HEADER <= end:
                (size,) = _SIZE.unpack_from(data, start)
                if size > self.frame_bytes_max:
                    raise BadFrame(f"a frame of {size} bytes is over the limit of {self.frame_bytes_max}")
                if start + _HEADER + size > end:
                    wanted += size
                    break
                body = data[start + _HEADER : start + _HEADER + size]
                start += _HEADER + size
                yield body
        finally:
            self._rest += data[start:]
            self._wanted = wanted
