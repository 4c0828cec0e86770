"""The projector with real servers and real kills: its own, Postgres's, the broker's; and refusals."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import first_database
import nats
import pytest
from fleet_history import History, publish
from journal_end import last_seq
from memory_journal import MemoryJournal
from roles import process
from store_databases import execute
from typed_commands import run_command
from waits import turns

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from controller.adapters.postgres.link import StoreCannotKeep
from controller.adapters.postgres.store import PostgresStore
from controller.deciders.fleet import Fleet, evolve
from controller.read_model import rows as projection
from controller.replay.rebuild import rebuild
from controller.replay.verify import verify
from controller.runtime.projection.projector import Projector
from events.fact import Recorded
from events.journal.nats import NatsJournal
from events.order import Order

pytestmark = pytest.mark.servers
CHILD = Path(__file__).parent / "projector_child.py"


async def everything(journal: Any) -> list[Recorded]:
    last = await last_seq(journal)
    return [event async for batch in journal.read(0, until=last) for event in batch]


async def assert_is_the_fold(journal: Any, url: str) -> None:
    """Assert that rows, position and kept events are the journal's, each event once, and that verify agrees."""
    store = PostgresStore(url)
    events = await everything(journal)
    order: Order[Fleet] = Order(evolve, Fleet())
    for event in events:
        order.take(event)
    kept = await execute(url, "SELECT seq, id FROM holdfast.fleet_events ORDER BY seq")
    assert [(row["seq"], row["id"]) for row in kept] == [(event.seq, event.id) for event in events]
    reading = await store.read_status()
    assert reading.position.seq == len(events) and reading.position.settled == order.position
    for name, rows in projection.state(order.shown).items():
        found = {tuple(row[c] for c in projection.COLUMNS[name]) for row in reading.rows[name]}
        assert {projection.comparable(name, r) for r in found} == {
            projection.comparable(name, r) for r in rows
        }
    report = await verify(journal, store)
    assert report.difference is None, report.lines()
    await store.close()


async def child(*arguments: object) -> int:
    async with process(sys.executable, str(CHILD), *map(str, arguments)) as one, asyncio.timeout(60):
        return await one.wait()


@pytest.mark.slow
async def test_killed_at_every_step_in_a_process_of_its_own(
    nats_url: str, database_url: str, tmp_path: Path
) -> None:
    history = History().start().corruption()
    journal = await NatsJournal.connect(nats_url, "test:history", tmp_path / "spool")
    half = len(history.events) // 2
    steps = ("begin", "loaded", "read", "folded", "writing", "written")
    for n, step in enumerate(steps):
        last = await publish(nats_url, history.events[half * n // 6 : half * (n + 1) // 6])
        died = await child(nats_url, database_url, tmp_path / "child", last, step, 1)
        assert died == -signal.SIGKILL, step
    last = await publish(nats_url, history.events[half:])
    assert await child(nats_url, database_url, tmp_path / "child", last, "never", 1) == 0
    await assert_is_the_fold(journal, database_url)
    await journal.close()


class Load:
    """A history that continues while processes die."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.journal = MemoryJournal(history.stream, "load-1")

    async def run(self, seconds: float = 0.001) -> None:
        """Record facts until cancelled, with decisions among them."""
        for n in range(10**9):
            worker = f"w{n % 3}"
            fact = self.history.failed(worker) if n % 7 == 0 else self.history.passed(worker)
            self.history.say(fact)
            if n % 5 == 0:
                self.history.say(self.history.migrated(f"req-{n}", worker, "w0"), source="frontend-0")
            if n % 10 == 0:
                self.history.decide(seconds=5)
            await asyncio.sleep(seconds)  # the pace of the load


PATIENCE_S = 30


@pytest.mark.slow
async def test_postgres_killed_again_and_again_under_load(tmp_path: Path, eventually: Any) -> None:
    directory = tmp_path / "postgres"
    server = await start_postgres(directory)
    url = first_database.urls(server).owner
    await migrate.upgrade(url)
    load, store = Load(History().start()), PostgresStore(url, snapshot_every=25)
    projector = Projector(load.journal, store)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(load.run()), group.create_task(projector.run())]
            for _ in range(6):
                goal = projector.progress.events + 20
                await eventually(lambda goal=goal: projector.progress.events >= goal, PATIENCE_S)
                await server.kill()
                server = await start_postgres(directory, port=server.port)
            tasks[0].cancel()
            end = len(load.history.events)
            await eventually(lambda: projector.progress.projected == end, PATIENCE_S)
            tasks[1].cancel()
        assert projector.progress.restarts >= 5
        await assert_is_the_fold(load.journal, url)
    finally:
        await store.close()
        await server.kill()


@pytest.mark.slow
async def test_a_broker_killed_twenty_times_leaves_every_fact_in_postgres_once(
    own_nats: EmbeddedServer, database_url: str, tmp_path: Path, eventually: Any
) -> None:
    history, server = History(), own_nats
    speaker = await NatsJournal.connect(server.url, "worker:w0", tmp_path / "spool")
    reader = await NatsJournal.connect(server.url, "projector:p0")
    store, said = PostgresStore(database_url, snapshot_every=50), 0
    projector = Projector(reader, store)

    async def speak() -> None:
        nonlocal said
        speaker.observe(history.joined("w0"))
        for said in range(1, 10**9):  # noqa: B007
            speaker.observe(history.passed("w0"))
            await asyncio.sleep(0.002)  # the pace of the load

    async with asyncio.TaskGroup() as group:
        speaking, projecting = group.create_task(speak()), group.create_task(projector.run())
        for _ in range(20):
            goal = projector.progress.events + 5
            await eventually(lambda goal=goal: projector.progress.events >= goal, 30)
            await server.kill()
            server = await start_nats(server.directory, port=server.port)
        speaking.cancel()
        await eventually(lambda: speaker.spool_depth == 0, 30)
        end = await last_seq(speaker)
        await eventually(lambda: projector.progress.projected == end, 30)
        projecting.cancel()
    await assert_is_the_fold(reader, database_url)
    kept = await execute(
        database_url,
        "SELECT source_number FROM holdfast.fleet_events WHERE source LIKE 'worker:w0%' ORDER BY source_number",
    )
    assert [row["source_number"] for row in kept] == list(range(1, said + 2))
    await store.close()
    await speaker.close()
    await reader.close()
    await server.kill()


@pytest.mark.slow
async def test_a_rebuild_while_a_projector_writes(database_url: str, eventually: Any) -> None:
    load, store = Load(History().start()), PostgresStore(database_url, snapshot_every=25)
    projector = Projector(load.journal, store)
    seen: list[int] = []

    async def look() -> None:
        reader = PostgresStore(database_url)
        try:
            while True:
                seen.append((await reader.position()).seq)
                await turns()
        finally:
            await reader.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in (load.run(), projector.run(), look())]
        await eventually(lambda: projector.progress.events > 50, 30)
        for _ in range(3):
            maker = PostgresStore(database_url)
            rebuilt = await rebuild(load.journal, maker)
            assert rebuilt.events >= rebuilt.position > 50 and not rebuilt.foreign
            await maker.close()
            goal = len(load.history.events) + 20
            await eventually(lambda goal=goal: projector.progress.projected >= goal, 30)
        tasks[0].cancel()
        end = len(load.history.events)
        await eventually(lambda: projector.progress.projected == end, 30)
        for task in tasks:
            task.cancel()
    await store.close()
    assert seen == sorted(seen), "readers saw the projection move backwards"
    await assert_is_the_fold(load.journal, database_url)
    schemas = await execute(database_url, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'holdfast%'")
    assert [row["nspname"] for row in schemas] == ["holdfast"]


async def test_a_rebuild_repairs_a_projection_of_another_stream(database_url: str) -> None:
    old, new = History().start().corruption(), History().start(2)
    store = PostgresStore(database_url)
    await Projector(MemoryJournal(old.stream, "p"), store).catch_up(len(old.events))
    rebuilt = await rebuild(MemoryJournal(new.stream, "p"), store)
    assert rebuilt.foreign and rebuilt.position == len(new.events)
    await store.close()
    await assert_is_the_fold(MemoryJournal(new.stream, "p"), database_url)


async def refused(nats_url: str, database_url: str, data: Path) -> str:
    """Start the real process, expect it to give up, and return its last line of output."""
    servers = ("--nats-url", nats_url, "--database-url", database_url)
    done = await asyncio.to_thread(run_command, ["projector", *servers, "--data", str(data)], os.environ)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


async def test_the_process_refuses_a_database_that_is_ahead(
    nats_url: str, database_url: str, tmp_path: Path
) -> None:
    await execute(database_url, "UPDATE holdfast.projection SET shown_seq = 500, shown_id = 'x'")
    journal = await NatsJournal.connect(nats_url, "test:history")
    await publish(nats_url, History().start().events)
    await journal.close()
    assert "the state store has folded event 500, the stream ends at" in await refused(
        nats_url, database_url, tmp_path
    )


async def test_the_process_refuses_an_unknown_kind(nats_url: str, database_url: str, tmp_path: Path) -> None:
    journal = await NatsJournal.connect(nats_url, "test:history")
    last = await publish(nats_url, History().start().events)
    client = await nats.connect(nats_url)
    headers = {
        "ce-specversion": "1.0",
        "ce-id": "x",
        "ce-type": "holdfast.worker_dreamt",
        "ce-source": "future",
    }
    await client.jetstream().publish("fleet.observed.worker.w0.worker_dreamt", b"{}", headers=headers)
    said = await refused(nats_url, database_url, tmp_path)
    assert (
        f"event {last + 1}, on fleet.observed.worker.w0.worker_dreamt, is of the kind 'worker_dreamt'" in said
    )
    assert "Upgrade" in said and f"holdfast journal quarantine {last + 1}" in said
    await client.close()
    await journal.close()
    place = (await execute(database_url, "SELECT shown_seq FROM holdfast.projection"))[0]["shown_seq"]
    assert place <= last


@pytest.mark.slow
async def test_the_process_projects_serves_its_admin_port_and_stops_gracefully(
    nats_url: str, database_url: str, tmp_path: Path, eventually: Any
) -> None:
    import aiohttp

    from events.process.presence import present

    journal = await NatsJournal.connect(nats_url, "test:history")
    last = await publish(nats_url, History().start().corruption().events)
    command = [sys.executable, "-m", "controller.cli", "projector", "--data", str(tmp_path)]
    servers = ["--nats-url", nats_url, "--database-url", database_url]
    async with process(*command, *servers, stderr=asyncio.subprocess.DEVNULL) as projector:
        await eventually(lambda: present(tmp_path), 20)
        (found,) = present(tmp_path)
        assert (found.role, found.pid) == ("projector", projector.pid)
        async with aiohttp.ClientSession() as session:

            async def lag() -> bool:
                async with session.get(f"{found.url}/ready") as answer:
                    report = await answer.json()
                    return answer.status == 200 and (report["position"], report["lag"]) == (last, 0)

            await eventually(lag, 20)
            async with session.get(f"{found.url}/metrics") as answer:
                text = await answer.text()
        assert f"holdfast_projector_position {last}.0" in text
        assert "holdfast_projector_lag 0.0" in text
        projector.terminate()
        assert await asyncio.wait_for(projector.wait(), 20) == 0
    await journal.close()
    await assert_is_the_fold_of(nats_url, database_url)


async def assert_is_the_fold_of(nats_url: str, database_url: str) -> None:
    journal = await NatsJournal.connect(nats_url, "test:check")
    await assert_is_the_fold(journal, database_url)
    await journal.close()


async def test_a_value_that_no_column_can_hold_is_refused_without_endless_retries(database_url: str) -> None:
    for portion in (1, 600):  # as arrays, and by COPY
        history = History().start(1)
        history.say(*(history.passed("w0") for _ in range(portion)))
        history.events[-1] = replace(history.events[-1], source_number=2**70)
        store = PostgresStore(database_url)
        with pytest.raises(StoreCannotKeep, match="refuses a statement"):
            await Projector(MemoryJournal(history.stream, "p"), store).run()
        await store.close()


async def test_the_views_work(database_url: str) -> None:
    history = History().start().corruption()
    store = PostgresStore(database_url)
    await Projector(MemoryJournal(history.stream, "p"), store).catch_up(len(history.events))
    await store.close()
    connection: asyncpg.Connection = await asyncpg.connect(database_url)
    now = await connection.fetch("SELECT worker, health, breaker FROM holdfast.fleet_now ORDER BY worker")
    (capacity,) = await connection.fetch("SELECT * FROM holdfast.model_capacity")
    await connection.close()
    assert [row["worker"] for row in now] == ["w0", "w1", "w2"]
    assert (capacity["model"], capacity["workers"]) == ("llama", 3)
