"""Checks the invariants of a run whenever the simulated world changes.

`InvariantWatch` has a hook for each kind of change, for example a recorded event, and each invariant names its hook.
Invariants compare the processes with a correct fleet state, and with the true state of the machines. They also use the check
ledger, an independent record of the decisions. The first violated invariant ends the run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from types import UnionType
from typing import Literal, TypeAlias

from controller.deciders.fleet import Fleet
from controller.frontend.request import events as on
from controller.frontend.request.effects import Effects
from controller.simulator.checks.ledger import CheckLedger, MachineStep, RequestLedger
from controller.simulator.world.controllers import PROBER, SimulatedController
from controller.simulator.world.kernel import SECOND
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
        """Return the time since which a condition has been true at every tick.

        `what` names the condition, and `so` is its present value. If `so` is False, return the current time.
        """
        now = self._world.kernel.now
        if so:
            return self._since.setdefault(what, now)
        self._since.pop(what, None)
        return now

    def overdue(self, due: int) -> bool:
        """Return whether the leader should by now have acted on something that was due at time `due`.

        This is true if the leader has run long enough without faults since time `due`.
        """
        world = self._world
        waited = world.kernel.now - max(due + 2 * world.scenario.skew, self.since)
        return self.leader is not None and waited > SLACK + 5 * SECOND

    def look(self) -> None:
        """Update two records: since when the leader runs without faults, and since when canaries reach each worker."""
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
        """Return the leader if there is exactly one, and no fault affects the leader or the broker; None otherwise."""
        broker = self._world.broker
        leaders = [c for c in self._world.controllers if c.up and c.leading and not c.paused]
        calm = broker.up and not broker.network.loss and not broker.network.slow
        return leaders[0] if calm and len(leaders) == 1 and not leaders[0].hold_append else None


On = Literal[
    "before", "recorded", "appended", "absorbed", "routed", "judged", "stepped", "said", "ended", "accused", "proposed",
    "tick", "end",
]  # fmt: skip
Found: TypeAlias = Iterator[str]  # descriptions of violations, of which only the first is used
Check: TypeAlias = Callable[..., Found]
GOLDEN_MOVES = (decided.GoldenAgreed, decided.GoldenRetired, seen.GoldenDisputed, seen.GoldenProposed)


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

    If `about` is given, the check runs only for facts of this type. `hook` determines when the check runs:

    - "before": before a decision is written into the check ledger
    - "recorded": after an event is recorded
    - "appended": after the broker has stored the decisions of an append
    - "absorbed": after a process has read a batch of events
    - "routed": when a request is sent to a worker
    - "judged": when the outcome of a request has been judged
    - "stepped": when the state machine of a request has applied an event
    - "said": when tokens of a request have arrived
    - "ended": when a request has ended
    - "accused": when a worker is reported silent
    - "proposed": before a scaling is proposed
    - "tick": once a second
    - "end": at the end of the run

    A check yields nothing if the docstring's sentence is true, and otherwise a description of the violation. The run ends with
    the first description, so the check is not continued.
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
    """Observes one run, and gives the invariants access to the state of all processes and machines."""

    def __init__(self, world: SimulatedWorld, seams: Seams, invariants: Mapping[str, Invariant]) -> None:
        self.world = world
        self.kernel = world.kernel
        self.seams = seams  # with a fold of its own, not the one that all processes share
        self.policy = world.scenario.policies[0]  # the policy in force: the one last adopted on the journal
        self.ledger = CheckLedger()
        self.entries = self.ledger.entries.values()  # of the workers' current instances; shows every change
        # Stays correct even if a test plants a fault elsewhere.
        self.reference = Order(self.seams.evolve, Fleet())
        self.shown: list[Fleet] = [Fleet()]  # by sequence
        self.steadiness = Steadiness(world)
        # By process: its replica, its last fold, and the true fold.
        self.compared: dict[str, tuple[Replica, Fleet, Fleet]] = {}
        self.agreed: dict[int, Fleet] = {}  # by sequence: a fold that was found correct
        # Fold from the journal's beginning to the stored position, at the end.
        self.replayed: Fleet | None = None
        self.requests: dict[SimulatedRequest, RequestLedger] = {}  # with live requests only
        self.goldens_moved: dict[str, int] = {}  # by canary key
        self._invariants = invariants
        self._by_hook: dict[On, list[Invariant]] = {}
        for found in invariants.values():
            self._by_hook.setdefault(found.on, []).append(found)
        self._reached = dict.fromkeys(self._by_hook, 0)

    @property
    def checks(self) -> dict[str, int]:
        """How often each invariant was checked, by its name."""
        return {name: self._reached[found.on] for name, found in self._invariants.items()}

    # --- hooks ---------------------------------------------------------------------------------------

    def recorded(self, event: Recorded) -> None:
        """Add an event of the journal to the check ledger and to the correct fleet state, and check the invariants."""
        fact = event.fact
        if isinstance(fact, Decision):
            self.notify("before", event, fact)
        self.ledger.write(event)
        if isinstance(fact, decided.PolicyAdopted):
            known = self.world.scenario.policies
            self.policy = next((p for p in known if p.adopted == fact.policy), self.policy)
        elif isinstance(fact, GOLDEN_MOVES):
            self.goldens_moved[fact.canary_key] = self.kernel.now
        self.shown.append(self.reference.absorb(event))
        self.notify("recorded", event, fact)

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
        """Return the violation for an event that was rejected because decision numbers are not consecutive."""
        return self._violation(self._invariants["decisions_gapless"], str(error))

    # --- internal -------------------------------------------------------------------------------------------------

    def notify(self, hook: On, *args: object) -> None:
        """Check all invariants of a hook. Raise Violated for the first violated one.

        `args` are passed to the checks. The last argument is the fact, if the hook has one.
        """
        self._reached[hook] += 1
        for found in self._by_hook[hook]:
            if found.about is not None and not isinstance(args[-1], found.about):
                continue
            for detail in found.check(self, *args):
                raise Violated(self._violation(found, detail))

    def _violation(self, found: Invariant, detail: str) -> Violation:
        return Violation(
            invariant=found.name,
            sentence=found.sentence,
            at_s=self.kernel.now / SECOND,
            seq=self.world.broker.last_seq,
            detail=detail,
        )
