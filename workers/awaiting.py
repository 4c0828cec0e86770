"""Who is told that a worker cannot join yet, and why? The journal: others may already be asked for what it will serve.

    engine.start … ── it waits for something ──▶ WorkerAwaited ── another reason, or two minutes ──▶ WorkerAwaited …

An engine that starts at once is awaited by nobody, and nothing is said of it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from events.journal.port import Journal
from events.observations import WorkerAwaited, WorkerLeft
from workers.config.worker import WorkerConfig
from workers.engines.engine import Engine

LOOK_S = 0.1
CHANGED_S = 10.0  # between two reasons: one that flaps is a few facts a minute
AGAIN_S = 120.0  # who has not said it for ten minutes is awaited no more


class WaitReport:
    """What is said of one worker until it joins."""

    def __init__(self, config: WorkerConfig, engine: Engine, journal: Journal) -> None:
        self._about = {"worker": config.name, "instance": config.instance}
        self._engine = engine
        self._journal = journal
        self._said: tuple[str, str] | None = None  # reason, model
        self._said_at = float("-inf")  # by the loop's clock

    @contextlib.asynccontextmanager
    async def telling(self) -> AsyncIterator[None]:
        """Say what the engine waits for, as long as this lasts."""
        looking = asyncio.create_task(self._look_again())
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.wait((looking,))

    async def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.look(loop.time())
            await asyncio.sleep(LOOK_S)

    def look(self, now: float) -> None:
        """Say what the engine waits for, if that is due. `now`: seconds, of any clock that only goes forward."""
        awaits = self._engine.awaits()
        if awaits is None:
            return
        due_s = AGAIN_S if self._said == (awaits.reason, awaits.model) else CHANGED_S
        if now - self._said_at < due_s:
            return
        self._said, self._said_at = (awaits.reason, awaits.model), now
        self._journal.observe(WorkerAwaited(**self._about, reason=awaits.reason, model=awaits.model))

    def leave(self) -> None:
        """Say that it is not to be waited for any longer: it was told to stop."""
        if self._said is not None:
            self._journal.observe(WorkerLeft(**self._about, mode="graceful", exit=0))
