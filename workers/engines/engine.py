"""The `Engine` protocol, which every engine of a worker implements.

An engine generates tokens for many requests at once, step by step. Its steps must not block the worker's event loop: they run in
a thread, on another server, or in short callbacks. The output of a step is delivered in one call, so that the worker can send one
frame per step. One call may deliver the outputs of several steps, in step order.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import xxhash

from events.errors import HoldfastError
from events.kv import KvEvent
from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.kv_transfer.messages import Buffer, Description

MOVES_MAX = 16
"""Maximum number of requests that may move out of one engine at once. The same maximum holds for requests that move in."""

CANARIES_MAX = 2
"""Maximum number of canaries accepted beyond the waiting limit, so that a full worker is checked, too."""


class EngineDead(HoldfastError):
    """The engine cannot serve any more; the worker must be replaced."""


class EngineChanged(EngineDead):
    """The server behind the engine has changed, so that the worker's registration is no longer right.

    This is no failure: the worker's instance ends, and the next instance registers anew.
    """


class MoveEnded(HoldfastError):
    """A request can no longer move to another worker, for example because it has ended or lost its KV cache."""


class MoveRefused(HoldfastError):
    """A request that arrived from another worker cannot be continued here, and its reservation has ended."""


class Awaits(NamedTuple):
    """What an engine waits for before it can start, such as a server that is loading its model."""

    reason: str  # readable, such as "cannot connect to http://…"; never contains a server's own text
    model: str = ""  # the model it will serve; empty: not known yet


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The model and configuration that an engine serves.

    The fields are part of the worker's registration. Most of them are also part of the canary key, which selects the stored
    correct answers (goldens) to the worker's canaries.
    """

    model: str
    revision: str
    tokenizer: str
    engine: str
    engine_version: str
    dtype: str
    tp: int
    device: str
    context_tokens: int
    exact: bool  # whether a continuation of an answer gets exactly the token ids generated so far
    profile: Profile
    dp: int = 1  # number of DP ranks; each has a KV cache and a queue of its own
    root: str = ""  # the weights' repository or folder, as the server reports it; empty: not reported
    also_served: tuple[str, ...] = ()  # further names of the same weights on the server
    generation_config: str = ""  # digest of the model's default sampling parameters; empty: none known
    waiting_max: int | None = None  # requests that may wait while the running batch is full; None: unlimited
    server: str = ""  # host and port of the server that runs the model; empty: this process runs the model
    lineage: str = ""  # the server's reports on its weights and on how it computes; empty: none were reported
    paths: tuple[str, ...] = ()  # HTTP paths of the server to which clients' requests can be passed on
    adapters: tuple[
        str, ...
    ] = ()  # names of its LoRA adapters; the only field that changes while the engine runs


@dataclass(frozen=True, slots=True)
class Phase:
    """The engine's current phase, from which the worker judges whether a step takes too long."""

    name: str = "idle"  # "idle", "prefill" or "decode"
    since: float = 0.0  # monotonic seconds
    prefill_tokens: int = 0  # number of prompt tokens in prefill now; 0 in the other phases


Deliver = Callable[[list[tuple[int, Chunk]]], None]
"""Called once per step, from any thread, with (request key, chunk) pairs. The worker fills in Chunk.stream.

A token that ends an answer (the end-of-sequence token, or one of `stop_token_ids`) is the last token of the answer's last chunk.
`tests/workers/engines/engine_contract.py` is the test suite that every engine passes.
"""


Announce = Callable[[int, list[KvEvent]], None]
"""Called at the end of a step, from any thread, right before or after the step's output is delivered.

The arguments are a DP rank and the KV events (stored, removed) of that rank's prefix cache in this step, in order. The blocks of
canaries never appear.
"""


def discard_output(out: list[tuple[int, Chunk]]) -> None:
    """Discard output. Engines use this function as their `Deliver` until `start` passes the worker's function."""


def discard_events(rank: int, events: list[KvEvent]) -> None:
    """Discard KV events. This function is the default `Announce`, for workers that do not publish KV events."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The state of a request that this engine has stopped, so that another worker can continue the request."""

    tokens: Sequence[int]  # the prompt and all generated tokens
    computed: int  # the request's blocks hold the KV of this many tokens, counted from the first


class Export(Protocol):
    """A request that moves to another worker with its KV cache.

    The request's KV blocks are kept until `close` is called, even if the request ends earlier.
    """

    def full_blocks(self) -> int:
        """Return the number of full KV blocks at the start of the sequence. A full block never changes again."""

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the bytes of `count` KV blocks of one shard, starting with the block at index `first`.

        The bytes are copied without blocking the event loop. Before `stop`, only full blocks may be read. After `stop`, the last,
        partial block may be read, too. The unused end of that block is filled with zeros.

        Raise MoveEnded if the request cannot move any more, or if a block does not exist yet.
        """

    async def stop(self) -> Stopped:
        """Stop the request after the current step, and return its state. Raise MoveEnded if the request cannot move any more.

        When `stop` returns, all output generated so far has been delivered.
        """

    def resume(self) -> None:
        """Continue to decode the request in this engine, as if it had not been stopped."""

    def close(self) -> None:
        """Release the KV blocks. May be called twice.

        If the request was stopped, it continues in this engine. To end the request and its export, cancel the request's key.
        """


class Import(Protocol):
    """The reservation for a request that arrives with its KV cache. To abort the import, cancel the request's key."""

    # tokens of the request's prefix, in whole blocks, that this engine has in its prefix cache
    cached_tokens: int

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified KV blocks of one shard into the reserved blocks, without blocking the event loop.

        `first` is the index in the sequence of the first block in `data`. If the engine cannot accept the blocks, abort the
        import and raise MoveRefused.
        """

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Start to decode the request under the key of its reservation.

        `tokens` are the prompt and all tokens generated so far. The KV of the first `computed` of these tokens has arrived. If
        the request cannot continue from `tokens`, abort the import and raise MoveRefused.
        """


class Engine(Protocol):
    """Generates tokens for requests.

    The worker calls all methods on its event loop. The engine may call `deliver` from any thread.
    """

    @property
    def identity(self) -> EngineIdentity:
        """The model and configuration that the engine serves."""

    @property
    def kv(self) -> tuple[Description, ...]:
        """The layout of the engine's KV blocks, one description per shard. Empty if no request can move with its KV cache."""

    def export(self, key: int) -> Export | None:
        """Prepare to send a decoding request to another worker.

        Return None if the key is unknown, or if the request has ended, is a canary, or is still in prefill.
        """

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Reserve KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives. `request` has the same form as
        for `submit`. This engine does not compute the request's prompt, because the KV cache arrives before `commit`. Tokens
        that the source worker generates before `commit` count against the request's limits.
        """

    @property
    def announces(self) -> bool:
        """Whether the engine reports every change of its prefix cache by KV events. The value is valid after `start`."""

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Load the model and begin to run steps. Raise EngineDead with the reason if the engine cannot start."""

    def awaits(self) -> Awaits | None:
        """Return what the engine waits for before it can start. Return None if the engine need not wait for anything slow."""

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request under a key that the worker has chosen.

        If the request cannot be accepted, deliver a chunk with the field `error` set.
        """

    def cancel(self, key: int) -> None:
        """Drop a request, and its export or reserved blocks, within one step. Unknown keys are ignored."""

    def trust(self, trusted: bool) -> None:
        """Set whether requests may reuse cached KV blocks.

        If `trusted` is false, the blocks computed so far may be wrong. The engine stops their reuse, and reports their removal by
        KV events. It keeps no blocks for later requests until a call with `trusted` true.
        """

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to `share` of its full size from the next step on, but to no less than one request.

        A share of 1 ends the limit. Running requests are not stopped, and requests that arrive with a KV cache are still
        accepted. Other new requests wait until the running batch is below the limit.
        """

    def phase(self) -> Phase:
        """Return the current phase of the engine. The call is cheap and never blocks."""

    def load(self) -> Load:
        """Return the engine's load. The call is cheap and never blocks."""

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank, or an empty list if there is only one rank. The call is cheap and never blocks."""

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot serve any more."""

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Inject a fault (error, corrupt, drift, slow …) into one rank. `heal` ends all faults except `die`.

        `EngineFaults.inject` defines the meaning of `argument` for each fault. Return False if this engine cannot inject the
        fault.
        """

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault of one rank. Other faults stay active."""

    async def stop(self) -> None:
        """Stop running steps, and free all resources of the engine within a few seconds."""


def lacks_adapter(request: Generate, adapters: Collection[str]) -> str:
    """Return the error for a request with an adapter that this engine does not have now; empty if it can use the adapter.

    The error makes the frontend send the request to another worker.
    """
    if not request.adapter or request.adapter in adapters:
        return ""
    return "not_serving: this worker does not have the adapter of the request"


def validate_request(request: Generate, context: int, vocabulary: int) -> str | None:
    """Return why a request can never be served, or None if it can.

    `context` is the largest number of tokens of a request, and `vocabulary` the number of token ids of the model.
    """
    tokens, bias = request.tokens, request.sampling.logit_bias
    if not tokens:
        return "invalid_request: the prompt is empty"
    if len(tokens) >= context:
        return f"invalid_request: {len(tokens)} tokens leave no room in a context of {context}"
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        return f"invalid_request: token ids go from 0 to {vocabulary - 1}"
    if bias and not 0 <= min(bias) <= max(bias) < vocabulary:
        return f"invalid_request: logit_bias: token ids go from 0 to {vocabulary - 1}"
    allowed, words = request.sampling.allowed_token_ids, request.sampling.bad_word_tokens
    if not all(word and 0 <= min(word) <= max(word) < vocabulary for word in words):
        return f"invalid_request: bad_words: token ids go from 0 to {vocabulary - 1}"
    if allowed and not 0 <= min(allowed) <= max(allowed) < vocabulary:
        return f"invalid_request: allowed_token_ids: token ids go from 0 to {vocabulary - 1}"
    return None


def seed_of(request: Generate) -> int:
    """Return a request's seed. Without one, return a hash of the request's id, so that all workers use the same seed."""
    seed = request.sampling.seed
    return xxhash.xxh64_intdigest(request.request.encode()) if seed is None else seed


def validate_import(
    request: Generate,
    room_tokens: int,
    tokens: Sequence[int],
    computed: int,
    *,
    context: int,
    vocabulary: int,
) -> str:
    """Return the reason why an arrived request cannot continue from its tokens; empty if it can.

    Args:
        request: the request of the reservation.
        room_tokens: the number of tokens for which blocks were reserved.
        tokens: the prompt and all generated tokens, as they arrived.
        computed: the KV of this many tokens, counted from the first, has arrived.
        context: the model's largest number of tokens.
        vocabulary: the number of token ids of the model.
    """
    length, submitted = len(tokens), len(request.tokens)
    if list(tokens[:submitted]) != request.tokens:
        return "the tokens do not continue those of the reservation"
    if length > room_tokens:
        return f"{length} tokens arrived, but room was reserved for {room_tokens}"
    if any(not 0 <= token < vocabulary for token in tokens[submitted:]):
        return f"token ids go from 0 to {vocabulary - 1}"
    if not 0 < computed <= length:
        return f"the KV of {computed} of {length} tokens was announced"
    if length >= min(submitted + request.sampling.max_tokens, context):
        return "the request was already complete on arrival"
    return ""
