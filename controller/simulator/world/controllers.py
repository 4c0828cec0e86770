"""Simulates controllers, which read the journal, decide, append their decisions, and probe workers.

Several controllers compete for a lease, but the lease only avoids duplicate work. A long garbage collection or a frozen virtual
machine can stop a controller between deciding and sending. When the controller continues, it still assumes that it holds the
lease, and its append arrives late. As in the production reconciler, a fence rejects such an append: the broker accepts an append
only from a controller that has read the last decision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import Any, TypeAlias

from controller.deciders.fleet import Fleet, SettleCache, Worker, absorbed, absorption_due
from controller.deciders.golden import Golden
from controller.runtime.beats import Beats
from controller.runtime.liveness import Liveness
from controller.runtime.settings import LivenessSettings
from controller.simulator.world.broker import LEASE_TTL
from controller.simulator.world.kernel import MS, SECOND, KernelClock
from controller.simulator.world.machines import CANARIES, Machine
from controller.simulator.world.surroundings import Replica, SimulatedProcess, Surroundings
from events import observations as seen
from events import subjects
from events.decisions import HealthStatus
from events.fact import Decision, Observation, Recorded

APPEND_DEADLINE = 2 * SECOND
ANSWER_AFTER = 60 * MS
DEADLINE = 5 * SECOND  # time limit of a whole probe
JOIN_AGAIN = 2 * SECOND  # after a failed join probe; doubles up to the interval
RETRIES = 2
SLOW_FROM = 3.0  # multiple of the baseline latency
GOES_ON_MAX = 0.5  # up to this failure rate, a machine still answers other requests when a canary times out
PROBER = "canary"
LOGPROBS = {"top_k": (), "margin": 5.0, "tolerance": 0.001}  # of each proposed golden
DRAINING, DEAD = HealthStatus.DRAINING, HealthStatus.DEAD
Append: TypeAlias = Callable[[], bool]  # appends a batch of decisions, and returns whether they were stored


@dataclass(slots=True)
class ProberTurn:
    """The schedule by which one worker instance is probed: which canary is sent next, and when."""

    machine: Machine
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

    turn: ProberTurn
    canary: int
    check_type: seen.CheckType
    sent_under: int
    sent_at: datetime
    joining: bool  # the probe was sent during the first round after the join
    attempt: int = 1
    first_answer: tuple[int, ...] = ()


class SimulatedProber:
    """The canary loop of one controller process, which probes simulated machines.

    Each worker has at most one probe in flight. The probes of a worker use its canaries one after another. A probe is sent at
    regular intervals, directly after a join, or as the trial of a half-open breaker. A wrong answer is confirmed by repeating
    the canary at once. Each probe is reported as one fact, even if it needed several attempts.

    While `stalled` is True, no probes are sent, and the results of probes in flight are lost.
    """

    def __init__(self, controller: "SimulatedController", chance: Random) -> None:
        self.alive, self.stalled = True, False
        self.turns: dict[str, ProberTurn] = {}
        self._controller, self._chance = controller, chance
        surroundings = controller.surroundings
        self._kernel, self._machines = surroundings.kernel, surroundings.machines
        self._interval = surroundings.scenario.interval

    def resume(self) -> None:
        """End a stall. Probes that were in flight when the stall began get no result."""
        if self.stalled:
            self.stalled = False
            self.turns.clear()

    def round(self) -> None:
        """Probe each worker for which a probe is due, unless the prober is stalled."""
        if self.stalled:
            return
        fleet, now, turns = self._controller.fleet, self._kernel.now, self.turns
        for name, worker in fleet.workers.items():
            if not worker.alive:
                continue
            turn = turns.get(name)
            if turn is None or turn.instance != worker.joined.instance:
                turn = turns[name] = self._begin(worker)
            self._recheck(fleet, turn, worker)
            if not turn.busy and (kind := self._due(now, turn, worker)):
                self._probe(fleet, turn, worker, kind)

    def _recheck(self, fleet: Fleet, turn: ProberTurn, worker: Worker) -> None:
        """Make all canaries of a worker due at once after the worker was convicted of wrong answers.

        The conviction can be unjust, because the golden itself can be wrong. The worker's new answers then count as votes
        against the golden. If a golden of the worker's canary key is outvoted during the conviction, all canaries become due
        again.
        """
        key = worker.joined.canary_key
        if not worker.health.corrupt:
            turn.outvoted = -1
            return
        moves = (golden.moves for (of, _), golden in fleet.goldens.items() if of == key)
        outvoted = max((one.outvoted_by for one in moves), default=0)
        if outvoted > turn.outvoted:
            turn.outvoted, turn.again, turn.due = outvoted, CANARIES, self._kernel.now

    def _begin(self, worker: Worker) -> ProberTurn:
        joined, joining = worker.joined, worker.last_canary is None or worker.health.joining
        due = self._kernel.now + (0 if joining else int(self._chance.random() * self._interval))
        number = int(self._chance.random() * CANARIES)
        return ProberTurn(self._machines[joined.worker], joined.instance, due, number, joining)

    def _due(self, now: int, turn: ProberTurn, worker: Worker) -> seen.CheckType | None:
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

    def _probe(self, fleet: Fleet, turn: ProberTurn, worker: Worker, kind: seen.CheckType) -> None:
        turn.busy = True
        turn.due = self._kernel.now + int(self._interval * (0.9 + 0.2 * self._chance.random()))
        joining = turn.joining
        canary, sent_at = self._next(fleet, turn, worker), self._controller.clock()
        self._send(SimulatedProbe(turn, canary, kind, fleet.number, sent_at, joining))

    def _next(self, fleet: Fleet, turn: ProberTurn, worker: Worker) -> int:
        """Return the index of the worker's next canary.

        The canaries are sent one after another: only the useful ones (see `_useful`) or, if none is useful, all of them.
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

    def _plan(self, probe: SimulatedProbe, passed: bool) -> None:
        """Schedule the next probe of a worker after a result.

        If the probe of a joining worker passed, the worker's next probe is due at once. If it failed, the next probe is due
        after a short wait, which increases with each failure.
        """
        turn, now = probe.turn, self._kernel.now
        turn.busy = False
        if probe.joining and not passed:
            turn.failures += 1
            turn.joining = True
            turn.due = min(turn.due, now + JOIN_AGAIN * 2 ** min(turn.failures - 1, 16))
        elif probe.joining and turn.joining:
            turn.failures = 0
            turn.due = now
        if turn.again:
            turn.again -= 1
            turn.due = now

    def _send(self, probe: SimulatedProbe) -> None:
        machine = probe.turn.machine
        if not machine.runs(probe.turn.instance):
            duration = 5 * MS
        elif not machine.reachable(PROBER) or self._chance.random() < machine.condition.flaky:
            duration = DEADLINE
        else:
            duration = int(ANSWER_AFTER * machine.condition.slow * (0.9 + 0.2 * self._chance.random()))
        self._kernel.after(duration, self._answered, probe)

    def _answered(self, probe: SimulatedProbe) -> None:
        turn, machine, fleet = probe.turn, probe.turn.machine, self._controller.fleet
        if not self.alive or self.stalled or self.turns.get(machine.name) is not turn:
            return
        same = fleet.living(machine.name, turn.instance) is not None
        runs, reachable = machine.runs(turn.instance), machine.reachable(PROBER)
        if not same or not self._controller.leading or (runs and machine.draining and reachable):
            turn.busy = False  # worker or leader changed: the probe is no evidence
            turn.due = min(turn.due, self._kernel.now + SECOND)
        elif not runs:
            self._failed(probe, "no_response")
        elif not reachable:
            self._failed(probe, "timeout")
        elif self._chance.random() < machine.condition.flaky:
            self._failed(probe, "timeout", engine_went_on=machine.condition.flaky <= GOES_ON_MAX)
        elif machine.condition.erring:
            self._failed(probe, "exception")
        else:
            self._compare(probe, machine)

    def _compare(self, probe: SimulatedProbe, machine: Machine) -> None:
        tokens, goldens = machine.answer(probe.canary), self._controller.fleet.goldens
        golden = goldens.get((machine.joined.canary_key, f"c{probe.canary}"))
        if golden is None or golden.status == "retired":
            votes = golden.votes if golden is not None else ()
            if not any(v.worker == machine.name and v.tokens == tokens for v in votes):
                self._report(seen.GoldenProposed, probe, prompt=(probe.canary,), tokens=tokens, **LOGPROBS)
            self._passed(probe, machine)
        elif tokens == golden.tokens:
            self._passed(probe, machine)
        elif probe.attempt <= RETRIES and probe.first_answer != tokens:
            kind: seen.CheckType = "confirm" if probe.check_type == "scheduled" else probe.check_type
            self._send(replace(probe, check_type=kind, attempt=probe.attempt + 1, first_answer=tokens))
        elif golden.status == "provisional" and machine.name != golden.proposed_by:
            # Only one worker has given that answer, so it is unknown which of the two is wrong.
            self._plan(probe, passed=False)
            self._report(seen.GoldenDisputed, probe, proposed_by=golden.proposed_by, tokens=tokens)
        else:
            confirmed = probe.first_answer == tokens
            self._failed(probe, "token_mismatch", confirmed=confirmed, golden=golden.status, got=tokens)

    def _passed(self, probe: SimulatedProbe, machine: Machine) -> None:
        self._plan(probe, passed=True)
        baseline_ms, slow = ANSWER_AFTER / MS, machine.condition.slow
        if slow >= SLOW_FROM:
            self._result(seen.CanarySlow, probe, baseline_ms * slow, baseline_ms=baseline_ms)
        else:
            self._result(seen.CanaryPassed, probe, baseline_ms * slow)

    def _failed(self, probe: SimulatedProbe, reason: seen.CanaryReason, **found: object) -> None:
        self._plan(probe, passed=False)
        found |= {"reason": reason, "whole": found.setdefault("confirmed", False)}
        self._result(seen.CanaryFailed, probe, DEADLINE / MS, **found)

    def _result(
        self, kind: type[seen.CanaryResult], probe: SimulatedProbe, latency_ms: float, **found: object
    ) -> None:
        found |= {"check_type": probe.check_type, "attempts": probe.attempt, "latency_ms": latency_ms}
        self._report(kind, probe, sent_under=probe.sent_under, sent_at=probe.sent_at, **found)

    def _report(self, kind: type[seen.WorkerObservation], probe: SimulatedProbe, **fields: Any) -> None:
        """Publish a fact about a probe."""
        turn, machine = probe.turn, probe.turn.machine
        fields |= {"canary_key": machine.joined.canary_key, "canary": f"c{probe.canary}"}
        self._controller.outbox.observe(kind(worker=machine.name, instance=turn.instance, **fields))


def _useful(golden: Golden | None, worker: str, doubtful: bool) -> bool:
    """Return whether one more answer of this worker to a canary would give information.

    `golden` is the stored right answer to the canary, or None. While a golden is in force, an answer is always useful, because
    it is compared with the golden. Without a golden in force, an answer is only a proposal. A proposal is useless from a
    worker in doubt, and from a worker that has already proposed an answer to this canary.
    """
    if golden is not None and golden.status != "retired":
        return True
    return not doubtful and (golden is None or all(vote.worker != worker for vote in golden.votes))


class SimulatedController(SimulatedProcess):
    """A host that runs controller processes, one after another.

    While a process can receive heartbeats, it runs the production heartbeat observer (`Liveness`). The observer reads the
    fleet, the journal and the message bus through this class.
    """

    unread = 0  # unread bytes on the bus; always 0, because every message is read at once

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        super().__init__(name, surroundings)
        skew = surroundings.scenario.skew
        self.skew = timedelta(microseconds=self._chance.randint(-skew, skew))
        self.paused = False
        self.hold_append = False  # stop between deciding and sending
        self.leading = False

    # --- lifecycle ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start a process with an empty fleet state. The process reads the journal from the beginning."""
        surroundings, scenario = self.surroundings, self.surroundings.scenario
        policy = scenario.policies[-1 if self._kernel.now >= scenario.change_at else 0]
        self.paused = self.leading = False
        self._asking = SettleCache(policy, surroundings.seams.settle)
        self._sent: Append | None = None  # the append in flight; answers to earlier ones are ignored
        # Sequence to read before deciding; None: the journal's end, which is not known yet.
        self._must_read: int | None = 0
        self._believed_until = 0
        self._held: Append | None = None  # the append to send when the pause ends
        self._pending_since: datetime | None = None
        self.outbox = self._outbox()
        self.replica = Replica(self.name, self._broker, self._absorbed)
        self.since: float | None = None  # since when it has been connected and not paused, in seconds
        self._virtual = clock = KernelClock(surroundings.kernel)
        self._beats = Beats(clock)
        settings = LivenessSettings(silent_after_s=scenario.silent_after_s)
        self._liveness = Liveness(self, self._beats, self, self, clock, settings, lambda: True)
        self.prober = SimulatedProber(self, self._chance)
        self._later(self._chance.randrange(SECOND), self._tick)

    def _end(self) -> None:
        """End the process. Its append in transit, if any, may still reach the broker."""
        self.leading = False
        self.prober.alive = False
        self._spool = self.outbox.crash()
        self.replica.close()

    def pause(self, duration: int) -> None:
        """Stop the process for `duration` microseconds. The process then continues without noticing the interruption."""
        if self.up and not self.paused:
            self.paused = True
            self.replica.follower.open = False
            self._later(duration, self._resume)

    def clock(self) -> datetime:
        """Return this controller's own time, which differs from virtual time by `skew`."""
        return self._kernel.instant() + self.skew

    def _resume(self) -> None:
        self.paused = False
        self.since = None
        follower = self.replica.follower
        follower.open = True
        follower.wake()
        if self._held is not None:
            held, self._held = self._held, None
            self._send(held)  # a stale append: the lease has expired
        self._tick_body()

    # --- the loop -----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._later(self.surroundings.scenario.tick, self._tick)
        if not self.paused:
            self._tick_body()

    def _tick_body(self) -> None:
        broker, now = self._broker, self._kernel.now
        self._renew(now)
        if self._must_read is None and broker.up:
            self._must_read = broker.last_seq
        if not self.leading or not broker.up:
            self.since = None
            return
        if self._caught_up():
            self._listen()
            self.prober.round()
            self._act_on_drains()
        self._decide()

    def _renew(self, now: int) -> None:
        broker = self._broker
        if not broker.up or broker.network.drops():
            self.leading = self.leading and now < self._believed_until
        elif broker.lease(self.name) != self.name:
            self.leading = False
        else:
            self._believed_until = now + LEASE_TTL - 500 * MS
            if not self.leading:
                self.leading, self._must_read = True, broker.last_seq

    def _caught_up(self) -> bool:
        return self._must_read is not None and self.replica.seq >= self._must_read and self.replica.whole

    def _absorbed(self, replica: Replica, batch: Sequence[Recorded]) -> None:
        self.surroundings.notify("absorbed", replica, batch)
        if self.leading and not self.paused:
            self._decide()
            if any(e.source != self.outbox.source for e in batch):
                self.prober.round()

    # --- liveness -----------------------------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        """The fleet state that this controller has folded from the journal. The heartbeat observer reads it."""
        return self.replica.fleet

    def observe(self, fact: Observation) -> str:
        """Publish a fact that the heartbeat observer has found, and return its id."""
        if isinstance(fact, seen.WorkerSilent):
            surroundings = self.surroundings
            surroundings.notify("accused", surroundings.machines[fact.worker], fact.instance)
        return self.outbox.observe(fact)

    def _listen(self) -> None:
        """Run the heartbeat observer on the workers' heartbeats and the frontends' reports of live connections."""
        now = self._virtual.monotonic()
        self.since = now if self.since is None else self.since
        at, quiet = self._virtual.now().isoformat(), []
        for name, machine in self.surroundings.machines.items():
            if machine.beating:
                beat = {"worker": name, "instance": machine.instance, "draining": machine.draining, "at": at}
                self._beats.on_beat(subjects.beat(name), beat)
            else:
                quiet.append(machine)
        veto = self.surroundings.seams.links_veto
        for frontend in self.surroundings.linking():
            # Connections to workers that send heartbeats do not matter.
            linked = {m.name: m.instance for m in quiet if veto and frontend.linked(m)}
            self._beats.on_links(frontend.name, {"frontend": frontend.name, "workers": linked})
        self._liveness.look(now)

    # --- deciding -----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        if self._sent is not None or self._held is not None or not self.leading or not self._caught_up():
            return
        now = self.clock()
        batch = self._due(now)
        if not batch:
            return
        order, append = self.replica.order, self._broker.append
        through, after = order.last_seq, order.position.decided
        due = partial(append, batch, source=self.source, through=through, after=after)
        if self.hold_append:
            self.hold_append = False
            self._held = due
            self.pause(self._chance.randrange(2, 20) * SECOND)
            return
        self._send(due)

    def _due(self, now: datetime) -> tuple[Decision, ...]:
        fleet = self.replica.fleet
        batch = self._asking.due(fleet, now)
        if batch or not self.replica.order.pending:
            self._pending_since = None
            return batch
        self._pending_since = self._pending_since or now
        if not absorption_due(len(self.replica.order.pending), now - self._pending_since):
            return ()
        self._pending_since = None
        return (absorbed(fleet, now),)

    def _send(self, append: Append) -> None:
        self._sent = append
        self._broker.transmit(self._arrive, append)
        self._kernel.after(APPEND_DEADLINE, self._unknown, append)

    def _arrive(self, append: Append) -> None:
        """Deliver an append to the broker, even if its sender has ended meanwhile."""
        broker = self._broker
        if not broker.up:
            return
        before, landed = broker.last_seq, append()
        if landed:
            self.surroundings.notify("appended", broker.events[before:])
        broker.acknowledge(self._answered, append, landed, broker.last_seq)

    def _answered(self, append: Append, landed: bool, last_seq: int) -> None:
        if not self.up or self._sent is not append:
            return
        self._sent = None
        self._must_read = max(self._must_read or 0, last_seq)
        if not landed:  # another controller has decided: discard the fold and read again
            self.leading = False
            self.replica.close()
            self.replica = Replica(self.name, self._broker, self._absorbed)

    def _unknown(self, append: Append) -> None:
        if self.up and self._sent is append:
            self._sent = self._must_read = None

    # --- acting -------------------------------------------------------------------------------------------------

    def _act_on_drains(self) -> None:
        """Make each worker drain or accept requests, as the fleet state of this controller requires."""
        fleet, machines = self.replica.fleet, self.surroundings.machines
        for name, worker in fleet.workers.items():
            machine = machines[name]
            if machine.instance != worker.joined.instance or machine.condition.cut:
                continue
            status = worker.health.status
            drains = status is DRAINING or worker.drain.active
            should_drain = drains and not worker.health.exit.resumed
            if should_drain and not machine.draining:
                machine.drain()
            elif not should_drain and machine.draining and status is not DEAD:
                machine.resume()
