"""`holdfast journal`: what it says of a journal, and what it refuses to quarantine."""

import json
from datetime import UTC, datetime

import pytest

from controller.commands.journal import NotToQuarantine, inspect, quarantine
from events import codec
from events.codec import UnknownKind
from events.decisions import Absorbed
from events.errors import UsageError
from events.fact import Skipped
from events.journal import messages
from events.journal.memory import MemoryJournal, MemoryStream
from events.observations import WorkerHeard

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEARD = WorkerHeard(worker="w1", instance="i1", observer="o")
DREAMT = "fleet.observed.worker.w1.worker_dreamt"


@pytest.fixture
def stream() -> MemoryStream:
    """An event, a message without headers, a kind of a newer version, and an event."""
    made = MemoryStream(clock=lambda: NOW)
    MemoryJournal(made, "worker:w1").observe(HEARD)
    made.publish("fleet.observed.worker.w1.\x1b[2J", b"hello")
    headers = codec.encode_headers(HEARD, id="x", source="future", source_number=1, said_at=NOW)
    made.publish(DREAMT, b"{}", messages.as_sent({**headers, "ce-type": "holdfast.worker_dreamt"}))
    MemoryJournal(made, "worker:w1").observe(HEARD)
    return made


async def inspected(stream: MemoryStream, since: str | None = None, output: str = "text") -> tuple[int, str]:
    said: list[str] = []
    code = await inspect(MemoryJournal(stream, "o"), since, 1, output, said.append)
    return code, "\n".join(said)


async def test_inspect_lists_what_is_skipped_and_where_it_stops(stream: MemoryStream) -> None:
    code, text = await inspected(stream)
    assert code == 3
    skipped, stops, count, way_out = text.splitlines()
    assert (
        skipped.split()[0] == "2"
        and "skipped" in skipped
        and "5 bytes: it has not the CloudEvents" in skipped
    )
    assert "\x1b" not in text
    assert stops.split()[0] == "3" and "stops" in stops and "'worker_dreamt'" in stops
    assert count == "read 4: 1 is stepped over by everybody"
    assert "upgrade this one" in way_out and "holdfast journal quarantine 3 --why TEXT" in way_out


async def test_inspect_begins_where_it_is_told_and_speaks_json(stream: MemoryStream) -> None:
    code, text = await inspected(stream, "3", "json")
    found = json.loads(text)
    assert (code, found["read"], found["stops_at"]) == (3, 2, 3)
    (one,) = found["messages"]
    assert one["seq"] == 3 and one["state"] == "stops" and one["subject"] == DREAMT and one["bytes"] == 2
    assert (await inspected(stream, "4"))[1] == "read 1: all of them are events"
    assert json.loads((await inspected(stream, "2026-01-02T00:00:00Z", "json"))[1])["read"] == 0
    with pytest.raises(UsageError, match="ends at 4, not 5"):
        await inspected(stream, "5")


async def test_what_stops_can_be_quarantined_and_then_everybody_passes(stream: MemoryStream) -> None:
    said: list[str] = []
    journal = MemoryJournal(stream, "operator:o")
    assert await quarantine(journal, 3, "a slip", said.append) == 0
    assert await quarantine(journal, 3, "again", said.append) == 0
    assert said[0] == "event 3 is quarantined: everybody steps over it"
    assert "event 3 is quarantined already" in said[1] and "a slip" in said[1]
    events = [e async for batch in journal.read(0, until=5) for e in batch]
    assert [isinstance(e.fact, Skipped) for e in events] == [False, True, True, False, False]
    code, text = await inspected(stream)
    assert code == 0 and "quarantined by " in text and "2 are stepped over by everybody" in text


async def test_what_is_skipped_can_be_quarantined_too(stream: MemoryStream) -> None:
    assert await quarantine(MemoryJournal(stream, "operator:o"), 2, "to be sure", lambda _: None) == 0
    code, text = await inspected(stream, "2", "json")
    assert code == 3 and json.loads(text)["messages"][0]["state"] == "quarantined"


async def test_what_has_been_folded_is_not_quarantined(stream: MemoryStream) -> None:
    journal = MemoryJournal(stream, "operator:o")
    with pytest.raises(NotToQuarantine, match="event 1 is a worker_heard"):
        await quarantine(journal, 1, "regret")
    with pytest.raises(UsageError, match="ends at 4: there is no event 9"):
        await quarantine(journal, 9, "a guess")
    newer = Absorbed(number=1, decided_at=NOW)
    await journal.append([newer], through=3, after=0)
    with pytest.raises(
        NotToQuarantine, match="decision 1, at 5, was made by a controller that had read event 3"
    ):
        await quarantine(journal, 3, "a slip")
    with pytest.raises(UnknownKind):
        [e async for batch in journal.read(0, until=5) for e in batch]
