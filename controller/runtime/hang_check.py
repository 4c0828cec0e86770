"""A frontend says that a worker has stalled, and a spare is ready to serve in its place: is it there still?

    RequestFailed, stalled ─▶ asked ── an answer, a beat, a frontend that hears it ──▶ it lives
                               ▲└── nothing of that within `answer_s` ── the spare is ready ──▶ WorkerSilent, at once
                               └─────────────────────────────────────── not yet, for as long as this is news

Without a spare haste would gain nothing: then its silence is waited for (`Liveness`), and a worker that was only slow for a
moment keeps its place. With one a mistake costs little: the worker is the spare when it is heard again.

What is asked is that it fill such a share of its batch as it is to fill anyway: any worker that lives answers that.
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import structlog

from controller.deciders.worker import Worker
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.canary.loop import View
from controller.runtime.liveness import Liveness
from controller.runtime.settings import LivenessSettings
from events import subjects
from events.fact import Recorded
from events.intrusion.control_message import control
from events.nats.bus import Bus, BusUnavailable, NoAnswer
from events.observations import RequestFailed

STALLED = "stalled"
NEWS = timedelta(seconds=2)  # what is told later than this is no news: silence is seen by itself soon after
DUE_MAX = 64  # lives that are to be asked
LATE_S = 0.1  # by which our own loop may be late: else an answer may be there and not read yet

log = structlog.get_logger(__name__)


class HangCheck:
    """Asks workers that are called stalled, while its controller leads."""

    def __init__(
        self,
        view: View,
        liveness: Liveness,
        beats: Beats,
        bus: Bus,
        clock: Clock,
        settings: LivenessSettings,
        leading: Callable[[], bool],
    ) -> None:
        self._view = view
        self._liveness = liveness
        self._beats = beats
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._leading = leading
        self._due: asyncio.Queue[Life] = asyncio.Queue(DUE_MAX)
        self._asked = set[Life]()  # or about to be
        self._unanswered: dict[Life, float] = {}  # when they were called stalled last
        view.listen(self._heard)

    def _heard(self, view: Any, batch: Sequence[Recorded]) -> None:
        for recorded in batch:
            fact = recorded.fact
            if not isinstance(fact, RequestFailed) or fact.reason != STALLED or not self._leading():
                continue
            life = (fact.worker, fact.instance)
            news = self._clock.now() - recorded.at < NEWS
            if news and life not in self._asked and not self._due.full() and self._has_spare(life):
                self._asked.add(life)
                self._unanswered[life] = self._clock.monotonic()
                self._due.put_nowait(life)

    def _worker(self, life: Life) -> Worker | None:
        workers = self._view.fleet.workers
        worker = workers.get(life[0])
        return worker if worker is not None and worker.joined.instance == life[1] and worker.alive else None

    def _has_spare(self, life: Life, *, ready: bool = False) -> bool:
        """Say whether there is a spare for its place, or one that could serve there at once."""
        worker, workers = self._worker(life), self._view.fleet.workers
        if worker is None or worker.spare.kept:
            return False
        return any(
            one.spare.kept and one.kind == worker.kind and one.alive and (one.well or not ready)
            for one in workers.values()
        )

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._check(await self._due.get()))

    async def _check(self, life: Life) -> None:
        until = self._clock.monotonic() + NEWS.total_seconds()
        try:
            while self._clock.monotonic() < until and self._leading() and self._has_spare(life):
                if await self._answers(life):
                    self._unanswered.pop(life, None)
                    return
                if not self._many() and self._leading() and self._has_spare(life, ready=True):
                    self._liveness.accuse(life)
                    return
        finally:
            self._asked.discard(life)

    async def _answers(self, life: Life) -> bool:
        """Ask one worker, and wait for its answer. False: nothing of it is to be heard, and we would hear it."""
        name, instance = life
        began, answer_s = self._clock.monotonic(), self._settings.answer_s
        worker = self._worker(life)
        if worker is None or self._bus.since is None:
            return True
        models = self._view.fleet.models
        model = models.get(worker.joined.model)
        share = model.knobs.batch_size if model is not None else 1.0
        try:
            message = control("batch", name, instance, "hang_check", {"share": share})
            await self._bus.request(subjects.batch(name), message, answer_s)
        except BusUnavailable:
            return True
        except NoAnswer:
            left = began + answer_s - self._clock.monotonic()
            await self._clock.sleep(max(0.0, left))  # nobody listens there: it may be about to come back
        else:
            return True
        late = self._clock.monotonic() - began - answer_s > LATE_S
        return late or not self._heard_all(began) or self._is_heard(life, began)

    def _heard_all(self, since: float) -> bool:
        """Say whether we have heard all that was said on the bus since then."""
        connected = self._bus.since
        return connected is not None and connected <= since and not self._bus.unread

    def _is_heard(self, life: Life, since: float) -> bool:
        """Say whether the worker, or a frontend that hears it, has said so after that."""
        beats, (name, instance) = self._beats, life
        lives, frontends = beats.lives, beats.frontends
        beat, reports = lives.get(life), [one for one in frontends.values() if one.at >= since]
        return (beat is not None and beat.at >= since) or any(
            one.workers.get(name) == instance for one in reports
        )

    def _many(self) -> bool:
        """Say whether so many are called stalled at once that it may be we who hear nothing."""
        since, workers = self._clock.monotonic() - NEWS.total_seconds(), self._view.fleet.workers
        self._unanswered = {
            life: at for life, at in self._unanswered.items() if at >= since and not self._is_heard(life, at)
        }
        living = sum(worker.alive for worker in workers.values())
        return len(self._unanswered) > self._settings.blind_share * living
