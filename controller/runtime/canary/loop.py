"""The canary loop: schedules the probes of all live workers. `CanaryRunner` executes the probes.

The kinds of probes (join, scheduled, trial) of one worker, and what leads from one kind to the next:

    (no probe) ── joined ──▶ join: at once, one after another until each canary was sent ──▶ scheduled: each interval
    scheduled ── drained ──▶ (no probe) ── resumed ──▶ scheduled, at once
    any of these ── breaker half-open ──▶ trial, at once

The first correct answer admits a worker. If more workers join than can be probed concurrently, a worker's join probes after the
first are delayed by random times of up to one interval. Each worker has its own task. So a hung worker does not delay the
probes of other workers, and two probes of one worker never overlap. Only the controller that holds the lease probes. Probes
continue while a worker's breaker is open, because they show whether the worker recovers. Enough passed probes acquit a
convicted worker.
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

LOOK_S = 1.0  # longest time between two updates of the set of probed workers
JOIN_AGAIN_S = 2.0  # wait after a failed join probe; doubles up to the canary interval
DECLINED_AGAIN_S = 1.0  # wait after a worker answered that it is leaving or full


@dataclass(slots=True)
class WorkerWatch:
    """The state of probing one instance of one worker: its task, and when its next probe is due."""

    worker: str
    instance: str
    next_at: float  # monotonic
    turn: CanaryTurn
    failures: int = 0  # consecutive failed join probes
    trial_of: int = 0  # number of the decision that made the breaker half-open for the last trial
    resumed: bool = False  # whether an operator has resumed the draining worker
    spread: bool = False  # whether the worker already has its own offset within the interval
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # set when the worker's state has changed
    task: asyncio.Task[None] | None = None
    unmarked: asyncio.Task[None] | None = None  # sends unmarked questions


class CanaryLoop:
    """Probes every live worker while this controller leads."""

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
        self._changed = asyncio.Event()  # set when a worker joins or leaves, or the lease is won or lost
        self.sampling = self._runner.sampling
        view.listen(self._on_batch)

    def kick(self) -> None:
        """Update the set of probed workers soon. Called when the lease is won or lost."""
        self._changed.set()

    async def run(self) -> None:
        """Probe until cancelled.

        The set of probed workers is also updated every second, because a lease can be lost for a moment without a notification.
        """
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
        """Send a worker all canaries one after another, starting now.

        An answer that contradicts an agreed golden can convict the worker. Complete answers also count as votes on goldens.
        """
        watch = self._watches.get(name)
        if watch is not None and not watch.turn.recheck:
            watch.turn.ask_all_again()
            watch.next_at = self._clock.monotonic()
            watch.wake.set()

    def _recheck_doubted(self, canary_key: str) -> None:
        """Recheck the corrupt workers of a canary key after one of its goldens was outvoted.

        A worker that was convicted by the outvoted golden is perhaps healthy. Workers from which an operator wants to record
        goldens are rechecked too.
        """
        fleet = self._view.fleet
        recorders = {state.moves.recorder for (key, _), state in fleet.goldens.items() if key == canary_key}
        for name, worker in fleet.workers.items():
            asked = worker.health.corrupt or name in recorders
            if worker.joined.canary_key == canary_key and asked:
                self._recheck(name)

    def _learn(self, fact: CanaryPassed | CanarySlow | CanaryFailed | RequestsServed) -> None:
        """Give the fact of a passed probe to the calibration, and every fact to the sampling check.

        If a worker's confirmed failure was recorded without the complete answer, recheck the worker. If the sampling check found
        that a worker sent unlikely tokens to users, probe the worker at once.
        """
        sampling = self.sampling
        if isinstance(fact, CanaryPassed | CanarySlow):
            self._runner.learn(fact)
        elif isinstance(fact, CanaryFailed) and _wants_votes(fact):
            self._recheck(fact.worker)
        sampling.receive(fact)
        watch = self._watches.get(fact.worker)
        if watch is not None and fact.worker in sampling.wanted:
            watch.next_at = min(watch.next_at, self._clock.monotonic())
            watch.wake.set()

    def _update_watches(self, group: asyncio.TaskGroup) -> None:
        """Start and stop watches so that each live instance has exactly one. Without the lease, stop all watches."""
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
        """Return a new watch of a worker.

        The first probe is due at once if the worker was never probed or is joining, otherwise after a random part of the
        interval.
        """
        joining = worker.last_canary is None or worker.health.joining
        wait = 0.0 if joining else self._draw.uniform(0, self._settings.interval_s)
        due = self._clock.monotonic() + wait
        return WorkerWatch(worker.joined.worker, worker.joined.instance, due, CanaryTurn(first_round=joining))

    def _worker(self, watch: WorkerWatch) -> Worker | None:
        """Return the watched worker's current state; None if the watched instance has ended or the lease is lost."""
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
        """Send a worker questions that are not marked as canaries, at random times that the worker cannot predict.

        These questions are sent in addition to the worker's canaries.
        """
        check = self._runner.unmarked
        while True:
            await self._clock.sleep(check.pause_s)
            worker = self._worker(watch)
            if worker is not None and check.due(worker):
                async with self._slots:
                    await self._runner.probe_unmarked(worker)

    async def _due(self, watch: WorkerWatch) -> CheckType | None:
        """Wait until a worker's next probe is due, and return the probe's check type.

        None if the worker's instance has ended or the lease is lost.
        """
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
        """Whether the worker drains and was not resumed. A draining worker needs no probes.

        When the worker is resumed, its next probe becomes due at once.
        """
        if worker.health.status is not HealthStatus.DRAINING:
            return False
        if worker.health.exit.resumed and not watch.resumed:
            watch.next_at = self._clock.monotonic()
        watch.resumed = worker.health.exit.resumed
        return not watch.resumed

    def _schedule_next(self, watch: WorkerWatch, began: float, outcome: Outcome, joining: bool) -> None:
        """Set the time of the worker's next probe.

        `began` is the monotonic time at which the last probe began. `joining` is true if that probe belonged to the worker's
        first round, in which each canary is sent once.
        """
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
            crowd = self._slots.locked()  # other workers wait for their first probe, which admits them
            watch.next_at = now + interval * self._draw.random() if crowd else now
        elif (worker := self._worker(watch)) is not None and self._runner.wants_samples(worker):
            watch.next_at = min(watch.next_at, max(now, began + self._settings.calibrate_every_s))
        elif not watch.spread:  # a random offset, because workers that joined together would stay in step
            watch.spread = True
            watch.next_at = max(now, began + interval * self._draw.random())


def _wants_votes(fact: CanaryFailed) -> bool:
    """Return whether the worker must answer again because this confirmed failure lacks the complete answer.

    Only a complete answer counts as a vote against the golden.
    """
    return fact.confirmed and fact.golden != "none" and not fact.whole and fact.temperature is None
