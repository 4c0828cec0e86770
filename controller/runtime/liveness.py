"""Detects silent workers: reports WorkerSilent, once per silence, and WorkerHeard on return.

    alive ── no beat for `silent_after_s`, observer listened all that time ──▶ silent ── a beat ──▶ alive

Silence is a statement about the observer as well. It counts only if, during the whole window, we were connected, our own loop
ran, and we kept up with the messages on the bus. If more than half of the fleet is silent at once, the observer itself is in
doubt: it reports ObserverBlind and reports no worker as silent. The last beats of a fleet that is cut off lie within about one
beat of each other. So when the first worker is late, workers that will be late within a beat and a half are counted as silent
too. A frontend's live connection to the instance is a veto: the instance is alive, but its messages do not reach us.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import structlog

from controller.deciders.fleet import Worker
from controller.deciders.health_state import SILENT
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.settings import LivenessSettings
from controller.runtime.view import FleetSource, View
from events import subjects
from events.fact import Observation, Recorded
from events.intrusion.control_message import control
from events.nats.bus import Bus, BusUnavailable, NoAnswer
from events.observations import ObserverBlind, RequestFailed, WorkerHeard, WorkerSilent

FORGET_AFTER_S = 600.0
UNREAD_BYTES = 256 * 1024  # unread input beyond which an observer is behind; in a large fleet:
BEAT_BYTES = 300  # per worker, which is what one sends in a second
SPREAD_BEATS = 1.5  # the last beats of a fleet that is cut off at once lie within this many beats

log = structlog.get_logger(__name__)


class FactRecorder(Protocol):
    """The part of a journal that liveness needs: to record a fact under its source."""

    source: str

    def observe(self, fact: Observation) -> str: ...


class BusState(Protocol):
    """The part of a bus that liveness needs: since when, in monotonic seconds, it receives all messages, and its unread bytes."""

    @property
    def since(self) -> float | None: ...
    @property
    def unread(self) -> int: ...


@dataclass(eq=False)
class Liveness:
    """The observer of heartbeats. Every controller listens; only the leader reports."""

    view: FleetSource
    beats: Beats
    journal: FactRecorder
    bus: BusState
    clock: Clock
    settings: LivenessSettings
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        self._awake_since = self.clock.monotonic()  # since when our own loop has not lagged
        self._first_seen: dict[Life, float] = {}  # when an instance first appeared in the fleet
        self._reported: dict[Life, Literal["silent", "heard"]] = {}
        self._accused: dict[Life, float] = {}  # when reported as silent: an earlier beat is no return
        self.blind = False

    async def run(self) -> None:
        """Watch until cancelled."""
        tick = self.settings.tick_s
        while True:
            due = self.clock.monotonic() + tick
            await self.clock.sleep(tick)
            now = self.clock.monotonic()
            if now - due > self.settings.lag_max_s:
                self._awake_since = now
                await asyncio.sleep(0)  # first process the messages that arrived meanwhile
            self.look(now)

    def look(self, now: float) -> None:
        """Report workers that have become silent, and those that are no longer silent."""
        workers = self.view.fleet.workers
        living = {(name, w.joined.instance): w for name, w in workers.items() if w.alive}
        self._track_instances(living, now)
        since = self.bus.since
        if since is None:
            return
        if self.bus.unread > max(UNREAD_BYTES, BEAT_BYTES * len(living)):
            self._awake_since = now  # a beat may lie in the unread input
        listening = max(since, self._awake_since)
        unheard = {life: now - max(self._last_heard(life), listening) for life in living}
        self._report_returned(living)
        self._report_late(living, unheard, now)

    def _track_instances(self, living: dict[Life, Worker], now: float) -> None:
        if living.keys() != self._first_seen.keys():
            for life in living.keys() - self._first_seen.keys():
                self._first_seen[life] = now
            for life in self._first_seen.keys() - living.keys():
                del self._first_seen[life]
                self._reported.pop(life, None)
                self._accused.pop(life, None)
        self.beats.forget(living, FORGET_AFTER_S)

    def _last_heard(self, life: Life) -> float:
        """Return when this instance last sent a beat, or was first seen in the fleet if that is later."""
        beat, met = self.beats.lives.get(life), self._first_seen[life]
        return beat.at if beat is not None and beat.at > met else met

    def _report_returned(self, living: dict[Life, Worker]) -> None:
        for life, worker in living.items():
            if SILENT not in worker.health.convictions:
                continue
            beat = self.beats.fresh(*life, self.settings.beat_s + self.settings.tick_s)
            if beat is None or beat.at <= self._accused.get(life, beat.at - 1):
                continue
            if self._reported.get(life) != "heard" and self.leading():
                self._reported[life] = "heard"
                name, instance = life
                self.journal.observe(
                    WorkerHeard(worker=name, instance=instance, observer=self.journal.source)
                )
                log.info("worker_heard", worker=name)

    def _report_late(self, living: dict[Life, Worker], unheard: dict[Life, float], now: float) -> None:
        s = self.settings
        suspicious_s = s.silent_after_s - SPREAD_BEATS * s.beat_s
        quiet = [life for life, seconds in unheard.items() if seconds >= suspicious_s]
        suspects = [life for life in quiet if not self._known_silent(life, living[life])]
        late = [life for life in suspects if unheard[life] >= s.silent_after_s]
        if len(suspects) > s.blind_share * len(living):
            if late and not self.blind:
                self._report_blind(len(suspects), len(living))
            return
        if self.blind:
            self.blind = False
            self._awake_since = now  # the silence of every worker is measured anew
            log.info("observer_sees_again")
            return
        for life in late:
            if self.leading() and not self.beats.linked(*life, s.silent_after_s):
                self._report_silent(life, unheard[life])

    def _known_silent(self, life: Life, worker: Worker) -> bool:
        return SILENT in worker.health.convictions or self._reported.get(life) == "silent"

    def _report_blind(self, silent: int, known: int) -> None:
        self.blind = True
        log.warning("observer_blind", silent=silent, known=known)
        if self.leading():
            self.journal.observe(ObserverBlind(observer=self.journal.source, silent=silent, known=known))

    def accuse(self, life: Life) -> None:
        """Report an instance as silent because another check has found it unresponsive."""
        fleet = self.view.fleet
        worker = fleet.living(*life)
        if worker is None or self._known_silent(life, worker):
            return
        if life in self._first_seen and self.leading():
            self._report_silent(life, self.clock.monotonic() - self._last_heard(life))

    def _report_silent(self, life: Life, seconds: float) -> None:
        name, instance = life
        self._reported[life], self._accused[life] = "silent", self.clock.monotonic()
        log.warning("worker_silent", worker=name, silent_s=round(seconds, 3))
        silent_s, observer = round(seconds, 3), self.journal.source
        self.journal.observe(
            WorkerSilent(worker=name, instance=instance, silent_s=silent_s, observer=observer)
        )


STALLED = "stalled"
NEWS = timedelta(seconds=2)  # older reports are ignored: the silence itself is detected soon after
DUE_MAX = 64  # instances waiting to be checked
LATE_S = 0.1  # lag of our own loop above which an answer may have arrived unread


@dataclass(eq=False)
class HangCheck:
    """Checks a worker that a frontend reports as stalled, if a spare is ready to replace it and its controller leads.

        RequestFailed, stalled ─▶ query ── an answer, a beat, a link of a frontend ──▶ alive
                                   ▲└── none of these within `answer_s`, spare ready ──▶ WorkerSilent, at once
                                   └───────────────────── spare not ready: repeat while the report is recent

    Without a spare, an early report would gain nothing: `Liveness` waits for the silence, and a worker that was only slow for a
    moment stays in service. With a spare, a false alarm costs little: the worker becomes the spare when it answers again.

    The query is a `batch` command with the share that the worker has to fill anyway: any live worker answers it.
    """

    view: View
    liveness: Liveness
    beats: Beats
    bus: Bus
    clock: Clock
    settings: LivenessSettings
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        self._due: asyncio.Queue[Life] = asyncio.Queue(DUE_MAX)
        self._asked = set[Life]()  # instances that are queried now, or queued
        self._unanswered: dict[Life, float] = {}  # when they were last reported as stalled
        self.view.listen(self._on_batch)

    def _on_batch(self, view: object, batch: Sequence[Recorded]) -> None:
        for recorded in batch:
            fact = recorded.fact
            if not isinstance(fact, RequestFailed) or fact.reason != STALLED or not self.leading():
                continue
            life = (fact.worker, fact.instance)
            news = self.clock.now() - recorded.at < NEWS
            if news and life not in self._asked and not self._due.full() and self._has_spare(life):
                self._asked.add(life)
                self._unanswered[life] = self.clock.monotonic()
                self._due.put_nowait(life)

    def _has_spare(self, life: Life, *, ready: bool = False) -> bool:
        """Return whether a spare exists for this worker; with `ready`, one that could serve at once."""
        fleet = self.view.fleet
        worker = fleet.living(*life)
        if worker is None or worker.spare.kept:
            return False
        spares = (one for one in fleet.workers.values() if one.spare.kept and one.kind == worker.kind)
        return any(one.alive and (one.well or not ready) for one in spares)

    async def run(self) -> None:
        """Check queued workers until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._check(await self._due.get()))

    async def _check(self, life: Life) -> None:
        until = self.clock.monotonic() + NEWS.total_seconds()
        try:
            while self.clock.monotonic() < until and self.leading() and self._has_spare(life):
                if await self._answers(life):
                    self._unanswered.pop(life, None)
                    return
                if not self._too_many() and self.leading() and self._has_spare(life, ready=True):
                    self.liveness.accuse(life)
                    return
        finally:
            self._asked.discard(life)

    async def _answers(self, life: Life) -> bool:
        """Query one worker. Return False only if we were connected, and neither it nor a frontend connected to it responded."""
        name, instance = life
        began, answer_s = self.clock.monotonic(), self.settings.answer_s
        fleet = self.view.fleet
        worker = fleet.living(name, instance)
        if worker is None or self.bus.since is None:
            return True
        model = fleet.models.get(worker.joined.model)
        share = model.knobs.batch_size if model is not None else 1.0
        try:
            message = control("batch", name, instance, "hang_check", {"share": share})
            await self.bus.request(subjects.batch(name), message, answer_s)
        except BusUnavailable:
            return True
        except NoAnswer:
            left = began + answer_s - self.clock.monotonic()
            await self.clock.sleep(max(0.0, left))  # no subscriber: the worker may be reconnecting
        else:
            return True
        late = self.clock.monotonic() - began - answer_s > LATE_S
        return late or not self._was_listening(began) or self._is_heard(life, began)

    def _was_listening(self, since: float) -> bool:
        """Return whether we have received everything that was sent on the bus after `since`."""
        connected = self.bus.since
        return connected is not None and connected <= since and not self.bus.unread

    def _is_heard(self, life: Life, since: float) -> bool:
        """Return whether, after `since`, the worker has sent a beat or a frontend has reported a connection to it."""
        beats, (name, instance) = self.beats, life
        beat, reports = beats.lives.get(life), beats.frontends.values()
        linked = (one.at >= since and one.workers.get(name) == instance for one in reports)
        return (beat is not None and beat.at >= since) or any(linked)

    def _too_many(self) -> bool:
        """Return whether so many workers are reported as stalled that we may be the one that is cut off."""
        since, workers = self.clock.monotonic() - NEWS.total_seconds(), self.view.fleet.workers
        self._unanswered = {
            life: at for life, at in self._unanswered.items() if at >= since and not self._is_heard(life, at)
        }
        living = sum(worker.alive for worker in workers.values())
        return len(self._unanswered) > self.settings.blind_share * living
