"""A compromised worker floods the fleet: it is reported and ejected, and no other answer suffers."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from fleet import streamed, undisturbed
from rogue_fleet import addresses, ejected, instances, reported, with_rogue

SECONDS = 60.0  # at most: it ends when the sender is ejected
SMALL = {  # budgets that every machine's flood exceeds, and no honest worker of these tests
    f"HOLDFAST_FRONTEND__WORKER_BUDGETS__{name}": str(value)
    for name, value in {
        "FRAMES_PER_S": 500, "FRAMES_BURST": 5000, "KV_BATCHES_PER_S": 200, "KV_BATCHES_BURST": 2000,
    }.items()
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("frames", "flood a frontend with frames"),
        ("kv_events", "flood the frontends with KV events"),
        ("beats", "flood the controllers with heartbeats"),
    ],
)
async def test_a_flood_is_stopped_and_reported_and_its_sender_ejected(
    tmp_path: Path, kind: str, words: str
) -> None:
    async with with_rogue(tmp_path, environment=SMALL) as (fleet, rogue):
        before = await instances(fleet)
        flood = asyncio.ensure_future(rogue.flood(kind, SECONDS))
        try:
            fact = await reported(fleet, words, 60)
            assert (fact.who, fact.worker, fact.eject) == ("worker-x0", "x0", True)
            for number in range(3):
                prompt = [300 + number, 301]
                assert await streamed(fleet, prompt, 16) == undisturbed(prompt, 16)
            await ejected(fleet, "x0", 60)
        finally:
            flood.cancel()
        assert (await instances(fleet))["w0"] == before["w0"], "the other worker lives as before"
        assert await streamed(fleet, [400, 401], 16) == undisturbed([400, 401], 16)


async def test_connections_with_the_fleets_key_keep_no_frontend_out(tmp_path: Path) -> None:
    """A worker limits the connections of one address; those in use stay, and a later frontend is admitted."""
    async with with_rogue(tmp_path) as (fleet, rogue):
        held = await rogue.connect_to((await addresses(fleet))["w0"], 400)
        open_now = [one for one in held if one.live]
        assert 200 < len(open_now) < 300, len(open_now)
        (frontend,) = (p["pid"] for p in (await fleet.status())["processes"] if p["role"] == "frontend")
        os.kill(frontend, signal.SIGKILL)
        await fleet.until(lambda s: frontend not in {p["pid"] for p in s["processes"]}, 60)
        await fleet.ready()
        await fleet.act("drain", "x0")  # all requests go to the worker with the occupied connections
        for number in range(3):
            prompt = [300 + number, 301]
            assert await streamed(fleet, prompt, 16) == undisturbed(prompt, 16)
        for one in held:
            one.abort("disconnected", "the test is over")
