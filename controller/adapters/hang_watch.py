"""Which of a request plane's connections hang? Looks at all of them twenty times a second.

What is said of one worker is `hang`'s; this takes our own lag off before anybody is judged, reads our sockets first, and
takes a silence of everybody at once for our own fault for a while.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import inf

import structlog

from controller.adapters.hang import HangPolicy, Process
from controller.adapters.worker_line import Line

log = structlog.get_logger(__name__)


class HangWatch:
    """Judges the connections that stand, and tells the streams of those that hang."""

    def __init__(
        self,
        policy: HangPolicy,
        lines: Callable[[], Mapping[str, Line]],
        processes: Callable[[], Iterable[Process]],
        changed: Callable[[], None],
    ) -> None:
        """`lines` are the connections that stand, by worker, and `processes` where the workers live; `changed` is called after
        a worker was found hung."""
        self._policy = policy
        self._lines = lines
        self._processes = processes
        self._changed = changed
        self._everyone_since: float | None = None
        self.look_due = inf  # when we listen next: time beyond it is our own loop's lag
        self.hangs = 0
        self.late_ticks = 0

    async def run(self) -> None:
        """Judge every connection each tick, after our own lag is taken off and our sockets are read."""
        loop, policy = asyncio.get_running_loop(), self._policy
        due = self.look_due = loop.time() + policy.tick_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            now = loop.time()
            if now - due > policy.lag_s:
                self.late_ticks += 1
                self._excuse(now - due, now)
            due = self.look_due = now + policy.tick_s
            for process in self._processes():
                process.look_due = due
            suspects = [line for line in self._lines().values() if line.pulse.suspect(now)]
            if suspects:
                await asyncio.sleep(policy.lag_s / 2)  # whole turns of the loop: what has arrived is read
                self._judge([line for line in suspects if not line.readable()], loop.time())
            else:
                self._everyone_since = None

    def _excuse(self, lag_s: float, now: float) -> None:
        """Take our own lag off everyone's silence."""
        for process in self._processes():
            process.excuse(lag_s, now)
        for line in self._lines().values():
            line.pulse.excuse(lag_s, now)

    def _judge(self, suspects: list[Line], now: float) -> None:
        policy, lines = self._policy, self._lines()
        guilty = [(line, why) for line in suspects if (why := line.pulse.suspect(now))]
        busy = [line for line in lines.values() if line.pulse.open_streams]
        if len(guilty) > 1 and len(guilty) == len(busy):
            self._everyone_since = self._everyone_since or now
            if now - self._everyone_since < policy.everyone_s:
                return  # all at once: more likely it is us
        for line, why in guilty:
            self.hangs += 1
            worker = next((name for name, one in lines.items() if one is line), "?")
            log.warning("worker_hung", worker=worker, why=why, streams=line.pulse.open_streams)
            if line.pulse.silent_s(now) > policy.silence_s:
                line.drop("stalled", why)  # all of them before any stream looks for another worker
        for line, why in guilty:
            line.lose("stalled", why)  # where the loop lives it will say when the engine gets on
        self._changed()
