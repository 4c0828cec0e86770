"""What is due now? Every machine is asked in turn, and each answer is absorbed before the next is asked.

    policy → goldens → health → budget → breaker → drain → spares → degradation → incidents → forgetting, and again until
    nothing is due

Machines that decided on the same stale state would together exceed a budget that each of them respects.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import TypeAlias

from controller.deciders import (
    breaker,
    budget,
    degradation,
    drain,
    forgetting,
    golden,
    health_moves,
    incident,
    spares,
)
from controller.deciders.fold import Fleet, evolve, voters
from controller.deciders.health_state import Health
from controller.deciders.incident import Incident
from controller.deciders.policy import OLDEST, FleetPolicy
from controller.deciders.shares import Shares, provisioned, standing, weighted
from controller.deciders.spares import SpareView
from controller.deciders.worker import Worker
from events.decisions import (
    Absorbed,
    DegradationChanged,
    IncidentOpened,
    PolicyAdopted,
    WorkerDecision,
)
from events.fact import Decision, Recorded
from events.frozen import replace
from events.observations import is_new_lineage
from events.versions import InForce, new_kinds

DECIDERS_VERSION = 6  # grows whenever the same facts would lead to another decision
MOVES_MAX = 8  # of one machine of one worker in one stratum
DECISIONS_MAX = 1000  # of one settle: more is a mistake of ours, which must not run for ever
DECISIONS_PER_WORKER_MAX = 50
ABSORB_FACTS_MAX = 1000  # pending at most, in a calm fleet
ABSORB_AFTER = timedelta(seconds=10)

Settle: TypeAlias = Callable[[FleetPolicy, Fleet, datetime], tuple[Decision, ...]]


def in_force(fleet: Fleet) -> InForce:
    """Return what is in force in a fleet, as far as this release knows it: all of ours where nothing was decided yet."""
    if not fleet.number:
        return InForce.of(new_kinds(), DECIDERS_VERSION)
    version = min(max(fleet.deciders_version, OLDEST), DECIDERS_VERSION)
    return InForce.of(fleet.kinds & new_kinds(), version)


def settle(
    policy: FleetPolicy,
    fleet: Fleet,
    now: datetime,
    among: Collection[str] | None = None,
    shares: Shares | None = None,
    force: InForce | None = None,
) -> tuple[Decision, ...]:
    """Return everything that is due, in order, numbered from `fleet.number + 1`; nothing if nothing is. `among`: the only
    workers whose own machines can have something to say, and of whom any is in doubt, if that is known. `shares`: of who asks
    again and again. `force`: what is to be in force from now on; None: what is.

    Level-triggered: twice, late or after a crash, the same state and time give the same answer, and once the
    answer is absorbed there is nothing left to say.
    """
    return settled(policy, fleet, now, among, shares, force)[0]


def settled(
    policy: FleetPolicy,
    fleet: Fleet,
    now: datetime,
    among: Collection[str] | None = None,
    shares: Shares | None = None,
    force: InForce | None = None,
) -> tuple[tuple[Decision, ...], Fleet]:
    """Return what `settle` does, and the fleet that has absorbed it."""
    force = force or in_force(fleet)
    settling = _Settling(policy.at(force.deciders_version), fleet, now, among, shares, force)
    _adopt(settling)
    before = -1
    while len(settling.decided) != before:
        before = len(settling.decided)
        for stratum in STRATA:
            stratum(settling)
    return tuple(settling.decided), settling.fleet


def next_due(policy: FleetPolicy, fleet: Fleet, now: datetime) -> datetime | None:
    """Return until when nothing becomes due in a fleet in which nothing is due now, if nothing happens; None: for ever."""
    times: list[datetime | None] = []
    for worker in fleet.workers.values():
        times.append(breaker.due_at(policy.breaker, worker.breaker))
        times.append(drain.due_at(policy.drain, worker.drain))
        times.append(health_moves.due_at(policy.health, worker.health))
        times.append(forgetting.due_at(policy.forgetting, worker))
    times.extend(degradation.due_at(policy.degradation, state) for state in fleet.models.values())
    return min((time for time in times if time is not None and time > now), default=None)


def absorption_due(pending: int, waited: timedelta) -> bool:
    """Return whether a calm fleet's leader should append `absorbed`: `pending` facts, the oldest read `waited` ago."""
    return pending > ABSORB_FACTS_MAX or (pending > 0 and waited >= ABSORB_AFTER)


def absorbed(fleet: Fleet, now: datetime) -> Absorbed:
    """Return the decision that says only how far the controller has read."""
    return Absorbed(number=fleet.number + 1, decided_at=now)


class Asking:
    """One decider's questions, under one policy: a fleet that was calm is not settled again before it could be otherwise.

    Nothing is due in a calm fleet until a fact changes it, or until a time that its own machines name. A fleet is frozen,
    so that the same object is the same fleet: nothing that is remembered here can be out of date.
    """

    def __init__(
        self,
        policy: FleetPolicy,
        settle: Settle = settle,
        force: Callable[[Fleet], InForce | None] = lambda fleet: None,
    ) -> None:
        self._policy = policy
        self._settle = settle
        self._force = force  # what is to be in force from now on
        self._calm: Fleet | None = None  # in which nothing was due when it was asked about last
        self._until: datetime | None = None  # nor will be until then

    def due(self, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
        """Return what `settle` returns."""
        force = self._force(fleet)
        if force is None and fleet is self._calm and (self._until is None or now < self._until):
            return ()
        ask = self._settle if force is None else partial(settle, force=force)
        decisions = ask(self._policy, fleet, now)
        if decisions:
            self._calm = None
        else:
            self._calm, self._until = fleet, next_due(self._policy, fleet, now)
        return decisions


@dataclass(slots=True)
class _Settling:
    """One settle in progress: the fleet as decided so far."""

    policy: FleetPolicy
    fleet: Fleet
    now: datetime
    among: Collection[str] | None
    shares: Shares | None
    force: InForce
    decided: list[Decision] = field(default_factory=list)
    asked: list[str] = field(init=False)  # the workers whose machines are asked
    barred: frozenset[str] = field(init=False)  # kinds of this release that may not be written yet

    def __post_init__(self) -> None:
        self.asked = sorted(self.fleet.workers if self.among is None else self.among)
        self.barred = new_kinds() - self.force.kinds

    def ask_all(self, canary_key: str) -> None:
        """Ask the machines of all workers of a canary key as well: a decision has changed them."""
        same = {name for name, one in self.fleet.workers.items() if one.joined.canary_key == canary_key}
        self.asked = sorted({*self.asked, *same})

    def keep(self, decision: Decision) -> None:
        """Number a decision, put it under its incident (opening one at a first symptom), and absorb it. One whose kind may not be
        written yet is not made."""
        if self.barred and decision.kind() in self.barred:
            return
        belongs = decision.incident or self._incident_of(decision)
        sign = incident.symptom(self.policy.incident, decision)
        if sign is not None and not belongs:
            subject, what = sign
            belongs = incident.incident_id(self.fleet.number + 1)
            opened = IncidentOpened(subject=subject, symptom=what, decided_at=self.now, cause=decision.cause)
            self._absorb(replace(opened, incident=belongs))
        self._absorb(replace(decision, incident=belongs))

    def allowed(self, due: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Return the decisions whose kinds may be written."""
        return tuple(d for d in due if d.kind() not in self.barred) if self.barred and due else due

    def _absorb(self, decision: Decision) -> None:
        assert len(self.decided) < DECISIONS_MAX + DECISIONS_PER_WORKER_MAX * len(self.fleet.workers), (
            "settle runs on"
        )
        numbered = replace(decision, number=self.fleet.number + 1)
        said = Recorded(seq=0, at=self.now, fact=numbered, id=f"decision:{numbered.number}")
        self.fleet = evolve(self.fleet, said)
        self.decided.append(numbered)

    def _incident_of(self, decision: Decision) -> str:
        """Return the open incident to which a decision belongs. A level belongs to the worker that cost capacity."""
        if isinstance(decision, WorkerDecision):
            worker = self.fleet.workers.get(decision.worker)
            return worker.incident if worker is not None else ""
        if not isinstance(decision, DegradationChanged):
            return ""
        state = self.fleet.models.get(decision.model)
        if state is not None and state.incident:
            return state.incident
        mine = {w.incident for w in self.fleet.workers.values() if w.joined.model == decision.model}
        return next((id for id in reversed(list(self.fleet.incidents)) if id in mine), "")


def _adopt(s: _Settling) -> None:
    adopted, force = s.policy.adopted, s.force
    known = (s.fleet.policy, s.fleet.deciders_version, s.fleet.kinds)
    if known != (adopted, force.deciders_version, force.kinds):
        s.keep(
            PolicyAdopted(
                policy=dict(adopted),
                deciders_version=force.deciders_version,
                kinds=force.stated,
                allowed_by=force.by,
                command=force.command,
                decided_at=s.now,
            )
        )


def _goldens(s: _Settling) -> None:
    policy, goldens = s.policy.golden, s.fleet.goldens
    open_ = [
        key
        for key, state in goldens.items()
        if state.status != "agreed"
        or state.configured
        or state.moves.wanted is not None
        or golden.may_be_outvoted(policy, state)
    ]
    for key in sorted(open_):
        electorate = partial(voters, s.fleet, *key)
        for decision in golden.decide(policy, s.fleet.goldens[key], s.now, electorate):
            s.keep(decision)
            s.ask_all(key[0])


def _each(s: _Settling, machine: str, decide: Callable[..., tuple[Decision, ...]]) -> None:
    """Ask a machine of every worker until it has nothing more to say."""
    policy, state_of, now = getattr(s.policy, machine), attrgetter(machine), s.now
    for name in s.asked:
        moves = 0
        while moves < MOVES_MAX and (due := s.allowed(decide(policy, state_of(s.fleet.workers[name]), now))):
            s.keep(due[0])  # what else it would say may be over now
            moves += 1


def _health(s: _Settling) -> None:
    def decide(policy: health_moves.HealthPolicy, state: Health, now: datetime) -> tuple[Decision, ...]:
        return health_moves.decide(policy, state, now, held=lambda: _is_held(s, state.worker))

    _each(s, "health", decide)


def _is_held(s: _Settling, name: str) -> bool:
    """Return whether a joining worker is of a new lineage, and other workers of its model could tell whether it is right."""
    workers, goldens = s.fleet.workers, s.fleet.goldens
    worker = workers[name]
    others = (one for other, one in workers.items() if other != name)
    if not s.policy.golden.hold_new_lineage or not any(
        one.joined.model == worker.joined.model for one in others
    ):
        return False
    agreed = {key for (key, _), state in goldens.items() if state.status == "agreed"}
    return is_new_lineage(worker.joined.canary_key, agreed)


def _breakers(s: _Settling) -> None:
    _each(s, "breaker", breaker.decide)


def _drains(s: _Settling) -> None:
    _each(s, "drain", drain.decide)


def _budgets(s: _Settling) -> None:
    workers = s.fleet.workers
    asked = [workers[name] for name in s.asked]
    concerned = {w.joined.model for w in asked if w.budgeted}
    for model in sorted(concerned):
        if s.shares is not None:
            ranks = s.shares.ranks(model, workers)
        else:
            ranks = [standing(workers[n]) for n in sorted(workers) if workers[n].joined.model == model]
        for decision in budget.decide(s.policy.budget, ranks, s.now):
            s.keep(decision)


def _spares(s: _Settling) -> None:
    known = s.fleet.workers
    if s.shares is not None and not s.shares.any_spare(known):
        return
    if not any(worker.spare.kept for worker in known.values()):
        return
    workers = [known[name] for name in sorted(known)]
    for decision in spares.decide(s.policy.spares, [_spare_view(worker) for worker in workers], s.now):
        s.keep(decision)


def _spare_view(worker: Worker) -> SpareView:
    joined, moved = worker.joined, max(worker.health.moved_by, worker.breaker.moved_by)
    return SpareView(
        joined.worker, joined.instance, worker.spare, worker.kind, joined.topology.host, worker.lost, worker.well,
        worker.incident, f"decision:{moved}" if moved else worker.health.cause,
    )  # fmt: skip


def _levels(s: _Settling) -> None:
    promised = s.policy.degradation.slo
    models = s.fleet.models
    concerned = [model for model, state in models.items() if promised(model) is not None or state.level]
    if not concerned:
        return
    shares = s.shares.of(s.fleet.workers) if s.shares is not None else weighted(s.fleet.workers)
    for model in sorted(concerned):
        state = s.fleet.models[model]
        full = provisioned(s.fleet.workers, model) if state.level else ()
        for decision in degradation.decide(s.policy.degradation, state, shares.get(model, ()), s.now, full):
            s.keep(decision)


def _incidents(s: _Settling) -> None:
    incidents = s.fleet.incidents
    for state in list(incidents.values()):
        outcome, cause = _outcome(s.fleet, state)
        for decision in incident.decide(state, outcome, s.now, cause):
            s.keep(decision)


def _forget(s: _Settling) -> None:
    for name in s.asked:
        worker = s.fleet.workers[name]
        for decision in forgetting.decide(s.policy.forgetting, worker, name in s.fleet.awaited, s.now):
            s.keep(decision)
    s.asked = [name for name in s.asked if name in s.fleet.workers]


def _outcome(fleet: Fleet, state: Incident) -> tuple[str, str]:
    """Return what became of an incident's subject, and through which fact; nothing while it lasts."""
    kind, _, name = state.subject.partition(":")
    if kind == "model":
        model = fleet.models.get(name)
        return ("recovered", model.cause) if model is not None and not model.level else ("", "")
    worker = fleet.workers.get(name)
    if worker is None:
        return "", ""
    if worker.alive and not worker.well:
        return "", ""
    last = f"decision:{max(worker.health.moved_by, worker.breaker.moved_by)}"
    return "recovered" if worker.alive else "dead", last


STRATA: Iterable[Callable[[_Settling], None]] = (
    _goldens,
    _health,
    _budgets,
    _breakers,
    _drains,
    _spares,
    _levels,
    _incidents,
    _forget,
)
