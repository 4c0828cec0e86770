"""Foreign messages on the stream are skipped by every reader alike, or stop a fold until quarantined."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from memory_journal import MemoryJournal, MemoryStream
from structlog.testing import capture_logs

from events import codec, subjects
from events.codec import UnknownKind
from events.decisions import Absorbed
from events.fact import Decision, Fact, Recorded, Skipped
from events.journal import messages
from events.journal.nats import NatsJournal
from events.journal.port import Fenced
from events.observations import DrainRequested, EventQuarantined, WorkerHeard
from events.order import Order, OutOfTurn, Position

NOW = datetime(2026, 1, 1, tzinfo=UTC)
Eventually = Callable[..., Awaitable[None]]
HEARD = WorkerHeard(worker="w1", instance="i1", observer="o")
ON = "fleet.observed.worker.w1.worker_heard"


def drain(number: int = 1) -> DrainRequested:
    return DrainRequested(worker="w1", instance="i1", by=f"fact {number}")


def headers_of(fact: Fact, **change: str) -> dict[str, str]:
    made = codec.encode_headers(fact, id=codec.new_id(), source="stranger:1", source_number=1, said_at=NOW)
    return {**made, **change}


AnyJournal = NatsJournal | MemoryJournal
TOMORROW = {"ce-type": "holdfast.of_tomorrow"}
DREAMT = "fleet.observed.worker.w1.of_tomorrow"
NASTY: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "headerless": ("fleet.observed.worker.w0.canary_passed", b"hello", {}),
    "nothing": ("fleet.observed.worker.w0.canary_passed", b"", {}),
    "bad JSON": (ON, b"{not json", headers_of(HEARD)),
    "wrong types": (ON, b'{"worker": 1, "instance": [], "observer": {}}', headers_of(HEARD)),
    "no object": (ON, b"[]", headers_of(HEARD)),
    "zeros": (ON, bytes(900_000), headers_of(HEARD)),
    "a NUL in a name": (
        "fleet.observed.worker.w_1.worker_heard",
        codec.encode_body(WorkerHeard(worker="w\0001", instance="i1", observer="o")),
        headers_of(HEARD),
    ),
    "another worker than the subject's": (
        "fleet.observed.worker.w2.worker_heard",
        codec.encode_body(HEARD),
        headers_of(HEARD),
    ),
    "another kind than the subject's": (
        "fleet.observed.worker.w1.worker_left",
        codec.encode_body(HEARD),
        headers_of(HEARD),
    ),
    "other headers": (DREAMT, b"{}", TOMORROW),
    "an unknown kind of no object": (DREAMT, b"tomorrow", headers_of(HEARD, **TOMORROW)),
    "an unknown kind elsewhere": (ON, b"{}", headers_of(HEARD, **TOMORROW)),
    "a decision of no controller": (
        "fleet.decided.absorbed",
        codec.encode_body(Absorbed(number=7, decided_at=NOW)),
        headers_of(Absorbed(number=7, decided_at=NOW)),
    ),
    "bytes among decisions": ("fleet.decided.breaker_opened", b"\x00\xff", {}),
    "no quarantine": (messages.quarantine_subject(1), b"{}", {}),
}  # fmt: skip


@dataclass
class Stage:
    """A stream to which any process can publish anything."""

    journal: AnyJournal
    publish: Callable[[str, bytes, dict[str, str]], Awaitable[None]]
    another: Callable[[str], Awaitable[AnyJournal]]

    async def say(self, *facts: DrainRequested | EventQuarantined) -> None:
        for fact in facts:
            self.journal.observe(fact)
        assert await self.journal.flush(20)

    async def all(self, after: int = 0, *, unknown: bool = False) -> list[Recorded]:
        found: list[Recorded] = []
        async with asyncio.timeout(20):
            last = await self.journal.last_seq()
            reading = self.journal.inspect if unknown else self.journal.read
            async for batch in reading(after, until=last):
                found += batch
        return found


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.servers)])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """A journal, in memory and on a broker."""
    stream, made = MemoryStream(), list[AnyJournal]()
    url = request.getfixturevalue("nats_url") if request.param == "nats" else ""

    async def another(source: str) -> AnyJournal:
        made.append(await NatsJournal.connect(url, source) if url else MemoryJournal(stream, source))
        return made[-1]

    journal = await another("worker:w1")

    async def publish(subject: str, body: bytes, headers: dict[str, str]) -> None:
        if isinstance(journal, NatsJournal):
            answer = await journal.connection.client.request(
                subject, body, headers=headers or None, timeout=10
            )
            assert "error" not in json.loads(answer.data), answer.data
        else:
            stream.publish(subject, body, messages.as_sent(headers) if headers else None)
            stream.wake()

    yield Stage(journal, publish, another)
    for each in made:
        await each.close()


def evolve(state: tuple[Any, ...], event: Recorded) -> tuple[Any, ...]:
    return (*state, event.fact)


def folded(events: list[Recorded]) -> Order[tuple[Any, ...]]:
    order: Order[tuple[Any, ...]] = Order(evolve, ())
    for event in events:
        order.take(event)
    return order


async def test_foreign_messages_are_skipped_counted_and_logged_once(stage: Stage) -> None:
    await stage.say(drain(1))
    for subject, body, headers in NASTY.values():
        await stage.publish(subject, body, headers)
    await stage.say(drain(2))
    with capture_logs() as logs:
        events = await stage.all()
        assert await stage.all() == events, "read again, it is the same"
    assert [event.seq for event in events] == list(range(1, len(NASTY) + 3))
    for name, event in zip(NASTY, events[1:-1], strict=True):
        assert isinstance(event.fact, Skipped), name
    assert stage.journal.counters.skipped == len(NASTY)
    assert len([told for told in logs if told["event"] == "message_skipped"]) == len(NASTY)
    order = folded(events)
    assert list(order.shown) == [drain(1), drain(2)]
    assert order.last_seq == len(events)


async def test_a_read_ends_at_a_skipped_message_and_continues_after_it(
    stage: Stage, eventually: Eventually
) -> None:
    await stage.publish("fleet.observed.worker.w0.canary_passed", b"hello", {})
    (event,) = await stage.all()
    assert isinstance(event.fact, Skipped) and event.fact.bytes == 5
    seen: list[Recorded] = []
    other = await stage.another("frontend:f1")

    async def follow() -> None:
        async for batch in other.read(1):
            seen.extend(batch)

    async with followed(follow()):
        await stage.publish("fleet.decided.nonsense", b"hello", {})
        await eventually(lambda: [event.seq for event in seen] == [2], 20)
        await stage.say(drain())
        await eventually(lambda: [event.seq for event in seen] == [2, 3], 20)


@asynccontextmanager
async def followed(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_bytes_among_the_decisions_move_the_fence_and_a_controller_that_read_them_passes_it(
    stage: Stage,
) -> None:
    def absorbed(number: int) -> Decision:
        return Absorbed(number=number, decided_at=NOW)

    await stage.journal.append([absorbed(1)], through=0, after=0)
    await stage.publish(*NASTY["bytes among decisions"])
    await stage.publish(*NASTY["a decision of no controller"])
    order = folded(await stage.all())
    assert (order.position.decided, order.position.number) == (3, 1)
    batch = [absorbed(2), absorbed(3)]
    assert await stage.journal.append(batch, through=order.last_seq, after=order.position.decided) == 5
    assert list(folded(await stage.all()).shown) == [absorbed(1), absorbed(2), absorbed(3)]


async def test_an_unknown_kind_stops_after_what_came_before_it_with_both_ways_out(stage: Stage) -> None:
    await stage.say(drain())
    await stage.publish(DREAMT, b"{}", headers_of(HEARD, **TOMORROW))
    seen: list[int] = []
    sentence = r"event 2, on .*'of_tomorrow'.*Upgrade.*holdfast journal quarantine 2 --why"
    with pytest.raises(UnknownKind, match=sentence):
        async with asyncio.timeout(20):
            async for batch in stage.journal.read(0):
                seen += [event.seq for event in batch]
    assert seen == [1]
    looked = (await stage.all(unknown=True))[1].fact
    assert isinstance(looked, Skipped) and looked.unknown


async def test_an_unknown_observation_is_skipped_by_readers_that_do_not_need_it(stage: Stage) -> None:
    """A frontend or a controller continues: it counts the event and logs its kind once."""
    await stage.say(drain())
    for _ in range(3):
        await stage.publish(DREAMT, b"{}", headers_of(HEARD, **TOMORROW) | {"Nats-Msg-Id": codec.new_id()})
    await stage.say(drain(1))
    for stops_at in ("decisions", "nothing"):
        stage.journal.stops_at = stops_at
        events = await stage.all()
        assert [type(event.fact) for event in events] == [DrainRequested, *[Skipped] * 3, DrainRequested]
        assert folded(events).last_seq == 5
    assert stage.journal.counters.unknown == 3, "each once, however often it is read"
    assert not stage.journal.counters.skipped


async def test_an_unknown_decision_stops_a_controller_and_a_frontend_continues(stage: Stage) -> None:
    """The decision has taken a number: the next controllers' decisions are in turn."""

    def absorbed(number: int) -> Decision:
        return Absorbed(number=number, decided_at=NOW)

    await stage.journal.append([absorbed(1)], through=0, after=0)
    fenced = headers_of(absorbed(2), **TOMORROW) | messages.fence(1)
    await stage.publish("fleet.decided.of_tomorrow", b"{}", fenced)
    await stage.journal.append([absorbed(3)], through=2, after=2)
    stage.journal.stops_at = "decisions"
    with pytest.raises(UnknownKind, match=r"event 2, on fleet\.decided\.of_tomorrow"):
        await stage.all()
    stage.journal.stops_at = "nothing"
    order = folded(await stage.all())
    assert (order.position.number, order.position.decided, order.lacks) == (3, 3, 1)
    assert list(order.shown) == [absorbed(1), absorbed(3)]


async def test_a_frontend_is_in_turn_also_where_the_unknown_decision_was_quarantined_later(
    stage: Stage,
) -> None:
    def absorbed(number: int) -> Decision:
        return Absorbed(number=number, decided_at=NOW)

    await stage.journal.append([absorbed(1)], through=0, after=0)
    await stage.publish(
        "fleet.decided.of_tomorrow", b"{}", headers_of(absorbed(2), **TOMORROW) | messages.fence(1)
    )
    await stage.journal.append([absorbed(2)], through=2, after=2)
    stage.journal.stops_at = "nothing"
    assert folded(await stage.all()).position.number == 2


async def test_later_events_cannot_be_quarantined(stage: Stage) -> None:
    await stage.say(EventQuarantined(event=2, why="a guess"), drain())
    assert [event.fact for event in await stage.all()][1:] == [drain()]


async def test_a_quarantine_lets_every_reader_pass_and_stays(stage: Stage) -> None:
    await stage.publish(DREAMT, b"{}", headers_of(HEARD, **TOMORROW))
    await stage.publish(messages.quarantine_subject(1), b"no quarantine", {})
    await stage.say(drain())
    with pytest.raises(UnknownKind):
        await stage.all()
    await stage.say(EventQuarantined(event=1, why="a slip", by="eve"))
    await stage.publish(messages.quarantine_subject(1), b"nor one", {})
    events = await stage.all()
    first = events[0].fact
    assert isinstance(first, Skipped) and first.quarantined and not first.unknown
    assert first.why == "quarantined by eve at 4: a slip"
    assert await stage.all() == events


async def test_a_quarantined_event_stays_quarantined_for_newer_versions(stage: Stage) -> None:
    """Others have decided without it: a version that can decode it must skip it all the same."""
    await stage.say(drain(1), drain(2), EventQuarantined(event=1, why="unknown then"), drain(3))
    events = await stage.all()
    assert isinstance(events[0].fact, Skipped) and events[0].fact.quarantined
    assert [event.fact for event in events[1:2]] == [drain(2)]
    assert [fact for fact in folded(events).shown if isinstance(fact, DrainRequested)] == [drain(2), drain(3)]
    assert (await stage.all(after=1))[0].fact == drain(2)


async def test_a_decision_out_of_turn_stops_every_fold_until_it_is_quarantined(stage: Stage) -> None:
    def absorbed(number: int) -> Decision:
        return Absorbed(number=number, decided_at=NOW)

    await stage.journal.append([absorbed(1)], through=0, after=0)
    await stage.journal.append([absorbed(9), absorbed(10)], through=1, after=1)
    await stage.say(drain())
    for place in (2, 3):
        with pytest.raises(OutOfTurn, match=f"at {place}, is out of turn, 2 is next"):
            folded(await stage.all())
        await stage.say(EventQuarantined(event=place, why="no controller wrote it", by="eve"))
    events = await stage.all()
    for event in events[1:3]:
        assert isinstance(event.fact, Skipped) and event.fact.quarantined and event.fact.decided
    order = folded(events)
    assert (order.position.decided, order.position.number) == (3, 1)
    with pytest.raises(Fenced):
        await stage.journal.append([absorbed(2)], through=order.last_seq, after=1)
    after = order.position.decided
    assert await stage.journal.append([absorbed(2)], through=order.last_seq, after=after) == 7
    facts = folded(await stage.all()).shown
    assert [f for f in facts if not isinstance(f, EventQuarantined)] == [absorbed(1), drain(), absorbed(2)]
    late = folded(await stage.all())
    assert late.position == Position(through=6, decided=7, number=2)


async def test_skipped_messages_have_distinct_ids(stage: Stage) -> None:
    await stage.publish(ON, b"one", {})
    await stage.publish(ON, b"two", {})
    one, two = await stage.all()
    assert one.id != two.id
    await stage.say(EventQuarantined(event=1, why="to be sure"))
    assert (await stage.all())[0].id == one.id, "a reader at that position must recognise it"


def test_of_very_many_skipped_messages_only_some_are_logged() -> None:
    stream = MemoryStream()
    journal = MemoryJournal(stream, "worker:w1")
    for n in range(1, 1025):
        stream.publish(ON, b"%d" % n)
        with capture_logs() as logs:
            journal.counters.note(stream.events[-1])
        assert bool(logs) == (n <= 100 or n.bit_count() == 1)
    assert journal.counters.skipped == 1024


def test_subjects_are_what_they_always_were() -> None:
    assert subjects.subject(EventQuarantined(event=12, why="w")) == messages.quarantine_subject(12)
