"""Checks the invariants of a run whenever the simulated world changes.

The watch has a hook for each kind of change, for example a recorded event, and each invariant names its hook. Invariants
compare the processes with a correct fold of the journal, with the check ledger, and with the true state of the machines.
The first violated invariant ends the run.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from types import UnionType
from typing import Literal

from controller.deciders.fleet import Fleet
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.simulator.checks.ledger import CheckLedger, LedgerEntry, MachineStep, RequestLedger
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.prober import PROBER
from controller.simulator.world.seams import Seams
from controller.simulator.world.surroundings import Replica
from controller.simulator.world.traffic import SimulatedRequest
from controller.simulator.world.world import SimulatedWorld
from events import decisions as decided
from events import observations as seen
from events.fact import Decision, Recorded
from events.order import Order, OutOfOrder

SLACK = 8 * SECOND  # time for a tick, an append with its retries, and reading


class Steadiness:
    """Records since when certain conditions have been true without interruption.

    Times are in microseconds of virtual time. The record is updated once a second.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self.since = 0  # since when both the leader and the broker have run without faults
        self.leader: SimulatedController | None = None
        self.convicted_under: dict[str, int | None] = {}  # by instance: the decision that opened its breaker
        self.last_of_model: dict[str, int] = {}  # when an instance last served because no other one could
        self.probed_since: dict[str, int] = {}  # by worker: since when its canaries could be sent
        self._world = world
        self._since: dict[tuple[str, ...], int] = {}

    def lasts_since(self, *what: str, so: bool) -> int:
        """Return since when the condition named by `what` has been true at every tick.

        `so` is whether the condition is true now. If not, the current time is returned.
        """
        now = self._world.kernel.now
        if so:
            return self._since.setdefault(what, now)
        self._since.pop(what, None)
        return now

    def overdue(self, due: int) -> bool:
        """Return whether the leader should have acted on something that was due at time `due`.

        This is true if the leader has run without faults for long enough since then.
        """
        world = self._world
        clocks = 2 * world.scenario.skew
        return (
            self.leader is not None and world.kernel.now - max(due + clocks, self.since) > SLACK + 5 * SECOND
        )

    def look(self) -> None:
        """Update since when the leader has run without faults, and since when it could send canaries to each worker."""
        world, now, leader = self._world, self._world.kernel.now, self._undisturbed_leader()
        if leader is None or leader is not self.leader:
            self.leader, self.since = leader, now
        probing = leader is not None and not leader.prober.stalled and self.since != now
        for machine in world.machines.values():
            condition = machine.condition
            faulty = condition.flaky or condition.erring or condition.cut
            if not probing or faulty or not machine.reachable(PROBER):
                self.probed_since[machine.name] = now

    def _undisturbed_leader(self) -> SimulatedController | None:
        """Return the only leader; None if there is not exactly one, or if a fault affects it or the broker."""
        broker = self._world.broker
        leaders = [c for c in self._world.controllers if c.up and c.leading and not c.paused]
        calm = broker.up and not broker.network.loss and not broker.network.slow
        return leaders[0] if calm and len(leaders) == 1 and not leaders[0].hold_append else None


On = Literal[
    "before", "recorded", "appended", "absorbed", "routed", "judged", "stepped", "said", "ended", "accused", "proposed",
    "tick", "end",
]  # fmt: skip
Check = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class Invariant:
    """A sentence that must be true of every run, with the function that checks it."""

    name: str
    on: On
    about: type | UnionType | None  # the check runs only if the last argument is of this type; None: always
    sentence: str
    check: Check


def invariant(hook: On, about: type | UnionType | None = None) -> Callable[[Check], Invariant]:
    """Turn a check function into an invariant, with the function's name and the first paragraph of its docstring.

    `hook` determines when the check runs:

    - "before": before a decision is written into the ledger
    - "recorded": after an event is recorded
    - "appended": after an append reached the broker
    - "absorbed": after a process folded a batch
    - "routed": when a request is sent to a worker
    - "judged": when the outcome of a request has been judged
    - "stepped": when the machine of a request has applied an event
    - "said": when tokens of a request have arrived
    - "ended": when a request has ended
    - "accused": when a worker is reported silent
    - "proposed": before a scaling is proposed
    - "tick": once a second
    - "end": at the end of the run

    A check returns None if the docstring's sentence is true, and otherwise a description of the violation.
    """

    def of(check: Check) -> Invariant:
        first, _, _ = cleandoc(check.__doc__ or "").partition("\n\n")
        return Invariant(check.__name__, hook, about, first.replace("\n", " "), check)

    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The first violated invariant of a run.

    `at_s` is the virtual time in seconds, `seq` the sequence of the last event, and `detail` a description of what was wrong.
    """

    invariant: str
    sentence: str
    at_s: float
    seq: int
    detail: str


class Violated(Exception):
    """Raised when an invariant is violated; ends the run."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.invariant}: {violation.detail}")
        self.violation = violation


class InvariantWatch:
    """The observer of one run, which knows the state of all processes and machines.

    The invariants read its attributes.
    """

    def __init__(self, world: SimulatedWorld, seams: Seams, invariants: Mapping[str, Invariant]) -> None:
        self.world = world
        self.kernel = world.kernel
        self.seams = seams  # with a fold of its own, not the one that all processes share
        self.policy = world.scenario.policies[0]  # the policy in force: the one last adopted on the journal
        self.ledger = CheckLedger()
        # Stays correct even if a test plants a fault elsewhere.
        self.reference = Order(self.seams.evolve, Fleet())
        self.shown: list[Fleet] = [Fleet()]  # by sequence
        self.verdicts: dict[
            str, list[tuple[int, decided.HealthStatus]]
        ] = {}  # by instance: (sequence, status)
        self.run_began = 0  # sequence before the last append's first decision
        self.decided: Recorded | None = None  # the last decision
        self.steadiness = Steadiness(world)
        self.serving_since: dict[str, int] = {}  # by instance: since when the decisions allow it a share
        # By process: its replica, its last fold, and the true fold.
        self.compared: dict[str, tuple[Replica, Fleet, Fleet]] = {}
        self.agreed: dict[int, Fleet] = {}  # by sequence: a fold that was found correct
        # Fold from the journal's beginning to the stored position, at the end.
        self.replayed: Fleet | None = None
        self.requests: dict[SimulatedRequest, RequestLedger] = {}  # with live requests only
        self.goldens_moved: dict[str, int] = {}  # by canary key
        self.worst_level: dict[str, int] = {}
        self._invariants = invariants
        self._by_hook: dict[On, list[Invariant]] = {}
        for found in invariants.values():
            self._by_hook.setdefault(found.on, []).append(found)
        self._reached = dict.fromkeys(self._by_hook, 0)

    @property
    def checks(self) -> dict[str, int]:
        """The number of checks of each invariant."""
        return {name: self._reached[found.on] for name, found in self._invariants.items()}

    # --- hooks ---------------------------------------------------------------------------------------

    def recorded(self, event: Recorded) -> None:
        """Update the ledger and the fold by an event that the journal has stored, and check the invariants."""
        fact = event.fact
        if isinstance(fact, Decision):
            self.notify("before", event, fact)
        self.ledger.write(event)
        if isinstance(fact, decided.PolicyAdopted):
            known = self.world.scenario.policies
            self.policy = next((p for p in known if p.adopted == fact.policy), self.policy)
        self._note_share(getattr(fact, "worker", ""))
        if isinstance(fact, decided.HealthChanged):
            self.verdicts.setdefault(fact.instance, []).append((event.seq, fact.after))
        elif isinstance(fact, decided.DegradationChanged):
            self.worst_level[fact.model] = max(fact.after, self.worst_level.get(fact.model, 0))
        elif isinstance(
            fact, decided.GoldenAgreed | decided.GoldenRetired | seen.GoldenDisputed | seen.GoldenProposed
        ):
            self.goldens_moved[fact.canary_key] = self.kernel.now
        self.shown.append(self.reference.absorb(event))
        if isinstance(fact, Decision):
            self.decided = event
        self.notify("recorded", event, fact)

    def appended(self, source: str) -> None:
        """Check the decisions that `source` has just appended. A rejected append has none."""
        run = self.world.broker.events[self.run_began :]
        while run and not (run[0].source == source and isinstance(run[0].fact, Decision)):
            run = run[1:]
        self.run_began = self.world.broker.last_seq
        if run:
            self.notify("appended", run)

    def stepped(self, request: SimulatedRequest, event: on.Event, effects: Effects) -> None:
        """Check one step of a request's state machine, before its effects are applied."""
        ledger = self.requests.get(request) or self.requests.setdefault(request, RequestLedger(request.state))
        step = MachineStep(ledger, request, event, effects)
        self.notify("stepped", step)
        ledger.write(step, self.kernel.now / SECOND)

    def tick(self) -> None:
        """Check the invariants of the hook "tick". This runs once a second."""
        self.kernel.after(SECOND, self.tick)
        self.steadiness.look()
        self.notify("tick")

    def out_of_order(self, error: OutOfOrder) -> Violation:
        """Return the violation for decision numbers that are not consecutive, which a fold has rejected."""
        found = self._invariants["decisions_gapless"]
        return self._violation(found, str(error))

    def entries(self) -> Iterable[LedgerEntry]:
        """Return the ledger's entries of the workers' current instances."""
        return self.ledger.entries.values()

    def status_at(self, instance: str, seq: int) -> decided.HealthStatus | None:
        """Return the last decided health of an instance in the events up to `seq`; None if none was decided."""
        verdicts = self.verdicts.get(instance, [])
        at = bisect_right(verdicts, seq, key=lambda verdict: verdict[0])
        return verdicts[at - 1][1] if at else None

    # --- internal -------------------------------------------------------------------------------------------------

    def notify(self, hook: On, *args: object) -> None:
        """Check all invariants of a hook. Raise Violated for the first violated one.

        `args` are passed to the checks. The last argument is the fact, if the hook has one.
        """
        self._reached[hook] += 1
        for found in self._by_hook[hook]:
            if found.about is not None and not isinstance(args[-1], found.about):
                continue
            if detail := found.check(self, *args):
                raise Violated(self._violation(found, detail))

    def _violation(self, found: Invariant, detail: str) -> Violation:
        return Violation(
            invariant=found.name,
            sentence=found.sentence,
            at_s=self.kernel.now / SECOND,
            seq=self.world.broker.last_seq,
            detail=detail,
        )

    def _note_share(self, worker: str) -> None:
        entry = self.ledger.entries.get(worker)
        if entry is not None and entry.share > 0:
            self.serving_since.setdefault(entry.instance, self.kernel.now)
        elif entry is not None:
            self.serving_since.pop(entry.instance, None)
