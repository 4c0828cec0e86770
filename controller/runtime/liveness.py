"""Who has fallen silent? Says WorkerSilent, once per silence, and WorkerHeard when the worker is back.

    heard ── no beat for `silent_after_s`, seen by one who listened all that time ──▶ silent ── a beat ──▶ heard

What a reader would get wrong: silence is a statement about the observer as well. It counts only if we were connected,
our own loop ran, and we kept up with what was said, during the whole window. If more than half of the fleet is unheard
at once we doubt ourselves and say ObserverBlind, accusing nobody. The last beats of a fleet that is cut off lie within
about one beat of each other, so those who will be late a beat and a half from now are counted when the first one is. A
frontend's live connection to the instance vetoes: it is heard, just not by us.
"""

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.health_state import SILENT
from controller.ports import Clock
from controller.runtime.beats import Beats, Life
from controller.runtime.settings import LivenessSettings
from events.fact import Observation
from events.observations import ObserverBlind, WorkerHeard, WorkerSilent

FORGET_AFTER_S = 600.0
UNREAD_BYTES = 256 * 1024  # by which an observer is behind, and in a large fleet:
BEAT_BYTES = 300  # for each of its workers, as much as all of them say in a second
SPREAD_BEATS = 1.5  # the last beats of a fleet that is cut off at once lie within this many beats

log = structlog.get_logger(__name__)


class Shown(Protocol):
    """What liveness needs of a FleetView."""

    @property
    def fleet(self) -> Fleet: ...


class Said(Protocol):
    """What liveness needs of a journal: to say a fact under its own name."""

    source: str

    def observe(self, fact: Observation) -> str: ...


class Heard(Protocol):
    """What liveness needs of a bus: since when, in monotonic seconds, it hears everything, and how many bytes lie unread."""

    @property
    def since(self) -> float | None: ...
    @property
    def unread(self) -> int: ...


class Liveness:
    """The observer of heartbeats. Every controller listens; only the holder of the lease speaks."""

    def __init__(
        self,
        view: Shown,
        beats: Beats,
        journal: Said,
        bus: Heard,
        clock: Clock,
        settings: LivenessSettings,
        leading: Callable[[], bool],
    ) -> None:
        self._view = view
        self._beats = beats
        self._journal = journal
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._leading = leading
        self._awake_since = clock.monotonic()  # our own loop has not lagged since then
        self._met: dict[Life, float] = {}  # when we first knew of an instance
        self._said: dict[Life, Literal["silent", "heard"]] = {}
        self._accused: dict[Life, float] = {}  # when: a beat from before does not acquit
        self.blind = False

    async def run(self) -> None:
        """Watch until cancelled."""
        tick = self._settings.tick_s
        while True:
            due = self._clock.monotonic() + tick
            await self._clock.sleep(tick)
            now = self._clock.monotonic()
            if now - due > self._settings.lag_max_s:
                self._awake_since = now
                await asyncio.sleep(0)  # what arrived meanwhile is heard first
            self.look(now)

    def look(self, now: float) -> None:
        """Compare what was heard with what should have been."""
        workers = self._view.fleet.workers
        living = {(name, w.joined.instance): w for name, w in workers.items() if w.alive}
        self._meet(living, now)
        since = self._bus.since
        if since is None:
            return
        if self._bus.unread > max(UNREAD_BYTES, BEAT_BYTES * len(living)):
            self._awake_since = now  # it may have been said, and lies here unread
        listening = max(since, self._awake_since)
        unheard = {life: now - max(self._last(life), listening) for life in living}
        self._welcome(living)
        self._accuse(living, unheard, now)

    def _meet(self, living: dict[Life, Worker], now: float) -> None:
        if living.keys() != self._met.keys():
            for life in living.keys() - self._met.keys():
                self._met[life] = now
            for life in self._met.keys() - living.keys():
                del self._met[life]
                self._said.pop(life, None)
                self._accused.pop(life, None)
        self._beats.forget(living, FORGET_AFTER_S)

    def _last(self, life: Life) -> float:
        """Return when this instance was heard last, or first known of."""
        beat, met = self._beats.lives.get(life), self._met[life]
        return beat.at if beat is not None and beat.at > met else met

    def _welcome(self, living: dict[Life, Worker]) -> None:
        for life, worker in living.items():
            if SILENT not in worker.health.convictions:
                continue
            beat = self._beats.fresh(*life, self._settings.beat_s + self._settings.tick_s)
            if beat is None or beat.at <= self._accused.get(life, beat.at - 1):
                continue
            if self._said.get(life) != "heard" and self._leading():
                self._said[life] = "heard"
                self._journal.observe(
                    WorkerHeard(worker=life[0], instance=life[1], observer=self._journal.source)
                )
                log.info("worker_heard", worker=life[0])

    def _accuse(self, living: dict[Life, Worker], unheard: dict[Life, float], now: float) -> None:
        s = self._settings
        suspicious_s = s.silent_after_s - SPREAD_BEATS * s.beat_s
        quiet = [life for life, seconds in unheard.items() if seconds >= suspicious_s]
        suspects = [life for life in quiet if not self._known_silent(life, living[life])]
        late = [life for life in suspects if unheard[life] >= s.silent_after_s]
        if len(suspects) > s.blind_share * len(living):
            if late and not self.blind:
                self._be_blind(len(suspects), len(living))
            return
        if self.blind:
            self.blind = False
            self._awake_since = now  # everybody gets a whole window again
            log.info("observer_sees_again")
            return
        for life in late:
            self._say_silent(life, unheard[life])

    def _known_silent(self, life: Life, worker: Worker) -> bool:
        return SILENT in worker.health.convictions or self._said.get(life) == "silent"

    def _be_blind(self, silent: int, known: int) -> None:
        self.blind = True
        log.warning("observer_blind", silent=silent, known=known)
        if self._leading():
            self._journal.observe(ObserverBlind(observer=self._journal.source, silent=silent, known=known))

    def accuse(self, life: Life) -> None:
        """Call an instance silent that somebody else has found out not to be there."""
        workers, now = self._view.fleet.workers, self._clock.monotonic()
        worker = workers.get(life[0])
        if worker is None or worker.joined.instance != life[1] or self._known_silent(life, worker):
            return
        if life in self._met and self._leading():
            self._say(life, now - self._last(life))

    def _say_silent(self, life: Life, seconds: float) -> None:
        name, instance = life
        if self._leading() and not self._beats.linked(name, instance, self._settings.silent_after_s):
            self._say(life, seconds)

    def _say(self, life: Life, seconds: float) -> None:
        name, instance = life
        self._said[life], self._accused[life] = "silent", self._clock.monotonic()
        log.warning("worker_silent", worker=name, silent_s=round(seconds, 3))
        self._journal.observe(
            WorkerSilent(
                worker=name, instance=instance, silent_s=round(seconds, 3), observer=self._journal.source
            )
        )
