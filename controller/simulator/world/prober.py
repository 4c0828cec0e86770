"""The canary loop of the leading controller, on simulated machines instead of a request plane.

Each worker has at most one probe in flight. The probes of a worker use its canaries in turn. A probe is sent at an interval,
directly after a join, or as the trial of a half-open breaker. A wrong answer is confirmed by repeating the canary at once.
Each probe is reported as one fact, even if it needed several attempts.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from random import Random
from typing import Any

from controller.deciders.fleet import Fleet, Worker
from controller.deciders.golden import Golden
from controller.simulator.world.broker import SimulatedOutbox
from controller.simulator.world.kernel import MS, SECOND, Kernel
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.surroundings import Surroundings
from events import observations
from events.decisions import HealthStatus

ANSWER_AFTER = 60 * MS
DEADLINE = 5 * SECOND  # time limit of a whole probe
JOIN_AGAIN = 2 * SECOND  # after a failed join probe; doubles up to the interval
RETRIES = 2
SLOW_FROM = 3.0  # multiple of the baseline latency
GOES_ON_MAX = 0.5  # up to this failure rate, a machine still answers other requests when a canary times out
PROBER = "canary"
DRAINING, DEAD = HealthStatus.DRAINING, HealthStatus.DEAD


@dataclass(slots=True)
class ProberTurn:
    """The state of the probes of one worker instance: which canary is next, and when."""

    instance: str
    due: int
    number: int  # position in the round robin
    joining: bool  # not every canary has been sent yet
    asked: set[int] = field(default_factory=set)  # canaries sent while joining
    failures: int = 0  # consecutive failed probes while joining
    busy: bool = False
    resumed: bool = False  # the worker has been probed after its resume
    trial_of: int = 0  # number of the half-opening for which a trial was sent last
    again: int = 0  # canaries to send at once, one after another
    # The last decision that outvoted a golden when all canaries were sent again; -1: not convicted.
    outvoted: int = -1


@dataclass(slots=True, frozen=True)
class SimulatedProbe:
    """One probe in flight."""

    worker: str
    instance: str
    canary: int
    check_type: observations.CheckType
    sent_under: int
    sent_at: datetime
    joining: bool  # the probe was sent during the first round after the join
    attempt: int = 1
    first_answer: tuple[int, ...] = ()


@dataclass(slots=True)
class SimulatedProber:
    """The canary loop of one controller.

    While `stalled` is true, no probes are sent, and the results of probes in flight are lost.
    """

    surroundings: Surroundings
    chance: Random
    fleet: Callable[[], Fleet]
    outbox: SimulatedOutbox
    clock: Callable[[], datetime]
    leading: Callable[[], bool]
    alive: bool = True
    stalled: bool = False
    turns: dict[str, ProberTurn] = field(default_factory=dict)
    kernel: Kernel = field(init=False)
    interval: int = field(init=False)

    def __post_init__(self) -> None:
        self.kernel, self.interval = self.surroundings.kernel, self.surroundings.scenario.interval

    def resume(self) -> None:
        """End a stall. Probes that were in flight at its beginning get no result."""
        if self.stalled:
            self.stalled = False
            self.turns.clear()

    def round(self) -> None:
        """Send a probe to each worker with a due probe."""
        if self.stalled:
            return
        fleet, now, turns = self.fleet(), self.kernel.now, self.turns
        for name, worker in fleet.workers.items():
            if worker.health.status is DEAD:
                continue
            turn = turns.get(name)
            if turn is None or turn.instance != worker.joined.instance:
                turn = turns[name] = self._begin(worker)
            self._recheck(fleet, turn, worker)
            if not turn.busy and (kind := self._due(now, turn, worker)):
                self._ask(fleet, turn, worker, kind)

    def _recheck(self, fleet: Fleet, turn: ProberTurn, worker: Worker) -> None:
        """Make all canaries due for a convicted worker, because its answers count as votes.

        They become due again when a golden of its canary key is outvoted.
        """
        key = worker.joined.canary_key
        if not worker.health.corrupt:
            turn.outvoted = -1
            return
        outvoted = max(
            (golden.moves.outvoted_by for (of, _), golden in fleet.goldens.items() if of == key), default=0
        )
        if outvoted > turn.outvoted:
            turn.outvoted, turn.again, turn.due = outvoted, CANARIES, self.kernel.now

    def _begin(self, worker: Worker) -> ProberTurn:
        joining = worker.last_canary is None or worker.health.joining
        wait = 0 if joining else int(self.chance.random() * self.interval)
        return ProberTurn(
            worker.joined.instance, self.kernel.now + wait, int(self.chance.random() * CANARIES), joining
        )

    def _due(self, now: int, turn: ProberTurn, worker: Worker) -> observations.CheckType | None:
        breaker = worker.breaker
        if breaker.position == "half_open" and turn.trial_of != breaker.moved_by:
            turn.trial_of = breaker.moved_by
            return "trial"
        if worker.health.status is DRAINING:
            if worker.health.exit.resumed and not turn.resumed:
                turn.due = now
            turn.resumed = worker.health.exit.resumed
            if not turn.resumed:
                return None
        if now < turn.due:
            return None
        return "join" if turn.joining else "scheduled"

    def _ask(self, fleet: Fleet, turn: ProberTurn, worker: Worker, kind: observations.CheckType) -> None:
        turn.busy = True
        turn.due = self.kernel.now + int(self.interval * (0.9 + 0.2 * self.chance.random()))
        joining = turn.joining
        canary = self._next(fleet, turn, worker)
        name, sent_at = worker.joined.worker, self.clock()
        probe = SimulatedProbe(name, turn.instance, canary, kind, fleet.number, sent_at, joining)
        self._send(turn, probe)

    def _next(self, fleet: Fleet, turn: ProberTurn, worker: Worker) -> int:
        """Return the number of the next canary.

        A worker in doubt only gets canaries that another worker has answered.
        """
        doubtful = worker.health.convicted or bool(worker.health.disputed)
        key, name = worker.joined.canary_key, worker.joined.worker
        canaries = [c for c in range(CANARIES) if _useful(fleet.goldens.get((key, f"c{c}")), name, doubtful)]
        canaries = canaries or list(range(CANARIES))
        if turn.joining:
            canary = next((c for c in canaries if c not in turn.asked), canaries[0])
            turn.asked.add(canary)
            turn.joining = any(c not in turn.asked for c in canaries)
            return canary
        turn.number += 1
        return canaries[turn.number % len(canaries)]

    def _plan(self, turn: ProberTurn, was_joining: bool, passed: bool) -> None:
        """Schedule the next probe after a result.

        For a joining worker it is due at once after a pass, and after a short, increasing wait after a failure.
        """
        turn.busy = False
        now = self.kernel.now
        if was_joining and not passed:
            turn.failures += 1
            turn.joining = True
            turn.due = min(turn.due, now + JOIN_AGAIN * 2 ** min(turn.failures - 1, 16))
        elif was_joining and turn.joining:
            turn.failures = 0
            turn.due = now
        if turn.again:
            turn.again -= 1
            turn.due = now

    def _send(self, turn: ProberTurn, probe: SimulatedProbe) -> None:
        machine = self.surroundings.machines[probe.worker]
        if not machine.runs(probe.instance):
            duration = 5 * MS
        elif not machine.reachable(PROBER) or self.chance.random() < machine.condition.flaky:
            duration = DEADLINE
        else:
            duration = int(ANSWER_AFTER * machine.condition.slow * (0.9 + 0.2 * self.chance.random()))
        self.kernel.after(duration, self._answered, turn, probe)

    def _answered(self, turn: ProberTurn, probe: SimulatedProbe) -> None:
        if not self.alive or self.stalled or self.turns.get(probe.worker) is not turn:
            return
        worker = self.fleet().workers.get(probe.worker)
        machine = self.surroundings.machines[probe.worker]
        same = worker is not None and worker.joined.instance == probe.instance and worker.alive
        runs, reachable = machine.runs(probe.instance), machine.reachable(PROBER)
        if not same or not self.leading() or (runs and machine.draining and reachable):
            turn.busy = False  # worker or leader changed: the probe is no evidence
            turn.due = min(turn.due, self.kernel.now + SECOND)
        elif not runs:
            self._failed(turn, probe, "no_response")
        elif not reachable:
            self._failed(turn, probe, "timeout")
        elif self.chance.random() < machine.condition.flaky:
            goes_on = machine.condition.flaky <= GOES_ON_MAX
            self._failed(turn, probe, "timeout", engine_went_on=goes_on)
        elif machine.condition.erring:
            self._failed(turn, probe, "exception")
        else:
            self._compare(turn, probe, machine)

    def _compare(self, turn: ProberTurn, probe: SimulatedProbe, machine: Machine) -> None:
        tokens = machine.answer(probe.canary)
        key, canary = machine.joined.canary_key, f"c{probe.canary}"
        golden = self.fleet().goldens.get((key, canary))
        if golden is None or golden.status == "retired":
            votes = golden.votes if golden is not None else ()
            if not any(v.worker == probe.worker and v.tokens == tokens for v in votes):
                self._report(
                    observations.GoldenProposed,
                    probe,
                    prompt=(probe.canary,),
                    tokens=tokens,
                    top_k=(),
                    margin=5.0,
                    tolerance=0.001,
                )
            self._passed(turn, probe, machine)
        elif tokens == golden.tokens:
            self._passed(turn, probe, machine)
        elif probe.attempt <= RETRIES and probe.first_answer != tokens:
            kind: observations.CheckType = "confirm" if probe.check_type == "scheduled" else probe.check_type
            again = replace(probe, check_type=kind, attempt=probe.attempt + 1, first_answer=tokens)
            self._send(turn, again)
        elif golden.status == "provisional" and probe.worker != golden.proposed_by:
            # Only one worker has given that answer, so it is unknown which of the two is wrong.
            self._plan(turn, probe.joining, passed=False)
            self._report(observations.GoldenDisputed, probe, proposed_by=golden.proposed_by, tokens=tokens)
        else:
            confirmed = probe.first_answer == tokens
            self._failed(turn, probe, "token_mismatch", confirmed=confirmed, golden=golden.status, got=tokens)

    def _passed(self, turn: ProberTurn, probe: SimulatedProbe, machine: Machine) -> None:
        self._plan(turn, probe.joining, passed=True)
        baseline_ms = ANSWER_AFTER / MS
        latency_ms = baseline_ms * machine.condition.slow
        if machine.condition.slow >= SLOW_FROM:
            self._result(observations.CanarySlow, probe, latency_ms, baseline_ms=baseline_ms)
        else:
            self._result(observations.CanaryPassed, probe, latency_ms)

    def _failed(
        self,
        turn: ProberTurn,
        probe: SimulatedProbe,
        reason: observations.CanaryReason,
        confirmed: bool = False,
        **found: object,
    ) -> None:
        self._plan(turn, probe.joining, passed=False)
        found |= {"reason": reason, "confirmed": confirmed, "whole": confirmed}
        self._result(observations.CanaryFailed, probe, DEADLINE / MS, **found)

    def _result(
        self, kind: type[observations.CanaryResult], probe: SimulatedProbe, latency_ms: float, **found: object
    ) -> None:
        found |= {"check_type": probe.check_type, "attempts": probe.attempt, "latency_ms": latency_ms}
        self._report(kind, probe, sent_under=probe.sent_under, sent_at=probe.sent_at, **found)

    def _report(
        self, kind: type[observations.WorkerObservation], probe: SimulatedProbe, **fields: Any
    ) -> None:
        """Publish a fact about a probe."""
        key = self.surroundings.machines[probe.worker].joined.canary_key
        fields |= {"canary_key": key, "canary": f"c{probe.canary}"}
        self.outbox.observe(kind(worker=probe.worker, instance=probe.instance, **fields))


def _useful(golden: Golden | None, worker: str, doubtful: bool) -> bool:
    """Return whether an answer of this worker to the canary would give information.

    It would not if only workers in doubt know the answer, or if this worker has already voted on a golden that is not agreed.
    """
    if golden is not None and golden.status != "retired":
        return True
    return not doubtful and (golden is None or all(vote.worker != worker for vote in golden.votes))
