"""The `Engine` protocol: what a worker requires of an engine.

An engine turns token sequences into more tokens, step by step, for many requests at once. It runs off the worker's event loop
(in a thread or a child process). It delivers the output of each step in one call, so that the worker can send one frame per
step. It must not split a step's output over two calls, nor merge the outputs of two steps out of order.
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
    """The reason why an engine has not started yet."""

    reason: str  # readable, such as "cannot connect to http://…"; never contains a server's own text
    model: str = ""  # the model it will serve; empty: not known yet


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The model and configuration that an engine serves. Part of the worker's registration and of the goldens' key."""

    model: str
    revision: str
    tokenizer: str
    engine: str
    engine_version: str
    dtype: str
    tp: int
    device: str
    context_tokens: int
    exact: bool
    profile: Profile
    dp: int = 1  # DP ranks, each with its own KV cache and queue
    root: str = ""  # the weights' repository or folder, as the server reports it; empty: not reported
    also_served: tuple[str, ...] = ()  # further names of the same weights on the server
    generation_config: str = ""  # digest of the model's default sampling parameters; empty: none known
    waiting_max: int | None = None  # requests that may wait beside a full batch; None: unlimited
    server: str = ""  # host and port of the server that computes; empty: this process computes
    lineage: str = ""  # what the server reports of its weights and how it computes; empty: nothing


@dataclass(frozen=True, slots=True)
class Phase:
    """The engine's current phase (idle, prefill or decode), its start (monotonic seconds), and its number of prompt tokens."""

    name: str = "idle"
    since: float = 0.0
    prefill_tokens: int = 0


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
    """Discard output before `start`."""


def discard_events(rank: int, events: list[KvEvent]) -> None:
    """Discard the events."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request that produces no more output here. Its blocks hold the KV of the first `computed` of its `tokens`."""

    tokens: Sequence[int]
    computed: int


class Export(Protocol):
    """A request that is moving out of an engine. Its blocks are kept until `close`, whatever happens to the request."""

    def full_blocks(self) -> int:
        """Return how many blocks are full, counted from the first one. Full blocks never change again."""

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the bytes of `count` blocks of one shard, copied off the event loop. Raise MoveEnded.

        Before `stop` only full blocks may be read; after it also the last one, its unused end filled with zeros.
        """

    async def stop(self) -> Stopped:
        """Stop the request's output after the current step; earlier output has been delivered. Raise MoveEnded."""

    def resume(self) -> None:
        """Continue the request as if it had not been stopped."""

    def close(self) -> None:
        """Release the blocks. May be called twice.

        The request continues even if it was stopped; cancelling its key ends both.
        """


class Import(Protocol):
    """The reservation for a request that arrives with its KV cache. Cancelling its key aborts the import, too."""

    cached_tokens: int  # tokens of its prefix, in whole blocks, that are already here

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified blocks of one shard, off the loop. Raise MoveRefused; the import is then aborted.

        `first` is the index of the first of these blocks in the sequence.
        """

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Start to decode under its key. Raise MoveRefused; the import is then aborted.

        `tokens` are all tokens so far; the KV of the first `computed` of them was taken.
        """

    def abort(self) -> None:
        """Free the reserved blocks. Does nothing after `commit` or when called again."""


class Immovable:
    """Base of engines that cannot move requests with their KV cache; the requests are replayed instead."""

    @property
    def kv(self) -> tuple[Description, ...]:
        """Empty: there are no blocks to move."""
        return ()

    def export(self, key: int) -> Export | None:
        """Return None: no request can leave with its KV cache."""
        return None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Refuse: no KV cache can arrive."""
        return "this engine takes no KV cache in"


class Engine(Protocol):
    """An engine. All methods are called on the worker's event loop; `deliver` may be called from any thread."""

    @property
    def identity(self) -> EngineIdentity:
        """The model and configuration that the engine serves."""

    @property
    def kv(self) -> tuple[Description, ...]:
        """The layout of its KV blocks, one description per shard; empty: requests cannot move with their KV cache."""

    def export(self, key: int) -> Export | None:
        """Prepare to move a decoding request. None: it is unknown, has ended, is a canary, or is still in prefill."""

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Reserve blocks for a request that will have grown to `room_tokens` tokens, or return why not.

        The request is like that of `submit`, but is not computed here: its KV cache arrives before `commit`. Tokens that it
        generates until then count against its limits.
        """

    @property
    def announces(self) -> bool:
        """Whether the engine announces every change of its prefix cache. Known after `start`."""

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Load the model and start to step. Raise EngineDead with the reason if the engine cannot start."""

    def awaits(self) -> Awaits | None:
        """Return why the engine has not started yet. None: it does not wait for anything that takes long."""

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request under a key chosen by the worker. Errors are delivered as a chunk with `error` set."""

    def cancel(self, key: int) -> None:
        """Drop a request within one step, with its export or reserved room. Unknown keys are ignored."""

    def trust(self, trusted: bool) -> None:
        """Set whether cached blocks may be reused.

        When distrusted, stop the reuse of all blocks computed so far, which may be wrong, and announce their removal. Until the
        engine is trusted again, keep no blocks for other requests.
        """

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once from the next step on, at least one request; 1: the whole batch.

        Running requests are not stopped. Requests that arrive with a KV cache are accepted as before; others wait.
        """

    def phase(self) -> Phase:
        """Return the current phase of the engine. Cheap, never blocks."""

    def load(self) -> Load:
        """Return the engine's load. Cheap, never blocks."""

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank; empty if there is only one. Cheap, never blocks."""

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot continue."""

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Inject a fault into one rank (error, corrupt, drift, slow), or `heal` all; False if this engine cannot."""

    def heal(self, fault: str, rank: int = 0) -> None:
        """End this fault of this rank. Other faults stay active."""

    async def stop(self) -> None:
        """Stop stepping and free everything, within a few seconds."""


def validate_import(
    request: Generate,
    room_tokens: int,
    tokens: Sequence[int],
    computed: int,
    *,
    context: int,
    vocabulary: int,
) -> str:
    """Return why these tokens do not continue the request for which room was reserved; empty if they do.

    The KV of the first `computed` tokens has arrived.
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
