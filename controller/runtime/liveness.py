"""Detects silent workers: reports WorkerSilent once per silence, and WorkerHeard at its end.

    alive ── no beat for `silent_after_s`, observer listened all that time ──▶ silent ── a beat ──▶ alive

The observer is this controller. Missing heartbeats can also be the observer's fault. So silence counts only if, during the whole
window, the observer was connected to the broker, its event loop ran, and it kept up with the messages. If more than half of the
fleet is silent at once, the fault is assumed to be the observer's. The observer then reports ObserverBlind, and no worker as
silent.

If a whole fleet is cut off at once, its workers become silent one after another, within about one heartbeat interval. So once one
worker is silent, workers that would become silent within the next 1.5 heartbeat intervals are counted as silent too. If a
frontend reports a live connection to an instance, the instance is not reported as silent: it is alive, and only its messages do
not reach the observer.
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
UNREAD_BYTES = 256 * 1024  # unread input beyond which an observer is behind, in a small fleet
BEAT_BYTES = 300  # the same per worker, in a large fleet: about the size of one beat
SPREAD_BEATS = 1.5  # beat intervals within which the last beats lie if a fleet is cut off at once

log = structlog.get_logger(__name__)


class FactRecorder(Protocol):
    """The part of a journal that liveness needs: recording facts, and the source under which they are recorded."""

    source: str

    def observe(self, fact: Observation) -> str: ...


class BusState(Protocol):
    """The part of a bus that liveness needs.

    `since` is the monotonic time since which the bus has been connected without a break; None while it is disconnected. `unread`
    is the number of bytes that have arrived and are not processed yet.
    """

    @property
    def since(self) -> float | None: ...
    @property
    def unread(self) -> int: ...


@dataclass(eq=False)
class Liveness:
    """Watches heartbeats, and reports silent workers. Every controller watches, but only the leader reports."""

    view: FleetSource
    beats: Beats
    journal: FactRecorder
    bus: BusState
    clock: Clock
    settings: LivenessSettings
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        self._awake_since = self.clock.monotonic()  # time since when this event loop has not lagged
        self._first_seen: dict[Life, float] = {}  # time when an instance first appeared in the fleet
        self._reported: dict[Life, Literal["silent", "heard"]] = {}  # the last report about an instance
        self._accused: dict[Life, float] = {}  # time of a silence report; only a later beat ends the silence
        self.blind = False

    async def run(self) -> None:
        """Check for silent workers every `tick_s`, until cancelled."""
        tick = self.settings.tick_s
        while True:
            due = self.clock.monotonic() + tick
            await self.clock.sleep(tick)
            now = self.clock.monotonic()
            if now - due > self.settings.lag_max_s:
                self._awake_since = now
                await asyncio.sleep(0)  # lets the loop process messages that have arrived
            self.look(now)

    def look(self, now: float) -> None:
        """Report workers that have become silent, and workers that send heartbeats again. `now` is the monotonic time."""
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
        """Return the monotonic time of an instance's last heartbeat, or of its first appearance in the fleet if later."""
        beat, met = self.beats.lives.get(life), self._first_seen[life]
        return beat.at if beat is not None and beat.at > met else met

    def _report_returned(self, living: dict[Life, Worker]) -> None:
        for life, worker in living.items():
            if SILENT not in worker.health.charges.convictions:
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
            self._awake_since = now  # measures every worker's silence from now on
            log.info("observer_sees_again")
            return
        for life in late:
            if self.leading() and not self.beats.linked(*life, s.silent_after_s):
                self._report_silent(life, unheard[life])

    def _known_silent(self, life: Life, worker: Worker) -> bool:
        return SILENT in worker.health.charges.convictions or self._reported.get(life) == "silent"

    def _report_blind(self, silent: int, known: int) -> None:
        self.blind = True
        log.warning("observer_blind", silent=silent, known=known)
        if self.leading():
            self.journal.observe(ObserverBlind(observer=self.journal.source, silent=silent, known=known))

    def report_unresponsive(self, life: Life) -> None:
        """Report an instance as silent at once, because another check has found the instance unresponsive."""
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
NEWS = timedelta(seconds=2)  # older reports are ignored, because `Liveness` detects the silence soon
DUE_MAX = 64  # number of instances that can wait for their check
LATE_S = 0.1  # lag of this event loop above which an answer may have arrived unread


@dataclass(eq=False)
class HangCheck:
    """Checks each worker that a frontend reports as stalled, while this controller leads and a spare could replace the worker.

        RequestFailed, stalled ─▶ query ── an answer, a beat, a link of a frontend ──▶ alive
                                   ▲└── none of these within `answer_s`, spare ready ──▶ WorkerSilent, at once
                                   └───────────────────── spare not ready: repeat while the report is recent

    Without a spare, an early report would gain nothing, so the worker is left to `Liveness`. `Liveness` reports only a longer
    silence, so a worker that was slow for a moment stays in service. With a spare, a false alarm costs little, because the
    worker becomes the spare when it answers again.

    The query is a `batch` command that repeats the worker's present batch limit. Any live worker answers it.
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
        self._asked = set[Life]()  # instances that are being queried or wait for their query
        self._unanswered: dict[Life, float] = {}  # unresponsive instances: time of the last stalled report
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
        """Return whether a live spare can replace this worker. If `ready` is true, the spare must be able to serve now."""
        fleet = self.view.fleet
        worker = fleet.living(*life)
        if worker is None or worker.spare.kept:
            return False
        spares = (one for one in fleet.workers.values() if one.spare.kept and one.kind == worker.kind)
        return any(one.alive and (one.fully_healthy or not ready) for one in spares)

    async def run(self) -> None:
        """Check stalled workers as they are reported, until cancelled."""
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
                    self.liveness.report_unresponsive(life)
                    return
        finally:
            self._asked.discard(life)

    async def _answers(self, life: Life) -> bool:
        """Query one worker, and return whether it may be alive.

        Return False only if three conditions hold: this controller was connected throughout; the worker sent no answer and no
        heartbeat; no frontend reported a connection to the worker.
        """
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
            await self.bus.request(subjects.command("batch", name), message, answer_s)
        except BusUnavailable:
            return True
        except NoAnswer:
            left = began + answer_s - self.clock.monotonic()
            await self.clock.sleep(max(0.0, left))  # without a subscriber, the worker may be reconnecting
        else:
            return True
        late = self.clock.monotonic() - began - answer_s > LATE_S
        return late or not self._was_listening(began) or self._is_heard(life, began)

    def _was_listening(self, since: float) -> bool:
        """Return whether this controller has received and processed everything that was sent on the bus after `since`."""
        connected = self.bus.since
        return connected is not None and connected <= since and not self.bus.unread

    def _is_heard(self, life: Life, since: float) -> bool:
        """Return whether, after `since`, the worker sent a heartbeat or a frontend reported a connection to the worker."""
        beats, (name, instance) = self.beats, life
        beat, reports = beats.lives.get(life), beats.frontends.values()
        linked = (one.at >= since and one.workers.get(name) == instance for one in reports)
        return (beat is not None and beat.at >= since) or any(linked)

    def _too_many(self) -> bool:
        """Return whether so many workers are unresponsive that this controller itself may be cut off."""
        since, workers = self.clock.monotonic() - NEWS.total_seconds(), self.view.fleet.workers
        self._unanswered = {
            life: at for life, at in self._unanswered.items() if at >= since and not self._is_heard(life, at)
        }
        living = sum(worker.alive for worker in workers.values())
        return len(self._unanswered) > self.settings.blind_share * living
