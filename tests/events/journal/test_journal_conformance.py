"""The promises of every journal, checked on the real one and on its test double."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime

import pytest
from memory_journal import MemoryJournal, MemoryStream
from waits import turns

from controller.adapters.embedded.server import EmbeddedServer
from events.decisions import Absorbed, BreakerClosed
from events.fact import Decision, Observation, Recorded
from events.journal.nats import NatsJournal
from events.journal.port import Fenced, Journal, JournalChanged
from events.observations import DrainRequested, ObserverBlind, ResumeRequested, ScaleProposed

Eventually = Callable[..., Awaitable[None]]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
Make = Callable[[str], Awaitable[Journal]]


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.servers)])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    """Make handles on one stream, one for each process instance."""
    made: list[Journal] = []
    stream = MemoryStream()
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def new(source: str) -> Journal:
        journal: Journal = await NatsJournal.connect(url, source) if url else MemoryJournal(stream, source)
        made.append(journal)
        return journal

    yield new
    for journal in made:
        await journal.close()


def drain(worker: str = "w1") -> Observation:
    return DrainRequested(worker=worker, instance="i1", by="test")


def absorbed(number: int) -> Decision:
    return Absorbed(number=number, decided_at=NOW)


async def read(journal: Journal, after: int, until: int) -> list[Recorded]:
    found: list[Recorded] = []
    async with asyncio.timeout(20):
        async for batch in journal.read(after, until=until):
            found += batch
    return found


async def test_facts_are_read_as_they_were_published(make: Make) -> None:
    journal = await make("worker:w1")
    fact = drain()
    id = journal.observe(fact, correlation="incident-1", causation="cause-1")
    assert await journal.flush(5)
    (event,) = await read(journal, 0, 1)
    assert (event.seq, event.fact, event.id) == (1, fact, id)
    assert (event.source, event.source_number) == (journal.source, 1)
    assert (event.correlation, event.causation) == ("incident-1", "cause-1")
    assert event.at.tzinfo is not None and event.said_at is not None


@pytest.mark.parametrize("name", ["worker:w1", "worker:w1:i1", "worker:a:b:c"])
async def test_a_source_is_one_life_of_a_process_also_under_the_same_name(make: Make, name: str) -> None:
    first, second = await make(name), await make(name)
    assert first.source.startswith(f"{name}:")
    assert first.source != second.source, "its numbers begin at 1 again, and would be taken for repetitions"


async def test_each_source_numbers_its_facts_from_one_without_a_gap_and_in_order(make: Make) -> None:
    first, second = await make("worker:w1"), await make("worker:w2")
    for index in range(120):
        (first if index % 2 else second).observe(drain(f"w{index}"))
    assert await first.flush(5) and await second.flush(5)
    events = await read(first, 0, 120)
    assert [event.seq for event in events] == list(range(1, 121))
    for journal in (first, second):
        mine = [event.source_number for event in events if event.source == journal.source]
        assert mine == list(range(1, 61))


async def test_reading_continues_from_any_position(make: Make) -> None:
    journal = await make("worker:w1")
    for index in range(10):
        journal.observe(drain(f"w{index}"))
    assert await journal.flush(5)
    assert [event.seq for event in await read(journal, 4, 7)] == [5, 6, 7]
    assert await journal.last_seq() == 10


async def test_an_empty_journal_ends_at_zero(make: Make) -> None:
    assert await (await make("worker:w1")).last_seq() == 0


async def test_the_end_has_the_time_of_the_clock_that_stamps_events(make: Make) -> None:
    journal = await make("worker:w1")
    assert (await journal.end()).seq == 0
    ends = []
    for _ in range(3):
        journal.observe(drain())
        assert await journal.flush(5)
        ends.append(await journal.end())
    stamps = [event.at for event in await read(journal, 0, 3)]
    assert [end.seq for end in ends] == [1, 2, 3]
    assert stamps[0] <= ends[0].at <= stamps[1] <= ends[1].at <= stamps[2] <= ends[2].at


async def test_a_reader_follows(make: Make, eventually: Eventually) -> None:
    journal, other = await make("worker:w1"), await make("frontend:f1")
    seen: list[Recorded] = []

    async def follow() -> None:
        async for batch in other.read(0):
            seen.extend(batch)

    task = asyncio.create_task(follow())
    for index in range(3):
        journal.observe(ResumeRequested(worker=f"w{index}", instance="i1"))
        await eventually(lambda index=index: len(seen) == index + 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [event.seq for event in seen] == [1, 2, 3]


async def test_decisions_carry_how_far_their_controller_had_read(make: Make) -> None:
    journal = await make("controller:c1")
    journal.observe(drain())
    await journal.flush(5)
    decision = Absorbed(number=1, decided_at=NOW, cause="because", incident="incident-1")
    assert await journal.append([decision], through=1, after=0) == 2
    (event,) = await read(journal, 1, 2)
    assert event.fact == decision
    assert (event.through, event.correlation, event.causation) == (1, "incident-1", "because")


async def test_several_decisions_land_together_and_in_order(make: Make) -> None:
    journal = await make("controller:c1")
    batch = [absorbed(1), BreakerClosed(number=2, decided_at=NOW, worker="w1", instance="i1"), absorbed(3)]
    assert await journal.append(batch, through=0, after=0) == 3
    assert [event.fact for event in await read(journal, 0, 3)] == batch


async def test_a_controller_that_has_not_read_the_last_decision_is_fenced(make: Make) -> None:
    first, second = await make("controller:c1"), await make("controller:c2")
    last = await first.append([absorbed(1)], through=0, after=0)
    with pytest.raises(Fenced, match="read again"):
        await second.append([absorbed(1)], through=0, after=0)
    with pytest.raises(Fenced):
        await second.append([absorbed(1), absorbed(2)], through=0, after=0)
    assert await first.last_seq() == last
    assert await second.append([absorbed(2), absorbed(3)], through=0, after=last) == last + 2


async def test_what_identifies_an_event(make: Make) -> None:
    """As in docs/reference/events.md: source and number of observations, the number of decisions, and the id of all events."""
    first, second = await make("controller:c1"), await make("controller:c1")
    for journal in (first, second, first):
        journal.observe(drain())
        assert await journal.flush(5)
    after = await first.append([absorbed(1), absorbed(2)], through=3, after=0)
    last = await second.append([absorbed(3)], through=3, after=after)
    events = await read(first, 0, last)
    observed = [event for event in events if not isinstance(event.fact, Decision)]
    decided = [event for event in events if isinstance(event.fact, Decision)]
    assert len({event.id for event in events}) == len(events) == 6
    pairs = [(event.source, event.source_number) for event in observed]
    assert pairs == [(first.source, 1), (second.source, 1), (first.source, 2)]
    assert {event.source_number for event in decided} == {0}, "the fleet counts decisions, not their source"
    assert [event.fact.number for event in decided if isinstance(event.fact, Decision)] == [1, 2, 3]


async def test_observations_do_not_move_the_fence(make: Make) -> None:
    journal = await make("controller:c1")
    last = await journal.append([absorbed(1)], through=0, after=0)
    journal.observe(ObserverBlind(observer="c1", silent=3, known=4))
    await journal.flush(5)
    assert await journal.append([absorbed(2)], through=last, after=last) == last + 2


def proposed(after: int, model: str = "m") -> Observation:
    return ScaleProposed(
        planner="p", model=model, before=2, after=after, why="up", needed=after, method="constant", error=None, bound="batch",
        held="", by="", position=7,
    )  # fmt: skip


async def test_of_two_concurrent_fenced_facts_only_one_is_written(make: Make) -> None:
    first, second = await make("planner:p1"), await make("planner:p2")
    id = await first.observe_next(proposed(3), after=0)
    with pytest.raises(Fenced, match="read again"):
        await second.observe_next(proposed(4), after=0)
    (event,) = await read(first, 0, await first.last_seq())
    assert (event.id, event.fact, event.source) == (id, proposed(3), first.source)
    await second.observe_next(proposed(5), after=event.seq)
    with pytest.raises(Fenced):
        await first.observe_next(proposed(6), after=event.seq)


async def test_fenced_facts_are_fenced_per_subject(make: Make) -> None:
    journal = await make("planner:p1")
    journal.observe(drain())
    assert await journal.flush(5)
    await journal.observe_next(proposed(3), after=0)
    await journal.observe_next(proposed(3, "other"), after=0)
    await journal.append([absorbed(1)], through=0, after=0)
    await journal.observe_next(proposed(4), after=2)
    assert [event.seq for event in await read(journal, 0, 5)] == [1, 2, 3, 4, 5]


async def test_of_many_controllers_at_once_exactly_one_writes(make: Make) -> None:
    journals = [await make(f"controller:c{index}") for index in range(8)]

    async def attempt(journal: Journal, size: int) -> bool:
        try:
            await journal.append([absorbed(number + 1) for number in range(size)], through=0, after=0)
        except Fenced:
            return False
        return True

    written = await asyncio.gather(
        *(attempt(journal, 1 + place % 3) for place, journal in enumerate(journals))
    )
    assert written.count(True) == 1
    assert await journals[0].last_seq() == 1 + written.index(True) % 3


async def test_a_position_beyond_the_end_is_refused(make: Make) -> None:
    journal = await make("projector:p1")
    journal.observe(drain())
    await journal.flush(5)
    with pytest.raises(JournalChanged, match="ends at 1, but 7 has been read"):
        await read(journal, 7, 8)


@pytest.mark.slow
async def test_ten_thousand_facts_arrive_in_order(make: Make) -> None:
    journal = await make("worker:w1")
    for index in range(10_000):
        journal.observe(drain(f"w{index % 16}"))
        if index % 500 == 0:
            await turns()
    assert await journal.flush(30)
    events = await read(journal, 0, 10_000)
    assert [event.source_number for event in events] == list(range(1, 10_001))


@pytest.mark.servers
async def test_a_single_fact_is_written_in_the_same_turn_of_the_loop(own_nats: EmbeddedServer) -> None:
    journal = await NatsJournal.connect(own_nats.url, "worker:w1")
    journal.observe(drain())
    assert await journal.flush(5)
    client = journal.connection.client
    written = client.stats["out_bytes"]
    journal.observe(drain())
    assert client.stats["out_bytes"] > written
    assert client.pending_data_size == 0
    await journal.close()


@pytest.mark.servers
async def test_the_trace_of_a_request_is_in_the_headers_of_its_events(own_nats: EmbeddedServer) -> None:
    journal = await NatsJournal.connect(own_nats.url, "frontend:f0")
    for traceparent in ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", ""):
        journal.observe(drain(), traceparent=traceparent)
        assert await journal.flush(5)
        seq = await journal.last_seq()
        stored = await journal.connection.client.jetstream().get_msg("FLEET", seq)
        assert (stored.headers or {}).get("traceparent", "") == traceparent
    await journal.close()
