"""A view that an unknown event has stopped goes on from there, once somebody has decided about it."""

import asyncio
from datetime import UTC, datetime

from controller.runtime.view import FleetView
from events import codec
from events.codec import UnknownKind
from events.journal import messages
from events.journal.memory import MemoryJournal, MemoryStream
from events.observations import EventQuarantined, WorkerHeard

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEARD = WorkerHeard(worker="w1", instance="i1", observer="o")


async def test_a_view_goes_on_from_where_it_stopped() -> None:
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
    following = asyncio.create_task(view.run())
    async with asyncio.timeout(20):
        while view.seq < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert view.fault is None and not following.done()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
