"""A fleet that loses its stores: the database is rebuilt; a lost journal is not invented."""

import json
import os
import signal
from pathlib import Path

import asyncpg
from fleet import holdfast, running, streamed, undisturbed
from test_up_servers import FAST, said
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.subjects import STREAM

PROMPT = (300, 301, 302)


async def is_rebuilt(fleet: LocalFleet, times: int) -> None:
    """Wait until it was reported `times` times, the projector has caught up, and the store matches the journal."""
    await until(lambda: fleet.log.read_text().count("the state store was rebuilt") >= times, 60)
    await fleet.until(lambda s: s["projector"]["lag"] == 0, within_s=60)
    verified = holdfast("replay", "verify", "--data", str(fleet.data))
    assert verified.returncode == 0 and "no difference" in verified.stdout, verified.stdout + verified.stderr


async def test_the_database_is_rebuilt_from_the_journal_and_a_lost_journal_is_reported_and_not_invented(
    tmp_path: Path,
) -> None:
    async with running(tmp_path / "fleet", *FAST) as fleet:
        status = await fleet.until(lambda s: "projector" in {p["role"] for p in s["processes"]})
        (fleet.data / "postgres" / "data").rename(tmp_path / "lost")  # at once: the server writes into it
        os.kill(next(p["pid"] for p in status["processes"] if p["role"] == "postgres"), signal.SIGKILL)
        await is_rebuilt(fleet, 1)
        known = json.loads((fleet.data / "fleet.json").read_text())
        owner = await asyncpg.connect(known["database_owner_url"], timeout=10)
        await owner.execute("TRUNCATE holdfast.projection")
        await owner.execute("DROP TABLE holdfast.migrations")
        await owner.close()
        await is_rebuilt(fleet, 2)
        await loses_its_journal(fleet)
        assert fleet.stop() == 0, fleet.last_words()
    refused = holdfast("up", "--data", str(fleet.data), "--port", str(fleet.port), *FAST)
    assert refused.returncode == 1 and "the stream is missing" in refused.stderr
    assert "holdfast up --accept-journal" in refused.stderr.splitlines()[-1]


async def loses_its_journal(fleet: LocalFleet) -> None:
    """Remove the stream from the broker's disk: requests are served, it is reported, and no process creates another."""
    status = await fleet.healthy(2)
    (stored,) = (fleet.data / "nats" / "store").rglob(f"streams/{STREAM}")
    stored.rename(fleet.data.parent / "lost-stream")  # no account may delete it
    os.kill(next(p["pid"] for p in status["processes"] if p["role"] == "nats"), signal.SIGKILL)
    await said(fleet, "the journal is gone; requests are still served")
    assert await streamed(fleet, PROMPT, 16) == undisturbed(PROMPT, 16)
    status = await fleet.until(lambda s: s["journal"]["fault"])
    assert status["journal"]["last_seq"] is None
    for command in (("replay", "verify"), ("events",)):
        asked = holdfast(*command, "--data", str(fleet.data))
        assert asked.returncode == 1 and f"there is no stream {STREAM}" in asked.stderr
