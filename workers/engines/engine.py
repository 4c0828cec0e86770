"""What an engine is, to the worker around it.

An engine turns token sequences into more tokens, step by step, for many requests at once. It runs off the worker's
event loop (a thread or a child), and hands each step's output over in one call, so that the worker can send one frame
per step. A step's output may never be split over two calls, nor two steps' outputs merged out of order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from events.errors import HoldfastError
from events.observations import Profile
from events.wire import Chunk, Generate, Load


class EngineError(HoldfastError):
    """The engine raised while it worked on a request."""


class EngineDead(HoldfastError):
    """The engine can no longer serve anything; the worker must be replaced."""


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


@dataclass(frozen=True, slots=True)
class Phase:
    """What the engine does now: idle, prefill or decode; since when (monotonic seconds); on how many prompt tokens."""

    name: str = "idle"
    since: float = 0.0
    prefill_tokens: int = 0


Deliver = Callable[[list[tuple[int, Chunk]]], None]
"""Called once per step, from any thread, with (request key, chunk) pairs. Chunk.stream is filled in by the worker.

A token that ends an answer (the end-of-sequence token, or one of `stop_token_ids`) is the last token of its last chunk.
`tests/workers/engine_contract.py` is the suite that every engine passes.
"""


class Engine(Protocol):
    """One engine. All methods but `deliver`'s callback are called on the worker's event loop."""

    identity: EngineIdentity

    async def start(self, deliver: Deliver) -> None:
        """Load what must be loaded and begin to step. Raise EngineDead with the reason if it cannot."""
        ...

    def submit(self, key: int, request: Generate) -> None:
        """Take a request in under a key of the worker's. Errors come back as a chunk with `error` set."""
        ...

    def cancel(self, key: int) -> None:
        """Forget a request within one step. Unknown keys are ignored."""
        ...

    def phase(self) -> Phase:
        """Return what the engine is doing. Cheap, never blocks."""
        ...

    def load(self) -> Load:
        """Return the engine's load. Cheap, never blocks."""
        ...

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot go on."""
        ...

    def chaos(self, fault: str, argument: float) -> bool:
        """Play a fault (error, corrupt, drift, slow, heal); False if this engine cannot."""
        ...

    async def stop(self) -> None:
        """Stop stepping and free everything, within a few seconds."""
        ...
