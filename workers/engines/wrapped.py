"""What an engine around an engine hands on: everything, but for what it overrides."""

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
    unheard,
)
from workers.kv_transfer.messages import Description


class WrappedEngine:
    """Another engine, as it is. All methods but what `deliver` calls are called on the worker's loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # what only some engines have: stats, counters

    @property
    def identity(self) -> EngineIdentity:
        """What it serves."""
        return self._engine.identity

    @property
    def kv(self) -> tuple[Description, ...]:
        """What its KV blocks mean."""
        return self._engine.kv

    @property
    def announces(self) -> bool:
        """Whether it announces all that its prefix cache stores and removes."""
        return self._engine.announces

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        """Start the engine. Raise EngineDead with the reason if it cannot."""
        await self._engine.start(deliver, announce)

    def awaits(self) -> Awaits | None:
        """Return what it waits for while it starts."""
        return self._engine.awaits()

    def submit(self, key: int, request: Generate) -> None:
        """Take a request in."""
        self._engine.submit(key, request)

    def cancel(self, key: int) -> None:
        """Forget a request. Unknown keys are ignored."""
        self._engine.cancel(key)

    def export(self, key: int) -> Export | None:
        """Prepare to move a request that decodes."""
        return self._engine.export(key)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Take the blocks for a request that comes with its KV cache, or say why not."""
        return self._engine.reserve(key, request, room_tokens)

    def trust(self, trusted: bool) -> None:
        """Let no request find what was computed up to now."""
        self._engine.trust(trusted)

    def limit_batch(self, share: float) -> None:
        """Run no more than this share of the batch at once."""
        self._engine.limit_batch(share)

    def phase(self) -> Phase:
        """Return what the engine is doing."""
        return self._engine.phase()

    def load(self) -> Load:
        """Return the engine's load."""
        return self._engine.load()

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank."""
        return self._engine.ranks()

    async def check(self) -> None:
        """Raise EngineDead if the engine cannot go on."""
        await self._engine.check()

    def chaos(self, fault: str, argument: float, rank: int = 0) -> bool:
        """Play a fault."""
        return self._engine.chaos(fault, argument, rank)

    def heal(self, fault: str, rank: int = 0) -> None:
        """End a fault."""
        self._engine.heal(fault, rank)

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()
