"""The ejection budget: which workers of a model stay in service although they are doubted, or a canary convicts them.

Doubt may take out at most a share of them. A conviction by canary takes out every worker but the last one that serves: the
canary may be wrong (new weights under the old name), and without that worker every request fails. Its answers are marked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from controller.deciders.validation import STRICT, demand, share
from events.decisions import WeightCapped
from events.fact import Decision, Fact
from events.frozen import quickly_made, replace

LAST_SERVING = "last_serving"  # reason of a WeightCapped that keeps the last worker of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPolicy:
    """Which share of a model's workers doubt may eject, and at which weight the others stay."""

    max_ejection_share: float = 0.5  # of a model's workers that doubt alone may take out of service
    kept_weight: float = 0.1  # share of the traffic of one that is kept in service all the same
    keep_last: bool = True  # whether a model's last worker serves on when only canaries convict it
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
    last: bool = False  # it is kept although a canary convicts it: no other worker of its model serves
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
    serves: bool = False  # it is in service without being kept
    suspect: bool = False  # nothing but canaries keeps it out of service
    limit: float = 1.0  # the weight that its devices leave it
    moved_by: int = 0  # number of the last decision about its health


def evolve(state: Budget, fact: Fact, cause: str = "") -> Budget:
    """Absorb one fact about this worker and instance."""
    match fact:
        case WeightCapped():
            return replace(state, kept=fact.weight, last=fact.reason == LAST_SERVING, cause=cause)
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
    last = _last(policy, standings) if not keep else ""
    for standing in standings:
        name, limit = standing.budget.worker, standing.limit
        weight = limit if name == last else policy.kept_weight if name in keep else None
        if (weight, name == last) != (standing.budget.kept, standing.budget.last):
            yield WeightCapped(
                worker=name,
                instance=standing.budget.instance,
                weight=weight,
                reason=LAST_SERVING
                if name == last
                else "ejection_budget"
                if name in keep
                else "within_budget",
                decided_at=now,
                cause=_cause(standing, last=name == last or standing.budget.last),
            )


def _cause(standing: BudgetRank, *, last: bool) -> str:
    """Return the cause of a decision about this worker.

    For a model's last worker it is what was last decided about its health: `standing.cause` can be another worker's fact, which
    raised or ended a dispute about a golden.
    """
    return f"decision:{standing.moved_by}" if last and standing.moved_by else standing.cause


def _last(policy: BudgetPolicy, standings: Sequence[BudgetRank]) -> str:
    """Return the worker that serves on although canaries convict it, because no other does; empty: there is none, or no need.

    One that serves so already goes on; otherwise it is the least bad, and of equals the one that was convicted last. One to
    which its devices leave nothing is the last choice.
    """
    if not policy.keep_last or any(s.serves for s in standings):
        return ""
    suspects = [s for s in standings if s.suspect]
    chosen = min(
        suspects,
        key=lambda s: (s.limit <= 0, not s.budget.last, s.badness, -s.moved_by, s.budget.worker),
        default=None,
    )
    return chosen.budget.worker if chosen is not None else ""
