"""What an engine is, to the worker around it.

An engine turns token sequences into more tokens, step by step, for many requests at once. It runs off the worker's
event loop (a thread or a child), and hands each step's output over in one call, so that the worker can send one frame
per step. A step's output may never be split over two calls, nor two steps' outputs merged out of order.
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
"""So many requests may be on their way out of one engine at once, and so many into it."""

CANARIES_MAX = 2
"""So many canaries are taken beyond what may wait: a worker that is full is checked, too."""


class EngineDead(HoldfastError):
    """The engine can no longer serve anything; the worker must be replaced."""


class EngineChanged(EngineDead):
    """What the engine serves has changed. Nothing failed: this life of the worker ends, and the next one registers anew."""


class MoveEnded(HoldfastError):
    """The request that was to be moved is over, or has lost its KV cache."""


class MoveRefused(HoldfastError):
    """What has arrived cannot be gone on with. Nothing of it is left here."""


class Awaits(NamedTuple):
    """What keeps an engine from starting."""

    reason: str  # as one reads it: cannot connect to http://…; without the words of a server
    model: str = ""  # what it will serve; empty: it does not know yet


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine serves: part of the worker's registration, and of the key under which goldens are kept."""

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
    dp: int = 1  # DP ranks, each with a KV cache and a queue of its own
    root: str = ""  # the weights' repository or folder, as the server tells; empty: it does not
    also_served: tuple[str, ...] = ()  # further names of the same weights at the server
    generation_config: str = ""  # digest of the model's own defaults for sampling; empty: none are known
    waiting_max: int | None = None  # requests that it lets wait beside a full batch; None: any number
    server: str = ""  # host and port of the server that computes; empty: this process does
    lineage: str = ""  # what the server tells of its weights and how it computes; empty: nothing


@dataclass(frozen=True, slots=True)
class Phase:
    """What the engine does now: idle, prefill or decode; since when (monotonic seconds); on how many prompt tokens."""

    name: str = "idle"
    since: float = 0.0
    prefill_tokens: int = 0


Deliver = Callable[[list[tuple[int, Chunk]]], None]
"""Called once per step, from any thread, with (request key, chunk) pairs. Chunk.stream is filled in by the worker.

A token that ends an answer (the end-of-sequence token, or one of `stop_token_ids`) is the last token of its last chunk.
`tests/workers/engines/engine_contract.py` is the suite that every engine passes.
"""


Announce = Callable[[int, list[KvEvent]], None]
"""Called from any thread at the end of a step, right before or after its output is delivered, with a DP rank and what its
prefix cache has stored and removed in the step, in order. Canaries never appear in it.
"""


def unheard(rank: int, events: list[KvEvent]) -> None:
    """Announce to nobody."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A request that says nothing more here. The KV of the first `computed` of its `tokens` is in its blocks."""

    tokens: Sequence[int]
    computed: int


class Export(Protocol):
    """A request on its way out of an engine. Its blocks stay where they are until `close`, whatever becomes of it."""

    def full_blocks(self) -> int:
        """Return how many of its blocks are full, from the first on: they change no more."""
        ...

    async def blocks(self, shard: int, first: int, count: int) -> Buffer:
        """Return the bytes of so many blocks of one shard, copied off the event loop. Before `stop` only full ones;
        after it also the last, whose unused end is zeros. Raise MoveEnded."""
        ...

    async def stop(self) -> Stopped:
        """Let it say no more, from the end of the present step on: what it said has been delivered. Raise MoveEnded."""
        ...

    def resume(self) -> None:
        """Let it go on, as if it had not been stopped."""
        ...

    def close(self) -> None:
        """Let go of the blocks. The request goes on, even if it was stopped; cancelling its key ends both. May be
        called twice."""
        ...


class Import(Protocol):
    """Room for a request that arrives with its KV cache. Cancelling its key aborts it too."""

    cached_tokens: int  # whole blocks of its beginning that are here already

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified blocks of one shard, `first` the index of the first of them in the sequence, off the loop.
        Raise MoveRefused: then it has been aborted."""
        ...

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Begin to decode under its key: `tokens` are all of them, and the KV of the first `computed` was taken.
        Raise MoveRefused: then it has been aborted."""
        ...

    def abort(self) -> None:
        """Free everything. After `commit`, or a second time, it does nothing."""
        ...


class Immovable:
    """What an engine inherits whose requests cannot move with their KV cache: they are replayed instead."""

    @property
    def kv(self) -> tuple[Description, ...]:
        """Nothing: there are no blocks to move."""
        return ()

    def export(self, key: int) -> Export | None:
        """Return None: nothing leaves."""
        return None

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Say that nothing comes in either."""
        return "this engine takes no KV cache in"


class Unbreakable:
    """What an engine inherits that plays no faults."""

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Return False: there is none that it could play."""
        return False

    def heal(self, fault: str, rank: int = 0) -> None:
        """There is nothing to end."""


class Engine(Protocol):
    """One engine. All methods but `deliver`'s callback are called on the worker's event loop."""

    @property
    def identity(self) -> EngineIdentity:
        """What it serves."""
        ...

    @property
    def kv(self) -> tuple[Description, ...]:
        """What its KV blocks mean, one description per shard; empty: its requests cannot move with them."""
        ...

    def export(self, key: int) -> Export | None:
        """Prepare to move a request that decodes. None: it is unknown, over, a canary, or still in its prefill."""
        ...

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Take the blocks for a request that will have grown to `room_tokens` tokens, or say why not.

        It is that of `submit`, but nothing of it is computed: `commit` brings its KV cache, and what it generated
        meanwhile counts against its limits."""
        ...

    @property
    def announces(self) -> bool:
        """Whether it announces all that its prefix cache stores and removes. Known once it has started."""
        ...

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        """Load what must be loaded and begin to step. Raise EngineDead with the reason if it cannot."""
        ...

    def awaits(self) -> Awaits | None:
        """Return what it waits for while it starts. None: for nothing that takes long."""
        ...

    def submit(self, key: int, request: Generate) -> None:
        """Take a request in under a key of the worker's. Errors come back as a chunk with `error` set."""
        ...

    def cancel(self, key: int) -> None:
        """Forget a request within one step, with its export or the room that is kept for it. Unknown keys are
        ignored."""
        ...

    def trust(self, trusted: bool) -> None:
        """Let no request find what was computed up to now, and announce that it is gone: it may be wrong. Until it is
        trusted again, keep nothing for other requests."""
        ...

    def limit_batch(self, share: float) -> None:
        """Run no more than this share of the batch at once from the next step on, one request at least; 1: all of it. Who runs is
        not stopped, who comes with a KV cache is taken as before, and who comes without one waits."""
        ...

    def phase(self) -> Phase:
        """Return what the engine is doing. Cheap, never blocks."""
        ...

    def load(self) -> Load:
        """Return the engine's load. Cheap, never blocks."""
        ...

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank; nothing where there is only one. Cheap, never blocks."""
        ...

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot go on."""
        ...

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Play a fault of one rank (error, corrupt, drift, slow), or `heal` all; False if this engine cannot."""
        ...

    def heal(self, fault: str, rank: int = 0) -> None:
        """End this fault of this rank. What else was played stays."""
        ...

    async def stop(self) -> None:
        """Stop stepping and free everything, within a few seconds."""
        ...
