"""The ejection budget: how many workers of a model may doubt take out of service at once?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.deciders.validation import STRICT, demand, share
from events.decisions import WeightCapped
from events.fact import Decision, Fact
from events.frozen import quickly_made, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """Which share of a model's workers doubt may eject, and at which weight the others stay."""

    max_ejection_share: float = 0.5  # of a model's workers that doubt alone may take out of service
    kept_weight: float = 0.1  # share of the traffic of one that is kept in service all the same
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        share(max_ejection_share=self.max_ejection_share, kept_weight=self.kept_weight)
        demand(self.kept_weight > 0, "kept_weight is 0: a worker that is kept must get something")


@dataclass(frozen=True, slots=True)
class Budget:
    """One worker's place in its model's ejection budget."""

    worker: str
    instance: str
    kept: float | None = None  # the weight at which it is kept in service in spite of doubt
    cause: str = ""


@quickly_made
@dataclass(frozen=True, slots=True)
class BudgetRank:
    """How one worker stands when the budget is reckoned: the least bad sorts first."""

    budget: Budget
    ejected: bool  # doubt alone keeps it out of service
    counts: bool  # it is, or would be but for doubt, in service
    badness: tuple[int, ...]
    cause: str = ""


def evolve(state: Budget, fact: Fact, cause: str = "") -> Budget:
    """Absorb one fact about this worker and instance."""
    match fact:
        case WeightCapped():
            return replace(state, kept=fact.weight, cause=cause)
        case _:
            return state


def decide(policy: BudgetPolicy, standings: Sequence[BudgetRank], now: datetime) -> Iterator[Decision]:
    """Say which workers of one model must be kept in service, and which no longer.

    Doubt may eject at most the floor of the share of those that count. Whoever is kept already stays kept while
    the budget is short, so that two equally bad workers do not take turns.
    """
    counted = sum(s.counts for s in standings)
    allowed = int(policy.max_ejection_share * counted + 1e-9)
    ejected = sorted(
        (s for s in standings if s.ejected and s.counts),
        key=lambda s: (s.budget.kept is None, s.badness, s.budget.worker),
    )
    keep = {s.budget.worker for s in ejected[: max(0, len(ejected) - allowed)]}
    for standing in standings:
        weight = policy.kept_weight if standing.budget.worker in keep else None
        if weight != standing.budget.kept:
            yield WeightCapped(
                worker=standing.budget.worker,
                instance=standing.budget.instance,
                weight=weight,
                reason="ejection_budget" if weight is not None else "within_budget",
                decided_at=now,
                cause=standing.cause,
            )
