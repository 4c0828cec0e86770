"""No process continues with a changed stream before an operator decides, and the error says how."""

import os
import signal
from pathlib import Path

import aiohttp
import nats
from fleet import running
from waits import until

from controller.adapters.embedded.server import EmbeddedServer
from events.journal.nats import NatsJournal
from events.subjects import STREAM

BODY = {"model": "sim", "prompt": [300, 301, 302], "max_tokens": 16, "temperature": 0, "ignore_eos": True}


async def status(session: aiohttp.ClientSession) -> int | None:
    """Send a request; return the status, or None if nothing listens."""
    try:
        async with session.post("/v1/completions", json=BODY) as answer:
            return answer.status
    except aiohttp.ClientError:
        return None


async def test_a_running_frontend_keeps_serving_and_a_new_one_serves_from_the_state_store(
    tmp_path: Path, own_nats: EmbeddedServer
) -> None:
    broker_of_its_own = {
        "HOLDFAST_NATS_URL": own_nats.url
    }  # on the embedded broker no account may delete the stream
    async with running(tmp_path / "fleet", "--workers", "2", environment=broker_of_its_own) as fleet:
        before = await fleet.healthy(2)
        (pid,) = (p["pid"] for p in before["processes"] if p["role"] == "frontend")
        await fleet.until(lambda s: s["projector"]["lag"] == 0)
        log = fleet.data / "logs" / "frontend-0.log"
        async with aiohttp.ClientSession(fleet.url, timeout=aiohttp.ClientTimeout(total=10)) as session:
            url = own_nats.url
            broker = await nats.connect(url)
            await broker.jetstream().delete_stream(STREAM)
            await broker.close()
            stranger = await NatsJournal.connect(
                url, "controller:stranger"
            )  # a process that remembers no stream creates another
            await stranger.close()
            assert await status(session) == 200, "it keeps what it knew"
            os.kill(pid, signal.SIGKILL)
            seen: set[int | None] = set()

            async def back() -> bool:
                seen.add(await status(session))
                return 200 in seen

            await until(back, 60, every_s=0.05)
        assert seen <= {None, 503, 200}, "it reports no model as unknown"
        started = log.read_text().rpartition("view_stopped")
        assert "the state store has folded event" in started[0].splitlines()[-1], (
            "it reports why it follows no journal"
        )
