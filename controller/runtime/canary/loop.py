"""The canary loop: schedules the probes of all live workers, which the runner executes.

    (no probe) ── joined ──▶ join: at once, one after another until each canary was sent ──▶ scheduled: each interval
    scheduled ── drained ──▶ (no probe) ── resumed ──▶ scheduled, at once
    any of these ── breaker half-open ──▶ trial, at once

If more workers join than can be probed concurrently, each is admitted by its first good answer, and the rest of its round is
spread over an interval. There is one task per worker, so that a hung worker delays no other one (B11), and so that two
probes of one worker never overlap. Only the holder of the lease probes. Probes continue while a worker's breaker is open: they
show whether it recovers, and enough passed probes acquit a convicted worker.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.deciders.fleet import Worker
from controller.runtime.bounded_read import pause
from controller.runtime.canary.runner import CanaryRunner, Outcome
from controller.runtime.canary.tools import ProberDependencies
from controller.runtime.canary.turn import CanaryTurn
from controller.runtime.settings import CanarySettings
from controller.runtime.view import View
from events.decisions import GoldenRetired, HealthStatus, WorkerDecision
from events.fact import Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanarySlow,
    CheckType,
    RequestsServed,
    ResumeRequested,
    WorkerJoined,
    WorkerLeft,
)

LOOK_S = 1.0  # interval of the comparison of probed workers with those to probe
JOIN_AGAIN_S = 2.0  # after a failed join probe; doubles up to the interval
DECLINED_AGAIN_S = 1.0  # after a worker answered that it is leaving, or full


@dataclass(slots=True)
class WorkerWatch:
    """The probing state of one instance of one worker."""

    worker: str
    instance: str
    next_at: float  # monotonic
    turn: CanaryTurn
    failures: int = 0  # consecutive failed join probes
    trial_of: int = 0  # number of the decision that opened the trial sent last
    resumed: bool = False  # a probe was sent after its resumption
    spread: bool = False  # it has its own offset within the interval
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set when its state has changed
    task: asyncio.Task[None] | None = None
    unmarked: asyncio.Task[None] | None = None  # sends unmarked questions


class CanaryLoop:
    """Probes every live worker while its controller leads."""

    def __init__(self, view: View, tools: ProberDependencies, settings: CanarySettings) -> None:
        self._view = view
        self._leading = tools.leading
        self._clock = tools.clock
        self._draw = tools.draw
        self._meter = tools.meter
        self._settings = settings
        self._runner = CanaryRunner(lambda: (view.fleet, view.number), tools, settings)
        self._watches: dict[str, WorkerWatch] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._changed = asyncio.Event()  # set when workers came or went, or the lease did
        self.sampling = self._runner.sampling
        view.listen(self._on_batch)

    def kick(self) -> None:
        """Update the set of probed workers: the lease was won or lost."""
        self._changed.set()

    async def run(self) -> None:
        """Probe until cancelled. Updates every second too: a lease can be lost for a moment without a notification."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                self._update_watches(group)
                await pause(self._changed, self._clock, LOOK_S)

    # --- selection ----------------------------------------------------------------------------------------

    def _on_batch(self, view: object, batch: Sequence[Recorded]) -> None:
        if not batch:  # the view started from a snapshot
            self._changed.set()
        for recorded in batch:
            fact = recorded.fact
            if isinstance(fact, WorkerJoined | WorkerLeft):
                self._changed.set()
            elif isinstance(fact, CanaryPassed | CanarySlow | CanaryFailed | RequestsServed):
                self._learn(fact)
            elif isinstance(fact, GoldenRetired):
                if fact.outvoted_by:
                    self._recheck_doubted(fact.canary_key)
            elif isinstance(fact, WorkerDecision | ResumeRequested):
                watch = self._watches.get(fact.worker)
                if watch is not None:
                    watch.wake.set()
                if getattr(fact, "after", None) is HealthStatus.DEAD:
                    self._changed.set()

    def _recheck(self, name: str) -> None:
        """Probe a worker with all canaries at once: agreed goldens can convict it, and its whole answers are its votes."""
        watch = self._watches.get(name)
        if watch is not None and not watch.turn.recheck:
            watch.turn.ask_all_again()
            watch.next_at = self._clock.monotonic()
            watch.wake.set()

    def _recheck_doubted(self, canary_key: str) -> None:
        """Probe the convicted workers of a canary key with all canaries at once, since one of its goldens was outvoted.

        The same applies to a worker from which an operator wants to record goldens.
        """
        fleet = self._view.fleet
        recorders = {state.moves.recorder for (key, _), state in fleet.goldens.items() if key == canary_key}
        for name, worker in fleet.workers.items():
            asked = worker.health.corrupt or name in recorders
            if worker.joined.canary_key == canary_key and asked:
                self._recheck(name)

    def _learn(self, fact: CanaryPassed | CanarySlow | CanaryFailed | RequestsServed) -> None:
        """Pass a fact to the calibration and the sampling check. Probe at once a worker that sent users unlikely tokens."""
        sampling = self.sampling
        if isinstance(fact, CanaryPassed | CanarySlow):
            self._runner.learn(fact)
        elif isinstance(fact, CanaryFailed) and _wants_votes(fact):
            self._recheck(fact.worker)
        sampling.hear(fact)
        watch = self._watches.get(fact.worker)
        if watch is not None and fact.worker in sampling.wanted:
            watch.next_at = min(watch.next_at, self._clock.monotonic())
            watch.wake.set()

    def _update_watches(self, group: asyncio.TaskGroup) -> None:
        """Start and stop watches so that every live instance has exactly one; none without the lease."""
        fleet = self._view.fleet
        living = {name: w for name, w in fleet.workers.items() if w.alive}
        wanted = living if self._leading() else {}
        for name, watch in list(self._watches.items()):
            worker = wanted.get(name)
            assert watch.task is not None
            if worker is None or worker.joined.instance != watch.instance or watch.task.done():
                watch.task.cancel()
                if watch.unmarked is not None:
                    watch.unmarked.cancel()
                del self._watches[name]
                if name not in living:
                    self._runner.forget(name)
        for name, worker in wanted.items():
            if name not in self._watches:
                watch = self._watches[name] = self._new_watch(worker)
                watch.task = group.create_task(self._probe_loop(watch), name=f"canary {name}")
                if self._settings.unmarked_every:
                    watch.unmarked = group.create_task(self._unmarked_loop(watch), name=f"unmarked {name}")

    def _new_watch(self, worker: Worker) -> WorkerWatch:
        """Return a fresh watch: due at once if the worker was never probed, otherwise after a random part of the interval."""
        joining = worker.last_canary is None or worker.health.joining
        wait = 0.0 if joining else self._draw.uniform(0, self._settings.interval_s)
        due = self._clock.monotonic() + wait
        return WorkerWatch(worker.joined.worker, worker.joined.instance, due, CanaryTurn(first_round=joining))

    def _worker(self, watch: WorkerWatch) -> Worker | None:
        """Return the watched worker in its current state; None if this instance has ended or the lease is lost."""
        fleet = self._view.fleet
        return fleet.living(watch.worker, watch.instance) if self._leading() else None

    # --- scheduling ---------------------------------------------------------------------------------------

    async def _probe_loop(self, watch: WorkerWatch) -> None:
        while (check := await self._due(watch)) is not None:
            async with self._slots:
                began = self._clock.monotonic()
                self._meter.late(max(0.0, began - watch.next_at) if check != "trial" else 0.0)
                worker = self._worker(watch)
                if worker is None:
                    return
                joining = watch.turn.first_round
                outcome = await self._runner.probe(worker, watch.turn, check)
            self._schedule_next(watch, began, outcome, joining)

    async def _unmarked_loop(self, watch: WorkerWatch) -> None:
        """Send a worker unmarked questions, in addition to its canaries, at times that it cannot predict."""
        check = self._runner.unmarked
        while True:
            await self._clock.sleep(check.pause_s)
            worker = self._worker(watch)
            if worker is not None and check.due(worker):
                async with self._slots:
                    await self._runner.probe_unmarked(worker)

    async def _due(self, watch: WorkerWatch) -> CheckType | None:
        """Wait until this worker is due and return the check type; None if its instance has ended or the lease is lost."""
        while True:
            watch.wake.clear()
            worker = self._worker(watch)
            if worker is None:
                return None
            breaker = worker.breaker
            if breaker.position == "half_open" and watch.trial_of != breaker.moved_by:
                watch.trial_of = breaker.moved_by
                return "trial"
            if self._drained(watch, worker):
                await watch.wake.wait()
                continue
            wait = watch.next_at - self._clock.monotonic()
            if wait <= 0:
                return "join" if watch.turn.first_round else "scheduled"
            await pause(watch.wake, self._clock, wait)

    def _drained(self, watch: WorkerWatch, worker: Worker) -> bool:
        """Whether the worker drains and was not resumed, so that it needs no probes. A resumed worker is due at once."""
        if worker.health.status is not HealthStatus.DRAINING:
            return False
        if worker.health.exit.resumed and not watch.resumed:
            watch.next_at = self._clock.monotonic()
        watch.resumed = worker.health.exit.resumed
        return not watch.resumed

    def _schedule_next(self, watch: WorkerWatch, began: float, outcome: Outcome, joining: bool) -> None:
        """Schedule the next probe. `joining`: the worker was still in its first round when this probe began."""
        interval, jitter = self._settings.interval_s, self._settings.jitter
        now = self._clock.monotonic()
        watch.next_at = max(now, began + interval * (1 + self._draw.uniform(-jitter, jitter)))
        if outcome == "nothing":
            watch.next_at = min(watch.next_at, now + DECLINED_AGAIN_S)
        elif watch.turn.recheck:
            watch.next_at = now
        elif joining and outcome == "failed":
            watch.failures += 1
            watch.turn.first_round = True
            watch.next_at = min(watch.next_at, now + JOIN_AGAIN_S * 2 ** min(watch.failures - 1, 16))
        elif joining and watch.turn.first_round:
            watch.failures = 0
            crowd = self._slots.locked()  # other workers wait for the probe that admits them
            watch.next_at = now + interval * self._draw.random() if crowd else now
        elif (worker := self._worker(watch)) is not None and self._runner.wants_samples(worker):
            watch.next_at = min(watch.next_at, max(now, began + self._settings.calibrate_every_s))
        elif not watch.spread:  # otherwise workers that joined together would always be probed together
            watch.spread = True
            watch.next_at = max(now, began + interval * self._draw.random())


def _wants_votes(fact: CanaryFailed) -> bool:
    """Return whether a confirmed failure lacks the whole answer, which is needed as a vote against the golden."""
    return fact.confirmed and fact.golden != "none" and not fact.whole and fact.temperature is None
