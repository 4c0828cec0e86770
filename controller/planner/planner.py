"""Computes the planner's proposals and capacity reports from events and rows, without I/O.

The process around it reads the journal and the state store, passes events and rows, and publishes the returned facts.

    events, rows ─▶ histories, workers ─▶ views ─▶ plan ─▶ CapacityReported, ScaleProposed
                                                    ▲ age of the state store's data (`ProjectionAge`)
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.policy import load
from controller.planner.history import ModelHistory
from controller.planner.model_view import (
    ModelCapacity,
    PlannedWorker,
    WorkerRow,
    WorkersSeen,
    capacity_of,
    view_of,
)
from controller.planner.plan import Expecting, ModelView, PlannerPolicy, Proposal, expected, plan
from events.decisions import PolicyAdopted
from events.fact import Recorded
from events.observations import CapacityReported, ScaleProposed

LOOKS_MAX = 1024
MODELS_MAX = 1_000
CAPACITY_EVERY = timedelta(seconds=60)
RATIO_CHANGE = 0.02  # change of a model's capacity ratio that is reported at once


class ProjectionAge:
    """Measures by how many seconds the state store lags behind the journal.

    The lag begins when the caller first reports an end of the journal that the store has not reached. Times are seconds of a
    monotonic clock. At the start, the store may already lag by an unknown time. So `before_s` seconds are added to the lag until
    the store has reached an end of the journal that the caller reported.
    """

    def __init__(self, before_s: float) -> None:
        """Create a measurement without data.

        `before_s` is the lag, in seconds, that is assumed at the start.
        """
        self._before_s = before_s
        self._reached = False  # the store has reached an observed end of the journal
        # time, and the journal's last sequence
        self._ends: deque[tuple[float, int]] = deque(maxlen=LOOKS_MAX)

    def seen(self, now: float, last: int) -> None:
        """Record that the journal ended at sequence `last` at time `now`."""
        if not self._ends or last > self._ends[-1][1]:
            self._ends.append((now, last))

    def of(self, shown: int, now: float) -> float:
        """Return by how many seconds the store lags behind the journal; 0 if it does not lag.

        `shown` is the sequence of the last event that the store's rows show.
        """
        while self._ends and self._ends[0][1] <= shown:
            self._ends.popleft()
            self._reached = True
        before_s = 0.0 if self._reached else self._before_s
        return now - self._ends[0][0] + before_s if self._ends else 0.0

    def forget(self) -> None:
        """Discard the measurement, because the journal was replaced."""
        self._ends.clear()
        self._reached = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerDuties:
    """Settings of a planner process, besides the policy for its proposals."""

    proposes: bool = True  # False: it only reports capacities
    by: str = ""  # name of the process that applies proposals; empty: none
    lost_after_s: float = 120.0  # seconds out of service after which a worker counts as lost
    repeat_s: float = 600.0  # seconds after which an unapplied proposal is repeated


@dataclass(frozen=True, slots=True)
class PlannerOutlook:
    """The data that a planner has read at one time, and the proposals computed from this data."""

    at: datetime
    position: int  # sequence up to which the state store was read
    projection_age_s: float
    workers: Mapping[str, Sequence[PlannedWorker]]  # by model
    views: Mapping[str, ModelView]
    proposals: Sequence[Proposal] = ()


class Planner:
    """The state of one planner. It absorbs events and rows, and returns the facts to publish."""

    def __init__(
        self, name: str, policy: PlannerPolicy, duties: PlannerDuties, expecting: Expecting = expected
    ) -> None:
        """Create a planner without data. `expecting` forecasts the load."""
        self.policy = policy
        self.age = ProjectionAge(before_s=2 * policy.stale_s)
        self.read = 0  # sequence of the last event that was absorbed
        self._name, self._duties, self._expecting = name, duties, expecting
        self._workers = WorkersSeen()
        self._histories: dict[str, ModelHistory] = {}
        self._ladder = DegradationPolicy()

    # --- reading ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Discard all events, because the journal was replaced or recreated."""
        self.read = 0
        self._histories.clear()
        self.age.forget()

    def take(self, events: Iterable[Recorded]) -> None:
        """Absorb planning events in the journal's order. Repeated events change nothing."""
        for event in events:
            if isinstance(event.fact, PolicyAdopted):
                with suppress(ValueError):  # another version may allow values that are invalid here
                    self._ladder = load(event.fact.policy).degradation
            elif (history := self._history(getattr(event.fact, "model", ""))) is not None:
                history.take(event)

    def _history(self, model: str) -> ModelHistory | None:
        known = self._histories.get(model)
        if known is None and model and len(self._histories) < MODELS_MAX:
            known = self._histories[model] = ModelHistory(model)
        return known

    def _slo(self, model: str) -> Slo:
        return self._ladder.slo(model) or Slo()

    # --- deciding ---------------------------------------------------------------------------------------------------

    def look(
        self, rows: Sequence[WorkerRow], position: int, now: datetime, monotonic: float
    ) -> PlannerOutlook:
        """Return the data for the next proposals, from the workers' rows at sequence `position`.

        `monotonic` is the current time in seconds of a monotonic clock.
        """
        age_s = self.age.of(position, monotonic)
        by_model = self._workers.by_model(rows, monotonic)
        return PlannerOutlook(now, position, age_s, by_model, self._views(by_model, now))

    def _views(self, by_model: Mapping[str, Sequence[PlannedWorker]], now: datetime) -> dict[str, ModelView]:
        views = {}
        for model, workers in sorted(by_model.items()):
            if (history := self._history(model)) is None:
                continue
            slo, share = self._slo(model), self._ladder.entries[0] + self._ladder.margin
            view = view_of(workers, history, slo, share, self.policy, self._duties.lost_after_s, now)
            if view is not None:
                views[model] = view
        return views

    def decide(self, seen: PlannerOutlook) -> list[Proposal]:
        """Return a proposal for each model.

        Fitting a seasonal forecast may take a second, so callers can run this method in another thread.
        """
        return plan(self.policy, [*seen.views.values()], seen.at, seen.projection_age_s, self._expecting)

    # --- facts to publish -----------------------------------------------------------------------------------------------------

    def capacities(self, seen: PlannerOutlook) -> dict[str, ModelCapacity]:
        """Return the capacity of each model's workers; empty if the state store's data is stale."""
        if seen.projection_age_s > self.policy.stale_s:
            return {}
        late_s, by_model = self._duties.lost_after_s, seen.workers.items()
        return {model: capacity_of(workers, self._slo(model), late_s) for model, workers in by_model}

    def capacity_fact(
        self, model: str, found: ModelCapacity, seen: PlannerOutlook
    ) -> CapacityReported | None:
        """Return the capacity report to publish for a model; None if no report is due.

        A report is due every CAPACITY_EVERY, and at once if the capacity has changed.
        """
        history = self._history(model)
        last = history.last_capacity if history is not None else None
        if last is not None and seen.at - last.at < CAPACITY_EVERY and not _differs(last, found):
            return None
        return CapacityReported(planner=self._name, model=model, position=seen.position, **asdict(found))

    def due(self, seen: PlannerOutlook) -> list[tuple[Proposal, ScaleProposed]]:
        """Return the proposals that must be published, each with its fact."""
        return [(one, self._fact(one, seen.position)) for one in seen.proposals if self._is_due(one, seen.at)]

    def _is_due(self, proposal: Proposal, now: datetime) -> bool:
        """Return whether a proposal must be published.

        A proposal is published only if it changes the number of workers. A proposal equal to the last one is repeated only
        after a waiting time.
        """
        if not self._duties.proposes or proposal.after == proposal.before:
            return False
        history, by = self._histories[proposal.model], self._duties.by
        last = history.last_proposal
        if last is None:
            return True
        fact = last.fact
        assert isinstance(fact, ScaleProposed)
        if (fact.before, fact.after, fact.by) != (proposal.before, proposal.after, by):
            return True
        undone = by and not history.carried_out(last)  # it failed, or the process that should apply it did
        wait_s = self.policy.up_cooldown_s if undone else self._duties.repeat_s
        return now - last.at >= timedelta(seconds=wait_s)

    def last_proposed(self, model: str) -> int:
        """Return the sequence of the last proposal about a model by any planner; 0 if there is none."""
        last = self._histories[model].last_proposal
        return last.seq if last is not None else 0

    def _fact(self, proposal: Proposal, position: int) -> ScaleProposed:
        predicted = proposal.forecast
        return ScaleProposed(
            planner=self._name, model=proposal.model, before=proposal.before, after=proposal.after, why=proposal.why,
            needed=proposal.needed, method=predicted.method if predicted else "", error=predicted.error if predicted else None,
            bound=proposal.bound, held=proposal.held, by=self._duties.by, position=position,
        )  # fmt: skip


def _differs(last: Recorded, found: ModelCapacity) -> bool:
    reported = last.fact
    assert isinstance(reported, CapacityReported)
    counts = [(one.provisioned, one.healthy, one.lost) for one in (reported, found)]
    return counts[0] != counts[1] or abs(reported.ratio - found.ratio) > RATIO_CHANGE
