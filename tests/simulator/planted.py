"""Planted faults, which the simulator must find.

Each replaces one piece through a seam of the simulator. Most are mistakes that were actually made somewhere: in the design
seed (B3, B4, B22), in the field, or in an earlier draft of this project.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from controller.deciders import fleet as deciders
from controller.deciders.fleet import Fleet, FleetPolicy
from controller.deciders.worker import Spare, Worker
from controller.frontend.admission.queue import Line, QueuedRequest
from controller.planner.plan import PlannerPolicy, Proposal
from controller.planner.planner import Planner, PlannerOutlook
from controller.planner.sizing import Minute, Traffic
from controller.ports import Snapshot
from controller.router.endpoints import EndpointTable, TableChange
from controller.simulator.world.seams import Seams
from events.decisions import (
    BreakerHalfOpened,
    DegradationChanged,
    HealthChanged,
    HealthStatus,
    PolicyAdopted,
    SpareActivated,
    WeightCapped,
)
from events.fact import Decision, Observation, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    CanaryResult,
    DeviceFaulted,
    RequestFailed,
    RequestsServed,
    WorkerJoined,
    WorkerObservation,
    WorkerSilent,
)
from events.order import Order, Position

FAR = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Planted:
    """One planted fault: what is wrong, and the invariants of which any may be the first to break.

    `first_seed` is where the search begins: by default at an eventful seed, so that few are needed.
    """

    says: str
    seams: Seams
    found_by: tuple[str, ...]
    first_seed: int = 2


class RawOrder(Order[Fleet]):
    """Folds in stream order, as if a controller had read everything that precedes its decision."""

    def _decide(self, event: Recorded, decision: Decision) -> None:
        self.settled = self.evolve(self.shown, event)
        self.position = Position(event.seq, event.seq, decision.number)
        self.pending.clear()
        self._shown, self._fresh = self.settled, []


class ForgetfulOrder(Order[Fleet]):
    """Folds a repeated fact a second time."""

    def _is_new(self, event: Recorded) -> bool:
        return True


def _evolving(change: Callable[[Fleet, Any], Any]) -> Callable[[Fleet, Recorded], Fleet]:
    """Return a fold that receives a changed fact instead of the recorded one."""

    def evolve(fleet: Fleet, recorded: Recorded) -> Fleet:
        return deciders.evolve(fleet, replace(recorded, fact=change(fleet, recorded.fact)))

    return evolve


def _no_straggler(fleet: Fleet, fact: Any) -> Any:
    if isinstance(fact, RequestFailed | RequestsServed):
        return replace(fact, routed_under=FAR)
    return replace(fact, sent_under=FAR) if isinstance(fact, CanaryResult) else fact


def _any_instance(fleet: Fleet, fact: Any) -> Any:
    worker = fleet.workers.get(getattr(fact, "worker", ""))
    if worker is None or isinstance(fact, WorkerJoined) or not isinstance(fact, WorkerObservation):
        return fact
    return replace(fact, instance=worker.joined.instance)


def _timeouts_are_silence(fleet: Fleet, fact: Any) -> Any:
    """Treat a canary that times out as a silent worker, although its engine answers other requests."""
    if isinstance(fact, CanaryFailed) and fact.engine_went_on:
        return WorkerSilent(worker=fact.worker, instance=fact.instance, observer="canary", silent_s=5.0)
    return fact


def _joins_anew(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Treat a second registration of the same instance as a new instance."""
    fact = recorded.fact
    if isinstance(fact, WorkerJoined):
        others = {name: worker for name, worker in fleet.workers.items() if name != fact.worker}
        fleet = replace(fleet, workers=others)
    return deciders.evolve(fleet, recorded)


def _never_resets(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Count failures over a worker's whole life: a success does not reset the count (B1)."""
    after = deciders.evolve(fleet, recorded)
    fact = recorded.fact
    before = fleet.workers.get(fact.worker) if isinstance(fact, CanaryPassed) else None
    if before is None or not isinstance(fact, CanaryPassed):
        return after
    now = after.workers[fact.worker]
    if now.breaker.position != "closed" or now.breaker.moved_by != before.breaker.moved_by:
        return after
    kept = replace(now, breaker=replace(now.breaker, canary_failures=before.breaker.canary_failures))
    return replace(after, workers={**after.workers, fact.worker: kept})


def _trial_without_end(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Ignore the deadline of a trial (B3)."""
    workers = {
        name: replace(w, breaker=replace(w.breaker, deadline=w.breaker.deadline + timedelta(days=1)))
        if w.breaker.deadline is not None
        else w
        for name, w in fleet.workers.items()
    }
    return deciders.settle(policy, replace(fleet, workers=workers), now)


def _stale_budget(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Compute the budget on the state before the other machines decided: workers newly out of service are missing in it."""
    decided = deciders.settle(policy, fleet, now)
    known = {name for name, worker in fleet.workers.items() if worker.in_doubt}
    return _numbered(fleet, [d for d in decided if not isinstance(d, WeightCapped) or d.worker in known])


def _sticky_knobs(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Step down from level 4 without accepting requests again (B22)."""
    decided = deciders.settle(policy, fleet, now)
    return tuple(
        replace(d, knobs=replace(d.knobs, accept_new=False))
        if isinstance(d, DegradationChanged) and d.before == 4
        else d
        for d in decided
    )


def _margin_alone(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Leave a level only a full margin above its entry, whatever is provisioned."""
    ladder = policy.degradation
    kept = [
        d
        for d in deciders.settle(policy, fleet, now)
        if not isinstance(d, DegradationChanged)
        or d.after >= d.before
        or ladder.slo(d.model) is None
        or d.ratio >= ladder.entries[d.after] + ladder.margin
    ]
    return _numbered(fleet, kept)


def _no_last(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Keep no worker in service that canaries convict, even if it is the model's last."""
    careless = replace(policy, budget=replace(policy.budget, keep_last=False))
    if fleet.policy == policy.adopted:
        fleet = replace(fleet, policy=careless.adopted)
    return tuple(
        replace(d, policy=dict(policy.adopted)) if isinstance(d, PolicyAdopted) else d
        for d in deciders.settle(careless, fleet, now)
    )


def _never_outvoted(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Ignore all contradictions of an agreed golden, however many workers share them."""
    goldens = {key: replace(state, contradictions=()) for key, state in fleet.goldens.items()}
    return deciders.settle(policy, replace(fleet, goldens=goldens), now)


def _no_trial_at_once(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Let an acquitted worker wait for its breaker although the goldens that convicted it were outvoted."""
    workers = {
        name: replace(worker, breaker=replace(worker.breaker, retry_now=False))
        for name, worker in fleet.workers.items()
    }
    before = replace(fleet, workers=workers)
    decided = deciders.settle(policy, before, now)
    for place, one in enumerate(decided):
        if isinstance(one, BreakerHalfOpened) and before.workers[one.worker].breaker.retry_now:
            return (*decided[:place], *_no_trial_at_once(policy, before, now))
        before = deciders.evolve(before, Recorded(seq=0, at=now, fact=one, id=f"decision:{one.number}"))
    return decided


def _full_weight(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Restore a worker's weight without applying its device limits."""
    return tuple(
        replace(d, weight=d.unlimited, unlimited=None)
        if isinstance(d, HealthChanged) and d.unlimited and d.reason != "device_limit"
        else d
        for d in deciders.settle(policy, fleet, now)
    )


def _throttles_unseen(fleet: Fleet, fact: Any) -> Any:
    return replace(fact, weight=None) if isinstance(fact, DeviceFaulted) else fact


def _numbered(fleet: Fleet, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    return tuple(replace(d, number=fleet.number + 1 + i) for i, d in enumerate(decisions))


def _first_half(batch: Sequence[Decision]) -> Sequence[Decision]:
    return batch[: max(1, len(batch) // 2)]


def _loses_silence(fact: Observation) -> bool:
    return not isinstance(fact, WorkerSilent)


def _shown_as_settled(order: Order[Fleet]) -> Snapshot:
    return Snapshot(order.shown, order.position, dict(order.sources))


class HealthAlone(EndpointTable):
    """Allows requests to every worker that is not dead."""

    def absorb(self, fleet: Fleet) -> TableChange:
        change = super().absorb(fleet)
        for endpoint in self.endpoints.values():
            endpoint.weight = max(endpoint.weight, 0.1)
        return change


class SparesServe(EndpointTable):
    """Allows requests to healthy spares."""

    def absorb(self, fleet: Fleet) -> TableChange:
        change = super().absorb(fleet)
        for endpoint in self.endpoints.values():
            worker = fleet.workers.get(endpoint.worker)
            if worker is not None and worker.spare.kept and worker.fully_healthy:
                endpoint.weight = 1.0
        return change


def _one_more(
    decided: tuple[Decision, ...], fleet: Fleet, now: datetime, wrong: Callable[[Worker, Worker], bool]
) -> tuple[Decision, ...]:
    """Add a decision that a spare replaces another worker of its kind, for the first pair for which `wrong` is true."""
    after = fleet
    for one in decided:
        after = deciders.evolve(after, Recorded(seq=0, at=now, fact=one, id=f"decision:{one.number}"))
    workers = [worker for worker in after.workers.values() if worker.alive]
    for lost in after.workers.values():
        for spare in workers:
            fit = spare.spare.kept and not lost.spare.kept and spare.kind == lost.kind
            if fit and wrong(spare, lost):
                activated = SpareActivated(
                    worker=spare.joined.worker,
                    instance=spare.joined.instance,
                    replaces=lost.joined.worker,
                    reason="planted",
                    decided_at=now,
                    cause=f"decision:{lost.health.moved_by}",
                )
                return _numbered(fleet, [*decided, activated])
    return decided


def _hasty_spare(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Give a worker's place away as soon as there is any doubt about it."""
    return _one_more(
        deciders.settle(policy, fleet, now),
        fleet,
        now,
        lambda spare, lost: (
            spare.fully_healthy and lost.health.status is HealthStatus.SUSPICIOUS and not lost.health.joining
        ),
    )


def _unready_spare(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Accept any living spare, even one that is not ready."""
    return _one_more(
        deciders.settle(policy, fleet, now),
        fleet,
        now,
        lambda spare, lost: bool(lost.lost) and not spare.fully_healthy,
    )


def _no_spare(policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
    """Never let a spare serve."""
    decided = deciders.settle(policy, fleet, now)
    return _numbered(fleet, [d for d in decided if not isinstance(d, SpareActivated)])


def _keeps_its_place(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Leave the lost worker its place, as if the spare were an additional worker."""
    after, fact = deciders.evolve(fleet, recorded), recorded.fact
    if not isinstance(fact, SpareActivated) or fact.replaces not in fleet.workers:
        return after
    lost = replace(after.workers[fact.replaces], spare=fleet.workers[fact.replaces].spare)
    return replace(after, workers={**after.workers, fact.replaces: lost})


def _role_of_a_life(fleet: Fleet, recorded: Recorded) -> Fleet:
    """Reset the role with each registration: a replaced worker serves beside the one that has its place."""
    after, fact = deciders.evolve(fleet, recorded), recorded.fact
    if not isinstance(fact, WorkerJoined) or fact.worker not in after.workers:
        return after
    joined = replace(after.workers[fact.worker], spare=Spare(fact.spare))
    return replace(after, workers={**after.workers, fact.worker: joined})


class OneLine(Line):
    """Serves queued requests in order of arrival, whatever their tier."""

    def head(self, now: float) -> QueuedRequest | None:
        return min(self, key=lambda request: request.since, default=None)


def _planning(**changed: Any) -> Callable[..., Planner]:
    """Return a factory of planners with a changed policy."""

    def make(name: str, policy: PlannerPolicy, *others: Any) -> Planner:
        return Planner(name, replace(policy, **changed), *others)

    return make


class ToNothing(Planner):
    """Removes all workers when no traffic is reported or none arrives."""

    def decide(self, seen: PlannerOutlook) -> list[Proposal]:
        return [
            replace(one, after=0, why="down") if one.after < one.before and one.why == "down" else one
            for one in super().decide(seen)
        ]


class Untroubled(Planner):
    """Treats minutes without a traffic report as minutes without traffic."""

    def decide(self, seen: PlannerOutlook) -> list[Proposal]:
        views = {
            model: replace(view, minutes=[minute or Minute(Traffic(), 0.0, 1.0) for minute in view.minutes])
            for model, view in seen.views.items()
        }
        return super().decide(replace(seen, views=views))


class SelfWilled(Planner):
    """Ignores the size that an operator has set."""

    def decide(self, seen: PlannerOutlook) -> list[Proposal]:
        views = {model: replace(view, set_by_operator=None) for model, view in seen.views.items()}
        return super().decide(replace(seen, views=views))


PLANTED: dict[str, Planted] = {
    "raw_order": Planted(
        "frontends fold in stream order instead of absorption order",
        Seams(frontend_order=RawOrder),
        ("folds_agree",),
    ),
    "repetitions": Planted(
        "frontends fold a fact twice that was stored twice",
        Seams(frontend_order=ForgetfulOrder),
        ("folds_agree",),
    ),
    "stragglers": Planted(
        "the breaker counts outcomes of requests that were sent before it last moved",
        Seams(evolve=_evolving(_no_straggler)),
        ("no_straggler",),
    ),
    "never_resets": Planted(
        "a success does not reset the count of failures",
        Seams(evolve=_never_resets),
        ("in_a_row",),
    ),
    "endless_trial": Planted(
        "a trial without a result keeps the breaker half-open for ever",
        Seams(settle=_trial_without_end),
        ("trials_end", "all_well"),
    ),
    "no_fence": Planted(
        "the journal accepts decisions of a controller that has not read the last one",
        Seams(fenced=False),
        ("decisions_gapless", "one_writer"),
    ),
    "half_a_batch": Planted(
        "a batch can be stored in part",
        Seams(lands=_first_half),
        ("batch_is_whole",),
    ),
    "stale_budget": Planted(
        "the ejection budget is computed before the other machines have decided",
        Seams(settle=_stale_budget),
        ("ejection_budget", "quiescence"),
    ),
    "timeouts_are_silence": Planted(
        "a canary that times out on a busy worker is treated as silence",
        Seams(evolve=_evolving(_timeouts_are_silence)),
        ("lateness_keeps_one",),
    ),
    "joins_anew": Planted(
        "a worker that registers twice loses its verdict",
        Seams(evolve=_joins_anew),
        ("fold_keeps_decisions", "legal_transition", "dead_stays_dead"),
    ),
    "veto_ignored": Planted(
        "a frontend's live connection does not count",
        Seams(links_veto=False),
        ("heard_is_not_silent",),
    ),
    "any_instance": Planted(
        "evidence about a worker's former instance counts against the current one",
        Seams(evolve=_evolving(_any_instance)),
        ("own_instance",),
    ),
    "sticky_knobs": Planted(
        "leaving the last level does not accept requests again",
        Seams(settle=_sticky_knobs),
        ("all_knobs",),
    ),
    "margin_alone": Planted(
        "a model provisioned at 100 to 105 % of its objective never leaves its first level",
        Seams(settle=_margin_alone),
        ("full_capacity",),
    ),
    "no_last": Planted(
        "canaries may take the last serving worker of a model out of service",
        Seams(settle=_no_last),
        ("canaries_leave_one",),
    ),
    "never_outvoted": Planted(
        "an agreed golden is never retired, whatever most workers answer",
        Seams(settle=_never_outvoted),
        ("all_well",),
    ),
    "no_trial_at_once": Planted(
        "a worker convicted by an outvoted golden waits until its breaker is due",
        Seams(settle=_no_trial_at_once),
        ("acquitted_are_tried",),
    ),
    "full_weight": Planted(
        "a worker returns at full weight although a device limits it",
        Seams(settle=_full_weight),
        ("limits_obeyed",),
    ),
    "throttles_unseen": Planted(
        "a device's limit is not noticed",
        Seams(evolve=_evolving(_throttles_unseen)),
        ("limits_decided", "limits_obeyed"),
    ),
    "fire_and_forget": Planted(
        "a fact without an acknowledgement is not sent again",
        Seams(gives_up=_loses_silence),
        ("nothing_lost",),
    ),
    "unsettled_snapshot": Planted(
        "the state store keeps the shown fold at the settled position",
        Seams(snapshot=_shown_as_settled),
        ("folds_agree", "snapshot_equals_replay"),
    ),
    "spares_serve": Planted(
        "frontends send requests to spares that have no place",
        Seams(table=SparesServe),
        ("spares_wait",),
    ),
    "hasty_spare": Planted(
        "a worker's place is given away because of doubt alone",
        Seams(settle=_hasty_spare),
        ("places_fit",),
    ),
    "unready_spare": Planted(
        "a spare that is not ready takes a place",
        Seams(settle=_unready_spare),
        ("places_fit",),
    ),
    "no_spare": Planted(
        "no spare ever takes a place",
        Seams(settle=_no_spare),
        ("places_filled",),
    ),
    "keeps_its_place": Planted(
        "the lost worker keeps its place beside the spare",
        Seams(evolve=_keeps_its_place),
        ("places_once", "places_fit"),
    ),
    "role_of_a_life": Planted(
        "a replaced worker regains its place with its next instance",
        Seams(evolve=_role_of_a_life),
        ("places_once",),
    ),
    "no_wakeup": Planted(
        "queued requests are retried only when another one arrives",
        Seams(wakes=False),
        ("room_is_used",),
    ),
    "one_line": Planted(
        "all tiers wait in one queue",
        Seams(lines=OneLine),
        ("tiers_ordered",),
    ),
    "never_late": Planted(
        "a request stays queued after its timeout",
        Seams(leaves_late=False),
        ("late_is_not_sent",),
    ),
    "to_nothing": Planted(
        "a planner removes the last worker",
        Seams(planner=ToNothing),
        ("planner_floor",),
    ),
    "stale_planner": Planted(
        "a planner ignores the age of the state store",
        Seams(planner=_planning(stale_s=100_000.0)),
        ("planner_fresh",),
    ),
    "untroubled": Planted(
        "a planner treats missing reports as low traffic",
        Seams(planner=Untroubled),
        ("planner_needs_traffic",),
        first_seed=60,
    ),
    "self_willed": Planted(
        "a planner overrides an operator",
        Seams(planner=SelfWilled),
        ("planner_obeys_operator",),
    ),
    "two_voices": Planted(
        "the journal accepts the proposals of two planners at once",
        Seams(proposals_fenced=False),
        ("planner_in_turn", "planner_steady"),
    ),
    "restless": Planted(
        "a planner makes another proposal at each tick",
        Seams(planner=_planning(up_cooldown_s=0.0, down_cooldown_s=0.0, changes_per_hour=10_000)),
        ("planner_steady",),
    ),
    "health_alone": Planted(
        "frontends route to every worker that is not dead",
        Seams(table=HealthAlone),
        ("verdict_obeyed",),
    ),
}
