"""The contract of every state store, in memory and in Postgres."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import pytest
from fleet_history import History
from store_databases import AnyStore, OpenStore

from controller.deciders.fleet import Fleet, evolve
from controller.ports import AnotherProjector, ReadPosition, RowsRead, Snapshot, StateStore
from controller.read_model import rows as projection
from events.decisions import IncidentClosed, IncidentOpened
from events.fact import Decision, Recorded
from events.observations import ScaleSet, TrafficReported
from events.order import Order


@dataclass
class Feeder:
    """Projects a history in batches, as a projector does."""

    history: History
    store: StateStore
    order: Order[Fleet]

    async def feed(self, until: int | None = None) -> None:
        """Project the new events, in one batch."""
        events = self.history.events[self.order.last_seq : until]
        for event in events:
            self.order.take(event)
        await self.project(events)

    async def project(self, events: Sequence[Recorded]) -> None:
        settled = Snapshot(self.order.settled, self.order.position, dict(self.order.sources))
        await self.store.project(events, self.order.shown, settled, events[0].seq - 1)


def feeder(history: History, store: StateStore) -> Feeder:
    return Feeder(history, store, Order(evolve, Fleet()))


async def everything(store: AnyStore) -> RowsRead:
    async with store.reading() as frozen:
        return frozen.reading


def expected_rows(fleet: Fleet, events: Sequence[Recorded]) -> dict[str, set[projection.Row]]:
    rows = {name: set(found) for name, found in projection.state(fleet).items()}
    for part, found in projection.history(events).items():
        if part.startswith("append"):
            rows[part.partition(" ")[2]] = set(found)
    return rows


def rows_of(reading: RowsRead) -> dict[str, set[projection.Row]]:
    return {
        name: {projection.comparable(name, tuple(row[c] for c in projection.COLUMNS[name])) for row in rows}
        for name, rows in reading.rows.items()
    }


def comparable(rows: dict[str, set[projection.Row]]) -> dict[str, set[projection.Row]]:
    return {name: {projection.comparable(name, row) for row in found} for name, found in rows.items()}


async def test_an_empty_store_has_no_position_and_no_snapshot(open_store: OpenStore) -> None:
    store = open_store()
    assert await store.position() == ReadPosition()
    assert await store.load() is None
    assert await store.snapshot_before(10**9) is None
    assert all(not rows for rows in (await store.read_status()).rows.values())


@pytest.mark.parametrize("portion", [1, 7, 1000])
async def test_rows_are_the_fold_for_any_batch_size(open_store: OpenStore, portion: int) -> None:
    history = History().start().corruption()
    fed = feeder(history, open_store())
    for until in [*range(portion, len(history.events), portion), len(history.events)]:
        await fed.feed(until)
    reading = await everything(open_store())
    assert reading.position.seq == len(history.events)
    assert reading.position.id == history.events[-1].id
    assert reading.position.settled == fed.order.position
    assert rows_of(reading) == comparable(expected_rows(fed.order.shown, history.events))


async def test_every_event_is_kept_and_read_back_whole(open_store: OpenStore) -> None:
    history = History().start().corruption()
    store = open_store()
    await feeder(history, store).feed()
    async with store.reading() as frozen:
        kept = [projection.recorded(row) async for batch in frozen.events(0) for row in batch]
    assert kept == history.events


async def test_nothing_is_written_from_a_wrong_position(open_store: OpenStore) -> None:
    history = History().start()
    first, second = feeder(history, open_store()), feeder(history, open_store())
    await first.feed(5)
    with pytest.raises(AnotherProjector):
        await second.feed(4)
    with pytest.raises(AnotherProjector):
        await second.project(history.events[6:8])  # a gap
    assert (await open_store().position()).seq == 5
    await first.feed()
    assert (await open_store().position()).seq == len(history.events)


async def test_a_repeated_event_is_kept_once(open_store: OpenStore) -> None:
    history = History().start()
    history.say(history.migrated("req-1", "w0", "w1"), source="frontend-0")
    history.repeat(history.events[-1])
    store = open_store()
    await feeder(history, store).feed()
    assert (await store.position()).seq == len(history.events)
    async with store.reading() as frozen:
        assert len([row async for batch in frozen.events(0) for row in batch]) == len(history.events) - 1
        assert len(frozen.reading.rows["migrations"]) == 1


async def test_snapshots_are_found_by_sequence_and_by_time(open_store: OpenStore) -> None:
    history = History().start()
    store = open_store(snapshot_every=5)
    fed = feeder(history, store)
    for _ in range(4):
        history.say(history.passed("w0"), history.passed("w1"), history.passed("w2"))
        history.absorb()
    for until in range(1, len(history.events) + 1):
        await fed.feed(until)
    newest = await store.load()
    assert newest is not None and newest.position.decided > len(history.events) - 8
    assert newest.fleet == history.order(newest.position.decided).settled
    assert newest.sources == {"test-1": history.order(newest.position.decided).sources["test-1"]}
    older = await store.snapshot_before(newest.position.decided - 1)
    assert older is not None and older.position.decided < newest.position.decided
    when = history.events[newest.position.decided - 1].at
    assert await store.snapshot_at(when) == newest
    assert await store.snapshot_at(when - timedelta(milliseconds=1)) == older


async def test_the_first_snapshot_is_kept_with_the_first_decision(open_store: OpenStore) -> None:
    """A young fleet has a snapshot at once, then one each time its history has doubled, up to the usual distance."""
    history = History().start()
    for _ in range(8):
        history.say(history.passed("w0"))
        history.absorb()
    store, reached = open_store(snapshot_every=12), list[int]()
    fed = feeder(history, store)
    for until in range(1, len(history.events) + 1):
        await fed.feed(until)
        if (kept := await store.load()) is not None and kept.position.decided not in reached:
            reached.append(kept.position.decided)
    first = next(event.seq for event in history.events if isinstance(event.fact, Decision))
    assert reached[0] == first and len(reached) > 2
    for before, after in pairwise(reached):
        assert after - before >= min(12, before)


async def test_a_start_from_a_snapshot_leads_to_the_same_state(open_store: OpenStore) -> None:
    history = History().start().corruption()
    store = open_store(snapshot_every=3)
    fed = feeder(history, store)
    for until in range(1, len(history.events) + 1):
        await fed.feed(until)
    snapshot = await store.load()
    assert snapshot is not None
    order = Order(evolve, snapshot.fleet, snapshot.position, dict(snapshot.sources))
    for event in history.events[snapshot.position.through :]:
        order.take(event)
    assert order.shown == fed.order.shown
    assert order.position == fed.order.position


async def test_events_are_found_by_id_number_worker_and_time(open_store: OpenStore) -> None:
    history = History().start().corruption().recovery()
    store = open_store()
    await feeder(history, store).feed()
    event = history.events[4]
    assert await store.locate(event.id) == event.seq
    decision = next(e for e in history.events if getattr(e.fact, "number", 0) == 3)
    assert await store.locate("decision:3") == decision.seq
    assert await store.locate("nothing") is None
    about = [e async for batch in store.select(worker="w2") for e in batch]
    assert about == [e for e in history.events if projection.concerns(e.fact, "w2")]
    named = [e for e in history.events if projection.event_row(e)[8] == "w2"]
    assert {e.fact.kind() for e in about if e not in named} == {"incident_opened", "incident_closed"}
    others = [e async for batch in store.select(worker="w0") for e in batch]
    named = [e for e in history.events if projection.event_row(e)[8] == "w0"]
    assert {e.fact.kind() for e in others if e not in named} == {"request_migrated"}  # to it
    (request, *_) = [e.fact.request for e in history.events if hasattr(e.fact, "request")]
    of_request = [e async for batch in store.select(request=request) for e in batch]
    assert of_request == [e for e in history.events if getattr(e.fact, "request", None) == request]
    late = [e async for batch in store.select(since=event.at, after=2) for e in batch]
    assert late == [e for e in history.events if e.at >= event.at]


async def test_characters_that_postgres_cannot_store_are_replaced(open_store: OpenStore) -> None:
    history = History().start()
    history.say(history.migrated("req\x00-1", "w0", "w1"), source="frontend-0")
    store = open_store()
    await feeder(history, store).feed()
    reading = await everything(store)
    assert [row["request"] for row in reading.rows["migrations"]] == ["req\ufffd-1"]


async def test_an_incident_is_opened_and_closed(open_store: OpenStore) -> None:
    history = History().start()
    given = {"decided_at": history.now, "subject": "worker:w0", "incident": "i1"}
    store = open_store()
    fed = feeder(history, store)
    history.append([IncidentOpened(symptom="timeout", number=fed_number(history), **given)], through=4)  # type: ignore[arg-type]
    await fed.feed()
    assert (await store.read_status()).rows["incidents"][0]["closed_at"] is None
    history.append([IncidentClosed(outcome="recovered", number=fed_number(history), **given)], through=4)  # type: ignore[arg-type]
    await fed.feed()
    assert (await store.read_status()).rows["incidents"] == []
    (row,) = (await everything(store)).rows["incidents"]
    assert (row["incident"], row["symptom"], row["outcome"]) == ("i1", "timeout", "recovered")


async def test_ended_incidents_are_listed_latest_first_up_to_a_limit(open_store: OpenStore) -> None:
    history, store = History().start(), open_store()
    fed = feeder(history, store)
    assert await store.ended_incidents(9) == []
    for n in range(4):
        given = {
            "subject": f"worker:w{n}",
            "incident": f"i{n}",
            "decided_at": history.now + timedelta(seconds=n),
        }
        history.append([IncidentOpened(symptom="timeout", number=fed_number(history), **given)], through=4)  # type: ignore[arg-type]
        if n < 3:
            history.append([IncidentClosed(outcome="dead", number=fed_number(history), **given)], through=4)  # type: ignore[arg-type]
    await fed.feed()
    found = await store.ended_incidents(2)
    assert [(row["incident"], row["symptom"], row["outcome"]) for row in found] == [
        ("i2", "timeout", "dead"),
        ("i1", "timeout", "dead"),
    ]
    assert all(row["opened_at"] == row["closed_at"] for row in found)


async def test_the_planners_input_is_read_as_of_one_instant(open_store: OpenStore) -> None:
    history = History().start()
    store = open_store()
    fed = feeder(history, store)
    traffic = [
        TrafficReported(
            frontend="f0", model="m", minute=history.now, requests=n, prompt_tokens=n, prompt_tokens_squared=n,
            output_tokens=n, late=0, rejected=0,
        )
        for n in range(3)
    ]  # fmt: skip
    wanted = [ScaleSet(model=model, workers=n, by="op", reason="") for n, model in enumerate("mnm", 1)]
    for fact in (*traffic, *wanted):
        history.say(fact)
    await fed.feed()
    last = history.events[-1].seq
    read = await store.read_planning(0, history.events[0].at, 100)
    assert read.position.seq == last
    assert {row["worker"] for row in read.workers} == set(fed.order.shown.workers)
    assert [event.fact for event in read.events] == traffic
    assert [e.fact for e in read.latest if isinstance(e.fact, ScaleSet)] == [wanted[1], wanted[2]]
    first = await store.read_planning(0, history.events[0].at, 2)
    assert [event.fact for event in first.events] == traffic[:2]
    rest = await store.read_planning(first.events[-1].seq, history.events[0].at, 2)
    assert [event.fact for event in rest.events] == traffic[2:]
    late = history.events[-1].at + timedelta(seconds=1)
    assert (await store.read_planning(0, late, 100)).events == []


def fed_number(history: History) -> int:
    return history.order().position.number + 1
