"""A view and the rows of the store agree at the same position, and differences are reported."""

import asyncio
from typing import Any

from fleet_history import History
from memory_journal import MemoryJournal
from memory_store import MemoryStore

from controller.ports import RowsRead, StoreUnavailable
from controller.read_model import rows as projection
from controller.read_model.diff import RowDifference
from controller.read_model.errors import StoreRefused
from controller.runtime.projection.projector import Projector
from controller.runtime.projection.row_watch import RowWatch
from controller.runtime.view import FleetView


async def test_rows_are_compared_at_their_own_position(eventually: Any) -> None:
    history, store = History().start(), MemoryStore()
    view = FleetView(MemoryJournal(history.stream, "frontend:f0"))
    watch = RowWatch(view, store)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(view.run())
        await eventually(lambda: view.seq == len(history.events))
        assert await watch.compare() == []  # nothing is projected, and the view was empty then
        await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
        assert await watch.compare() == []
        history.say(history.failed("w0", confirmed=True, reason="token_mismatch"))
        await eventually(lambda: view.seq == len(history.events))
        assert await watch.compare() == []  # the view is ahead, but it keeps its earlier states
        rows, weight = store.tables.rows["workers"], projection.COLUMNS["workers"].index("weight")
        rows["w1",] = (*rows["w1",][:weight], 0.25, *rows["w1",][weight + 1 :])
        found = await watch.compare()
        following.cancel()
    assert found == [RowDifference("workers: weight of w1", 1.0, 0.25)]


async def test_an_unavailable_store_or_missing_tables_do_not_end_the_watch(eventually: Any) -> None:
    class Strange(MemoryStore):
        asked = 0

        async def read_status(self) -> RowsRead:
            self.asked += 1
            raise (StoreUnavailable, StoreRefused)[self.asked % 2]

    view, store = FleetView(MemoryJournal(History().stream, "frontend:f0")), Strange()
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(RowWatch(view, store, every_s=0.001).run())
        await eventually(lambda: store.asked >= 3)
        watching.cancel()
