"""Defines the frames of the request plane, between frontends and workers.

One TCP connection per frontend-worker pair carries every stream between the two. A frame is four bytes of length (little
endian), followed by one msgpack value. A worker sends one frame per engine step to each frontend, with the new tokens of all
streams of that frontend.

A stream number belongs to one *attempt* of one request and is never reused on a connection. By this number a frontend recognises
late output of an old attempt, for example after a worker has hung, and drops it.
"""

import re
import struct
from collections.abc import Iterator
from typing import Literal, TypeAlias

import msgspec

from events.errors import HoldfastError
from events.json_types import Json

VERSION = 1
# why a frontend stopped reading a stream
Why: TypeAlias = Literal["gone", "elsewhere", "drained", "complete"]
FRAME_BYTES_MAX = 16 * 1024 * 1024
_HEADER = 4
_SIZE = struct.Struct("<I")


class BadFrame(HoldfastError):
    """The peer on the request plane sent something that is not a frame. The connection is closed."""


class Sampling(msgspec.Struct, array_like=True, frozen=True):
    """The sampling parameters and stop conditions of a request. Random numbers depend on `seed` and the token's position."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = 0  # top-k logprobs requested with each token; 0: not requested
    # tokens below this share of the highest probability are not sampled; 0: all may be sampled
    min_p: float = 0.0
    logit_bias: dict[int, float] = {}  # value added to the logit, by token id
    # top-k logprobs requested for the prompt's tokens; None: not requested
    prompt_logprobs: int | None = None
    # fields above that the client omitted; they are not sent to a server with its own defaults
    unset: list[str] = []
    allowed_token_ids: list[int] = []  # only these tokens may be generated; empty: all
    # texts that must not occur in the answer, for engines that tokenize them
    bad_words: list[str] = []
    # the same texts as sequences of tokens, for the other engines
    bad_word_tokens: list[list[int]] = []


class ProxiedRequest(msgspec.Struct, array_like=True, frozen=True):
    """A client's HTTP request, which a worker passes on to the server behind it."""

    path: str  # such as /v1/embeddings
    body: bytes
    media: str = "application/json"  # media type of the body, with its parameters
    streamed: bool = False  # whether the client requested a stream of server-sent events


class ProxiedPiece(msgspec.Struct, array_like=True):
    """A piece of a server's HTTP response to a ProxiedRequest. The first piece of a response has its status and media type.

    In a stream of server-sent events, a piece contains whole events.
    """

    body: bytes
    status: int = 0  # 0: not the first piece
    media: str = ""


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """The first frame of a connection, sent by the frontend or prober that opens it."""

    frontend: str
    version: int = VERSION
    nonce: bytes = b""  # fresh random bytes from a frontend with the fleet's key: see `fleet_key`


class Proof(msgspec.Struct, tag="proof", array_like=True):
    """The frontend's reply to a Challenge: the proof that the frontend knows the fleet's key."""

    proof: bytes


class Generate(msgspec.Struct, tag="gen", array_like=True):
    """A frontend's request to a worker: generate the tokens that follow `tokens`, on a new stream.

    The first `prompt_tokens` tokens are the prompt. The other tokens were generated on another worker and are replayed.
    Penalties count the replayed tokens. `max_tokens` and `min_tokens` are already reduced by the number of replayed tokens.
    """

    stream: int
    request: str
    tokens: list[int]
    prompt_tokens: int
    sampling: Sampling
    canary: bool = False  # a canary, which bypasses the prefix cache and counts in no request metric
    cache_salt: str = ""
    prompt_text: str = ""  # for engines that accept only text
    guided: Json | None = None
    traceparent: str = ""  # the client's trace, for engines that can continue it
    rank: int = 0  # the chosen DP rank
    # Names the prefix cache to use, if caches outlive the worker. Every conviction starts a new cache.
    cache_epoch: int = 0
    priority: int = 0  # from the request's tier; the waiting request with the lowest value is scheduled first
    # the client's own constraint, for servers that take no grammar; only with an answer's first tokens
    guided_fallback: Json | None = None
    # An HTTP request to pass on instead of `tokens`, which are empty. `prompt_tokens` is then an estimate.
    proxied: ProxiedRequest | None = None
    adapter: str = ""  # name of the LoRA adapter to use; empty: the model without an adapter


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """A frontend's request to a worker: stop a stream.

    The client of the stream is gone, the stream continues on another worker, or the answer is complete. If `why` is `drained`,
    the stream continues on another worker, because the fleet drains this worker. This frame can arrive before the command to
    drain.
    """

    stream: int
    why: str = "gone"  # a Why; an unknown value is treated as gone


class Reserve(msgspec.Struct, tag="reserve", array_like=True):
    """A frontend's request to the target of a planned move: reserve KV cache for a request that will arrive with its KV cache.

    The target, the worker to which the request moves, does not start to generate yet.

    `request` has the prompt and every token accepted so far. Its `max_tokens` and `min_tokens` are already reduced by the
    number of accepted tokens. `room_tokens` is the number of tokens (prompt and answer) that is expected when the move commits,
    plus a margin. A Cancel frees the reservation.
    """

    stream: int
    request: Generate
    room_tokens: int


class Ship(msgspec.Struct, tag="ship", array_like=True):
    """A frontend's request to the source of a planned move: send this stream's KV cache to the target, and continue decoding
    meanwhile.

    The source is the worker that the stream leaves. The target issued `grants`, one per shard of the model. A grant (a permission
    to send) states the first block to send. Only the source and the target decode the grants.
    """

    stream: int
    grants: list[bytes]


class Stay(msgspec.Struct, tag="stay", array_like=True):
    """A frontend's request to the source of a planned move: keep the stream.

    The source aborts the transfer of the stream's KV cache and continues decoding, even if the stream has stopped for the move.
    """

    stream: int


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The frame in which a worker states its identity to a frontend.

    If the worker requires a proof of the fleet's key, it sends its Welcome after a valid Proof. Otherwise the Welcome is the
    worker's first frame.
    """

    worker: str
    instance: str
    model: str
    version: int = VERSION
    alike: bool = False  # the worker handles canaries like users' requests, so that they need no mark


class Logprob(msgspec.Struct, array_like=True):
    """The logprobs of one position: of the chosen token, and of the top-k tokens as (token id, logprob), best first."""

    chosen: float
    top: list[tuple[int, float]] = []
    rank: int = 0  # of the chosen token, from 1 for the best one; 0: unknown, as for all tokens of an answer


class Chunk(msgspec.Struct, array_like=True):
    """The output of one engine step for one stream.

    `finish` is stop, length or another finish_reason of the engine. It is None while the stream continues. An `error` ends the
    stream.

    If `prompt_logprobs` were requested, the first chunk with tokens also has one logprob for each token of the prompt. The
    prompt's logprobs come before those of the chunk's own tokens. The logprob of the prompt's first token is meaningless.
    """

    stream: int
    tokens: list[int]
    finish: str | None = None
    error: str | None = None  # one of ERRORS, followed by ": detail"
    logprobs: list[Logprob] | None = None
    text: str | None = None  # output of engines that return text and no tokens
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache; with the first chunk
    proxied: ProxiedPiece | None = None  # of the response to a proxied request, which has no tokens


def finish_reason(given: object) -> str:
    """Return an engine's finish_reason in the form that clients get. Return `stop` for a value that is not a valid
    finish_reason."""
    if given == "length" or given == "stop":
        return given
    return given if isinstance(given, str) and _finish_reason(given) else "stop"


_finish_reason = re.compile(r"[a-z_]{1,40}").fullmatch


def join(earlier: Chunk, later: Chunk) -> bool:
    """Append a later chunk of a stream to an earlier one, and return True.

    Return False without a change if a single chunk cannot carry the output of both. There are three such cases: the earlier
    chunk ends the stream, the chunks have output of different kinds (tokens, text, a proxied response), or logprobs would no
    longer match their tokens.
    """
    if earlier.finish is not None or earlier.error is not None:
        return False
    details = (
        later.logprobs
        or later.text is not None
        or earlier.text is not None
        or later.proxied is not None
        or earlier.proxied is not None
    )
    if details and not _join_details(earlier, later):
        return False
    earlier.tokens.extend(later.tokens)
    # checked first, because setting a struct's field takes longer than this check
    if later.finish is not None:
        earlier.finish = later.finish
    if later.error is not None:
        earlier.error = later.error
    if earlier.cached_tokens is None and later.cached_tokens is not None:
        earlier.cached_tokens = later.cached_tokens
    return True


def _join_details(earlier: Chunk, later: Chunk) -> bool:
    """Append logprobs, text and proxied response of the later chunk. Return False without a change if the two do not fit into
    one."""
    if earlier.proxied is not None and later.proxied is not None:
        earlier.proxied.body += later.proxied.body
        return True
    if (earlier.proxied is not None and _has_output(later)) or (
        later.proxied is not None and _has_output(earlier)
    ):
        return False
    if later.proxied is not None:
        earlier.proxied = later.proxied
        return True
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


def _has_output(chunk: Chunk) -> bool:
    return bool(chunk.tokens) or chunk.text is not None or chunk.proxied is not None


ERRORS = (
    "engine_error",  # the engine raised; the request may be tried on another worker
    "engine_shutdown",  # the worker is shutting down; the request may be tried on another worker
    "overloaded",  # this worker is full; the request may be tried on another worker
    "upstream_lost",  # the server behind the worker, or the engine of that server, is gone
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
    """Return an engine's error without text from the server behind the worker, so that the error may be stored.

    That text may quote a prompt, or the key with which Holdfast authenticates to the server. The client of the request receives
    the full error.
    """
    return _QUOTING.sub(r"\1 …", error)


class Load(msgspec.Struct, array_like=True, frozen=True):
    """The load of a worker or of one DP rank, as the worker reports it."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # KV blocks
    kv_total: int = 0
    active_tokens: int = 0
    canaries: int = 0  # number of canaries among the running and waiting requests; they use no capacity of users' requests
    batch: int = 0  # current limit of running requests of an adaptive worker; 0: the registered limit
    closed_s: float = 0.0  # seconds in which users' requests are not accepted: the Retry-After of the server behind the worker
    # share of requests that the worker shall get (0 to 1), compared with a worker of weight 1
    weight: float = 1.0


class Step(msgspec.Struct, tag="step", array_like=True):
    """The output of one engine step for all streams of one frontend."""

    chunks: list[Chunk]


class Beat(msgspec.Struct, tag="beat", array_like=True):
    """The worker's heartbeat. A frontend without open streams receives one every second.

    A frontend with open streams receives a frame at least every 0.1 s. The frame is a heartbeat if no step is sent. While steps
    are sent, the frontend also receives a heartbeat every 0.24 s.

    `phase` is idle, prefill or decode. `step_age_ms` is the time since the engine began its current step. `prefill_tokens` is
    the number of prompt tokens that this step processes. The larger this number, the longer the step may take before the worker
    counts as hung.
    """

    phase: str
    step_age_ms: float
    prefill_tokens: int = 0
    load: Load = Load()  # load of all ranks together
    draining: bool = False
    ranks: list[Load] = []  # load of each DP rank; empty: the worker has only one


class Reserved(msgspec.Struct, tag="reserved", array_like=True):
    """The target has reserved KV cache for a planned move. The target's prefix cache already has `cached_tokens` tokens (whole
    blocks), so the KV cache of these tokens need not be sent."""

    stream: int
    grants: list[bytes]
    cached_tokens: int = 0


class Declined(msgspec.Struct, tag="declined", array_like=True):
    """The sender of this frame cannot carry out the planned move. If the target sends this frame, the stream ends at the target.
    If the source sends this frame, the stream continues decoding at the source."""

    stream: int
    reason: str


class Committed(msgspec.Struct, tag="committed", array_like=True):
    """The target of a planned move has the whole KV cache, and continues decoding.

    `tokens` are those that the source generated during the transfer, after the tokens of the reserved request. The frontend
    compares them with the tokens that it has accepted, before it accepts the next chunk.
    """

    stream: int
    tokens: list[int]
    bytes: int = 0  # bytes transferred, over all shards
    blocks: int = 0
    link: str = ""  # link of the transfer: shm, unix, tcp, nixl
    stopped_ms: float = 0.0  # time from the first byte of the last part until the target decodes


class Challenge(msgspec.Struct, tag="challenge", array_like=True):
    """A worker with the fleet's key sends this frame before its Welcome. The frame proves that the worker knows the key, and
    requests the frontend's proof."""

    nonce: bytes
    proof: bytes = b""


ToWorker = Hello | Proof | Generate | Cancel | Reserve | Ship | Stay
ToFrontend = Challenge | Welcome | Step | Beat | Reserved | Declined | Committed

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_frontend = msgspec.msgpack.Decoder(ToFrontend)


def encode(frame: ToWorker | ToFrontend) -> bytes:
    """Return a frame as bytes, preceded by its length in 4 bytes."""
    body = _encoder.encode(frame)
    return len(body).to_bytes(_HEADER, "little") + body


class Splitter:
    """Splits a byte stream into the bodies of frames. Each connection has two splitters, one per direction."""

    __slots__ = ("_rest", "_wanted", "frame_bytes_max")

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._wanted = 0  # number of bytes needed before the next frame can be split off

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the body of every frame that `data` completes, and keep the bytes of an incomplete frame. Raise BadFrame if a
        length exceeds the limit."""
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
