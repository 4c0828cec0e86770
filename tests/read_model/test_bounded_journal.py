"""A journal whose oldest events are gone: whoever folds begins with a snapshot on it, and knows what one knows who read all."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise

import msgspec
import pytest
from made_history import EPOCH, History
from store_databases import OpenStore

from controller.adapters.clock import SystemClock
from controller.adapters.memory_store import MemoryStore
from controller.deciders.fleet import Fleet, evolve
from controller.ports import StoreLost
from controller.read_model import snapshot as fleet_codec
from controller.replay import travel
from controller.replay.find import NoSuchEvent, find
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.beginning import join, newest
from controller.runtime.keeping import SnapshotKeeper, newest_kept
from controller.runtime.projection.projector import Projector
from controller.runtime.view import FleetView
from events.fact import Recorded
from events.journal.bounds import JournalBounds
from events.journal.memory import MemoryJournal
from events.journal.port import JournalChanged
from events.journal.usage import JournalUsage
from events.observations import SnapshotKept, WorkerHeard
from events.order import Order

Eventually = Callable[..., Awaitable[None]]
MIB = 1 << 20


def keep(history: History) -> int:
    """Say the settled fleet on the journal, as a controller does; return behind which sequence one reads on."""
    order = history.latest
    since = order.pending[0].at if order.pending else history.now
    facts = fleet_codec.parts(
        order.settled, order.position, order.sources, id=f"s{len(history.events)}", since=since
    )
    history.say(*facts, source="controller-1:life")
    return order.position.through


def eventful() -> History:
    """A fleet with a past, a snapshot of it, and what happened then."""
    history = History().start().corruption()
    history.say(history.migrated("req-1", "w0", "w1"), source="frontend-0")
    history.absorb()
    keep(history)
    history.say(history.passed("w0"), history.passed("w1"))
    history.decide(seconds=5)
    history.absorb()
    return history


def dropped(history: History) -> MemoryJournal:
    """Let go of all that the newest snapshot stands for, and return a handle on what is left."""
    through = next(e.fact.through for e in history.events if isinstance(e.fact, SnapshotKept))
    history.stream.drop(through)
    return MemoryJournal(history.stream, "reader")


async def test_a_view_begins_on_the_journal_and_knows_what_all_know(eventually: Eventually) -> None:
    history = eventful()
    expected, journal = history.fleet, dropped(history)
    view = FleetView(journal)
    following = asyncio.create_task(view.run())
    await view.ready(20)
    assert view.fleet == expected and view.seq == len(history.events)
    history.say(history.passed("w0"))
    await eventually(lambda: view.fleet == history.fleet)
    following.cancel()


async def test_one_that_was_away_too_long_goes_on_from_the_snapshot(eventually: Eventually) -> None:
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


async def test_without_a_snapshot_on_it_nobody_begins_and_the_reason_is_said() -> None:
    history = History().start()
    history.stream.drop(3)
    with pytest.raises(JournalChanged, match="begins at 4: what follows 0 is gone, and no snapshot"):
        await join(
            MemoryJournal(history.stream, "r"), (await MemoryStore().position()), Order(evolve, Fleet())
        )


async def test_a_part_that_is_gone_makes_its_snapshot_none() -> None:
    history = eventful()
    order, small = history.latest, 100
    whole = fleet_codec.parts(order.settled, order.position, order.sources, id="x", since=history.now)[0]
    pieces = [whole.data[at : at + small * 4] for at in range(0, len(whole.data), small * 4)]
    facts = [replace(whole, part=n, parts=len(pieces), data=piece) for n, piece in enumerate(pieces, 1)]
    assert len(facts) > 3
    history.say(*facts[:1], *facts[2:], source="controller-1:life")
    journal = MemoryJournal(history.stream, "r")
    assert (await newest(journal, 0)).position.through < order.position.through, "that before it"
    history.say(*facts, source="controller-1:life")
    assert (await newest(journal, 0)).fleet == order.settled


def test_one_that_two_controllers_said_at_once_is_whole() -> None:
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


def test_a_snapshot_of_an_older_release_is_read_where_what_was_added_has_a_default() -> None:
    history = eventful()
    order = history.latest
    blob = msgspec.msgpack.decode(fleet_codec.encode(order.settled))
    assert blob.pop("policy", None) is not None
    older = fleet_codec.decode(msgspec.msgpack.encode(blob | {"of_tomorrow": 1}))
    assert older == replace(order.settled, policy=Fleet().policy)


def test_what_is_no_snapshot_is_refused() -> None:
    history = eventful()
    order = history.latest
    (fact,) = fleet_codec.parts(order.settled, order.position, order.sources, id="x", since=history.now)
    for spoilt in (replace(fact, data="!"), replace(fact, data="AAAA"), replace(fact, parts=5000)):
        with pytest.raises(fleet_codec.BadSnapshot):
            fleet_codec.Parts().take(spoilt)


# --- the state store ------------------------------------------------------------------------------------------------


async def test_an_empty_store_is_projected_from_the_snapshot_on(open_store: OpenStore) -> None:
    history = eventful()
    journal = dropped(history)
    store = open_store()
    await Projector(journal, store).catch_up(len(history.events))
    report = await verify(journal, store)
    assert report.difference is None and report.audited and report.rows
    assert report.begins == history.stream.first > 1
    assert f"the journal begins at {report.begins}" in report.lines()[0]


async def test_a_store_that_lacks_what_is_gone_is_lost_and_a_rebuild_keeps_what_only_it_has(
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


async def test_a_fold_that_an_upgrade_has_lost_comes_from_the_journal(open_store: OpenStore) -> None:
    history = eventful()
    store = open_store()
    await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
    history.say(history.passed("w0"))
    journal = dropped(history)
    await Projector(journal, store).catch_up(len(history.events))
    assert (await verify(journal, store)).difference is None


# --- asking for the past --------------------------------------------------------------------------------------------


async def test_the_past_is_told_from_the_first_snapshot_on() -> None:
    history = eventful()
    journal = dropped(history)
    for seq in (len(history.events), len(history.events) - 1):
        assert (await travel.at(journal, None, seq)).fleet == history.order(seq).shown
    assert (await travel.at(journal, None, history.now)).fleet == history.fleet
    with pytest.raises(travel.NoLonger, match=f"begins at {history.stream.first}"):
        await travel.at(journal, None, history.stream.first - 1)
    with pytest.raises(travel.NoLonger):
        await travel.at(journal, None, history.events[0].at)


# --- saying it ------------------------------------------------------------------------------------------------------


@dataclass
class Keeping:
    """A keeper over a history, and what it is told of the stream's size."""

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


async def test_the_leader_says_the_fleet_each_eighth_of_the_bound() -> None:
    world = Keeping(History().start())
    assert await world.keeper.look(), "none lies there yet"
    assert not await world.keeper.look()
    for _ in range(20):
        world.history.say(WorkerHeard(worker="w0", instance="w0-a", observer="c"))
        world.history.absorb()
        await world.keeper.look()
    begins = [e.fact.through for e in world.said if isinstance(e.fact, SnapshotKept)]
    assert len(begins) > 4 and all(6 <= later - earlier <= 9 for earlier, later in pairwise(begins)), begins
    kept = await newest_kept(world.journal)
    assert kept is not None and kept.through == world.said[-1].fact.through  # type: ignore[attr-defined]


async def test_by_age_it_says_it_each_eighth_of_that() -> None:
    world = Keeping(History().start(), JournalBounds(age=timedelta(hours=8)), each=1)
    assert await world.keeper.look()
    world.history.now += timedelta(minutes=59)
    assert not await world.keeper.look()
    world.history.now += timedelta(minutes=1)
    assert await world.keeper.look()


async def test_who_does_not_lead_says_nothing_and_a_new_leader_knows_what_the_last_one_said() -> None:
    first = Keeping(History().start(), leading=False)
    assert not await first.keeper.look()
    first.leading = True
    assert await first.keeper.look()
    assert not await Keeping(first.history).keeper.look()


async def test_without_bounds_nothing_is_said() -> None:
    assert not await Keeping(History().start(), JournalBounds()).keeper.look()
