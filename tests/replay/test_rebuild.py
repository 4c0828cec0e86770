"""A rebuild with and without a helper process that writes the events: equal tables, or no change."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from any_fact import facts
from fleet_history import EPOCH, History
from hypothesis import given
from memory_journal import MemoryJournal
from roles import process
from store_databases import execute

from controller.adapters.postgres.audit_helper import AuditFailed, AuditHelper, HelperPolicy, rows
from controller.adapters.postgres.store import PostgresStore
from controller.read_model import rows as projection
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events.fact import Fact, Recorded

servers = pytest.mark.servers
ALWAYS = HelperPolicy(events_min=1, cores_min=1)
CHILD = Path(__file__).parent / "rebuild_child.py"
TABLES = (
    "workers", "breakers", "goldens", "levels", "incidents", "migrations", "exposures", "fleet_events", "snapshots",
)  # fmt: skip


@given(facts())
def test_the_helper_makes_the_same_rows_as_the_fold(fact: Fact) -> None:
    event = Recorded(7, EPOCH, fact, "id-7", "source", 3, 5, "correlation", "causation", EPOCH)
    frame = msgspec.json.encode(([fact.kind()], [event]))
    assert rows(frame) == [projection.event_row(event)]


def a_history() -> History:
    history = History().start().corruption()
    history.repeat(history.events[4])
    history.say(history.migrated("req-1", "w0", "w1"), source="frontend-0")
    return history


class Store(PostgresStore):
    """Remembers for the test which store it created beside itself."""

    fresh: PostgresStore

    async def beside(self) -> Any:
        self.fresh = await super().beside()
        return self.fresh


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    """A store that always uses the helper."""
    store = Store(database_url, help_policy=ALWAYS)
    yield store
    await store.close()


async def tables(url: str) -> dict[str, Any]:
    return {name: await execute(url, f"SELECT * FROM holdfast.{name} ORDER BY 1, 2") for name in TABLES}


async def assert_untouched(url: str, before: dict[str, Any]) -> None:
    assert await tables(url) == before
    schemas = await execute(url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast%'")
    assert [row["nspname"] for row in schemas] == ["holdfast"]


def gone(pid: int | None) -> bool:
    """Return whether a process has ended; an unreaped zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def noting(store: Store, pids: list[int | None]) -> Any:
    """Return a callback that records the helper's pid with each batch."""
    return lambda seq, events: pids.append(store.fresh.helper_pid)


@pytest.mark.slow
@servers
async def test_two_processes_make_the_tables_that_one_makes(store: Store) -> None:
    history, pids = a_history(), list[int | None]()
    journal, last = MemoryJournal(history.stream, "p"), len(history.events)
    await Projector(journal, store).catch_up(last)
    alone = await tables(store.url)
    helped = await rebuild(journal, store, written=noting(store, pids))
    assert (helped.events, helped.position) == (last, last)
    await assert_untouched(store.url, alone)
    report = await verify(journal, store)
    assert report.difference is None, report.lines()
    assert pids[0] is not None and gone(pids[0])


@pytest.mark.slow
@servers
async def test_a_stream_that_grows_meanwhile_is_projected_and_audited_to_the_same_position(
    store: Store,
) -> None:
    history = a_history()
    journal, left = MemoryJournal(history.stream, "p"), 2

    def grow(seq: int, events: int) -> None:
        nonlocal left
        if left:
            left -= 1
            history.say(*(history.passed(f"w{n % 3}") for n in range(1_200)), seconds=0.001)

    rebuilt = await rebuild(journal, store, written=grow)
    kept = await execute(store.url, "SELECT max(seq) FROM holdfast.fleet_events")
    assert rebuilt.position == kept[0][0] == (await store.position()).seq > 2_000
    report = await verify(journal, store)
    assert report.difference is None, report.lines()


@pytest.mark.slow
@servers
async def test_a_helper_that_is_killed_ends_the_rebuild_and_nothing_is_left(store: Store) -> None:
    history, pids = a_history(), list[int | None]()
    journal = MemoryJournal(history.stream, "p")
    await Projector(journal, store).catch_up(10)
    before = await tables(store.url)

    def kill(seq: int, events: int) -> None:
        assert store.fresh.helper_pid is not None
        pids.append(store.fresh.helper_pid)
        os.kill(store.fresh.helper_pid, signal.SIGKILL)

    with pytest.raises(AuditFailed, match="exit status -9"):
        await rebuild(journal, store, written=kill)
    await assert_untouched(store.url, before)
    assert (await store.position()).seq == 10 and gone(pids[0])


@servers
async def test_a_helper_that_hangs_is_not_waited_for(database_url: str) -> None:
    store = Store(database_url, help_policy=replace(ALWAYS, answer_s=0.5))
    history, pids = a_history(), list[int | None]()

    def stop(seq: int, events: int) -> None:
        assert store.fresh.helper_pid is not None
        pids.append(store.fresh.helper_pid)
        os.kill(store.fresh.helper_pid, signal.SIGSTOP)

    with pytest.raises(AuditFailed, match="silent for"):
        await rebuild(MemoryJournal(history.stream, "p"), store, written=stop)
    await assert_untouched(store.url, await tables(store.url))
    assert gone(pids[0])
    await store.close()


@servers
async def test_an_error_of_the_helper_is_reported(store: Store) -> None:
    helper = AuditHelper(store.url, "nowhere", ALWAYS)
    assert await helper.write(a_history().events)
    with pytest.raises(AuditFailed, match=r"fleet_events.*does not exist"):
        await helper.flush()
    await helper.close()


@servers
async def test_a_failure_of_the_fold_leaves_nothing(store: Store) -> None:
    class Broken(MemoryJournal):
        async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
            async for batch in super().read(after, until=until):
                yield batch[:10]
                raise AuditFailed("the journal is damaged")

    history = a_history()
    before = await tables(store.url)
    with pytest.raises(AuditFailed, match="damaged"):
        await rebuild(Broken(history.stream, "p"), store)
    await assert_untouched(store.url, before)


@servers
async def test_a_short_history_and_a_single_core_need_no_helper(database_url: str) -> None:
    history = a_history()
    helper = AuditHelper(database_url, "nowhere", HelperPolicy(events_min=11))
    assert not await helper.write(history.events[:10]) and helper.pid is None
    assert not await helper.write(history.events[10:21]), "one process writes the rows"
    cores = len(os.sched_getaffinity(0))
    assert HelperPolicy(cores_min=cores).possible() and not HelperPolicy(cores_min=cores + 1).possible()


@pytest.mark.slow
@servers
async def test_a_killed_rebuild_leaves_no_process_and_the_next_one_succeeds(
    store: Store, eventually: Any
) -> None:
    history = a_history()
    journal = MemoryJournal(history.stream, "p")
    async with process(sys.executable, str(CHILD), store.url, stdout=asyncio.subprocess.PIPE) as child:
        assert child.stdout is not None
        async with asyncio.timeout(30):
            pid = int(await child.stdout.readline())
        assert not gone(pid)
    await eventually(lambda: gone(pid))
    assert (await rebuild(journal, store)).position == len(history.events)
    report = await verify(journal, store)
    assert report.difference is None, report.lines()
    await assert_untouched(store.url, await tables(store.url))
