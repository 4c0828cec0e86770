"""Computes the due decisions by running all state machines in turn, until no decision is due.

    policy → goldens → health → budget → breaker → drain → spares → degradation → incidents → forgetting, repeated until
    nothing is due

Each state machine decides on the fleet as it is after the previous decisions. If two state machines decided on the same fleet,
their decisions could together exceed a budget that each of them respects.
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
    golden,
    health_state,
    incident,
    spares,
    worker_removal,
)
from controller.deciders.fold import Fleet, evolve, voters
from controller.deciders.health_state import Health
from controller.deciders.incident import Incident
from controller.deciders.policy import OLDEST, FleetPolicy
from controller.deciders.shares import Shares, provisioned, standing, weighted
from events import decisions as decided
from events.fact import Decision, Recorded
from events.frozen import replace
from events.observations import is_new_lineage
from events.versions import InForce, new_kinds

DECIDERS_VERSION = 6  # incremented whenever the same facts lead to another decision
MOVES_MAX = 8  # per machine and worker in one stratum
DECISIONS_MAX = 1000  # per settle; more is a bug in a decider, which must not loop for ever
DECISIONS_PER_WORKER_MAX = 50
ABSORB_FACTS_MAX = 1000  # maximum number of pending facts in a calm fleet
ABSORB_AFTER = timedelta(seconds=10)

Settle: TypeAlias = Callable[[FleetPolicy, Fleet, datetime], tuple[Decision, ...]]


def in_force(fleet: Fleet) -> InForce:
    """Return the event kinds that the leader may write, and the deciders' version by which it decides.

    Kinds that this release does not know are left out, and the version is one that this release can apply. Before the first
    decision, all known kinds and the newest version are in force.
    """
    if not fleet.number:
        return InForce.of(new_kinds(), DECIDERS_VERSION)
    version = min(max(fleet.deciders_version, OLDEST), DECIDERS_VERSION)
    return InForce.of(fleet.kinds & new_kinds(), version)


def settle(
    policy: FleetPolicy,
    fleet: Fleet,
    now: datetime,
    *,
    shares: Shares | None = None,
    force: InForce | None = None,
) -> tuple[Decision, ...]:
    """Return all decisions that are due, in order, numbered from `fleet.number + 1`.

    The result depends only on the state and the time. A call that is late, repeated or made after a crash therefore gives the
    same decisions. Once the decisions have been applied to the fleet, no further decision is due.

    Args:
        shares: a cache for callers that call this function repeatedly.
        force: the kinds and version in force from now on; None: unchanged.
    """
    return settled(policy, fleet, now, None, shares, force)[0]


def settled(
    policy: FleetPolicy,
    fleet: Fleet,
    now: datetime,
    among: Collection[str] | None = None,
    shares: Shares | None = None,
    force: InForce | None = None,
) -> tuple[tuple[Decision, ...], Fleet]:
    """Return the decisions of `settle`, and the fleet after these decisions.

    `among` names the workers to evaluate. Callers may omit workers that cannot have a due decision and cannot be in doubt.
    None means all workers.
    """
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
    """Return the next time at which a decision becomes due if no further fact arrives; None if none does.

    The fleet must be calm, which means that no decision is due at `now`.
    """
    times: list[datetime | None] = []
    for worker in fleet.workers.values():
        times.append(breaker.due_at(policy.breaker, worker.breaker))
        times.append(drain.due_at(policy.drain, worker.drain))
        times.append(health_state.due_at(policy.health, worker.health))
        times.append(worker_removal.due_at(policy.forgetting, worker))
    times.extend(degradation.due_at(policy.degradation, state) for state in fleet.models.values())
    return min((time for time in times if time is not None and time > now), default=None)


def absorption_due(pending: int, waited: timedelta) -> bool:
    """Return whether a leader without due decisions should record its position in an `Absorbed` decision.

    `pending` is the number of facts after the last decision, and `waited` is the time since the oldest of them was read.
    """
    return pending > ABSORB_FACTS_MAX or (pending > 0 and waited >= ABSORB_AFTER)


def absorbed(fleet: Fleet, now: datetime) -> decided.Absorbed:
    """Return a decision that changes nothing in the fleet, but records how far the controller has read."""
    return decided.Absorbed(number=fleet.number + 1, decided_at=now)


class SettleCache:
    """Computes the due decisions of a fleet only if a decision can be due.

    A fleet is calm if the last call of `settle` for this fleet returned no decisions. In a calm fleet, no decision becomes due
    until a fact changes the fleet, or the time that `next_due` returns has come. Fleets are immutable and compared by
    identity, so the cached result is never outdated.
    """

    def __init__(
        self,
        policy: FleetPolicy,
        settle: Settle = settle,
        force: Callable[[Fleet], InForce | None] = lambda fleet: None,
    ) -> None:
        self._policy = policy
        self._settle = settle
        self._force = force  # what is in force from now on
        self._calm: Fleet | None = None  # the last fleet in which nothing was due
        self._until: datetime | None = None  # nothing becomes due in it before this time

    def due(self, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
        """Return the decisions of `settle`. While the fleet is known to be calm, return () without calling `settle`."""
        force = self._force(fleet)
        if force is None and fleet is self._calm and (self._until is None or now < self._until):
            return ()
        run = self._settle if force is None else partial(settle, force=force)
        decisions = run(self._policy, fleet, now)
        if decisions:
            self._calm = None
        else:
            self._calm, self._until = fleet, next_due(self._policy, fleet, now)
        return decisions


@dataclass(slots=True)
class _Settling:
    """One call of `settle` in progress: the decisions so far, and the fleet after these decisions."""

    policy: FleetPolicy
    fleet: Fleet
    now: datetime
    among: Collection[str] | None
    shares: Shares | None
    force: InForce
    decided: list[Decision] = field(default_factory=list)
    selected: list[str] = field(init=False)  # workers to settle
    barred: frozenset[str] = field(init=False)  # kinds of this release that may not be written yet

    def __post_init__(self) -> None:
        self.selected = sorted(self.fleet.workers if self.among is None else self.among)
        self.barred = new_kinds() - self.force.kinds

    def include_all(self, canary_key: str) -> None:
        """Also evaluate all workers of a canary key (model build and device), because a golden of the key has changed."""
        same = {name for name, one in self.fleet.workers.items() if one.joined.canary_key == canary_key}
        self.selected = sorted({*self.selected, *same})

    def keep(self, decision: Decision) -> None:
        """Number a decision, assign the decision to an incident, and apply it to the fleet.

        A first symptom opens an incident. A decision of a kind that may not be written yet is dropped.
        """
        if self.barred and decision.kind() in self.barred:
            return
        belongs = decision.incident or self._incident_of(decision)
        sign = incident.symptom(self.policy.incident, decision)
        if sign is not None and not belongs:
            subject, what = sign
            belongs = f"incident-{self.fleet.number + 1}"
            opened = decided.IncidentOpened(
                subject=subject, symptom=what, decided_at=self.now, cause=decision.cause
            )
            self._absorb(replace(opened, incident=belongs))
        self._absorb(replace(decision, incident=belongs))

    def allowed(self, due: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Return the decisions without those of a kind that may not be written yet."""
        return tuple(d for d in due if d.kind() not in self.barred) if self.barred and due else due

    def _absorb(self, decision: Decision) -> None:
        assert len(self.decided) < DECISIONS_MAX + DECISIONS_PER_WORKER_MAX * len(self.fleet.workers), (
            "settle does not terminate"
        )
        numbered = replace(decision, number=self.fleet.number + 1)
        recorded = Recorded(seq=0, at=self.now, fact=numbered, id=f"decision:{numbered.number}")
        self.fleet = evolve(self.fleet, recorded)
        self.decided.append(numbered)

    def _incident_of(self, decision: Decision) -> str:
        """Return the id of the open incident to which a decision belongs; empty if there is none.

        A change of degradation belongs to the model's incident, or else to the latest open incident of the model's workers.
        """
        if isinstance(decision, decided.WorkerDecision):
            worker = self.fleet.workers.get(decision.worker)
            return worker.incident if worker is not None else ""
        if not isinstance(decision, decided.DegradationChanged):
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
            decided.PolicyAdopted(
                policy=dict(adopted),
                deciders_version=force.deciders_version,
                kinds=force.stated,
                allowed_by=force.by,
                command=force.command,
                decided_at=s.now,
            )
        )


def _goldens(s: _Settling) -> None:
    for key in sorted(s.fleet.goldens):
        electorate = partial(voters, s.fleet, *key)
        for decision in golden.decide(s.policy.golden, s.fleet.goldens[key], s.now, electorate):
            s.keep(decision)
            s.include_all(key[0])


def _each(s: _Settling, machine: str, decide: Callable[..., tuple[Decision, ...]]) -> None:
    """Run the state machine in the field `machine` of each selected worker, until it has no due decision."""
    policy, state_of, now = getattr(s.policy, machine), attrgetter(machine), s.now
    for name in s.selected:
        moves = 0
        while moves < MOVES_MAX and (due := s.allowed(decide(policy, state_of(s.fleet.workers[name]), now))):
            s.keep(due[0])  # the rest may be obsolete after this one
            moves += 1


def _health(s: _Settling) -> None:
    def decide(policy: health_state.HealthPolicy, state: Health, now: datetime) -> tuple[Decision, ...]:
        return health_state.decide(policy, state, now, held=lambda: _is_held(s, state.worker))

    _each(s, "health", decide)


def _is_held(s: _Settling, name: str) -> bool:
    """Return whether a joining worker must wait because its lineage has no agreed golden yet.

    The lineage is what the engine reports about its weights. The worker waits only if the model has other workers, because
    otherwise no worker could confirm the new answers.
    """
    workers, goldens = s.fleet.workers, s.fleet.goldens
    worker = workers[name]
    others = (one.joined.model for other, one in workers.items() if other != name)
    if not s.policy.golden.hold_new_lineage or worker.joined.model not in others:
        return False
    agreed = {key for (key, _), state in goldens.items() if state.status == "agreed"}
    return is_new_lineage(worker.joined.canary_key, agreed)


def _budgets(s: _Settling) -> None:
    workers = s.fleet.workers
    selected = [workers[name] for name in s.selected]
    concerned = {w.joined.model for w in selected if w.budgeted}
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
    for decision in spares.decide(s.policy.spares, [known[name] for name in sorted(known)], s.now):
        s.keep(decision)


def _levels(s: _Settling) -> None:
    slo_of = s.policy.degradation.slo
    models = s.fleet.models
    concerned = [model for model, state in models.items() if slo_of(model) is not None or state.level]
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
    for name in s.selected:
        worker = s.fleet.workers[name]
        for decision in worker_removal.decide(s.policy.forgetting, worker, name in s.fleet.awaited, s.now):
            s.keep(decision)
    s.selected = [name for name in s.selected if name in s.fleet.workers]


def _outcome(fleet: Fleet, state: Incident) -> tuple[str, str]:
    """Return an incident's outcome ("recovered" or "dead"), and the id of the fact or decision that caused it.

    Both are empty while the incident lasts.
    """
    kind, _, name = state.subject.partition(":")
    if kind == "model":
        model = fleet.models.get(name)
        return ("recovered", model.cause) if model is not None and not model.level else ("", "")
    worker = fleet.workers.get(name)
    if worker is None or (worker.alive and not worker.fully_healthy):
        return "", ""
    last = f"decision:{max(worker.health.moved_by, worker.breaker.moved_by)}"
    return "recovered" if worker.alive else "dead", last


STRATA: Iterable[Callable[[_Settling], None]] = (
    _goldens,
    _health,
    _budgets,
    lambda s: _each(s, "breaker", breaker.decide),
    lambda s: _each(s, "drain", drain.decide),
    _spares,
    _levels,
    _incidents,
    _forget,
)
