"""The journal's bounds: when they may be set, what they drop, and what readers notice."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from memory_journal import MemoryJournal, MemoryStream

from events.journal import bounds, stream
from events.journal.bounds import SnapshotPosition
from events.journal.nats import NatsJournal
from events.journal.port import Journal, JournalChanged
from events.journal.retention import JournalBounds
from events.journal.usage import JournalUsage
from events.observations import DrainRequested, ObserverBlind, SnapshotKept

Eventually = Callable[..., Awaitable[None]]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KIB = 1024
USED = JournalUsage(1, 1000, 1000 * KIB, None, None, None, NOW)  # one KiB per event
BOUND = JournalBounds(bytes=800 * KIB)


def kept(through: int, ago: timedelta = timedelta(0)) -> SnapshotPosition:
    return SnapshotPosition(through, NOW - ago)


def test_a_snapshot_is_due_when_the_journal_has_grown_by_an_eighth_of_its_bound() -> None:
    assert not bounds.due(BOUND, USED, kept(901))
    assert bounds.due(BOUND, USED, kept(900))
    assert bounds.due(BOUND, USED, None)
    assert not bounds.due(JournalBounds(), USED, None)
    assert not bounds.due(BOUND, replace(USED, last_seq=0, bytes=0), None), "there is nothing to say"


def test_a_snapshot_is_due_when_an_eighth_of_the_age_bound_has_passed() -> None:
    of_age = JournalBounds(age=timedelta(hours=8))
    assert not bounds.due(of_age, USED, kept(999, timedelta(minutes=59)))
    assert bounds.due(of_age, USED, kept(999, timedelta(hours=1)))


def test_a_bound_may_be_set_only_where_the_rest_holds_a_snapshot() -> None:
    assert not bounds.safe(BOUND, USED, None)
    assert not bounds.safe(BOUND, USED, kept(600))
    assert bounds.safe(BOUND, USED, kept(601))
    assert bounds.safe(JournalBounds(), USED, None), "none drops nothing"
    assert not bounds.safe(JournalBounds(age=timedelta(hours=8)), USED, kept(999, timedelta(hours=4)))


def test_a_streams_configuration_changes_in_its_bounds_alone() -> None:
    config = stream.stream_config(1)
    changed = bounds.changed(config, JournalBounds(bytes=KIB, age=timedelta(seconds=90)))
    assert changed == config | {"max_bytes": KIB, "max_age": 90_000_000_000, "discard": "old"}
    assert bounds.changed(changed, JournalBounds(bytes=KIB, age=timedelta(seconds=90))) is None
    assert bounds.changed(changed, JournalBounds()) == config
    assert not stream.differences(changed, 1)
    assert stream.differences(config | {"discard": "old"}, 1), "without a bound nothing may go"


def part(number: int, snapshot: str = "s") -> SnapshotKept:
    return SnapshotKept(
        snapshot=snapshot, part=number, parts=2, shape=1, through=3, decided=2, number=1, since=NOW, data="AA=="
    )  # fmt: skip


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.servers)])
async def journal(request: pytest.FixtureRequest) -> AsyncIterator[Journal]:
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""
    made: Journal = await NatsJournal.connect(url, "c:1") if url else MemoryJournal(MemoryStream(), "c:1")
    yield made
    await made.close()


async def test_rare_facts_about_the_fleet_are_found_without_reading_the_rest(journal: Journal) -> None:
    assert await journal.first_seq() == 1
    assert [e async for e in journal.of_kind(SnapshotKept)] == []
    drain = DrainRequested(worker="w", instance="i", by="test")
    for fact in (drain, part(1), drain, part(2), ObserverBlind(observer="c", silent=1, known=2)):
        journal.observe(fact)
    assert await journal.flush(10)
    assert [(e.seq, e.fact) async for e in journal.of_kind(SnapshotKept)] == [(2, part(1)), (4, part(2))]
    assert [e.seq async for e in journal.of_kind(SnapshotKept, after=2)] == [4]


@pytest.mark.servers
async def test_the_broker_drops_the_oldest_events_and_a_reader_of_them_fails(
    nats_url: str, eventually: Eventually
) -> None:
    journal = await NatsJournal.connect(nats_url, "c:1")
    try:
        fact = DrainRequested(worker="w" * 100, instance="i", by="test")
        for _ in range(300):
            journal.observe(fact)
        assert await journal.flush(10)
        whole = await journal.usage()
        half = JournalBounds(bytes=whole.bytes // 2)
        assert await bounds.bound(journal.connection, half)
        assert not await bounds.bound(journal.connection, half), "it has them"
        left = await journal.usage()
        assert left.bytes_max == whole.bytes // 2 and left.bytes <= left.bytes_max
        assert await journal.first_seq() == left.first_seq > 100
        with pytest.raises(JournalChanged, match=f"begins at {left.first_seq}"):
            [batch async for batch in journal.read(0, until=300)]
        read = [e.seq async for batch in journal.read(left.first_seq - 1, until=300) for e in batch]
        assert read == list(range(left.first_seq, 301))
        journal.observe(fact)
        assert await journal.flush(10), "a bounded journal never refuses"
        assert await bounds.bound(journal.connection, JournalBounds())
        assert (await journal.usage()).bytes_max is None
    finally:
        await journal.close()
    again = await NatsJournal.connect(nats_url, "c:1")  # a bounded stream is not refused
    await again.close()
