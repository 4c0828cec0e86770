"""Checks a worker that a frontend reports as stalled, if a spare is ready to replace it.

    RequestFailed, stalled ─▶ query ── an answer, a beat, a link of a frontend ──▶ alive
                               ▲└── none of these within `answer_s`, spare ready ──▶ WorkerSilent, at once
                               └───────────────────── spare not ready: repeat while the report is recent

Without a spare, an early report would gain nothing: `Liveness` waits for the silence, and a worker that was only slow for a
moment stays in service. With a spare, a false alarm costs little: the worker becomes the spare when it answers again.

The query is a `batch` command with the share that the worker has to fill anyway: any live worker answers it.
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
NEWS = timedelta(seconds=2)  # older reports are ignored: the silence itself is detected soon after
DUE_MAX = 64  # instances waiting to be checked
LATE_S = 0.1  # lag of our own loop above which an answer may have arrived unread

log = structlog.get_logger(__name__)


class HangCheck:
    """Checks workers that are reported as stalled, while its controller leads."""

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
        self._asked = set[Life]()  # instances that are queried now, or queued
        self._unanswered: dict[Life, float] = {}  # when they were last reported as stalled
        view.listen(self._on_batch)

    def _on_batch(self, view: Any, batch: Sequence[Recorded]) -> None:
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
        """Return whether a spare exists for this worker; with `ready`, one that could serve at once."""
        worker, workers = self._worker(life), self._view.fleet.workers
        if worker is None or worker.spare.kept:
            return False
        return any(
            one.spare.kept and one.kind == worker.kind and one.alive and (one.well or not ready)
            for one in workers.values()
        )

    async def run(self) -> None:
        """Check queued workers until cancelled."""
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
                if not self._too_many() and self._leading() and self._has_spare(life, ready=True):
                    self._liveness.accuse(life)
                    return
        finally:
            self._asked.discard(life)

    async def _answers(self, life: Life) -> bool:
        """Query one worker. Return False only if we were connected, and neither it nor a frontend connected to it responded."""
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
            await self._clock.sleep(max(0.0, left))  # no subscriber: the worker may be reconnecting
        else:
            return True
        late = self._clock.monotonic() - began - answer_s > LATE_S
        return late or not self._was_listening(began) or self._is_heard(life, began)

    def _was_listening(self, since: float) -> bool:
        """Return whether we have received everything that was sent on the bus after `since`."""
        connected = self._bus.since
        return connected is not None and connected <= since and not self._bus.unread

    def _is_heard(self, life: Life, since: float) -> bool:
        """Return whether, after `since`, the worker has sent a beat or a frontend has reported a connection to it."""
        beats, (name, instance) = self._beats, life
        lives, frontends = beats.lives, beats.frontends
        beat, reports = lives.get(life), [one for one in frontends.values() if one.at >= since]
        return (beat is not None and beat.at >= since) or any(
            one.workers.get(name) == instance for one in reports
        )

    def _too_many(self) -> bool:
        """Return whether so many workers are reported as stalled that we may be the one that is cut off."""
        since, workers = self._clock.monotonic() - NEWS.total_seconds(), self._view.fleet.workers
        self._unanswered = {
            life: at for life, at in self._unanswered.items() if at >= since and not self._is_heard(life, at)
        }
        living = sum(worker.alive for worker in workers.values())
        return len(self._unanswered) > self._settings.blind_share * living
