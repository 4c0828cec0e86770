"""The broker of a fleet allows every process its own work, and nothing else."""

import asyncio
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import nats
from fleet import holdfast, running, streamed, undisturbed
from waits import until

from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.nats_log import STRANGER, refusals
from controller.adapters.embedded.nats_users import BrokerUsers
from controller.processes.operator_client import find
from events import codec, subjects
from events.fact import Fact, Skipped
from events.journal.nats import NatsJournal
from events.nats import keys
from events.nats.bus import NatsBus
from events.nats.urls import addresses
from events.observations import IntrusionRefused, WorkerLeft

FLAGS = (
    *("--workers", "2", "--frontends", "2", "--request-plane", "nats", "--router-replica-sync"),
    *("--canary-interval", "0.5", "--breaker-wait", "1", "--chaos"),
)


def refused(fleet: LocalFleet) -> dict[str, int]:
    """Return the number of the broker's refusals so far, by account."""
    said = (fleet.data / "nats" / "nats-server.log").read_bytes()
    known = BrokerUsers(fleet.data / "secrets" / "nats").names_by_key()
    return {one.client: one.times for one in refusals(said, known)}


async def test_a_fleet_has_all_permissions_it_needs_and_a_forger_has_none(tmp_path: Path) -> None:
    async with running(tmp_path / "fleet", *FLAGS, stops=True) as fleet:
        await fleet.healthy(2)
        with joined(fleet, "x0", 2):
            await fleet.healthy(4)
            await a_day_of(fleet)
        assert refused(fleet) == {}
        await no_forger_gets_through(fleet)
        await fleet.healthy(2)
        await it_is_told(fleet)
        before = refused(fleet)
        done = await asyncio.to_thread(holdfast, "journal", "inspect", "--data", str(fleet.data))
        assert done.returncode == 0, done.stderr
        assert refused(fleet) == before
        verified = holdfast("replay", "verify", "--data", str(fleet.data))
        assert verified.returncode == 0, verified.stdout + verified.stderr


class joined:
    """Workers that join a running fleet through its directory."""

    def __init__(self, fleet: LocalFleet, name: str, count: int) -> None:
        words = ["worker", "--name", name, "--count", str(count), "--data", str(fleet.data)]
        self.command = [sys.executable, "-m", "controller.cli", *words, "--request-plane", "nats", "--chaos"]
        self.log = fleet.data / "logs" / f"{name}.log"

    def __enter__(self) -> None:
        with self.log.open("wb") as said:
            self.process = subprocess.Popen(self.command, stdout=said, stderr=said)

    def __exit__(self, *about: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


async def a_day_of(fleet: LocalFleet) -> None:
    """Run every kind of operation: requests, a drain, rehearsals, restarts, commands."""
    data = ("--data", str(fleet.data))
    prompts = [[300 + n] * 40 for n in range(6)]
    answers = [asyncio.ensure_future(streamed(fleet, prompt, 60)) for prompt in prompts]
    for words in (
        ("drain", "w0"),
        ("resume", "w0"),
        ("move", "w1"),
        ("restart", "x1"),
        ("chaos", "kill", "w1"),
    ):
        done = await asyncio.to_thread(holdfast, *words, *data)
        assert done.returncode == 0, (words, done.stderr)
    assert await asyncio.gather(*answers) == [undisturbed(prompt, 60) for prompt in prompts]
    await responses_are_found(fleet)
    status = await fleet.healthy(4)
    for role in ("nats", "controller", "projector"):
        (pid,) = (p["pid"] for p in status["processes"] if p["role"] == role)
        os.kill(pid, signal.SIGKILL)
        await fleet.until(lambda s, old=pid: old not in {p["pid"] for p in s["processes"]})  # type: ignore[misc]
        status = await fleet.healthy(4)
    await fleet.until(lambda s: s["projector"]["lag"] == 0)
    for words in (("events", "-o", "json"), ("replay", "timeline"), ("replay", "rebuild"), ("restart", "w1")):
        done = await asyncio.to_thread(holdfast, *words, *data)
        assert done.returncode == 0, (words, done.stderr)
    await fleet.healthy(4)


async def responses_are_found(fleet: LocalFleet) -> None:
    """Each frontend finds a stored response, whichever of them has created it."""
    path, served = f"{fleet.url}/v1/responses", set()
    body = {"model": "sim", "input": "hello", "max_output_tokens": 5}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        while len(served) < 2:  # each connection reaches one of the frontends
            async with http.post(path, json=body) as answer:
                id = (await answer.json())["id"]
            served.add(id[:17])
            for _ in range(8):
                async with http.get(f"{path}/{id}") as answer:
                    assert answer.status == 200, await answer.text()


async def no_forger_gets_through(fleet: LocalFleet) -> None:
    """A thief of a worker's seed cannot publish for others, and a client without a seed is not admitted."""
    url = find(fleet.data)["nats_url"]
    before = await last(url)
    (place,) = addresses(url)
    told: list[str] = []

    async def tell(error: Exception) -> None:
        told.append(str(error))

    seed = keys.seed_file(fleet.data / "secrets" / "nats", "worker-w0")
    forger = await nats.connect(place, nkeys_seed=str(seed), error_cb=tell)
    forged = forgeries()
    for subject, body, about in forged:
        await forger.publish(subject, body, headers=about)
    for subject in ("fleet.>", "_INBOX.>", "answer.>", "plane.>", "live.>"):
        await forger.subscribe(subject)
    await until(lambda: len(told) >= len(forged) + 5)
    await forger.close()
    assert all("permissions violation" in error for error in told)
    assert refused(fleet) == {"worker-w0": len(told)}
    stranger = await NatsBus.connect(place, "stranger", wait_s=1.0)
    assert stranger.since is None and "Authorization Violation" in stranger.connection.why
    await stranger.close()
    assert refused(fleet)[STRANGER] > 0
    assert await last(url) >= before


async def it_is_told(fleet: LocalFleet) -> None:
    """Attempts are reported with their sender and number on the journal, on the console and among the metrics. No message of a
    forger is on the journal."""
    tried: dict[str, int] = {}
    async with asyncio.timeout(60):
        while not (tried.keys() >= {"worker-w0", STRANGER} and tried == refused(fleet)):
            tried, skipped = {}, 0
            for event in await fleet.events():
                if isinstance(fact := event.fact, IntrusionRefused):
                    tried[fact.who] = tried.get(fact.who, 0) + fact.times
                skipped += isinstance(fact, Skipped)
    assert tried["worker-w0"] == len(forgeries()) + 5 and not skipped
    assert "worker-w0" in fleet.log.read_text()
    status = await fleet.status()
    (controller,) = (p["url"] for p in status["processes"] if p["role"] == "controller")
    counted = f"holdfast_intrusions_refused_total {float(sum(tried.values()))}"
    async with aiohttp.ClientSession() as session:

        async def shown() -> bool:
            return counted in await page(session, f"{controller}/metrics")

        await until(shown, 60, counted, every_s=0.1)  # the controller reads the journal


async def page(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return await answer.text()


def forgeries() -> list[tuple[str, bytes, dict[str, str]]]:
    facts: list[Fact] = [
        WorkerLeft(worker=w, instance="i", mode="immediate", exit=9) for w in ("w0", "w1", "x0")
    ]
    said = [(subjects.subject(f), codec.encode_body(f), headers(f)) for f in facts]
    plain: list[tuple[str, bytes]] = [
        ("fleet.observed.worker.w1.worker_joined", b"{}"),
        ("$JS.API.STREAM.DELETE.FLEET", b""),
        ("$JS.API.STREAM.PURGE.FLEET", b""),
        ("$JS.API.STREAM.UPDATE.FLEET", b"{}"),
        ("control.drain", b'{"worker": "w1"}'),
        ("control.chaos", b'{"worker": "w1", "fault": "kill"}'),
        ("fleet.decided.health_changed", b"{}"),
        ("live.stop.w1", b"{}"),
        ("live.beat.w1", b"{}"),
        ("$KV.HOLDFAST.lease", b"{}"),
    ]
    return [*said, *((subject, body, {}) for subject, body in plain)]


def headers(fact: Fact) -> dict[str, str]:
    return codec.encode_headers(
        fact, id=codec.new_id(), source="worker:forged:i", source_number=1, said_at=datetime.now(UTC)
    )


async def last(url: str) -> int:
    journal = await NatsJournal.connect(url, "reader", None, make=False)
    try:
        return await journal.last_seq()
    finally:
        await journal.close()
