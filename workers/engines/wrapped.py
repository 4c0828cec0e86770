"""Base of engines that wrap another engine and forward every call that they do not override."""

from typing import Any

from events.wire import Generate, Load
from workers.engines.engine import (
    Announce,
    Awaits,
    Deliver,
    Engine,
    EngineIdentity,
    Export,
    Import,
    Phase,
    discard_events,
)
from workers.kv_transfer.messages import Description


class WrappedEngine:
    """Forwards to another engine. All methods are called on the worker's loop; `deliver` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # only some engines have these: stats, counters

    @property
    def identity(self) -> EngineIdentity:
        """The model and configuration that the engine serves."""
        return self._engine.identity

    @property
    def kv(self) -> tuple[Description, ...]:
        """The layout of its KV blocks."""
        return self._engine.kv

    @property
    def announces(self) -> bool:
        """Whether the engine announces every change of its prefix cache."""
        return self._engine.announces

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine. Raise EngineDead with the reason if it cannot."""
        await self._engine.start(deliver, announce)

    def awaits(self) -> Awaits | None:
        """Return why the engine has not started yet."""
        return self._engine.awaits()

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request."""
        self._engine.submit(key, request)

    def cancel(self, key: int) -> None:
        """Cancel a request. Unknown keys are ignored."""
        self._engine.cancel(key)

    def export(self, key: int) -> Export | None:
        """Prepare to move a decoding request."""
        return self._engine.export(key)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Reserve room for a request that arrives with its KV cache, or return why not."""
        return self._engine.reserve(key, request, room_tokens)

    def trust(self, trusted: bool) -> None:
        """Set whether cached blocks may be reused."""
        self._engine.trust(trusted)

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once."""
        self._engine.limit_batch(share)

    def phase(self) -> Phase:
        """Return the current phase of the engine."""
        return self._engine.phase()

    def load(self) -> Load:
        """Return the engine's load."""
        return self._engine.load()

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank."""
        return self._engine.ranks()

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot continue."""
        await self._engine.check()

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Inject a fault."""
        return self._engine.chaos(fault, argument, rank)

    def heal(self, fault: str, rank: int = 0) -> None:
        """End a fault."""
        self._engine.heal(fault, rank)

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()
