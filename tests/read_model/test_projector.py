"""The projector: the store's rows are the journal's fold, each event once, despite all failures."""

import asyncio
import contextlib
from typing import Any

import pytest
from fleet_history import History
from memory_journal import MemoryJournal, MemoryStream
from memory_store import MemoryStore
from projector_steps import STEPS, JournalSteps, Step, StoreSteps
from store_databases import AnyStore, OpenStore, execute
from waits import turns

from controller.adapters.postgres.store import PostgresStore
from controller.ports import AnotherProjector, StoreAhead
from controller.read_model import rows as projection
from controller.runtime.projection.projector import Projector
from events.journal.port import JournalChanged


class Killed(Exception):
    """The projector was interrupted here."""


def kill_at(wanted: str, nth: int) -> Step:
    count = 0

    async def step(name: str) -> None:
        nonlocal count
        count += name == wanted
        if name == wanted and count == nth:
            raise Killed

    return step


def journal(history: History) -> MemoryJournal:
    return MemoryJournal(history.stream, "projector-1")


async def in_portions(history: History, store: AnyStore) -> None:
    """Project all missing events, each in its own batch."""
    for until in range(1, len(history.events) + 1):
        await Projector(journal(history), store).catch_up(until)


async def assert_projected(history: History, store: AnyStore) -> None:
    """Assert that the rows are the fold of the whole history, and that every event is kept once."""
    async with store.reading() as frozen:
        kept = [projection.recorded(row) async for batch in frozen.events(0) for row in batch]
        assert kept == history.events
        assert frozen.reading.position.seq == len(history.events)
        assert frozen.reading.position.settled == history.order().position
        for name, rows in projection.state(history.fleet).items():
            found = {tuple(row[c] for c in projection.COLUMNS[name]) for row in frozen.reading.rows[name]}
            assert {projection.comparable(name, r) for r in found} == {
                projection.comparable(name, r) for r in rows
            }
        assert len(frozen.reading.rows["migrations"]) == sum(
            e.fact.kind() == "request_migrated" for e in kept
        )


@pytest.mark.parametrize("name", STEPS)
async def test_killed_at_every_step_the_state_is_the_fold_without_duplicates(
    open_store: OpenStore, name: str
) -> None:
    history = History().start().corruption()
    for part in range(1, 4):
        until = len(history.events) * part // 3
        with contextlib.suppress(Killed):
            step = kill_at(name, 1)
            store = StoreSteps(open_store(snapshot_every=5), step)
            await Projector(JournalSteps(journal(history), step), store).catch_up(until)
            pytest.fail(f"the projector never came to {name}")
    whole = open_store()
    await Projector(journal(history), whole).catch_up(len(history.events))
    await assert_projected(history, whole)


async def test_two_projectors_at_once_are_safe(open_store: OpenStore, eventually: Any) -> None:
    history = History().start()
    stores = [open_store(snapshot_every=10), open_store(snapshot_every=10)]
    projectors = [Projector(journal(history), store) for store in stores]
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(projector.run()) for projector in projectors]
        for _ in range(40):
            history.say(history.passed("w0"), history.passed("w1"))
            await turns()
        await eventually(lambda: max(p.progress.projected for p in projectors) == len(history.events), 20)
        for task in running:
            task.cancel()
    await assert_projected(history, stores[0])


async def test_a_projector_that_is_cancelled_while_it_fails_ends() -> None:
    history, store = History().start(), MemoryStore()
    started = asyncio.Event()

    async def fail_when_cancelled(name: str) -> None:
        if name == "writing":
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise AnotherProjector from None

    running = asyncio.create_task(Projector(journal(history), StoreSteps(store, fail_when_cancelled)).run())
    await started.wait()
    running.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait({running})
    assert running.cancelled()


async def test_the_projector_waits_for_an_unavailable_store(eventually: Any) -> None:
    history, store = History().start(), MemoryStore()
    store.tables.reachable = False
    projector = Projector(journal(history), store)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(projector.run())
        await eventually(lambda: projector.progress.restarts >= 2)
        assert not projector.progress.connected
        store.tables.reachable = True
        await eventually(lambda: projector.progress.projected == len(history.events), 20)
        running.cancel()
    await assert_projected(history, store)


async def test_a_store_that_is_ahead_of_the_stream_is_refused(open_store: OpenStore) -> None:
    history = History().start()
    await Projector(journal(history), open_store()).catch_up(len(history.events))
    restored = MemoryStream(events=history.events[:-2])
    with pytest.raises(StoreAhead, match=f"has folded event {len(history.events)}, the stream ends at"):
        await Projector(MemoryJournal(restored, "p"), open_store()).run()


async def test_a_recreated_stream_is_refused(open_store: OpenStore) -> None:
    history, other = History().start(), History().start().corruption()
    await Projector(journal(history), open_store()).catch_up(len(history.events))
    with pytest.raises(JournalChanged, match=f"event {len(history.events)} of the stream is"):
        await Projector(journal(other), open_store()).run()


async def test_a_snapshot_of_other_deciders_is_not_used(open_store: OpenStore, database_url: str) -> None:
    history = History().start().corruption()
    store = open_store(snapshot_every=3)
    await in_portions(history, store)
    assert await store.load() is not None
    if isinstance(store, MemoryStore):
        from dataclasses import replace

        store.tables.snapshots[:] = [replace(kept, deciders_version=0) for kept in store.tables.snapshots]
    else:
        await execute(database_url, "UPDATE holdfast.snapshots SET deciders_version = 0")
    assert await store.load() is None
    history.say(history.passed("w0"))
    await Projector(journal(history), open_store()).catch_up(len(history.events))
    await assert_projected(history, store)


@pytest.mark.parametrize("change", ["fleet = 'broken'::bytea", """sources = '{"test-1": 7}'"""])
async def test_a_damaged_snapshot_is_not_used(database_url: str, change: str) -> None:
    history, store = History().start().corruption(), PostgresStore(database_url, snapshot_every=3)
    await in_portions(history, store)
    await execute(database_url, f"UPDATE holdfast.snapshots SET {change}")
    assert await store.load() is None
    history.say(history.passed("w0"))
    await Projector(journal(history), store).catch_up(len(history.events))
    await assert_projected(history, store)
    await store.close()


async def test_large_batches_with_a_repeated_event_are_copied(open_store: OpenStore) -> None:
    history = History().start()
    number = history.order().position.number
    for _ in range(600):  # more than one page of reading
        history.say(history.passed("w0"), history.passed("w1"))
    history.repeat(history.events[-5])
    assert history.order().position.number == number
    store = open_store()
    await Projector(journal(history), store).catch_up(len(history.events))
    async with store.reading() as frozen:
        kept = [row async for batch in frozen.events(0) for row in batch]
    assert len(kept) == len(history.events) - 1
    assert [row[0] for row in kept] == [e.seq async for batch in store.select() for e in batch]
    assert (await store.position()).seq == len(history.events)


async def test_a_history_is_written_in_few_transactions() -> None:
    class OneByOne(MemoryJournal):
        async def read(self, after: int, *, until: int | None = None) -> Any:
            async for batch in super().read(after, until=until):
                for event in batch:
                    yield [event]
                    await turns()  # let the writer run

    history, store = History().start().corruption(), MemoryStore()
    projector = Projector(OneByOne(history.stream, "projector-1"), store)
    await projector.catch_up(len(history.events))
    assert projector.progress.batches == 1 and (await store.position()).seq == len(history.events)
