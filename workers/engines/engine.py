"""The `Engine` protocol, which every engine of a worker implements.

An engine generates tokens for many requests at once, step by step. The engine runs off the worker's event loop, in a thread or
a child process. It delivers the output of each step in one call, so that the worker can send one frame per step. An engine must
not split a step's output over two calls. If it delivers the outputs of several steps in one call, they must be in step order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from events.errors import HoldfastError
from events.kv import KvEvent
from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.kv_transfer.messages import Buffer, Description

MOVES_MAX = 16
"""Maximum number of requests that may leave one engine at once, and that may enter it at once."""

CANARIES_MAX = 2
"""Maximum number of canaries accepted beyond the waiting limit: a full worker is checked, too."""


class EngineDead(HoldfastError):
    """The engine cannot serve any more; the worker must be replaced."""


class EngineChanged(EngineDead):
    """What the engine serves has changed.

    This is no failure: this instance of the worker ends, and the next one registers anew.
    """


class MoveEnded(HoldfastError):
    """The request to move has ended, or has lost its KV cache."""


class MoveRefused(HoldfastError):
    """The arrived request cannot be continued here. Nothing of it is kept."""


class Awaits(NamedTuple):
    """What an engine waits for before it can start, such as a server that is loading its model."""

    reason: str  # readable, such as "cannot connect to http://…"; never contains a server's own text
    model: str = ""  # the model it will serve; empty: not known yet


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The model and configuration that an engine serves.

    They are part of the worker's registration. Most of them are also part of the canary key.
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


@dataclass(frozen=True, slots=True)
class Phase:
    """The engine's current phase, from which the worker judges whether a step takes too long."""

    name: str = "idle"  # "idle", "prefill" or "decode"
    since: float = 0.0  # monotonic seconds
    prefill_tokens: int = 0  # number of prompt tokens in prefill now; 0 in the other phases


Deliver = Callable[[list[tuple[int, Chunk]]], None]
"""Called once per step, from any thread, with (request key, chunk) pairs. The worker fills in Chunk.stream.

A token that ends an answer (the end-of-sequence token, or one of `stop_token_ids`) is the last token of its last chunk.
`tests/workers/engines/engine_contract.py` is the test suite that every engine passes.
"""


Announce = Callable[[int, list[KvEvent]], None]
"""Called at the end of a step, from any thread, right before or after its output is delivered.

The arguments are a DP rank and the events of its prefix cache in this step (stored, removed), in order. Canaries never appear.
"""


def discard_output(out: list[tuple[int, Chunk]]) -> None:
    """Discard output. Engines use this function as their `Deliver` until `start` gives them the worker's."""


def discard_events(rank: int, events: list[KvEvent]) -> None:
    """Discard KV events. It is the default `Announce`, for a worker that does not publish KV events."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The state of a request that this engine has stopped, so that another worker can continue the request."""

    tokens: Sequence[int]  # the prompt and all generated tokens
    computed: int  # the request's blocks hold the KV of this many tokens, counted from the first


class Export(Protocol):
    """A request that moves to another worker with its KV cache.

    The request's KV blocks are kept until `close`, even if the request ends earlier.
    """

    def full_blocks(self) -> int:
        """Return the number of full KV blocks at the start of the sequence. A full block never changes again."""

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the bytes of `count` KV blocks of one shard, starting with the block at index `first`.

        The bytes are copied off the event loop. Before `stop`, only full blocks may be read. After `stop`, the last, partial
        block may be read, too. The unused end of that block is filled with zeros. Raise MoveEnded.
        """

    async def stop(self) -> Stopped:
        """Stop the request's output after the current step. Raise MoveEnded.

        When `stop` returns, all output generated so far has been delivered.
        """

    def resume(self) -> None:
        """Continue to decode the request in this engine, as if it had not been stopped."""

    def close(self) -> None:
        """Release the KV blocks. May be called twice.

        A request that was stopped then continues in this engine. To end the request and its export, cancel the request's key.
        """


class Import(Protocol):
    """The reservation for a request that arrives with its KV cache. Cancelling the request's key aborts the import, too."""

    cached_tokens: (
        int  # tokens of the request's prefix, in whole blocks, that this engine has in its prefix cache
    )

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified KV blocks of one shard into the reserved blocks, off the event loop.

        `first` is the index in the sequence of the first block in `data`. Raise MoveRefused if the engine cannot accept the
        blocks. The import is then aborted.
        """

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Start to decode the request under the key of its reservation.

        `tokens` are the prompt and all tokens generated so far. The KV of the first `computed` of these tokens has arrived. Raise
        MoveRefused if the request cannot continue from them. The import is then aborted.
        """

    def abort(self) -> None:
        """Free the reserved blocks. A second call has no effect, and neither has a call after `commit`."""


class Immovable:
    """Base of engines that cannot move a request with its KV cache. Another worker then recomputes the request's tokens."""

    @property
    def kv(self) -> tuple[Description, ...]:
        """An empty tuple, because this engine has no KV blocks that another worker could use."""
        return ()

    def export(self, key: int) -> Export | None:
        """Return None, because no request can leave this engine with its KV cache."""
        return None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Return the reason why no KV cache can arrive."""
        return "this engine takes no KV cache in"


class Engine(Protocol):
    """Generates tokens for requests. The worker calls all methods on its event loop. `deliver` may be called from any thread."""

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

        `room_tokens` is the largest number of tokens that the request can have when it arrives. `request` has the form of a
        request to `submit`, but this engine does not compute its prompt, because the KV cache arrives before `commit`. Tokens
        that the source generates until then count against the request's limits.
        """

    @property
    def announces(self) -> bool:
        """Whether the engine reports every change of its prefix cache by KV events. The value is valid after `start`."""

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Load the model and begin to run steps. Raise EngineDead with the reason if the engine cannot start."""

    def awaits(self) -> Awaits | None:
        """Return why the engine has not started yet. None if the engine waits for nothing that takes long."""

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request under a key that the worker has chosen. Report an error by a chunk with its `error` field set."""

    def cancel(self, key: int) -> None:
        """Drop a request within one step, with its export or its reserved blocks. Unknown keys are ignored."""

    def trust(self, trusted: bool) -> None:
        """Set whether requests may reuse cached KV blocks.

        When the engine becomes distrusted, the blocks computed so far may be wrong. The engine then stops their reuse and reports
        their removal by KV events. Until the engine is trusted again, it keeps no blocks for later requests.
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
        """Inject a fault (error, corrupt, drift, slow …) into one rank. The fault name `heal` ends all faults.

        Return False if this engine cannot inject the fault.
        """

    def heal(self, fault: str, rank: int = 0) -> None:
        """End one fault of one rank. Other faults stay active."""

    async def stop(self) -> None:
        """Stop the steps and free all resources within a few seconds."""


def validate_import(
    request: Generate,
    room_tokens: int,
    tokens: Sequence[int],
    computed: int,
    *,
    context: int,
    vocabulary: int,
) -> str:
    """Return why the arrived tokens do not continue the request of the reservation; empty if they do.

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
