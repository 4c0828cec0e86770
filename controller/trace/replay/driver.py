"""An open-loop load generator: sends the planned requests at their times, and measures the answers.

    plan ── bodies, encoded in advance ──▶ at the request's time, if fewer than the maximum are in flight ──▶ one task per request

If the maximum number of requests is in flight, the next request is held back until a request in flight has ended. The measure
`held` is the time for which a request is held back. The measure `late` is the generator's own delay. It begins when a request
is due and not held back, and ends when the request is sent.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from controller.trace.replay.answer import ReplayedAnswer
from controller.trace.replay.endpoint import ReplayTarget, now
from controller.trace.replay.measures import ReplayMeasures
from controller.trace.replay.plan import PlannedRequest
from controller.trace.replay.request_bodies import Wording

AHEAD = 64  # number of bodies encoded in advance
SOON_S = 0.005  # time before a request is due in which no body is encoded
TURN_S = 0.002  # longest time of sending and encoding before the event loop processes arrived data
TICK_S = 0.05
SAMPLE_TICKS = 5
CUT_S_MAX = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a replay: requests in flight, time of one request, and duration."""

    concurrency: int = 4096  # requests in flight
    timeout_s: float = 300.0  # time limit of one request
    seconds: float | None = None  # after this time, no more requests are sent


class Replay:
    """Runs one replay. `measures` has the counts and times of the replay so far."""

    def __init__(
        self,
        target: ReplayTarget,
        wording: Wording,
        planned: Iterator[PlannedRequest],
        measures: ReplayMeasures,
        limits: Limits,
    ) -> None:
        self.measures = measures
        self._times = measures.generator
        self._target, self._wording, self._planned, self._limits = target, wording, planned, limits
        self._ahead = deque[tuple[PlannedRequest, bytes]]()
        self._room = asyncio.Semaphore(limits.concurrency)
        self._requests = set[asyncio.Task[None]]()
        self._turn = 0.0  # time at which this module last yielded to the event loop
        self._name = f"replay-{uuid.uuid4().hex[:8]}"

    async def run(self, stop: asyncio.Event) -> None:
        """Send all requests, and wait until they have ended.

        If `stop` is set, send no more requests, and cancel the requests in flight.
        """
        await self._write(until=None)
        self.measures.began = self.measures.ended = now()
        cpu_s = time.process_time()
        tasks = [asyncio.ensure_future(one) for one in (self._send(), stop.wait(), self._tick())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            interrupted = stop.is_set()
        finally:
            every = [*tasks, *self._requests]
            for task in every:
                task.cancel()
            await asyncio.wait(every, timeout=CUT_S_MAX)
        if interrupted:
            self.measures.ended = now()
        self.measures.generator.cpu_s = time.process_time() - cpu_s
        self.measures.sample(now())
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def _send(self) -> None:
        began, free_at = self.measures.began, 0.0
        seconds = self._limits.seconds
        while (one := await self._next()) is not None:
            planned, body = one
            if seconds is not None and planned.at_s >= seconds:
                break
            due = began + planned.at_s
            await self._until(due)
            if self._room.locked():
                if not await self._held(None if seconds is None else began + seconds):
                    break
                free_at = now()
            else:
                await self._room.acquire()
            if free_at > due:  # also if the request waited behind another request that was held back
                self._times.held.add(free_at - due)
            task = asyncio.ensure_future(self._request(planned.tokens, body, max(due, free_at)))
            self._requests.add(task)
            task.add_done_callback(self._ended)
        while self._requests:
            await asyncio.wait(self._requests)

    async def _next(self) -> tuple[PlannedRequest, bytes] | None:
        """Return the next request and its encoded body; None if there are no more.

        Until the request is nearly due, encode further bodies in advance, so that a burst does not wait for encoding.
        """
        if not self._ahead:
            await self._write(until=now())
        if not self._ahead:
            return None
        one = self._ahead.popleft()
        await self._write(until=self.measures.began + one[0].at_s - SOON_S)
        return one

    async def _write(self, *, until: float | None) -> None:
        """Encode bodies in advance until the time `until` or until AHEAD bodies are ready. None means no time limit.

        If no body is ready, encode one even after `until`.
        """
        while len(self._ahead) < AHEAD:
            if self._ahead and until is not None and now() >= until:
                break
            if (planned := next(self._planned, None)) is None:
                break
            self._ahead.append((planned, self._wording.body(planned.prompt, planned.tokens)))
            await self._until(0.0)

    async def _until(self, due: float) -> None:
        """Wait until the time `due`.

        If `due` has passed, yield to the event loop at most once every TURN_S, because one iteration of a busy event loop takes
        many milliseconds.
        """
        at = now()
        if due > at or at - self._turn > TURN_S:
            await asyncio.sleep(max(0.0, due - at))
            self._turn = now()

    async def _held(self, until: float | None) -> bool:
        """Wait until fewer requests than the maximum are in flight, reserve a place for one more, and return True.

        If the wait lasts until the time `until`, return False instead. None means no time limit.
        """
        try:
            async with asyncio.timeout(None if until is None else max(0.0, until - now())):
                await self._room.acquire()
        except TimeoutError:
            return False
        return True

    async def _request(self, tokens: int, body: bytes, due: float) -> None:
        measures = self.measures
        self._times.late.add(max(0.0, now() - due))
        measures.leaves()
        answer = ReplayedAnswer(now(), first_token=measures.first_token, gap=measures.gap)
        try:
            reply = await self._target.ask(
                "POST",
                self._wording.path,
                body,
                take=answer.take,
                deadline_s=self._limits.timeout_s,
                headers={"X-Request-Id": f"{self._name}-{measures.sent}"},
            )
        except asyncio.CancelledError:
            measures.cuts()
            raise
        measures.ends(reply, answer, tokens)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.discard(task)
        self._room.release()
        if not task.cancelled():
            task.result()  # raises a bug of this module, for the loop's exception handler

    async def _tick(self) -> None:
        """Every TICK_S, record the lag of the event loop: the delay of its timers or of arrived data, whichever is longer.

        The replay's measured times can be too large by this lag.
        """
        ticks = 0
        while True:
            at = now()
            await asyncio.sleep(TICK_S)
            self._times.lag.add(max(0.0, now() - at - TICK_S, self._target.behind_s()))
            ticks += 1
            if ticks % SAMPLE_TICKS == 0:
                self.measures.sample(now())
