"""`holdfast journal`: what `inspect` reports, and what `quarantine` refuses."""

import json
from datetime import UTC, datetime

import pytest
from memory_journal import MemoryJournal, MemoryStream

from controller.commands.journal import NotToQuarantine, inspect, quarantine
from events import codec
from events.codec import UnknownKind
from events.decisions import Absorbed, PolicyAdopted
from events.errors import UsageError
from events.fact import Decision, Skipped
from events.journal import messages
from events.observations import WorkerHeard

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEARD = WorkerHeard(worker="w1", instance="i1", observer="o")
DREAMT = "fleet.observed.worker.w1.worker_dreamt"


@pytest.fixture
def stream() -> MemoryStream:
    """Return a stream of an event, a message without headers, a kind of a newer version, and an event."""
    made = MemoryStream(clock=lambda: NOW)
    MemoryJournal(made, "worker:w1").observe(HEARD)
    made.publish("fleet.observed.worker.w1.\x1b[2J", b"hello")
    headers = codec.encode_headers(HEARD, id="x", source="future", source_number=1, said_at=NOW)
    made.publish(DREAMT, b"{}", messages.as_sent({**headers, "ce-type": "holdfast.worker_dreamt"}))
    MemoryJournal(made, "worker:w1").observe(HEARD)
    return made


async def inspected(stream: MemoryStream, since: str | None = None, output: str = "text") -> tuple[int, str]:
    output_lines: list[str] = []
    code = await inspect(MemoryJournal(stream, "o"), since, 1, output, output_lines.append)
    return code, "\n".join(output_lines)


async def test_inspect_lists_skipped_messages_and_where_readers_stop(stream: MemoryStream) -> None:
    code, text = await inspected(stream)
    assert code == 3
    skipped, stops, count, way_out = text.splitlines()
    assert skipped.split()[0] == "2" and "skipped" in skipped and "5 bytes: the CloudEvents" in skipped
    assert "\x1b" not in text
    assert stops.split()[0] == "3" and "stops" in stops and "'worker_dreamt'" in stops
    assert count == "read 4: 1 is skipped by all readers"
    assert "upgrade this one" in way_out and "holdfast journal quarantine 3 --why TEXT" in way_out


async def test_inspect_starts_at_a_given_sequence_and_prints_json(stream: MemoryStream) -> None:
    code, text = await inspected(stream, "3", "json")
    found = json.loads(text)
    assert (code, found["read"], found["stops_at"]) == (3, 2, 3)
    (one,) = found["messages"]
    assert one["seq"] == 3 and one["state"] == "stops" and one["subject"] == DREAMT and one["bytes"] == 2
    assert (await inspected(stream, "4"))[1] == "read 1: all are events"
    assert json.loads((await inspected(stream, "2026-01-02T00:00:00Z", "json"))[1])["read"] == 0
    with pytest.raises(UsageError, match="sequence 5 does not exist: the journal ends at 4"):
        await inspected(stream, "5")


async def test_an_event_that_stops_readers_can_be_quarantined_and_is_then_skipped(
    stream: MemoryStream,
) -> None:
    printed: list[str] = []
    journal = MemoryJournal(stream, "operator:o")
    assert await quarantine(journal, 3, 1, "a slip", printed.append) == 0
    assert await quarantine(journal, 3, 1, "again", printed.append) == 0
    assert printed[0] == "event 3 is quarantined: all readers skip it"
    assert "event 3 is already quarantined" in printed[1] and "a slip" in printed[1]
    events = [e async for batch in journal.read(0, until=5) for e in batch]
    assert [isinstance(e.fact, Skipped) for e in events] == [False, True, True, False, False]
    code, text = await inspected(stream)
    assert code == 0 and "quarantined by " in text and "2 are skipped by all readers" in text


async def test_a_skipped_message_can_be_quarantined_too(stream: MemoryStream) -> None:
    assert await quarantine(MemoryJournal(stream, "operator:o"), 2, 1, "to be sure", lambda _: None) == 0
    code, text = await inspected(stream, "2", "json")
    assert code == 3 and json.loads(text)["messages"][0]["state"] == "quarantined"


def forge(stream: MemoryStream, number: int, **change: str) -> int:
    """Publish a decision as a controller would, under the fence. Return its sequence."""
    fact = Absorbed(number=number, decided_at=NOW)
    made = codec.encode_headers(
        fact, id=codec.new_id(), source="forger", source_number=0, said_at=NOW, through=len(stream.events)
    )
    headers = {**made, **messages.fence(stream.decided), **change}
    subject = f"fleet.decided.{headers['ce-type'].removeprefix('holdfast.')}"
    return stream.publish(subject, codec.encode_body(fact), messages.as_sent(headers))


@pytest.fixture
def forged() -> MemoryStream:
    """Return a stream of decisions 1, 7, 8, 1 and 2: no reader continues after the second."""
    stream = MemoryStream(clock=lambda: NOW)
    for number in (1, 7, 8, 1, 2):
        forge(stream, number)
    return stream


async def test_inspect_lists_decisions_out_of_turn_with_the_expected_number(forged: MemoryStream) -> None:
    code, text = await inspected(forged)
    assert code == 3
    *places, count, way_out = text.splitlines()
    assert [(line.split()[0], line.split()[2]) for line in places] == [
        ("2", "stops"),
        ("3", "stops"),
        ("4", "stops"),
    ]
    assert places[0].endswith(": decision 7, out of turn: expected 2")
    assert places[2].endswith(": decision 1, out of turn: expected 2")
    assert count == "read 5: 0 are skipped by all readers"
    assert "newer" not in way_out and way_out.endswith("holdfast journal quarantine 2 --why TEXT")
    code, text = await inspected(forged, "4", "json")
    found = json.loads(text)
    assert (found["read"], found["stops_at"]) == (2, 4), (
        "turns are counted from the start of the stream, whatever is listed"
    )


async def test_only_a_decision_out_of_turn_can_be_quarantined(forged: MemoryStream) -> None:
    journal = MemoryJournal(forged, "operator:o")
    for good in (1, 5):
        with pytest.raises(NotToQuarantine, match=f"event {good} is a absorbed"):
            await quarantine(journal, good, 1, "regret")
    for bad in (3, 2, 4):  # although the author of the next one claims to have read them
        assert await quarantine(journal, bad, 1, "forged", lambda _: None) == 0
    code, text = await inspected(forged)
    assert code == 0 and "3 are skipped by all readers" in text
    numbers = [
        e.fact.number
        async for batch in journal.read(0, until=5)
        for e in batch
        if isinstance(e.fact, Decision)
    ]
    assert numbers == [1, 2]


async def test_the_first_decision_of_a_truncated_stream_is_in_turn() -> None:
    stream = MemoryStream(clock=lambda: NOW)
    for number in (41, 42, 44):
        forge(stream, number)
    printed: list[str] = []
    assert await inspect(MemoryJournal(stream, "o"), None, 2, "json", printed.append) == 3
    assert json.loads(printed[0])["stops_at"] == 3
    with pytest.raises(NotToQuarantine, match="event 2 is a absorbed"):
        await quarantine(MemoryJournal(stream, "o"), 2, 2, "regret")


async def test_a_decision_of_a_newer_version_may_have_used_a_number(stream: MemoryStream) -> None:
    journal = MemoryJournal(stream, "operator:o")
    unknown = {"ce-type": "holdfast.of_tomorrow"}
    assert [forge(stream, 1), forge(stream, 2, **unknown), forge(stream, 3)] == [5, 6, 7]
    _, text = await inspected(stream, "5", "json")
    assert [m["seq"] for m in json.loads(text)["messages"]] == [6], (
        "decision 3 is in turn if the unknown one was 2"
    )
    with pytest.raises(NotToQuarantine, match="event 7 is a absorbed"):
        await quarantine(journal, 7, 1, "a guess")
    assert [forge(stream, 4, **unknown), forge(stream, 6)] == [8, 9]
    assert await quarantine(journal, 9, 1, "neither 4 nor 5", lambda _: None) == 0


@pytest.mark.parametrize(("kinds", "known"), [((), False), (("worker_dreamt",), True)])
async def test_an_observation_that_controllers_read_past_is_quarantined_unless_a_newer_one_folded_it(
    kinds: tuple[str, ...], known: bool
) -> None:
    """A controller reads past an unknown observation. A newer controller may know it once its kind is in force."""
    stream = MemoryStream(clock=lambda: NOW)
    journal = MemoryJournal(stream, "controller:c")
    adopted = PolicyAdopted(number=1, decided_at=NOW, policy={}, deciders_version=6, kinds=kinds)
    await journal.append([adopted], through=0, after=0)
    headers = codec.encode_headers(HEARD, id="x", source="future", source_number=1, said_at=NOW)
    stream.publish(DREAMT, b"{}", messages.as_sent({**headers, "ce-type": "holdfast.worker_dreamt"}))
    await journal.append([Absorbed(number=2, decided_at=NOW)], through=2, after=1)
    if known:
        with pytest.raises(NotToQuarantine, match="decision 2, at 3, was made by a controller that had read"):
            await quarantine(journal, 2, 1, "a slip", lambda _: None)
    else:
        assert await quarantine(journal, 2, 1, "a slip", lambda _: None) == 0


async def test_a_folded_event_cannot_be_quarantined(stream: MemoryStream) -> None:
    journal = MemoryJournal(stream, "operator:o")
    with pytest.raises(NotToQuarantine, match="event 1 is a worker_heard"):
        await quarantine(journal, 1, 1, "regret")
    with pytest.raises(UsageError, match="event 9 does not exist: the journal ends at 4"):
        await quarantine(journal, 9, 1, "a guess")
    newer = Absorbed(number=1, decided_at=NOW)
    await journal.append([newer], through=3, after=0)
    with pytest.raises(
        NotToQuarantine, match="decision 1, at 5, was made by a controller that had read event 3"
    ):
        await quarantine(journal, 3, 1, "a slip")
    with pytest.raises(UnknownKind):
        [e async for batch in journal.read(0, until=5) for e in batch]
