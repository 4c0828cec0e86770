"""One planner and two, in virtual time: what they read, what they publish, and what they leave alone."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest
from fleet_history import PROFILE, History
from memory_journal import MemoryJournal
from memory_store import MemoryStore
from prometheus_client import CollectorRegistry, generate_latest
from waits import turns, until

from controller.deciders.capacity import Slo, fleet_capacity
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import Fleet, FleetPolicy, evolve
from controller.planner.plan import PlannerPolicy
from controller.ports import HookResult, ScaleRequest, Snapshot, StoreUnavailable
from controller.runtime.planning import PlannerMetrics, Planning
from controller.runtime.settings import PlannerSettings
from events.fact import Fact
from events.observations import (
    CapacityReported,
    ScaleApplied,
    ScaleProposed,
    ScaleSet,
    ShutdownBegan,
    TrafficReported,
    WorkerLeft,
)
from events.order import Order

QUIET, BUSY = 60, 1800  # requests per minute: one worker is nearly idle; three are overloaded


@dataclass
class PlayedHook:
    """A hook that scales nothing, but records what it was asked for."""

    by: str = "command"
    ok: bool = True
    asked: list[ScaleRequest] = field(default_factory=list)

    async def scale(self, wanted: ScaleRequest) -> HookResult:
        self.asked.append(wanted)
        return HookResult(self.ok, "done" if self.ok else "no room")


class PlannedFleet:
    """A fleet in virtual time, with its state store, and its frontend's traffic reports."""

    def __init__(self, workers: int = 3, policy: FleetPolicy | None = None) -> None:
        self.history = History(policy=policy or FleetPolicy()).start(workers)
        self.store = MemoryStore()
        self.order: Order[Fleet] = Order(evolve, Fleet())

    def now(self) -> datetime:
        return self.history.now

    def monotonic(self) -> float:
        return self.history.now.timestamp()

    async def sleep(self, seconds: float) -> None:
        await turns(1)

    def planner(self, name: str = "p1", hook: PlayedHook | None = None, **settings: Any) -> Planning:
        """Return a planner of this fleet."""
        journal, metrics = MemoryJournal(self.history.stream, name), PlannerMetrics(CollectorRegistry())
        policy = PlannerPolicy(workers_min=1, start_s=30.0, ahead_s=60.0)
        chosen = PlannerSettings(policy=policy, **settings)
        return Planning(self.store, journal, self, chosen, name, hook, metrics)

    async def project(self) -> None:
        """Bring the state store up to the journal's end."""
        events = self.history.events[self.order.last_seq :]
        if not events:
            return
        for event in events:
            self.order.take(event)
        settled = Snapshot(self.order.settled, self.order.position, dict(self.order.sources))
        await self.store.project(events, self.order.shown, settled, events[0].seq - 1)

    def minute(self, requests: int, frontend: str = "f0") -> None:
        """Let a minute pass in which `requests` arrived."""
        now = self.history.now
        end = datetime.fromtimestamp((now.timestamp() // 60 + 1) * 60, now.tzinfo)
        fact = TrafficReported(
            frontend=frontend, model="llama", minute=end - timedelta(minutes=1), requests=requests,
            prompt_tokens=300 * requests, prompt_tokens_squared=90_000 * requests, output_tokens=100 * requests, late=0,
            rejected=0,
        )  # fmt: skip
        self.history.now = end + timedelta(seconds=10)
        self.history.say(fact, source=frontend, seconds=1.0)

    async def minutes(self, requests: int, count: int) -> None:
        """Let `count` minutes pass, and project them into the store."""
        for _ in range(count):
            self.minute(requests)
        await self.project()

    async def after(self, seconds: float) -> None:
        """Let time pass, record a fact, and project it into the store."""
        self.history.now += timedelta(seconds=seconds)
        await self.project()

    def said(self, kind: type[Fact]) -> list[Any]:
        """Return all facts of a kind on the journal."""
        return [event.fact for event in self.history.events if isinstance(event.fact, kind)]

    def proposals(self) -> list[tuple[int, int, str]]:
        return [(fact.before, fact.after, fact.why) for fact in self.said(ScaleProposed)]


async def looks(fleet: PlannedFleet, planners: Sequence[Planning], count: int, every_s: float = 5.0) -> None:
    """Let planners run repeatedly, with the store at the journal's end."""
    for _ in range(count):
        for planner in planners:
            await planner.look()
        await fleet.after(every_s)


async def test_a_models_capacity_is_reported_on_each_change_and_once_a_minute() -> None:
    fleet = PlannedFleet(2)
    planner = fleet.planner(mode="observe")
    await fleet.project()
    await looks(fleet, [planner], 13)
    first, second = fleet.said(CapacityReported)
    assert (first.model, first.provisioned, first.healthy, first.ratio) == ("llama", 2, 2, 1.0)
    assert first.achievable_rps > 0 and second.position > first.position
    fleet.history.say(fleet.history.failed("w0", confirmed=True, reason="token_mismatch"))
    fleet.history.decide()
    await fleet.project()
    await looks(fleet, [planner], 2)
    last = fleet.said(CapacityReported)[-1]
    assert (last.provisioned, last.healthy, last.ratio) == (2, 1, 0.5)
    assert last.achievable_rps == pytest.approx(first.achievable_rps / 2, abs=0.002)


async def test_an_increase_is_proposed_once_without_a_hook() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 40)
    (fact,) = fleet.said(ScaleProposed)
    assert (fact.before, fact.why, fact.by, fact.planner) == (3, "up", "", "p1")
    assert fact.after > 3 and fact.needed >= fact.after and fact.method and fact.bound


async def test_an_unapplied_proposal_is_repeated_after_a_while() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(repeat_s=300)
    await fleet.minutes(BUSY, 3)
    for _ in range(12):
        await fleet.minutes(BUSY, 1)
        await looks(fleet, [planner], 2)
    assert len(fleet.proposals()) == 3


@pytest.mark.parametrize(("promised", "left"), [(None, 1), (0.5, 2), (0.9, 3)])
async def test_enough_workers_for_the_slo_throughput_stay(promised: float | None, left: int) -> None:
    """Fewer would suffice for the traffic, but would trigger the degradation ladder."""
    three = fleet_capacity([(PROFILE, 1.0)] * 3, Slo()).effective_capacity_rps
    slos = {} if promised is None else {"llama": Slo(slo_throughput_rps=promised * three)}
    fleet = PlannedFleet(3, FleetPolicy(degradation=DegradationPolicy(slos=slos)))
    planner = fleet.planner()
    await fleet.minutes(QUIET, 15)
    await planner.look()
    (shown,) = planner.report()["models"]
    assert shown["proposed"] == left


async def test_an_observer_proposes_nothing() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(mode="observe")
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 3)
    assert not fleet.proposals() and fleet.said(CapacityReported)
    (shown,) = planner.report()["models"]
    assert shown["proposed"] > shown["workers"] == 3


async def test_of_two_planners_with_the_same_data_one_proposal_lands() -> None:
    fleet = PlannedFleet(3)
    planners = [fleet.planner("p1"), fleet.planner("p2")]
    await fleet.minutes(BUSY, 5)
    for planner in planners:  # the second reads a store without the first one's proposal
        await planner.look()
    assert len(fleet.proposals()) == 1
    await looks(fleet, planners, 10)
    assert len(fleet.proposals()) == 1


async def test_a_planner_started_with_a_stale_state_store_proposes_nothing() -> None:
    """It cannot know how long the store has been behind."""
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.minutes(BUSY, 5)
    fleet.minute(BUSY)  # which the store does not show
    await planner.look()
    assert not fleet.proposals()
    await fleet.project()
    await planner.look()
    assert len(fleet.proposals()) == 1


async def test_nothing_is_proposed_while_the_state_store_is_behind() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.minutes(BUSY, 5)
    await planner.look()
    fleet.minute(BUSY)  # which the store does not show
    await planner.look()
    fleet.history.say(fleet.history.passed("w0"), seconds=11)
    await planner.look()
    (shown,) = planner.report()["models"]
    assert shown["held"] == "the state store is 11 s behind" and shown["proposed"] == 3
    assert len(fleet.proposals()) == 1, "from the first run, when nothing was known to be missing"
    await fleet.project()
    await planner.look()
    assert "behind" not in planner.report()["models"][0]["held"]


async def test_an_idle_journal_does_not_make_the_store_stale() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(mode="observe")
    await fleet.minutes(QUIET, 12)
    await planner.look()
    for _ in range(2):
        fleet.history.now += timedelta(seconds=20)
        await planner.look()
    assert planner.report()["projection_age_s"] == 20, "its own facts are not projected yet"
    await fleet.project()
    fleet.history.now += timedelta(seconds=50)
    await planner.look()
    assert planner.report()["projection_age_s"] == 0


async def test_a_hook_is_called_and_its_result_is_on_the_journal() -> None:
    fleet, hook = PlannedFleet(3), PlayedHook()
    planner = fleet.planner(hook=hook, mode="act", hook_command="scale")
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 5)
    (proposed,), (applied,) = fleet.said(ScaleProposed), fleet.said(ScaleApplied)
    (event,) = [e for e in fleet.history.events if e.fact == proposed]
    assert proposed.by == "command"
    assert applied == ScaleApplied(
        model="llama", proposal=event.id, after=proposed.after, by="command", ok=True, says="done"
    )
    assert [(one.before, one.after, one.proposal) for one in hook.asked] == [(3, proposed.after, event.id)]


async def test_a_hook_that_fails_is_called_again_after_the_cooldown_and_not_before() -> None:
    fleet, hook = PlannedFleet(3), PlayedHook(ok=False)
    planner = fleet.planner(hook=hook, mode="act", hook_command="scale")
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 11)
    assert len(hook.asked) == 1
    await fleet.minutes(BUSY, 1)
    await looks(fleet, [planner], 1)
    assert len(hook.asked) == 2


async def test_an_operators_unreachable_number_is_not_requested_repeatedly() -> None:
    fleet, hook = PlannedFleet(3), PlayedHook(ok=False)
    planner = fleet.planner(hook=hook, mode="act", hook_command="scale")
    fleet.history.say(ScaleSet(model="llama", workers=5, by="op", reason=""))
    await fleet.project()
    await looks(fleet, [planner], 36)  # three minutes
    assert len(hook.asked) == 3


async def test_a_supervisor_that_does_not_answer_is_called_again() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(mode="act")
    fleet.history.say(ScaleSet(model="llama", workers=5, by="op", reason=""))
    await fleet.project()
    await looks(fleet, [planner], 11)
    (proposed,) = [event.fact for event in fleet.history.events if isinstance(event.fact, ScaleProposed)]
    assert proposed.by == "supervisor"
    await looks(fleet, [planner], 3)
    assert len(fleet.proposals()) == 2
    last = next(e for e in reversed(fleet.history.events) if isinstance(e.fact, ScaleProposed))
    fleet.history.say(
        ScaleApplied(model="llama", proposal=last.id, after=5, by="supervisor", ok=True, says="")
    )
    await fleet.project()
    await looks(fleet, [planner], 11)
    assert len(fleet.proposals()) == 2, "they are starting"


async def test_capacities_are_not_reported_from_a_stale_store() -> None:
    fleet = PlannedFleet(2)
    planner = fleet.planner(mode="observe")
    await fleet.project()
    for _ in range(30):
        await planner.look()
        fleet.history.now += timedelta(seconds=5)
    assert 1 <= len(fleet.said(CapacityReported)) <= 4


async def test_a_model_that_is_gone_has_no_gauges() -> None:
    fleet = PlannedFleet(2)
    planner = fleet.planner(mode="observe")
    await fleet.project()
    await planner.look()
    shown = generate_latest(planner.metrics.registry).decode()
    assert 'holdfast_planner_workers{model="llama"} 2.0' in shown
    fleet.store.tables.rows["workers"].clear()
    await planner.look()
    assert 'model="llama"' not in generate_latest(planner.metrics.registry).decode()


async def test_n19_starting_workers_count_until_they_should_have_started() -> None:
    fleet, hook = PlannedFleet(3), PlayedHook()
    planner = fleet.planner(hook=hook, mode="act", hook_command="scale", repeat_s=0)
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 2)
    assert planner.report()["models"][0]["workers"] == hook.asked[0].after > 3
    await fleet.after(31)
    await planner.look()
    assert planner.report()["models"][0]["workers"] == 3


async def test_an_operators_number_holds_until_it_is_released() -> None:
    fleet, hook = PlannedFleet(3), PlayedHook()
    planner = fleet.planner(hook=hook, mode="act", hook_command="scale")
    fleet.history.say(ScaleSet(model="llama", workers=2, by="op", reason="a rehearsal"))
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [planner], 2)
    assert fleet.proposals() == [(3, 2, "operator")]
    fleet.history.say(ScaleSet(model="llama", workers=None, by="op", reason="over"))
    await fleet.minutes(BUSY, 1)
    await looks(fleet, [planner], 1)
    assert fleet.proposals()[-1][2] == "up"


async def test_a_worker_is_lost_when_it_has_been_out_of_service_for_long() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(mode="observe", lost_after_s=60)
    fleet.history.say(fleet.history.failed("w0", confirmed=True, reason="token_mismatch"))
    fleet.history.decide()
    await fleet.project()
    await planner.look()
    assert planner.report()["models"][0]["lost"] == 0
    await fleet.after(61)
    await planner.look()
    assert planner.report()["models"][0]["lost"] == 1


async def test_a_worker_that_leaves_gracefully_is_not_counted() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner(mode="observe")
    about: dict[str, Any] = {"worker": "w2", "instance": "w2-a"}
    fleet.history.say(ShutdownBegan(mode="graceful", **about))
    fleet.history.decide()
    await fleet.project()
    await planner.look()
    assert planner.report()["models"][0]["workers"] == 2
    fleet.history.say(WorkerLeft(mode="graceful", **about))
    fleet.history.decide()
    await fleet.project()
    await planner.look()
    assert planner.report()["models"][0]["workers"] == 2


async def test_silent_frontends_are_not_low_load() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.minutes(QUIET, 15)
    fleet.history.now += timedelta(minutes=5)
    fleet.history.say(fleet.history.passed("w0"))
    await fleet.project()
    await planner.look()
    (shown,) = planner.report()["models"]
    assert shown["proposed"] == 3 and "no frontend reported traffic" in shown["held"]
    assert not fleet.proposals()


async def test_a_restarted_planner_continues_where_the_last_one_stopped() -> None:
    fleet = PlannedFleet(3)
    await fleet.minutes(BUSY, 5)
    await looks(fleet, [fleet.planner("p1")], 2)
    await looks(fleet, [fleet.planner("p2")], 5)
    assert len(fleet.proposals()) == 1


async def test_a_recreated_store_is_read_from_its_beginning() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.minutes(BUSY, 5)
    await planner.look()
    fresh = PlannedFleet(3)
    await fresh.minutes(QUIET, 2)
    fleet.store.tables = fresh.store.tables
    await planner.look()
    assert planner.report()["models"][0]["minutes_known"] == 2


async def test_an_unreachable_store_is_awaited_and_reported() -> None:
    fleet = PlannedFleet(3)
    planner = fleet.planner()
    await fleet.project()
    fleet.store.tables.reachable = False
    with pytest.raises(StoreUnavailable):
        await planner.look()
    running = asyncio.create_task(planner.run())
    await until(lambda: bool(planner.why_not))
    fleet.store.tables.reachable = True
    await until(lambda: not planner.why_not)
    running.cancel()
    await asyncio.wait({running})
