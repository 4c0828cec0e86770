"""`holdfast fleet allow` on an earlier release's journal, and commands that meet newer kinds."""

import asyncio
import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pytest
from fleet import holdfast, running, streamed, undisturbed
from nats.js.api import ConsumerConfig
from record import restore
from release_before import RELEASE

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.server import EmbeddedServer
from controller.deciders.fleet import DECIDERS_VERSION
from events import codec
from events.observations import WorkerHeard
from events.subjects import STREAM
from events.versions import new_kinds

pytestmark = [pytest.mark.attack, pytest.mark.servers]

HEARD = WorkerHeard(worker="w0", instance="i", observer="o")
OLD_READER = "r1-0123456789ab"  # a consumer name in the format of 0.2.0


async def typed(fleet: LocalFleet, *words: str) -> Any:
    """Run one command as an operator."""
    return await asyncio.to_thread(holdfast, *words, "--data", str(fleet.data))


async def versions(fleet: LocalFleet) -> dict[str, Any]:
    """Return the output of `holdfast fleet versions`; empty while no controller leads."""
    ran = await typed(fleet, "fleet", "versions", "-o", "json")
    return json.loads(ran.stdout) if ran.returncode == 0 else {}


async def test_kinds_unknown_to_an_old_process_are_used_once_an_operator_allows_them(
    tmp_path: Path, own_nats: EmbeddedServer
) -> None:
    broker = await nats.connect(own_nats.url)
    await restore(broker, (RELEASE / "journal.snapshot").read_bytes())
    stream = broker.jetstream()
    environment = {"HOLDFAST_NATS_URL": own_nats.url, "HOLDFAST_CONTROLLER__VERSIONS__SOAK_S": "1"}
    async with (
        asyncio.timeout(240),
        running(tmp_path / "fleet", "--workers", "2", environment=environment) as fleet,
    ):
        await stream.add_consumer(STREAM, ConsumerConfig(name=OLD_READER, inactive_threshold=300.0))
        await fleet.healthy(2)
        said: dict[str, Any] = {}
        while f"reader {OLD_READER}" not in said.get("held_back", {}).get("by", ()):
            said = await versions(fleet)
        assert said["in_force"]["kinds"] == [] and said["in_force"]["deciders_version"] < DECIDERS_VERSION
        assert set(said["held_back"]["kinds"]) == new_kinds()

        garbage = await stream.publish("fleet.observed.worker.w0.garbage", b"no event")
        refused = await typed(fleet, "journal", "quarantine", str(garbage.seq), "--why", "a slip")
        assert refused.returncode != 0 and "`holdfast fleet allow`" in refused.stderr, refused.stderr

        allowed = await typed(fleet, "fleet", "allow")
        assert allowed.returncode == 0, allowed.stderr
        await all_in_force(fleet)
        await the_controller_is_killed(fleet)
        await all_in_force(fleet)  # a restarted controller reads it from the journal

        quarantined = await typed(fleet, "journal", "quarantine", str(garbage.seq), "--why", "a slip")
        assert quarantined.returncode == 0, quarantined.stderr
        assert await streamed(fleet, [300, 301, 302], 16) == undisturbed([300, 301, 302], 16)
        verified = await typed(fleet, "replay", "verify")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        await commands_skip_what_is_newer(fleet, stream)
    await broker.close()


async def all_in_force(fleet: LocalFleet) -> None:
    said: dict[str, Any] = {}
    while set(said.get("in_force", {}).get("kinds", ())) != new_kinds():
        said = await versions(fleet)
    assert said["in_force"]["deciders_version"] == DECIDERS_VERSION


async def the_controller_is_killed(fleet: LocalFleet) -> None:
    before = pids(await fleet.status())
    os.kill(before["controller"], signal.SIGKILL)
    await fleet.until(lambda status: pids(status).get("controller") not in (None, before["controller"]))


def pids(status: dict[str, Any]) -> dict[str, int]:
    return {process["role"]: process["pid"] for process in status["processes"]}


async def commands_skip_what_is_newer(fleet: LocalFleet, stream: nats.js.JetStreamContext) -> None:
    made = codec.encode_headers(
        HEARD, id=codec.new_id(), source="newer:x", source_number=1, said_at=datetime.now(UTC)
    )
    newer = {**made, "ce-type": "holdfast.worker_dreamt"}
    for _ in range(2):
        newer = {**newer, "ce-id": codec.new_id()}
        newer["Nats-Msg-Id"] = newer["ce-id"]
        await stream.publish("fleet.observed.worker.w0.worker_dreamt", b"{}", headers=newer)
    last = (await stream.stream_info(STREAM)).state.last_seq
    listed = await typed(fleet, "events", "-o", "json")
    assert listed.returncode == 0, listed.stderr
    assert listed.stderr.count("does not know (worker_dreamt)") == 1
    assert "skipped 2 events of unknown kinds" in listed.stderr
    assert last and len(listed.stdout.splitlines()) > 100
    drawn = await typed(fleet, "top", "--once")
    assert drawn.returncode == 0 and "2 events of unknown kinds" in drawn.stdout, drawn.stdout
