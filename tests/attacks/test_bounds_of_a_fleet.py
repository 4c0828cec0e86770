"""A fleet with a full journal keeps running: events before a snapshot are dropped.

Every process can still start.
"""

import asyncio
import os
import signal
from pathlib import Path

from fleet import holdfast, running, streamed, undisturbed
from store_databases import execute
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.processes.operator_client import find
from controller.runtime.snapshot_publisher import newest_kept
from events.journal import bounds
from events.journal.bounds import SnapshotPosition
from events.journal.nats import NatsJournal
from events.journal.retention import JournalBounds
from events.observations import WorkerLeft

FLAGS = ("--workers", "2", "--canary-interval", "0.5", "--breaker-wait", "1", "--journal-max-bytes", "8MiB")
KIB = 1024
BOUND = JournalBounds(bytes=256 * KIB)
FILLER = WorkerLeft(worker="filler", instance="x" * 200, mode="immediate", exit=0)


async def test_a_full_journal_stops_nothing_and_loses_no_state(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS) as fleet:
        await fleet.healthy(2)
        await until(lambda: "the journal now keeps at most 8 MiB" in fleet.log.read_text(), 60)
        status = await fleet.status()
        assert status["journal"]["bytes_max"] == 8 * KIB * KIB

        journal = await NatsJournal.connect(fleet.nats_url("supervisor"), "supervisor:test", None, make=False)
        try:
            async with asyncio.timeout(120):
                first = await fill(journal)
        finally:
            await journal.close()

        pids = {p["role"]: p["pid"] for p in (await fleet.status())["processes"]}
        for role in ("controller", "frontend", "projector"):
            os.kill(pids[role], signal.SIGKILL)
        await fleet.until_reachable()
        await fleet.healthy(2)
        assert await streamed(fleet, [300, 301], 16) == undisturbed([300, 301], 16)
        verified = await said(fleet, "replay", "verify")
        assert "the journal begins at " in verified and "no difference" in verified
        assert (await said(fleet, "events")).splitlines()[0].split()[0] != "1"
        assert "journal      events " in await said(fleet, "status")

        await execute(find(fleet.data)["database_owner_url"], "DROP SCHEMA holdfast CASCADE")
        await until(lambda: "the state store was rebuilt" in fleet.log.read_text(), 60)
        back = await fleet.until(lambda s: s["projector"]["lag"] == 0, 60)
        assert back["journal"]["first_seq"] >= first
        assert "no difference" in await said(fleet, "replay", "verify")
        await fleet.healthy(2)


async def fill(journal: NatsJournal) -> int:
    """Fill the journal, as in years of use, until its beginning is dropped; return its new first sequence."""
    kept = await newest_kept(journal)
    assert kept is not None, "before the bound was set"
    while not bounds.safe(BOUND, await journal.usage(), kept):
        kept = await newer_than(journal, kept)
    assert await bounds.bound(journal.connection, BOUND)
    before = await journal.last_seq()
    while (first := await journal.first_seq()) <= before:
        for _ in range(60):
            journal.observe(FILLER)
        assert await journal.flush(10)
        kept = await newer_than(journal, kept)
    return first


async def newer_than(journal: NatsJournal, kept: SnapshotPosition) -> SnapshotPosition:
    """Wait until the controller has written the next snapshot."""

    async def newer() -> SnapshotPosition | None:
        found = await newest_kept(journal)
        return found if found is not None and found.through > kept.through else None

    return await until(newer, 60, every_s=0.2)


async def said(fleet: LocalFleet, *command: str) -> str:
    """Run a command that finds nothing wrong, and return its output."""
    ran = await asyncio.to_thread(holdfast, *command, "--data", str(fleet.data))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
