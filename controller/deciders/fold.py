"""Folds the journal into the fleet state: applies one recorded fact after another.

The fleet state has only the current instance of each worker, and facts about other instances are ignored. A new instance
starts with a new state, except that the convictions of hardware or weights (`health.rejoin`) and the open incident are kept.
An operator command that reached the stream after its deadline is ignored, because the operator got an error for that command.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import compress
from operator import is_, is_not
from typing import Any, TypeAlias, TypeVar

from controller.deciders import degradation, golden, health, incident, thresholds, worker_removal
from controller.deciders import worker as one
from controller.deciders.degradation import Degradation
from controller.deciders.golden import Golden
from controller.deciders.incident import Incident
from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.deciders.votes import Voter
from controller.deciders.worker import NO_SPARE, Spare, Worker
from events import decisions as decided
from events import observations as seen
from events.fact import Decision, Fact, Recorded
from events.frozen import replace
from events.intrusion.registration import impossible
from events.versions import stated_kinds

Key = tuple[str, str]  # canary key, canary id
T = TypeVar("T")
CLAIMS_SINCE = 6  # the decider version from which impossible registrations are rejected
AWAITED_FOR = timedelta(minutes=10)  # after the last WorkerAwaited; workers repeat it every two minutes
AWAITED_MAX = 10_000  # workers; more than that is a mistake
# Named once: a union inside an isinstance check is rebuilt at every call.
GoldenSeen: TypeAlias = seen.CanaryPassed | seen.CanarySlow | seen.GoldenProposed | seen.GoldenDisputed
GoldenFact: TypeAlias = GoldenSeen | seen.CanaryFailed | decided.GoldenAgreed | decided.GoldenRetired


@dataclass(frozen=True, slots=True)
class AwaitedWorker:
    """A worker that runs but has not joined yet, with the instance id under which it will join.

    (absent) ── WorkerAwaited ──▶ awaited ── joined, left gracefully, or not repeated for `AWAITED_FOR` ──▶ (absent)

    A process that crashes while it waits stays awaited, because its supervisor restarts it. If it is not restarted, the
    timeout removes it. The timeout is measured between two facts of the stream, so no two clocks are compared. The timeout
    is a constant, not a policy setting, so that every reader of the journal computes the same awaited workers.
    """

    worker: str
    instance: str
    model: str  # empty: unknown
    reason: str  # why it cannot join
    since: datetime  # when this or the previous instance began to wait; journal time, here and below
    said_at: datetime  # time of the last WorkerAwaited


@dataclass(frozen=True, slots=True)
class Fleet:
    """The state of the fleet after all facts so far.

    A fleet is immutable. Each fact gives a new value, which shares its unchanged parts with the previous value.
    """

    workers: Mapping[str, Worker] = field(default_factory=dict)  # by worker id; the current instance only
    # By worker id: workers with an instance that waits to join.
    awaited: Mapping[str, AwaitedWorker] = field(default_factory=dict)
    # Forgotten workers, kept in case they return.
    departed: Mapping[str, Worker] = field(default_factory=dict)
    goldens: Mapping[Key, Golden] = field(default_factory=dict)
    models: Mapping[str, Degradation] = field(default_factory=dict)  # by model name
    incidents: Mapping[str, Incident] = field(default_factory=dict)  # open incidents by id, oldest first
    # By model: the load at which workers count as busy.
    thresholds: Mapping[str, BusyThresholds] = field(default_factory=dict)
    number: int = 0  # of the last decision
    policy: Mapping[str, Any] | None = None  # as adopted by the last leader; plain JSON values
    deciders_version: int = 0
    kinds: frozenset[str] = frozenset()  # event kinds that may be written, beyond those of 0.2.0

    @property
    def waiting(self) -> tuple[AwaitedWorker, ...]:
        """The awaited workers without a live instance, sorted by name."""
        live = {name for name, worker in self.workers.items() if worker.alive}
        return tuple(self.awaited[name] for name in sorted(self.awaited.keys() - live))

    def remembered(self, name: str) -> Worker | None:
        """Return the current or forgotten worker of this name; None if no such worker is known."""
        return self.workers.get(name) or self.departed.get(name)

    def living(self, name: str, instance: str) -> Worker | None:
        """Return the worker if `instance` is its current instance and is alive; None otherwise."""
        worker = self.workers.get(name)
        return worker if worker is not None and worker.joined.instance == instance and worker.alive else None


def changed_since(before: Mapping[str, Worker], workers: Mapping[str, Worker]) -> list[str]:
    """Return the names of the workers that are new or changed in `workers`, compared with `before`.

    A worker is immutable, so an unchanged worker is the same object in both mappings.
    """
    if len(before) == len(workers) and all(map(is_, before, workers)):  # the usual case, five times as fast
        return list(compress(workers, map(is_not, workers.values(), before.values())))
    return [name for name, worker in workers.items() if before.get(name) is not worker]


def evolve(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Return the fleet after one recorded fact. This function never raises.

    An unknown fact, and a fact about another instance than a worker's current one, changes nothing.
    """
    fact = recorded.fact
    if isinstance(fact, Decision):
        if isinstance(fact, decided.WorkerDecision):
            return _worker_decided(fleet, fact, recorded, f"decision:{fact.number}")
        return _decided(replace(fleet, number=fact.number), fact, f"decision:{fact.number}")
    if fleet.awaited or isinstance(fact, seen.WorkerAwaited):
        fleet = _waits(fleet, fact, recorded.at)
    if isinstance(fact, seen.WorkerJoined):
        return _joined(fleet, fact, recorded)
    if isinstance(fact, seen.GoldenRequested):
        return _requested(fleet, fact, recorded)
    if isinstance(fact, seen.WorkerObservation):
        worker = fleet.workers.get(fact.worker)
        if worker is not None and worker.joined.instance == fact.instance:
            return _observed(fleet, worker, fact, recorded)
        if isinstance(fact, seen.GoldenProposed) and fact.configured:  # from the settings, not from a worker
            return _golden(fleet, fact, recorded.id)
    if isinstance(fact, seen.IntrusionRefused):
        return _intruded(fleet, fact, recorded.id)
    if isinstance(fact, seen.BusyThresholdsSet):
        moved = thresholds.evolve(fleet.thresholds.get(fact.model, NEVER), fact)
        return replace(fleet, thresholds={**fleet.thresholds, fact.model: moved})
    return fleet


def _decided(fleet: Fleet, fact: Decision, cause: str) -> Fleet:
    match fact:
        case decided.GoldenAgreed():
            before = fleet.goldens.get((fact.canary_key, fact.canary))
            return _revised(_golden(fleet, fact, cause), fact, before)
        case decided.GoldenRetired():
            return _outvoted(_golden(fleet, fact, cause), fact)
        case decided.DegradationChanged():
            state = degradation.evolve(fleet.models.get(fact.model, Degradation(fact.model)), fact, cause)
            return replace(fleet, models={**fleet.models, fact.model: state})
        case decided.IncidentOpened() | decided.IncidentClosed():
            return _incident(fleet, fact)
        case decided.PolicyAdopted():
            kinds = stated_kinds(fact.kinds, fact.deciders_version)
            return replace(fleet, policy=fact.policy, deciders_version=fact.deciders_version, kinds=kinds)
        case _:
            return fleet


def voters(fleet: Fleet, canary_key: str, canary: str) -> Mapping[str, Voter]:
    """Return, by name, the live workers of a canary key that may vote on the golden of `canary`.

    A canary key stands for a model build and a device.
    """
    found = {}
    for name, worker in fleet.workers.items():
        if worker.joined.canary_key == canary_key and worker.alive:
            # Passes are not recorded with several ranks.
            heard = canary in worker.passes or worker.joined.dp > 1
            confirms = heard and not worker.health.joining and not worker.health.convicted
            found[name] = Voter(worker.joined.instance, worker.place, worker.joined.account or name, confirms)
    return found


def _requested(fleet: Fleet, fact: seen.GoldenRequested, recorded: Recorded) -> Fleet:
    """Apply an operator's request to the goldens that the request names.

    A request that reached the stream after its deadline is ignored.
    """
    if fact.late(recorded.at):
        return fleet
    goldens = dict(fleet.goldens)
    for canary in dict.fromkeys((*fact.canaries, *(answer.canary for answer in fact.answers))):
        known = goldens.get((fact.canary_key, canary))
        one = replace(fact, answers=tuple(answer for answer in fact.answers if answer.canary == canary))
        state = golden.evolve(known, one, recorded.id)
        if state is not None:
            goldens[fact.canary_key, canary] = state
    return replace(fleet, goldens=goldens)


def _revised(fleet: Fleet, fact: decided.GoldenAgreed, before: Golden | None) -> Fleet:
    """Withdraw the charges against workers for an answer that has now become the golden.

    A worker is charged if it proposes a golden and later gives another answer. If the workers in `fact.by` now agree on the
    later answer, the charge was wrong. `before` is the golden before this agreement, with its votes.
    """
    votes = before.votes if before is not None else ()
    for name in (vote.worker for vote in votes if vote.revised and vote.worker in fact.by):
        worker = fleet.workers.get(name)
        if worker is not None:
            fleet = _with_worker(fleet, one.outvoted(worker, fact.canary, fact.number, agrees=True))
    return fleet


def _outvoted(fleet: Fleet, fact: decided.GoldenRetired) -> Fleet:
    """Update the charges that an outvoted golden has caused.

    Nothing is done if the golden was retired for another reason. The charge against a worker is dropped if the worker gave
    the answer that outvoted the golden. Any other charge becomes void: it is dropped after one good answer to the canary.
    """
    if not fact.outvoted_by:
        return fleet
    workers = dict(fleet.workers)
    for name, worker in fleet.workers.items():
        if worker.joined.canary_key == fact.canary_key:
            agrees = name in fact.outvoted_by
            workers[name] = one.outvoted(worker, fact.canary, fact.number, agrees=agrees)
    return replace(fleet, workers=workers)


def _with_worker(fleet: Fleet, worker: Worker) -> Fleet:
    return replace(fleet, workers={**fleet.workers, worker.joined.worker: worker})


def _waits(fleet: Fleet, fact: Fact, at: datetime) -> Fleet:
    """Return the fleet with its awaited workers updated by one fact.

    A worker for which no WorkerAwaited was recorded during the last `AWAITED_FOR` is no longer awaited.
    """
    waiting = {name: one for name, one in fleet.awaited.items() if at - one.said_at <= AWAITED_FOR}
    if isinstance(fact, seen.WorkerAwaited):
        known, before = fleet.remembered(fact.worker), waiting.get(fact.worker)
        past = known is not None and fact.instance in (known.joined.instance, *known.past)
        if not past and (before is not None or len(waiting) < AWAITED_MAX):
            waiting[fact.worker] = _awaited(fact, before, known, at)
    elif isinstance(fact, seen.WorkerJoined):
        waiting.pop(fact.worker, None)
    elif isinstance(fact, seen.WorkerLeft) and fact.mode == "graceful":
        ended = waiting.get(fact.worker)
        if ended is not None and ended.instance == fact.instance:
            del waiting[fact.worker]
    return fleet if waiting == fleet.awaited else replace(fleet, awaited=waiting)


def _awaited(
    fact: seen.WorkerAwaited, before: AwaitedWorker | None, known: Worker | None, at: datetime
) -> AwaitedWorker:
    """Return the entry of an awaited worker after a new WorkerAwaited.

    `before` is the worker's previous entry. `known` is the worker of this name that has joined before. Either is None if it
    does not exist.
    """
    model, since = (fact.model, at) if before is None else (fact.model or before.model, before.since)
    if not model and known is not None:
        model = known.joined.model
    return AwaitedWorker(fact.worker, fact.instance, model, fact.reason, since, at)


def refuses(fleet: Fleet, fact: seen.WorkerJoined) -> str:
    """Return why a registration is rejected, as text that names the impossible value; empty if it is accepted.

    Deciders before version `CLAIMS_SINCE` accepted every registration. A fleet with such a `deciders_version` still does.
    """
    return "" if 0 < fleet.deciders_version < CLAIMS_SINCE else impossible(fact)


def _joined(fleet: Fleet, fact: seen.WorkerJoined, recorded: Recorded) -> Fleet:
    if refuses(fleet, fact):
        return fleet
    name, cause = fact.worker, recorded.id
    previous = fleet.remembered(name)
    worker = one.join(previous, fact, cause, recorded.at)
    if worker is previous:
        return fleet
    fleet = _with_worker(fleet, worker)
    if name in fleet.departed:
        fleet = replace(fleet, departed=_without(fleet.departed, name))
    if fact.model not in fleet.models:
        fleet = replace(fleet, models={**fleet.models, fact.model: Degradation(fact.model)})
    if previous is None:  # it has not voted on any golden, so no dispute can have changed
        return fleet
    return _at_odds(fleet, {fact.canary_key, previous.joined.canary_key}, cause)


def _observed(fleet: Fleet, worker: Worker, fact: seen.WorkerObservation, recorded: Recorded) -> Fleet:
    """Apply an observation about a worker's current instance."""
    if isinstance(fact, seen.Commanded) and fact.late(recorded.at):
        return fleet
    observed: Fact = _only_of_its_own(fleet, worker, fact) if isinstance(fact, seen.CanaryFailed) else fact
    moved = one.evolve(worker, observed, recorded, recorded.id)
    if moved is not worker:
        fleet = _with_worker(fleet, moved)
    if isinstance(fact, GoldenSeen) or (isinstance(fact, seen.CanaryFailed) and fact.whole):
        return _golden(fleet, fact, recorded.id)
    if isinstance(fact, seen.ResumeRequested) and worker.health.corrupt:
        return _begin_anew(fleet, worker, fact, recorded.id)
    return fleet


def _intruded(fleet: Fleet, fact: seen.IntrusionRefused, cause: str) -> Fleet:
    """Record an intrusion attempt in the health of the responsible worker instance.

    Nothing is recorded if the fact requires no ejection.
    """
    worker = fleet.workers.get(fact.worker) if fact.eject else None
    if worker is None or worker.joined.instance != fact.instance:
        return fleet
    return _with_worker(fleet, replace(worker, health=health.intruded(worker.health, fact.tried, cause)))


def _begin_anew(fleet: Fleet, worker: Worker, fact: seen.ResumeRequested, cause: str) -> Fleet:
    """Dispute the provisional goldens that a convicted worker proposed, because an operator resumes the worker.

    The goldens may be wrong, because the worker's own answers established them.
    """
    goldens = dict(fleet.goldens)
    for key, state in fleet.goldens.items():
        own = state.proposed_by == worker.joined.worker and key[0] == worker.joined.canary_key
        if own and state.status == "provisional":
            goldens[key] = golden.evolve(state, fact, cause) or state
    return _at_odds(replace(fleet, goldens=goldens), {worker.joined.canary_key}, cause)


def _only_of_its_own(fleet: Fleet, worker: Worker, fact: seen.CanaryFailed) -> seen.CanaryFailed:
    """Return the failed canary, with `golden` set to "none" if the canary's golden may not convict this worker.

    A provisional golden may convict only the worker that proposed it. A golden that was outvoted after the canary was sent may
    convict no worker.
    """
    if fact.golden == "agreed":
        known = fleet.goldens.get((fact.canary_key, fact.golden_canary))
        outvoted = known is not None and fact.sent_under < known.moves.outvoted_by
        return replace(fact, golden="none") if outvoted else fact
    if fact.golden != "provisional":
        return fact
    state = fleet.goldens.get((fact.canary_key, fact.canary))
    own = state is not None and state.status != "retired" and state.proposed_by == worker.joined.worker
    return fact if own else replace(fact, golden="none")


def _without(known: Mapping[str, T], name: str) -> Mapping[str, T]:
    return {other: value for other, value in known.items() if other != name}


def _forgotten(fleet: Fleet, worker: Worker) -> Fleet:
    """Move a worker from the current to the departed workers.

    The worker's model is removed too, if no other worker has this model and the model is not degraded.
    """
    name, model = worker.joined.worker, worker.joined.model
    workers, models = _without(fleet.workers, name), fleet.models
    departed = worker_removal.remember(fleet.departed, worker)
    last = all(other.joined.model != model for other in workers.values())
    if last and model in models and not models[model].level:
        models = _without(models, model)
    return replace(fleet, workers=workers, models=models, departed=departed)


def _placed(fleet: Fleet, worker: Worker, fact: decided.SpareActivated | decided.SpareReleased) -> Fleet:
    """Exchange the roles of a spare and the worker that it replaces, after the spare was activated or released.

    An activated spare serves, and the replaced worker becomes a spare. A release reverses these roles.
    """
    name = fact.replaces if isinstance(fact, decided.SpareActivated) else fact.returned
    other = fleet.remembered(name)
    role, others = Spare(kept=True), NO_SPARE
    if isinstance(fact, decided.SpareActivated):
        place = (other.spare.place if other is not None else "") or name
        role, others = Spare(place="" if place == fact.worker else place), Spare(kept=True)
    fleet = _with_worker(fleet, replace(worker, spare=role))
    if name in fleet.workers:
        return _with_worker(fleet, replace(fleet.workers[name], spare=others))
    return fleet


def _worker_decided(fleet: Fleet, fact: decided.WorkerDecision, recorded: Recorded, cause: str) -> Fleet:
    worker = fleet.workers.get(fact.worker)
    if worker is None or worker.joined.instance != fact.instance:
        return replace(fleet, number=fact.number)
    if isinstance(fact, decided.WorkerForgotten):
        return _forgotten(replace(fleet, number=fact.number), worker)
    model = worker.joined.model
    state = degradation.evolve(fleet.models.get(model, Degradation(model)), fact, cause)
    fleet = _with_worker(fleet, one.evolve(worker, fact, recorded, cause))
    fleet = replace(fleet, models={**fleet.models, model: state}, number=fact.number)
    if isinstance(fact, decided.SpareActivated | decided.SpareReleased):
        return _placed(fleet, fleet.workers[fact.worker], fact)
    if isinstance(fact, decided.HealthChanged) and fact.after is decided.HealthStatus.DEAD:
        return _at_odds(fleet, {worker.joined.canary_key}, cause)
    return fleet


def _golden(fleet: Fleet, fact: GoldenFact, cause: str) -> Fleet:
    key = (fact.canary_key, fact.canary)
    before = fleet.goldens.get(key)
    state = golden.evolve(before, fact, cause)
    if state is None or state is before:
        return fleet
    return _at_odds(replace(fleet, goldens={**fleet.goldens, key: state}), {fact.canary_key}, cause)


def _at_odds(fleet: Fleet, canary_keys: set[str], cause: str) -> Fleet:
    """For all workers of these canary keys, update the list of canaries on which their answers are disputed."""
    goldens = [state for (canary_key, _), state in fleet.goldens.items() if canary_key in canary_keys]
    if not goldens:
        return fleet
    disputed = _disputed(fleet, [state for state in goldens if not golden.is_undisputed(state)])
    marked = [name for name, worker in fleet.workers.items() if worker.health.disputed and worker.alive]
    for name in dict.fromkeys((*disputed, *marked)):
        worker = fleet.workers[name]
        canaries = tuple(sorted(disputed.get(name, ())))
        if worker.joined.canary_key in canary_keys and worker.health.disputed != canaries:
            moved = health.at_odds(worker.health, canaries, cause)
            fleet = _with_worker(fleet, replace(worker, health=moved))
    return fleet


def _disputed(fleet: Fleet, doubtful: Sequence[Golden]) -> Mapping[str, list[str]]:
    """Return, by worker name, the canaries on which a live worker's answer contradicts another worker's answer."""
    lives = {name: w.joined.instance for name, w in fleet.workers.items() if w.alive} if doubtful else {}
    disputed = defaultdict[str, list[str]](list)
    for state in doubtful:
        for name in golden.at_odds(state, lives):
            disputed[name].append(state.canary)
    return disputed


def _incident(fleet: Fleet, fact: decided.IncidentOpened | decided.IncidentClosed) -> Fleet:
    state = incident.evolve(fleet.incidents.get(fact.incident), fact)
    incidents = {id: known for id, known in fleet.incidents.items() if id != fact.incident}
    if state is not None:
        incidents[fact.incident] = state
    fleet = replace(fleet, incidents=incidents)
    kind, _, name = fact.subject.partition(":")
    worker = fleet.workers.get(name) if kind == "worker" else None
    if worker is None:
        return fleet
    return _with_worker(fleet, replace(worker, incident=fact.incident if state is not None else ""))
