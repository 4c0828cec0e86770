"""Limits how many requests an engine runs at once so that its steps stay fast (AIMD).

The limit starts at the full batch. It drops while steps are late, and grows back step by step.

    target: 1.5 times the duration of a full-batch step, by the engine's profile
    every 0.25 s, if at least 4 steps were measured:
        their mean is above the target ──▶ limit to 0.9 times the running requests, at least a quarter of the batch
        the limit is reached           ──▶ raise it by 1/32 of the batch, at most to the batch

Only steps without prefill are measured: they show how long decoding currently takes on this machine, which the duration of a
whole request does not. Off by default; meant for engines in which all requests share each step.
"""

import asyncio
import threading
from collections.abc import Callable
from math import inf

import msgspec

from events.observations import Profile
from events.wire import Chunk, Load
from workers.engines.engine import Announce, Deliver, Engine, discard_events
from workers.engines.wrapped import WrappedEngine

TOLERATED = 1.5
CUT, LEAST = 0.9, 0.25  # factor on the running requests; smallest share of the batch
GROWS = 1 / 32  # share of the batch, per increase
ADJUST_S = 0.25
STEPS_LEAST = 4
OUTLIER = 3.0  # times the target: longer steps count as this


class BatchLimit:
    """The batch limit of one engine. Pure; `step` may be called from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.most = self.limit = max(1, profile.max_batch)
        self.target_s = _full_step_s(profile) * TOLERATED
        self._lock = threading.Lock()
        self._sum_s, self._steps = 0.0, 0

    def step(self, took_s: float) -> None:
        """Record the duration of a step without prefill."""
        if 0.0 < self.target_s < inf and took_s > 0.0:
            with self._lock:
                self._sum_s += min(took_s, OUTLIER * self.target_s)
                self._steps += 1

    def adjust(self, running: int) -> bool:
        """Adjust the limit if enough steps were recorded since the last call. Return whether it changed."""
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
    """An engine with a batch limit that keeps its steps within a target duration."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._batch: BatchLimit | None = None  # set by `start`: the profile is known only then
        self._requested = 1.0
        self._deliver: Deliver = _discard
        self._now: Callable[[], float] = float  # the loop's clock; may be called from any thread
        self._last_at: float | None = None  # end of the last step after which requests continued
        self._adjusted_at = -inf

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine and measure its steps."""
        self._deliver, self._now = deliver, asyncio.get_running_loop().time
        await self._engine.start(self._delivered, announce)
        self._batch = BatchLimit(self._engine.identity.profile)

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once."""
        self._requested = share
        self._apply()

    def load(self) -> Load:
        """Return the engine's load with its current limit. Called with every beat; adjusts the limit."""
        load, batch = self._engine.load(), self._batch
        if batch is None:
            return load
        now = self._now()
        if now - self._adjusted_at >= ADJUST_S:
            self._adjusted_at = now
            if batch.adjust(load.running):
                self._apply()
        return msgspec.structs.replace(load, batch=batch.limit)

    def _apply(self) -> None:
        batch = self._batch
        own = 1.0 if batch is None else batch.limit / batch.most
        self._engine.limit_batch(min(self._requested, own))

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Deliver a step's output, from any thread, and record the duration of the step."""
        now, last, batch = self._now(), self._last_at, self._batch
        reads = self._engine.phase().prefill_tokens > 0 or any(c.cached_tokens is not None for _, c in out)
        continues = any(chunk.finish is None and chunk.error is None for _, chunk in out)
        self._last_at = now if continues else None
        if batch is not None and last is not None and not reads:
            batch.step(now - last)
        self._deliver(out)


def _full_step_s(profile: Profile) -> float:
    """Return the duration of a full-batch step by a profile, extrapolated in proportion; inf if the profile has none."""
    if not profile.tpot_ms:
        return inf
    batch, milliseconds = profile.tpot_ms[-1]
    return milliseconds / 1000 * max(1.0, profile.max_batch / max(1, batch))


def _discard(out: list[tuple[int, Chunk]]) -> None:
    """Discard output before `start`."""
