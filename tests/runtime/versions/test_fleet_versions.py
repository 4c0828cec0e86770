"""New kinds and versions are put in force after the soak time, or when an operator allows them."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fleet_history import History
from memory_bus import MemoryBus

from controller.deciders.fleet import DECIDERS_VERSION, OLDEST, Fleet, FleetPolicy
from controller.runtime.beats import Beats
from controller.runtime.fleet_versions import ANNOUNCED_S, LISTEN_S, FleetVersions
from controller.runtime.settings import VersionSettings
from events import subjects
from events.journal.port import JournalUnavailable
from events.versions import Known, new_kinds

SOAK_S = 900.0
OLD = Fleet(number=7, policy=dict(FleetPolicy().adopted), deciders_version=4)
EVERYTHING = Known.ours(DECIDERS_VERSION)


class FakeClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.seconds)

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class Watch:
    """The leader's view of what each process knows, with a clock of its own."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.bus = MemoryBus()
        self.beats = Beats(self.clock)
        self.fleet = OLD
        self.readers: list[str] | None = []
        self.leads = True
        self.versions = FleetVersions(
            self,
            self.beats,
            self.bus,
            self.consumer_names,
            self.clock,
            VersionSettings(soak_s=SOAK_S),
            lambda: self.leads,
        )

    async def consumer_names(self) -> list[str]:
        if self.readers is None:
            raise JournalUnavailable
        return self.readers

    async def announce(self, source: str, known: Known = EVERYTHING, *, left: bool = False) -> None:
        role, name, _ = source.split(":")
        body = {
            "source": source,
            **known.as_body(),
            "workers": [name] if role == "worker" else [],
            "left": left,
        }
        await self.versions.on_known(subjects.known(role, name), body)

    async def pass_(self, seconds: float, *sources: str) -> None:
        """Let time pass, with these processes announcing themselves."""
        for _ in range(int(seconds)):
            for source in sources:
                await self.announce(source)
            self.clock.advance(1.0)
            await self.versions.look()

    @property
    def wish(self) -> object:
        return self.versions.next_in_force(self.fleet)


async def test_nothing_is_put_in_force_before_the_soak_time_is_over() -> None:
    """Until then the upgrade can be rolled back: the journal holds nothing that an older release does not know."""
    watch = Watch()
    await watch.pass_(LISTEN_S + SOAK_S - 10, "controller:a:1", "frontend:f:1")
    assert watch.wish is None
    due = watch.versions.due_in_s()
    assert due is not None and 0 < due < 20
    await watch.pass_(25, "controller:a:1", "frontend:f:1")
    wish = watch.versions.next_in_force(watch.fleet)
    assert wish is not None and wish.kinds == new_kinds() and wish.deciders_version == DECIDERS_VERSION
    watch.fleet = replace(watch.fleet, kinds=wish.kinds, deciders_version=wish.deciders_version)
    await watch.versions.look()
    assert watch.wish is None and watch.versions.due_in_s() is None


@pytest.mark.parametrize("what", ["worker", "frontend", "reader", "announces less"])
async def test_a_process_that_does_not_know_everything_holds_new_kinds_back(what: str) -> None:
    watch = Watch()
    links = {"frontend": "old", "workers": {}}
    history = History().start(1)
    living = history.fleet.workers
    if what == "reader":
        watch.readers = ["r3-0123456789ab", "reader1-0123456789ab", "a-program-of-yours"]
    for _ in range(int(LISTEN_S + SOAK_S) + 10):
        if what == "frontend":
            watch.beats.on_links("live.links.old", links)
        if what == "announces less":
            await watch.announce("planner:p:1", Known(frozenset(), 0, "0.2.5"))
        if what == "worker":
            watch.fleet = replace(OLD, workers=living)
        await watch.pass_(1, "controller:a:1")
    wish = watch.versions.next_in_force(watch.fleet)
    if (
        what == "announces less"
    ):  # it reads no decisions, so it holds back kinds but no version of the deciders
        assert wish is not None and not wish.kinds
    else:
        assert wish is None
    held = watch.versions.report()["held_back"]
    assert (
        held["by"]
        == {
            "worker": ["worker w0"],
            "frontend": ["frontend old"],
            "reader": ["reader r3-0123456789ab"],
            "announces less": ["planner p"],
        }[what]
    )
    assert set(held["kinds"]) == new_kinds()


async def test_a_rollback_restarts_the_soak_time() -> None:
    watch = Watch()
    await watch.pass_(LISTEN_S + 500, "controller:a:1", "frontend:f:1")
    await watch.announce("frontend:f:1", left=True)
    watch.beats.on_links("live.links.f", {"frontend": "f", "workers": {}})
    await watch.versions.look()
    assert watch.versions.due_in_s() is None, "the older frontend has returned"
    await watch.pass_(ANNOUNCED_S + 3, "controller:a:1", "frontend:f:2")
    assert (watch.versions.due_in_s() or 0) > SOAK_S - 60


async def test_a_leader_that_cannot_list_the_readers_or_is_new_puts_nothing_in_force() -> None:
    watch = Watch()
    watch.readers = None
    await watch.pass_(LISTEN_S + SOAK_S + 60, "controller:a:1")
    assert watch.wish is None and watch.versions.due_in_s() is None
    watch.readers = []
    await watch.pass_(5, "controller:a:1")
    assert watch.versions.due_in_s() is not None
    watch.leads = False
    await watch.pass_(1, "controller:a:1")
    watch.leads = True
    await watch.pass_(5, "controller:a:1")
    assert watch.versions.due_in_s() is None, "another leader must first hear the fleet"


async def test_an_operator_allows_everything_until_the_deadline_and_once() -> None:
    watch = Watch()
    until = watch.clock.now()
    assert watch.versions.allow("ann", "c1", until) is not None
    watch.clock.advance(1.0)
    assert watch.versions.next_in_force(watch.fleet) is None, "its deadline has passed"
    wish = watch.versions.allow("ann", "c2", None)
    assert wish is not None and (wish.by, wish.command) == ("ann", "c2")
    assert watch.versions.next_in_force(watch.fleet) == wish
    watch.fleet = replace(watch.fleet, kinds=wish.kinds, deciders_version=wish.deciders_version)
    assert watch.wish is None and watch.versions.allow("ann", "c3", None) is None


async def test_the_leader_answers_an_announcement_with_what_is_in_force() -> None:
    watch = Watch()
    await watch.announce("worker:w0:1")
    assert watch.bus.said == [("live.kinds.w0", {"kinds": []})]
    watch.fleet = replace(watch.fleet, kinds=new_kinds(), deciders_version=5)
    await watch.announce("planner:p:1")
    assert watch.bus.said[1:] == [("live.kinds.planner-p", {"kinds": sorted(new_kinds())})]
    watch.leads = False
    await watch.announce("worker:w0:1")
    assert len(watch.bus.said) == 2


async def test_an_announcement_about_another_process_or_an_invalid_one_is_refused() -> None:
    watch = Watch()
    body = {"source": "frontend:f:1", **EVERYTHING.as_body(), "workers": [], "left": False}
    await watch.versions.on_known(subjects.known("frontend", "other"), body)
    await watch.versions.on_known(subjects.known("frontend", "f"), {"source": "frontend:f:1"})
    await watch.versions.on_known(subjects.known("frontend", "f"), {**body, "kinds": "all"})
    assert watch.versions.processes() == []


def test_old_fleets_decide_by_the_oldest_supported_version() -> None:
    watch = Watch()
    assert watch.versions.report()["in_force"] == {"kinds": [], "deciders_version": OLDEST}
