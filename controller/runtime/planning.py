"""The planner loop: reads the state store every few seconds; records and applies scaling proposals.

    state store ─▶ Planner ─▶ CapacityReported, ScaleProposed ─▶ hook ─▶ ScaleApplied

Two planners that read the same state make the same proposal. The journal accepts the proposal that arrives first. The planner of
the later proposal drops it and reads again.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import structlog
from prometheus_client import CollectorRegistry

from controller.metric_table import MetricTable, counter, gauge
from controller.planner.history import DAYS
from controller.planner.plan import ModelView, Proposal
from controller.planner.planner import Planner, PlannerDuties, PlannerOutlook
from controller.ports import Clock, PlanningRead, PlanningStore, ScaleHook, ScaleRequest
from controller.runtime.settings import PlannerSettings
from events.errors import HoldfastError
from events.journal.port import Fenced, Journal
from events.json_types import Json
from events.observations import ScaleApplied, ScaleProposed


class PlannerMetrics(MetricTable):
    """The planner's metrics, in the registry of its process."""

    provisioned = gauge("holdfast_planner_workers", "Present workers of a model", "model")
    wanted = gauge("holdfast_planner_workers_wanted", "Workers that the model should have now", "model")
    needed = gauge("holdfast_planner_workers_needed", "Workers that the forecast load needs", "model")
    expected = gauge(
        "holdfast_planner_expected_work", "Highest forecast of work per minute, in worker seconds", "model"
    )
    error = gauge("holdfast_planner_forecast_error", "Recent relative error of the load forecast", "model")
    held = gauge("holdfast_planner_held", "1 while a rule keeps the planner from a change", "model")
    achievable = gauge("holdfast_planner_achievable_rps", "Requests a second within the objectives", "model")
    proposals = counter("holdfast_planner_proposals", "Proposals of this process", "model", "why")
    fenced = counter("holdfast_planner_fenced", "Proposals dropped because another planner was first")
    applied = counter("holdfast_planner_hooks", "Calls of the scaling hook", "outcome")
    position = gauge("holdfast_planner_position", "Stream sequence up to which the state store was read")
    age = gauge("holdfast_planner_projection_age_seconds", "Seconds since the state store fell behind")

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with the process's registry."""
        super().__init__(registry)
        self._shown: set[str] = set()  # models

    def keep(self, models: Collection[str]) -> None:
        """Keep the gauges of `models`, which are all models that still exist, and remove all other gauges."""
        of_models = (
            self.provisioned, self.wanted, self.needed, self.expected, self.error, self.held, self.achievable,
        )  # fmt: skip
        for model in self._shown.difference(models):
            for one in of_models:
                with suppress(KeyError):  # a model without a forecast lacks some gauges
                    one.remove(model)
        self._shown = set(models)


EVENTS_MAX = 10_000  # events per read
READ_S = 20.0
JOURNAL_S = 5.0

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class Planning:
    """Runs one planner: reads the state store and the journal's last sequence, and records what the planner proposes."""

    store: PlanningStore
    journal: Journal
    clock: Clock
    settings: PlannerSettings
    name: str
    hook: ScaleHook | None  # applies proposals where no supervisor reads them from the journal
    metrics: PlannerMetrics

    def __post_init__(self) -> None:
        duties = PlannerDuties(
            proposes=self.settings.mode != "observe",
            by=self.settings.by,
            lost_after_s=self.settings.lost_after_s,
            repeat_s=self.settings.repeat_s,
        )
        self._planner = Planner(self.name, self.settings.policy, duties)
        self.outlook: PlannerOutlook | None = None  # the result of the last look; None: none yet
        self.why_not = "the planner has not read the state store yet"  # empty: the planner does not wait

    async def run(self) -> None:
        """Read and plan every `every_s`, until cancelled. Errors of the store or the journal are logged."""
        while True:
            try:
                outlook = await self.look()
                stale = outlook.projection_age_s > self.settings.policy.stale_s
                self._log_waiting("the state store is behind the journal" if stale else "")
            except (HoldfastError, TimeoutError) as error:
                self._log_waiting(str(error) or "the journal or the state store does not answer in time")
            await self.clock.sleep(self.settings.every_s)

    def _log_waiting(self, why: str) -> None:
        """Store why the planner waits, and log a reason that is new. If `why` is empty, the planner does not wait."""
        if why and why != self.why_not:
            log.warning("planner_waits", why=why)
        self.why_not = why

    async def look(self) -> PlannerOutlook:
        """Read the state store once, record the proposals that are due, and return what the planner has concluded.

        Raise StoreUnavailable, JournalUnavailable or TimeoutError if the store or the journal does not answer.
        """
        async with asyncio.timeout(JOURNAL_S):
            last = await self.journal.last_seq()
        planner = self._planner
        planner.age.seen(self.clock.monotonic(), last)
        async with asyncio.timeout(READ_S):
            read = await self._read()
        seen = planner.look(read.workers, read.position.seq, self.clock.now(), self.clock.monotonic())
        # in a thread, because fitting a seasonal forecast takes about a second
        seen = replace(seen, proposals=await asyncio.to_thread(planner.decide, seen))
        self.outlook = seen
        self._measure(seen)
        self._report_capacity(seen)
        for proposal, fact in planner.due(seen):
            await self._propose(proposal, fact)
        return seen

    async def _read(self) -> PlanningRead:
        """Read all new events and pass them to the planner. Return the result of the last read."""
        planner = self._planner
        while True:
            since = self.clock.now() - timedelta(days=DAYS)
            read = await self.store.read_planning(planner.read, since, EVENTS_MAX)
            if read.position.seq < planner.read:  # the store now projects another, or a recreated, journal
                planner.forget()
                continue
            planner.take((*read.events, *read.latest))
            if read.events:
                planner.read = read.events[-1].seq
            if len(read.events) < EVENTS_MAX:
                return read

    def _report_capacity(self, seen: PlannerOutlook) -> None:
        for model, found in self._planner.capacities(seen).items():
            self.metrics.achievable.labels(model).set(found.achievable_rps)
            if (fact := self._planner.capacity_fact(model, found, seen)) is not None:
                self.journal.observe(fact)

    async def _propose(self, proposal: Proposal, fact: ScaleProposed) -> None:
        """Record and apply a proposal, unless another planner has recorded one first.

        Raise JournalUnavailable if the journal does not answer.
        """
        last = self._planner.last_proposed(proposal.model)
        after = last if last and last >= await self.journal.first_seq() else 0
        try:
            id = await self.journal.observe_next(fact, after=after)
        except Fenced:
            self.metrics.fenced.inc()
            return
        self.metrics.proposals.labels(proposal.model, proposal.why).inc()
        log.info("scale_proposed", model=fact.model, before=fact.before, after=fact.after, why=fact.why)
        if self.hook is not None:
            await self._apply(self.hook, fact, id)

    async def _apply(self, hook: ScaleHook, fact: ScaleProposed, id: str) -> None:
        wanted = ScaleRequest(
            model=fact.model, before=fact.before, after=fact.after, why=fact.why, proposal=id, planner=self.name
        )  # fmt: skip
        result = await hook.scale(wanted)
        self.metrics.applied.labels("ok" if result.ok else "failed").inc()
        if not result.ok:
            log.warning("scale_failed", model=fact.model, after=fact.after, by=hook.by, why=result.says)
        self.journal.observe(
            ScaleApplied(
                model=fact.model, proposal=id, after=fact.after, by=hook.by, ok=result.ok, says=result.says
            ),
            causation=id,
        )

    # --- reporting --------------------------------------------------------------------------------------------------

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

    def report(self) -> Json:
        """Return the content of the HTTP endpoint /plan, which `holdfast plan` prints, as plain JSON values."""
        outlook = self.outlook
        header: Json = {"planner": self.name, "mode": self.settings.mode, "waits": self.why_not}
        if outlook is None:
            return {**header, "models": []}
        about = {
            "at": outlook.at.isoformat(),
            "position": outlook.position,
            "projection_age_s": round(outlook.projection_age_s, 3),
        }
        return {
            **header,
            **about,
            "models": [_as_json(one, outlook.views[one.model]) for one in outlook.proposals],
        }


def _as_json(proposal: Proposal, view: ModelView) -> Json:
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
