"""How many requests may an engine run at once, so that its steps take no longer than they should? As many as it says, less while
its steps are late, and one more at a time again (AIMD).

    target    1.5 times what a step of a full batch takes by its profile
    each quarter of a second with steps enough in it:
        their mean is over the target ──▶ nine tenths of what runs, a quarter of the batch at least
        what runs fills the limit     ──▶ a little more, up to the batch

Only steps in which nobody's prompt is read are measured: those say what decoding takes, on this machine, now. How long a request
lasts says nothing of it. Off by default; meant for engines whose steps all requests share.
"""

import asyncio
import threading
from collections.abc import Callable
from math import inf

import msgspec

from events.observations import Profile
from events.wire import Chunk, Load
from workers.engines.engine import Announce, Deliver, Engine, unheard
from workers.engines.wrapped import WrappedEngine

TOLERATED = 1.5
CUT, LEAST = 0.9, 0.25  # of what runs; of the batch
GROWS = 1 / 32  # of the batch, at a time
LOOK_S = 0.25
STEPS_LEAST = 4
OUTLIER = 3.0  # times the target: no step counts for more


class BatchLimit:
    """The limit of one engine. Pure; steps may be told from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.most = self.limit = max(1, profile.max_batch)
        self.target_s = _full_step_s(profile) * TOLERATED
        self._lock = threading.Lock()
        self._sum_s, self._steps = 0.0, 0

    def step(self, took_s: float) -> None:
        """Take in a step in which nothing was read."""
        if 0.0 < self.target_s < inf and took_s > 0.0:
            with self._lock:
                self._sum_s += min(took_s, OUTLIER * self.target_s)
                self._steps += 1

    def look(self, running: int) -> bool:
        """Move the limit, if there were steps enough since the last time. Return whether it has moved."""
        with self._lock:
            if self._steps < STEPS_LEAST:
                return False
            mean_s = self._sum_s / self._steps
            self._sum_s, self._steps = 0.0, 0
        before = self.limit
        if mean_s > self.target_s:
            cut = int(min(self.limit, max(1, running)) * CUT)
            self.limit = min(self.limit, max(cut, int(self.most * LEAST), 1))
        elif running >= self.limit:
            self.limit = min(self.most, self.limit + max(1, int(self.most * GROWS)))
        return self.limit != before


class AdaptiveEngine(WrappedEngine):
    """An engine that runs no more at once than it can without being late."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._batch: BatchLimit | None = (
            None  # from its start on: only then it is known how fast it should be
        )
        self._told = 1.0
        self._deliver: Deliver = _nowhere
        self._now: Callable[[], float] = float  # of the loop; may be asked from any thread
        self._last_at: float | None = None  # when a step ended after which others go on
        self._looked = -inf

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        """Start the engine, and listen to its steps."""
        self._deliver, self._now = deliver, asyncio.get_running_loop().time
        await self._engine.start(self._delivered, announce)
        self._batch = BatchLimit(self._engine.identity.profile)

    def limit_batch(self, share: float) -> None:
        """Run no more than this share of the batch at once, or less."""
        self._told = share
        self._apply()

    def load(self) -> Load:
        """Return the engine's load, and how many it runs at once now. Called with every beat: then the limit moves, too."""
        load, batch = self._engine.load(), self._batch
        if batch is None:
            return load
        now = self._now()
        if now - self._looked >= LOOK_S:
            self._looked = now
            if batch.look(load.running):
                self._apply()
        return msgspec.structs.replace(load, batch=batch.limit)

    def _apply(self) -> None:
        batch = self._batch
        own = 1.0 if batch is None else batch.limit / batch.most
        self._engine.limit_batch(min(self._told, own))

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Hand over what a step has brought, from any thread, and see how long it took."""
        now, last, batch = self._now(), self._last_at, self._batch
        reads = self._engine.phase().prefill_tokens > 0 or any(c.cached_tokens is not None for _, c in out)
        goes_on = any(chunk.finish is None and chunk.error is None for _, chunk in out)
        self._last_at = now if goes_on else None
        if batch is not None and last is not None and not reads:
            batch.step(now - last)
        self._deliver(out)


def _full_step_s(profile: Profile) -> float:
    """Return how long a step of a full batch takes by a profile, beyond its curve in proportion; inf: it does not say."""
    if not profile.tpot_ms:
        return inf
    batch, milliseconds = profile.tpot_ms[-1]
    return milliseconds / 1000 * max(1.0, profile.max_batch / max(1, batch))


def _nowhere(out: list[tuple[int, Chunk]]) -> None:
    """Where output goes before `start`."""
