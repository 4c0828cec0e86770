"""A view that an unknown event or a decision out of turn has stopped continues after the quarantine."""

import asyncio
from datetime import UTC, datetime

import pytest
from memory_journal import MemoryJournal, MemoryStream
from structlog.testing import capture_logs
from waits import until

from controller.runtime.view import FleetView
from events import codec
from events.codec import UnknownKind
from events.decisions import Absorbed
from events.journal import messages
from events.observations import EventQuarantined, WorkerHeard
from events.order import OutOfTurn

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEARD = WorkerHeard(worker="w1", instance="i1", observer="o")


async def test_a_view_continues_from_where_it_stopped() -> None:
    stream = MemoryStream()
    journal = MemoryJournal(stream, "worker:w1")
    journal.observe(HEARD)
    headers = codec.encode_headers(HEARD, id="x", source="future", source_number=1, said_at=NOW)
    unknown = messages.as_sent({**headers, "ce-type": "holdfast.worker_dreamt"})
    stream.publish("fleet.observed.worker.w1.worker_dreamt", b"{}", unknown)
    view = FleetView(MemoryJournal(stream, "frontend:f0"))
    for _ in range(2):
        try:
            async with asyncio.timeout(20):
                await view.run()
        except UnknownKind:
            assert view.seq == 1 and view.fault is not None
    journal.observe(EventQuarantined(event=2, why="a slip"))
    await follows(view, 3)


async def test_a_view_stops_before_a_decision_out_of_turn_and_reports_earlier_events_once() -> None:
    stream = MemoryStream()
    journal, told = MemoryJournal(stream, "worker:w1"), list[int]()
    journal.observe(HEARD)
    controller = MemoryJournal(stream, "controller:c0")
    await controller.append([Absorbed(number=7, decided_at=NOW)], through=1, after=0)
    view = FleetView(MemoryJournal(stream, "frontend:f0"))
    view.listen(lambda _, batch: told.extend(event.seq for event in batch))
    for _ in range(3):
        with pytest.raises(OutOfTurn), capture_logs() as logs:
            async with asyncio.timeout(20):
                await view.run()
        assert (view.seq, told) == (1, [1])
    assert not logs, "it has said so"
    journal.observe(EventQuarantined(event=2, why="forged"))
    await controller.append([Absorbed(number=1, decided_at=NOW)], through=3, after=2)
    await follows(view, 4)
    assert told == [1, 2, 3, 4] and view.number == 1


async def follows(view: FleetView, seq: int) -> None:
    """Let a view follow up to a sequence."""
    following = asyncio.create_task(view.run())
    await until(lambda: view.seq >= seq)
    assert view.fault is None and not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
