"""Looks at the state store every few seconds, decides, says on the journal what is due, and has it carried out.

    state store ─▶ histories, views ─▶ plan ─▶ CapacityReported, ScaleProposed ─▶ hook ─▶ ScaleApplied
                                         ▲ age of the projection: journal's end, against how far the store is

Two planners that read the same decide the same: of their proposals the journal takes the first, the other reads again.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import structlog

from controller.deciders.capacity import slo_of
from controller.planner.history import DAYS, ModelHistory
from controller.planner.plan import ModelView, Proposal, plan
from controller.planner.reading import ModelCapacity, PlannedWorker, capacity_of, view_of
from controller.ports import Clock, PlanningRead, PlanningStore, ScaleHook, WantedScale
from controller.runtime.planning.metrics import PlannerMetrics
from controller.runtime.planning.projection_age import ProjectionAge
from controller.runtime.planning.settings import PlannerSettings
from controller.runtime.planning.workers import WorkersSeen
from events.decisions import PolicyAdopted
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Fenced, Journal
from events.observations import CapacityReported, ScaleApplied, ScaleProposed

EVENTS_MAX = 10_000  # in one reading
MODELS_MAX = 1_000
CAPACITY_EVERY = timedelta(seconds=60)
READ_S = 20.0
JOURNAL_S = 5.0
RATIO_CHANGE = 0.02  # of a model's capacity, that is told at once

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PlannerOutlook:
    """What was found and decided at one look."""

    at: datetime
    position: int
    projection_age_s: float
    views: Mapping[str, ModelView]
    proposals: Sequence[Proposal]


class Planning:
    """One planner."""

    def __init__(
        self,
        store: PlanningStore,
        journal: Journal,
        clock: Clock,
        settings: PlannerSettings,
        name: str,
        hook: ScaleHook | None,
        metrics: PlannerMetrics,
    ) -> None:
        """`hook`: who carries out what is proposed, if that is no supervisor that hears of it on the journal."""
        self._store, self._journal, self._clock = store, journal, clock
        self._settings, self._name, self._hook, self.metrics = settings, name, hook, metrics
        self._age = ProjectionAge()
        self._workers = WorkersSeen()
        self._histories: dict[str, ModelHistory] = {}
        self._policy: Mapping[str, Any] | None = None
        self._after = 0  # sequence of the last event that was read
        self.outlook: PlannerOutlook | None = None  # of the last look
        self.why_not = "it has not looked yet"  # why there was none; empty: there was

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                outlook = await self.look()
                stale = outlook.projection_age_s > self._settings.policy.stale_s
                self._waits("the state store is behind the journal" if stale else "")
            except (HoldfastError, TimeoutError) as error:
                self._waits(str(error) or "the journal or the state store does not answer in time")
            await self._clock.sleep(self._settings.every_s)

    def _waits(self, why: str) -> None:
        """Say for what the planner waits, once; empty: for nothing."""
        if why and why != self.why_not:
            log.warning("planner_waits", why=why)
        self.why_not = why

    async def look(self) -> PlannerOutlook:
        """Look once, and do what is due. Raise StoreUnavailable, JournalUnavailable or TimeoutError."""
        async with asyncio.timeout(JOURNAL_S):
            last = await self._journal.last_seq()
        self._age.seen(self._clock.monotonic(), last)
        async with asyncio.timeout(READ_S):
            read = await self._read()
        now, position = self._clock.now(), read.position.seq
        age_s = self._age.of(position, self._clock.monotonic())
        by_model = self._workers.by_model(read.workers, self._clock.monotonic())
        views = self._views(by_model, now)
        # a season takes a second to be fitted
        proposals = await asyncio.to_thread(plan, self._settings.policy, list(views.values()), now, age_s)
        self.outlook = PlannerOutlook(now, position, age_s, views, proposals)
        self._measure(self.outlook)
        if age_s <= self._settings.policy.stale_s:  # what is older is not what models carry now
            for model, workers in by_model.items():
                self._tell_capacity(model, workers, position, now)
        for proposal in proposals:
            if self._due(proposal, now):
                await self._propose(proposal, position)
        return self.outlook

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _read(self) -> PlanningRead:
        """Read what is new, and take it in."""
        while True:
            since = self._clock.now() - timedelta(days=DAYS)
            read = await self._store.read_planning(self._after, since, EVENTS_MAX)
            if read.position.seq < self._after:  # another journal, or one that was made anew
                self._after = 0
                self._histories.clear()
                self._age.forget()
                continue
            for event in (*read.events, *read.latest):
                self._take(event)
            if read.events:
                self._after = read.events[-1].seq
            if len(read.events) < EVENTS_MAX:
                return read

    def _take(self, event: Recorded) -> None:
        if isinstance(event.fact, PolicyAdopted):
            self._policy = event.fact.policy
        elif (history := self._history(getattr(event.fact, "model", ""))) is not None:
            history.take(event)

    def _history(self, model: str) -> ModelHistory | None:
        known = self._histories.get(model)
        if known is None and model and len(self._histories) < MODELS_MAX:
            known = self._histories[model] = ModelHistory(model)
        return known

    def _views(self, by_model: Mapping[str, Sequence[PlannedWorker]], now: datetime) -> dict[str, ModelView]:
        views = {}
        for model, workers in sorted(by_model.items()):
            if (history := self._history(model)) is None:
                continue
            slo, settings = slo_of(self._policy, model), self._settings
            view = view_of(workers, history, slo, settings.policy, settings.lost_after_s, now)
            if view is not None:
                views[model] = view
        return views

    # --- saying -----------------------------------------------------------------------------------------------------

    def _tell_capacity(
        self, model: str, workers: Sequence[PlannedWorker], position: int, now: datetime
    ) -> None:
        """Say what a model's workers carry: where that is another than was said last, and each minute."""
        history = self._history(model)
        found = capacity_of(workers, slo_of(self._policy, model), self._settings.lost_after_s)
        self.metrics.achievable.labels(model).set(found.achievable_rps)
        last = history.last_capacity if history is not None else None
        if last is not None and now - last.at < CAPACITY_EVERY and not _differs(last, found):
            return
        fact = CapacityReported(
            planner=self._name, model=model, provisioned=found.provisioned, healthy=found.healthy, lost=found.lost,
            gpus=found.gpus, achievable_rps=found.achievable_rps, ratio=found.ratio, position=position,
        )  # fmt: skip
        self._journal.observe(fact)

    def _due(self, proposal: Proposal, now: datetime) -> bool:
        """Say whether a proposal is to be made: it changes something, and is not the one that everybody knows."""
        if self._settings.mode == "observe" or proposal.after == proposal.before:
            return False
        history = self._histories[proposal.model]
        last, by = history.last_proposal, self._settings.by
        if last is None:
            return True
        fact = last.fact
        assert isinstance(fact, ScaleProposed)
        if (fact.before, fact.after, fact.by) != (proposal.before, proposal.after, by):
            return True
        undone = by and not history.carried_out(last)  # it failed, or whoever was to do it fell
        wait_s = self._settings.policy.up_cooldown_s if undone else self._settings.repeat_s
        return now - last.at >= timedelta(seconds=wait_s)

    async def _propose(self, proposal: Proposal, position: int) -> None:
        """Say a proposal, if nobody else was quicker, and have it carried out. Raise JournalUnavailable."""
        last = self._histories[proposal.model].last_proposal
        after = last.seq if last is not None and last.seq >= await self._journal.first_seq() else 0
        foreseen = proposal.forecast
        fact = ScaleProposed(
            planner=self._name, model=proposal.model, before=proposal.before, after=proposal.after, why=proposal.why,
            needed=proposal.needed, method=foreseen.method if foreseen else "", error=foreseen.error if foreseen else None,
            bound=proposal.bound, held=proposal.held, by=self._settings.by, position=position,
        )  # fmt: skip
        try:
            id = await self._journal.observe_next(fact, after=after)
        except Fenced:
            self.metrics.fenced.inc()
            return
        self.metrics.proposals.labels(proposal.model, proposal.why).inc()
        log.info("scale_proposed", model=fact.model, before=fact.before, after=fact.after, why=fact.why)
        if self._hook is not None:
            await self._apply(self._hook, fact, id)

    async def _apply(self, hook: ScaleHook, fact: ScaleProposed, id: str) -> None:
        wanted = WantedScale(
            model=fact.model, before=fact.before, after=fact.after, why=fact.why, proposal=id, planner=self._name
        )  # fmt: skip
        result = await hook.scale(wanted)
        self.metrics.applied.labels("ok" if result.ok else "failed").inc()
        if not result.ok:
            log.warning("scale_failed", model=fact.model, after=fact.after, by=hook.by, why=result.says)
        self._journal.observe(
            ScaleApplied(
                model=fact.model, proposal=id, after=fact.after, by=hook.by, ok=result.ok, says=result.says
            ),
            causation=id,
        )

    # --- showing ----------------------------------------------------------------------------------------------------

    def _measure(self, outlook: PlannerOutlook) -> None:
        metrics = self.metrics
        metrics.position.set(outlook.position)
        metrics.age.set(outlook.projection_age_s)
        metrics.keep(outlook.views.keys())
        for proposal in outlook.proposals:
            model = proposal.model
            metrics.provisioned.labels(model).set(proposal.before)
            metrics.wanted.labels(model).set(proposal.after)
            metrics.needed.labels(model).set(proposal.needed)
            metrics.held.labels(model).set(bool(proposal.held))
            if proposal.forecast is not None:
                metrics.expected.labels(model).set(proposal.forecast.peak)
                metrics.error.labels(model).set(proposal.forecast.error or 0.0)

    def report(self) -> dict[str, Any]:
        """Return what /plan shows, and `holdfast plan` prints."""
        outlook = self.outlook
        told: dict[str, Any] = {"planner": self._name, "mode": self._settings.mode, "waits": self.why_not}
        if outlook is None:
            return {**told, "models": []}
        about = {
            "at": outlook.at.isoformat(),
            "position": outlook.position,
            "projection_age_s": round(outlook.projection_age_s, 3),
        }
        return {
            **told,
            **about,
            "models": [_told(one, outlook.views[one.model]) for one in outlook.proposals],
        }


def _differs(last: Recorded, found: ModelCapacity) -> bool:
    said = last.fact
    assert isinstance(said, CapacityReported)
    counts = (said.provisioned, said.healthy, said.lost) != (found.provisioned, found.healthy, found.lost)
    return counts or abs(said.ratio - found.ratio) > RATIO_CHANGE


def _told(proposal: Proposal, view: ModelView) -> dict[str, Any]:
    foreseen = proposal.forecast
    return {
        "model": proposal.model,
        "workers": proposal.before,
        "lost": view.lost,
        "proposed": proposal.after,
        "why": proposal.why,
        "held": proposal.held,
        "needed": proposal.needed,
        "bound": proposal.bound,
        "set_by_operator": view.set_by_operator,
        "minutes_known": sum(minute is not None for minute in view.minutes),
        "forecast": None
        if foreseen is None
        else {
            "method": foreseen.method,
            "work_s_per_minute": [round(value, 3) for value in foreseen.values],
            "margin": round(foreseen.margin, 4),
            "error": None if foreseen.error is None else round(foreseen.error, 4),
        },
    }
