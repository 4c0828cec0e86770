"""The ejection budget: limits how many workers of a model may be out of service on suspicion.

Doubt may take at most a configured share of a model's workers out of service. A conviction by a canary takes any worker
out of service, except the last worker that can serve the model. Without that worker every request would fail, and the canary
may be wrong, for example because new weights were deployed under the old name. The answers of such a last worker are marked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.deciders.validation import STRICT, demand, share
from events.decisions import WeightCapped
from events.fact import Decision, Fact
from events.frozen import fast_constructor, replace

LAST_SERVING = "last_serving"  # reason of a WeightCapped that keeps a model's last worker in service


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """The share of a model's workers that doubt may eject, and the weight of doubted workers that stay in service."""

    max_ejection_share: float = 0.5  # share of a model's workers that doubt alone may take out of service
    kept_weight: float = 0.1  # weight of a doubted worker that is kept in service
    keep_last: bool = True  # keep a model's last worker in service when only canaries convict it
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        share(max_ejection_share=self.max_ejection_share, kept_weight=self.kept_weight)
        demand(self.kept_weight > 0, "kept_weight is 0: a worker that is kept must get something")


@dataclass(frozen=True, slots=True)
class Budget:
    """One worker's state in the ejection budget: whether the budget keeps it in service, and at which weight."""

    worker: str
    instance: str
    kept: float | None = None  # the weight at which it is kept in service despite doubt
    last: bool = False  # kept although a canary convicts it, because no other worker of its model serves
    cause: str = ""


@fast_constructor
@dataclass(frozen=True, slots=True)
class BudgetRank:
    """The properties of one worker that the computation of the ejection budget uses.

    Doubted workers are kept in service in the order of their `badness`, the lowest first.
    """

    budget: Budget
    ejected: bool  # doubt alone keeps it out of service
    counts: bool  # it is in service, or would be without doubt
    badness: tuple[int, ...]
    cause: str = ""
    serves: bool = False  # it is in service without being kept
    suspect: bool = False  # only canaries keep it out of service
    limit: float = 1.0  # the weight that its devices allow
    moved_by: int = 0  # number of the last decision about its health


def evolve(state: Budget, fact: Fact, cause: str = "") -> Budget:
    """Return the budget state of a worker after one fact about its instance. Only `WeightCapped` changes the state."""
    if isinstance(fact, WeightCapped):
        return replace(state, kept=fact.weight, last=fact.reason == LAST_SERVING, cause=cause)
    return state


def decide(policy: BudgetPolicy, standings: Sequence[BudgetRank], now: datetime) -> Iterator[Decision]:
    """Yield a `WeightCapped` for each worker of one model for which the budget's verdict changes.

    A worker is kept if the budget leaves it in service despite doubt or a conviction. The verdict changes if a worker is
    newly kept, kept at another weight, or no longer kept.

    Doubt may take at most floor(`max_ejection_share` * n) workers out of service, where n is the number of `standings` with
    `counts` set. Further doubted workers are kept at `kept_weight`. Workers that are already kept are chosen first, so that
    two equally bad workers do not alternate.
    """
    counted = sum(s.counts for s in standings)
    allowed = int(policy.max_ejection_share * counted + 1e-9)
    ejected = sorted(
        (s for s in standings if s.ejected and s.counts),
        key=lambda s: (s.budget.kept is None, s.badness, s.budget.worker),
    )
    keep = {s.budget.worker for s in ejected[: max(0, len(ejected) - allowed)]}
    last = _last(policy, standings) if not keep else ""
    for standing in standings:
        name, limit = standing.budget.worker, standing.limit
        weight = limit if name == last else policy.kept_weight if name in keep else None
        if (weight, name == last) == (standing.budget.kept, standing.budget.last):
            continue
        # A model's last worker is kept because of its health. `standing.cause` can be another worker's fact, one that raised
        # or ended a dispute about a golden.
        by_health = standing.moved_by and (name == last or standing.budget.last)
        reason = "ejection_budget" if name in keep else "within_budget"
        yield WeightCapped(
            worker=name,
            instance=standing.budget.instance,
            weight=weight,
            reason=LAST_SERVING if name == last else reason,
            decided_at=now,
            cause=f"decision:{standing.moved_by}" if by_health else standing.cause,
        )


def _last(policy: BudgetPolicy, standings: Sequence[BudgetRank]) -> str:
    """Return the name of the suspect that stays in service as the last worker of its model.

    A suspect (`suspect`) is out of service only because of wrong answers to canaries, or because its lineage (reported
    weights) is new. The result is empty if another worker of the model serves, or if no worker is a suspect. The first of
    these criteria by which two suspects differ decides between them:

    1. The worker's devices allow a weight above 0.
    2. The worker was chosen before.
    3. Its `badness` is lower.
    4. Its last health decision is later.
    """
    if not policy.keep_last or any(s.serves for s in standings):
        return ""
    suspects = [
        (s.limit <= 0, not s.budget.last, s.badness, -s.moved_by, s.budget.worker)
        for s in standings
        if s.suspect
    ]
    return min(suspects)[-1] if suspects else ""
