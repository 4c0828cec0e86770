"""Who sees everything: the true fold, a naive ledger of the decisions, and what was really the case.

The watch listens at every point where something can go wrong and runs there the invariants that it is given. The
first that is broken ends the run.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from types import UnionType
from typing import Any, Literal

from controller.deciders.fleet import Fleet
from controller.simulator.checks.ledger import CheckLedger, LedgerEntry
from controller.simulator.checks.request_ledger import MachineStep, RequestLedger
from controller.simulator.checks.steadiness import Steadiness
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.replica import Replica
from controller.simulator.world.requests.traffic import SimulatedRequest
from controller.simulator.world.world import SimulatedWorld
from events.decisions import (
    DegradationChanged,
    GoldenAgreed,
    GoldenRetired,
    HealthChanged,
    HealthStatus,
    PolicyAdopted,
)
from events.fact import Decision, Recorded
from events.observations import GoldenDisputed, GoldenProposed
from events.order import Order, OutOfOrder

On = Literal[
    "before",
    "recorded",
    "appended",
    "absorbed",
    "routed",
    "judged",
    "stepped",
    "said",
    "ended",
    "accused",
    "proposed",
    "tick",
    "end",
]
Check = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class Invariant:
    """One sentence about every history, and how it is checked."""

    name: str
    on: On
    about: type | UnionType | None  # the kinds of the last argument that are checked; None: all
    sentence: str
    check: Check


def invariant(on: On, about: type | UnionType | None = None) -> Callable[[Check], Invariant]:
    """Make an invariant of a check: the function's name is its name, the first paragraph of the docstring its sentence.

    `on` is when it is checked: "before" a decision is written into the ledger, after an event was "recorded", after an
    append ("appended"), after a process folded a batch ("absorbed"), when a request was "routed", when its outcome is
    in ("judged"), when its machine has "stepped", tokens of it have come ("said") or it has "ended", when a worker was
    "accused" of silence, when a scaling is about to be "proposed", once a second ("tick"), and at the "end". A check
    returns what it saw if the sentence is false, and None if it holds.
    """

    def of(check: Check) -> Invariant:
        first, _, _ = cleandoc(check.__doc__ or "").partition("\n\n")
        return Invariant(check.__name__, on, about, first.replace("\n", " "), check)

    return of


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken invariant: which, when (virtual seconds, after which event), and what was seen."""

    invariant: str
    sentence: str
    at_s: float
    seq: int
    detail: str


class Violated(Exception):
    """Ends a run."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(f"{violation.invariant}: {violation.detail}")
        self.violation = violation


class InvariantWatch:
    """The all-seeing side of one run. What it keeps is for the invariants to read."""

    def __init__(self, world: SimulatedWorld, invariants: Mapping[str, Invariant]) -> None:
        self.world = world
        self.kernel = world.kernel
        self.seams = world.seams
        self.policy = world.scenario.policies[0]  # in force: as the journal's last adoption says
        self.ledger = CheckLedger()
        self.reference = Order(self.seams.evolve, Fleet())  # whatever is swapped, this order is right
        self.shown: list[Fleet] = [Fleet()]  # by sequence
        self.verdicts: dict[str, list[tuple[int, HealthStatus]]] = {}  # by instance: sequence, status
        self.run_began = 0  # sequence before the last append's first decision
        self.decided: Recorded | None = None  # the last decision
        self.steadiness = Steadiness(world)
        self.serving_since: dict[str, int] = {}  # since when the decisions leave a worker's instance a share
        # By process: its last fold, and the true one.
        self.compared: dict[str, tuple[Replica, Fleet, Fleet]] = {}
        self.agreed: dict[int, Fleet] = {}  # by sequence: a fold that was found right
        self.replayed: Fleet | None = None  # folded from the journal's beginning to what is stored at the end
        self.requests: dict[SimulatedRequest, RequestLedger] = {}  # where they are played token by token
        self.goldens_moved: dict[str, int] = {}  # by canary key
        self.worst_level: dict[str, int] = {}
        self._invariants = invariants
        self._by_hook: dict[On, list[Invariant]] = {}
        for found in invariants.values():
            self._by_hook.setdefault(found.on, []).append(found)
        self._reached = dict.fromkeys(self._by_hook, 0)

    @property
    def checks(self) -> dict[str, int]:
        """How often each invariant was checked."""
        return {name: self._reached[found.on] for name, found in self._invariants.items()}

    # --- where it listens ---------------------------------------------------------------------------------------

    def recorded(self, event: Recorded) -> None:
        """The journal has stored an event."""
        fact = event.fact
        if isinstance(fact, Decision):
            self.tell("before", event, fact)
        self.ledger.write(event)
        if isinstance(fact, PolicyAdopted):
            known = self.world.scenario.policies
            self.policy = next((p for p in known if p.adopted == fact.policy), self.policy)
        self._note_share(getattr(fact, "worker", ""))
        if isinstance(fact, HealthChanged):
            self.verdicts.setdefault(fact.instance, []).append((event.seq, fact.after))
        elif isinstance(fact, DegradationChanged):
            self.worst_level[fact.model] = max(fact.after, self.worst_level.get(fact.model, 0))
        elif isinstance(fact, GoldenAgreed | GoldenRetired | GoldenDisputed | GoldenProposed):
            self.goldens_moved[fact.canary_key] = self.kernel.now
        self.shown.append(self.reference.absorb(event))
        if isinstance(fact, Decision):
            self.decided = event
        self.tell("recorded", event, fact)

    def appended(self, source: str) -> None:
        """An append has reached the broker, and landed or not."""
        run = self.world.broker.events[self.run_began :]
        while run and not (run[0].source == source and isinstance(run[0].fact, Decision)):
            run = run[1:]
        self.run_began = self.world.broker.last_seq
        if run:
            self.tell("appended", run)

    def stepped(self, request: SimulatedRequest, event: Any, effects: Any) -> None:
        """The request machine has taken an event; its effects are applied next."""
        ledger = self.requests.get(request) or self.requests.setdefault(request, RequestLedger(request.state))
        step = MachineStep(ledger, request, event, effects)
        self.tell("stepped", step)
        ledger.write(step, self.kernel.now / SECOND)

    def tick(self) -> None:
        """A second has passed."""
        self.kernel.after(SECOND, self.tick)
        self.steadiness.look()
        self.tell("tick")

    def end(self) -> None:
        """The run is over."""
        self.tell("end")

    def out_of_order(self, error: OutOfOrder) -> Violation:
        """A fold refused the journal: its numbers do not follow one another."""
        found = self._invariants["decisions_gapless"]
        return self._violation(found, str(error))

    def entries(self) -> Iterable[LedgerEntry]:
        """Return what the decisions say of each worker's present instance."""
        return self.ledger.entries.values()

    def status_at(self, instance: str, seq: int) -> HealthStatus | None:
        """Return the last health that was decided for an instance, among the events up to `seq`."""
        verdicts = self.verdicts.get(instance, [])
        at = bisect_right(verdicts, seq, key=lambda verdict: verdict[0])
        return verdicts[at - 1][1] if at else None

    # --- within -------------------------------------------------------------------------------------------------

    def tell(self, on: On, *args: Any) -> None:
        """Something has happened: check what is to be checked then. `args`: to what, last the fact if there is one."""
        self._reached[on] += 1
        for found in self._by_hook[on]:
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
