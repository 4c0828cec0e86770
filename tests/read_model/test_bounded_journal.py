"""A journal without its oldest events: a fold that starts from its snapshot equals one of all events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import msgspec
import pytest
from fleet_history import EPOCH, History
from memory_journal import MemoryJournal
from memory_store import MemoryStore
from store_databases import OpenStore

from controller.adapters.clock import SystemClock
from controller.deciders.fleet import Fleet, evolve
from controller.ports import StoreLost
from controller.read_model import snapshot as fleet_codec
from controller.replay import travel
from controller.replay.event_lookup import NoSuchEvent, find
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.initial_fold import join, newest
from controller.runtime.projection.projector import Projector
from controller.runtime.snapshot_publisher import SnapshotKeeper, newest_kept
from controller.runtime.view import FleetView
from events.fact import Recorded
from events.journal.port import JournalChanged
from events.journal.retention import JournalBounds
from events.journal.usage import JournalUsage
from events.observations import SnapshotKept, WorkerHeard
from events.order import Order

Eventually = Callable[..., Awaitable[None]]
MIB = 1 << 20


def keep(history: History) -> int:
    """Publish the settled fleet to the journal, as a controller does; return the sequence from which to read on."""
    order = history.latest
    since = order.pending[0].at if order.pending else history.now
    facts = fleet_codec.parts(
        order.settled, order.position, order.sources, id=f"s{len(history.events)}", since=since
    )
    history.say(*facts, source="controller-1:life")
    return order.position.through


def eventful() -> History:
    """Return a fleet's history with a snapshot in the middle."""
    history = History().start().corruption()
    history.say(history.migrated("req-1", "w0", "w1"), source="frontend-0")
    history.absorb()
    keep(history)
    history.say(history.passed("w0"), history.passed("w1"))
    history.decide(seconds=5)
    history.absorb()
    return history


def dropped(history: History) -> MemoryJournal:
    """Drop all events that the newest snapshot covers, and return a handle on the rest."""
    through = next(e.fact.through for e in history.events if isinstance(e.fact, SnapshotKept))
    history.stream.drop(through)
    return MemoryJournal(history.stream, "reader")


async def test_a_view_that_starts_from_the_journals_snapshot_has_the_same_fold(
    eventually: Eventually,
) -> None:
    history = eventful()
    expected, journal = history.fleet, dropped(history)
    view = FleetView(journal)
    following = asyncio.create_task(view.run())
    await view.ready(20)
    assert view.fleet == expected and view.seq == len(history.events)
    history.say(history.passed("w0"))
    await eventually(lambda: view.fleet == history.fleet)
    following.cancel()


async def test_a_view_that_was_cut_off_too_long_continues_from_the_snapshot(eventually: Eventually) -> None:
    history = eventful()
    view = FleetView(MemoryJournal(history.stream, "v"))
    following = asyncio.create_task(view.run())
    await view.ready(20)
    following.cancel()
    await asyncio.wait({following})
    held = view.seq
    history.say(*(history.passed("w0") for _ in range(20)))
    history.absorb()
    history.stream.drop(keep(history))
    assert history.stream.first > held + 1
    following = asyncio.create_task(view.run())
    await eventually(lambda: view.seq == len(history.events))
    assert view.fleet == history.fleet
    following.cancel()


async def test_without_a_snapshot_on_the_journal_no_fold_starts_and_the_reason_is_reported() -> None:
    history = History().start()
    history.stream.drop(3)
    with pytest.raises(
        JournalChanged, match="begins at 4: what follows 0 is lost, and the journal holds no snapshot"
    ):
        await join(
            MemoryJournal(history.stream, "r"), (await MemoryStore().position()), Order(evolve, Fleet())
        )


async def test_a_snapshot_with_a_missing_part_is_not_used() -> None:
    history = eventful()
    order, small = history.latest, 100
    whole = fleet_codec.parts(order.settled, order.position, order.sources, id="x", since=history.now)[0]
    pieces = [whole.data[at : at + small * 4] for at in range(0, len(whole.data), small * 4)]
    facts = [replace(whole, part=n, parts=len(pieces), data=piece) for n, piece in enumerate(pieces, 1)]
    assert len(facts) > 3
    history.say(*facts[:1], *facts[2:], source="controller-1:life")
    journal = MemoryJournal(history.stream, "r")
    assert (await newest(journal, 0)).position.through < order.position.through, (
        "the snapshot before it is used"
    )
    history.say(*facts, source="controller-1:life")
    assert (await newest(journal, 0)).fleet == order.settled


def test_snapshots_of_two_controllers_at_once_can_be_read() -> None:
    order = eventful().latest
    (whole,) = fleet_codec.parts(order.settled, order.position, order.sources, id="a", since=EPOCH)
    half = len(whole.data) // 8 * 4
    first, second = (
        [
            replace(whole, snapshot=id, part=n, parts=2, data=data)
            for n, data in enumerate((whole.data[:half], whole.data[half:]), 1)
        ]
        for id in "ab"
    )
    together = fleet_codec.Parts()
    said = [together.take(fact) for fact in (first[0], second[0], first[1], second[1])]
    assert said[:3] == [None] * 3 and said[3] is not None and said[3][0] == order.settled


def test_a_snapshot_of_an_older_release_is_read_if_new_fields_have_defaults() -> None:
    history = eventful()
    order = history.latest
    blob = msgspec.msgpack.decode(fleet_codec.encode(order.settled))
    assert blob.pop("policy", None) is not None
    older = fleet_codec.decode(msgspec.msgpack.encode(blob | {"of_tomorrow": 1}))
    assert older == replace(order.settled, policy=Fleet().policy)


def test_an_invalid_snapshot_is_refused() -> None:
    history = eventful()
    order = history.latest
    (fact,) = fleet_codec.parts(order.settled, order.position, order.sources, id="x", since=history.now)
    for spoilt in (replace(fact, data="!"), replace(fact, data="AAAA"), replace(fact, parts=5000)):
        with pytest.raises(fleet_codec.BadSnapshot):
            fleet_codec.Parts().take(spoilt)


# --- the state store ------------------------------------------------------------------------------------------------


async def test_an_empty_store_is_projected_from_the_snapshot(open_store: OpenStore) -> None:
    history = eventful()
    journal = dropped(history)
    store = open_store()
    await Projector(journal, store).catch_up(len(history.events))
    report = await verify(journal, store)
    assert report.difference is None and report.audited and report.rows
    assert report.begins == history.stream.first > 1
    assert f"the journal begins at {report.begins}" in report.lines()[0]


async def test_verify_starts_at_a_later_snapshot_if_the_journal_drops_the_first_one_meanwhile(
    open_store: OpenStore,
) -> None:
    """A full journal drops events between the moment when `verify` finds a snapshot and the moment when it reads on."""
    history = eventful()
    store = open_store()
    journal = dropped(history)
    await Projector(journal, store).catch_up(len(history.events))
    later = keep(history)
    await Projector(journal, store).catch_up(len(history.events))

    class Dropping(MemoryJournal):
        def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
            history.stream.drop(later)
            return super().read(after, until=until)

    report = await verify(Dropping(history.stream, "reader"), store)
    assert report.difference is None and report.rows
    assert report.begins == later + 1 and report.since == later


async def test_a_store_that_lacks_dropped_events_is_lost_and_a_rebuild_keeps_its_history(
    open_store: OpenStore,
) -> None:
    history = History().start().corruption()
    history.say(history.migrated("req-1", "w0", "w1"), source="frontend-0")
    history.absorb()
    journal = MemoryJournal(history.stream, "p")
    store = open_store()
    await Projector(journal, store).catch_up(len(history.events))
    kept = len(history.events)
    history.say(history.passed("w0"), history.passed("w1"))
    history.absorb()
    history.stream.drop(keep(history))
    with pytest.raises(StoreLost, match=rf"begins at {kept + 3}, and the store was projected to {kept}\."):
        await Projector(journal, store).catch_up(len(history.events))
    await rebuild(journal, store)
    assert (await verify(journal, store)).difference is None
    seqs = [event.seq async for batch in store.select() for event in batch]
    assert seqs[:kept] == list(range(1, kept + 1)), "the journal does not have them any more"
    rows = (await store.read_status()).position
    assert rows.seq == len(history.events)
    assert (await find(journal, store, "1")).fact == history.events[0].fact
    with pytest.raises(NoSuchEvent):
        await find(journal, store=None, reference="nothing") if False else await find(
            journal, None, "nothing"
        )


async def test_a_snapshot_made_unreadable_by_an_upgrade_is_replaced_from_the_journal(
    open_store: OpenStore,
) -> None:
    history = eventful()
    store = open_store()
    await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
    history.say(history.passed("w0"))
    journal = dropped(history)
    await Projector(journal, store).catch_up(len(history.events))
    assert (await verify(journal, store)).difference is None


# --- queries about the past -----------------------------------------------------------------------------------------


async def test_history_is_available_from_the_first_snapshot_on() -> None:
    history = eventful()
    journal = dropped(history)
    for seq in (len(history.events), len(history.events) - 1):
        assert (await travel.at(journal, None, seq)).fleet == history.order(seq).shown
    assert (await travel.at(journal, None, history.now)).fleet == history.fleet
    with pytest.raises(travel.NoLonger, match=f"begins at {history.stream.first}"):
        await travel.at(journal, None, history.stream.first - 1)
    with pytest.raises(travel.NoLonger):
        await travel.at(journal, None, history.events[0].at)


# --- publishing snapshots -------------------------------------------------------------------------------------------


@dataclass
class KeeperWorld:
    """A snapshot keeper for a history, with a controlled stream size."""

    history: History
    bounds: JournalBounds = field(default_factory=lambda: JournalBounds(bytes=8 * MIB))
    leading: bool = True
    each: int = MIB // 8  # bytes of an event

    def __post_init__(self) -> None:
        self.journal = MemoryJournal(self.history.stream, "controller:c")
        self.keeper = SnapshotKeeper(
            self.journal,
            lambda: self.history.latest,
            lambda: self.leading,
            self.usage,
            self.bounds,
            SystemClock(),
        )

    async def usage(self) -> JournalUsage:
        last = len(self.history.events)
        return JournalUsage(1, last, last * self.each, None, None, None, self.history.now)

    @property
    def said(self) -> list[Recorded]:
        return [e for e in self.history.events if isinstance(e.fact, SnapshotKept)]


async def test_the_leader_publishes_a_snapshot_at_each_eighth_of_the_bound() -> None:
    world = KeeperWorld(History().start())
    assert await world.keeper.look(), "the journal has no snapshot yet"
    assert not await world.keeper.look()
    for _ in range(20):
        world.history.say(WorkerHeard(worker="w0", instance="w0-a", observer="c"))
        world.history.absorb()
        await world.keeper.look()
    begins = [e.fact.through for e in world.said if isinstance(e.fact, SnapshotKept)]
    assert len(begins) > 4 and all(6 <= later - earlier <= 9 for earlier, later in pairwise(begins)), begins
    kept = await newest_kept(world.journal)
    assert kept is not None and kept.through == world.said[-1].fact.through  # type: ignore[attr-defined]


async def test_with_an_age_bound_it_publishes_one_at_each_eighth_of_the_age() -> None:
    world = KeeperWorld(History().start(), JournalBounds(age=timedelta(hours=8)), each=1)
    assert await world.keeper.look()
    world.history.now += timedelta(minutes=59)
    assert not await world.keeper.look()
    world.history.now += timedelta(minutes=1)
    assert await world.keeper.look()


async def test_a_standby_publishes_nothing_and_a_new_leader_finds_the_last_snapshot() -> None:
    first = KeeperWorld(History().start(), leading=False)
    assert not await first.keeper.look()
    first.leading = True
    assert await first.keeper.look()
    assert not await KeeperWorld(first.history).keeper.look()


async def test_without_bounds_no_snapshot_is_published() -> None:
    assert not await KeeperWorld(History().start(), JournalBounds()).keeper.look()
