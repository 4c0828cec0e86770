"""The controller as a process, with a real broker and real (simulated) workers."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waits import until

from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.server import EmbeddedServer
from controller.frontend.openai.text.tokenizer import TokenizerMissing
from controller.processes.controller import load_vocabulary
from controller.runtime.command_sender import command
from events.decisions import BreakerOpened, GoldenAgreed, HealthChanged
from events.fact import Fact
from events.journal.nats import NatsJournal
from events.nats.bus import BusUnavailable, NatsBus, NoAnswer
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    ChaosInjected,
    DrainFinished,
    EngineFaulted,
    ObserverBlind,
    WorkerJoined,
    WorkerSilent,
)
from events.process.presence import present

pytestmark = pytest.mark.servers
INTERVAL_S = 0.5
CANARIES = 4


class Processes:
    """Processes of one fleet, and an operator's connection to it."""

    def __init__(self, url: str, data: Path, bus: NatsBus) -> None:
        self.url = url
        self.data = data
        self.bus = bus
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = (self.data / f"{name}.log").open("ab")
        environment = {
            **os.environ,
            "HOLDFAST_NATS_URL": self.url,
            "HOLDFAST_CONTROLLER__CANARY__INTERVAL_S": str(INTERVAL_S),
        }
        command = [
            sys.executable,
            "-m",
            "controller.cli",
            *arguments,
            "--data",
            str(self.data),
            "--name",
            name,
        ]
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        log.close()
        self.children[name] = child
        return child

    async def ask(self, verb: str, **body: Any) -> dict[str, Any]:
        if verb == "status":
            return dict(await self.bus.request("control.status", body, 2.0))
        return await command(self.bus, self.url, verb, body, 5.0)

    async def status(self) -> dict[str, Any]:
        try:
            return await self.ask("status")
        except (NoAnswer, BusUnavailable):
            return {"workers": [], "processes": [], "leader": None}

    async def healthy(self, count: int) -> bool:
        return [w["health"] for w in (await self.status())["workers"]] == ["HEALTHY"] * count

    async def facts(self, kind: type[Fact]) -> list[Any]:
        journal = await NatsJournal.connect(self.url, "test:reader")
        found = []
        try:
            async for batch in journal.read(0, until=await journal.last_seq()):
                found += [event.fact for event in batch if isinstance(event.fact, kind)]
        finally:
            await journal.close()
        return found

    def stop(self) -> dict[str, int]:
        for child in self.children.values():
            child.terminate()
        try:
            return {name: child.wait(30) for name, child in self.children.items()}
        finally:
            for child in self.children.values():
                child.kill()


@contextlib.asynccontextmanager
async def fleet(url: str, data: Path) -> AsyncIterator[Processes]:
    bus = await NatsBus.connect(url, "test-operator")
    processes = Processes(url, data, bus)
    try:
        yield processes
    finally:
        processes.stop()
        await bus.close()


@pytest.mark.slow
async def test_a_corrupt_worker_is_convicted_and_a_healthy_one_never(
    nats_url: str, tmp_path: Path, eventually: Any
) -> None:
    async with fleet(nats_url, tmp_path) as processes:
        processes.start("controller", "controller", "--chaos")
        processes.start("w", "worker", "--count", "3")
        await eventually(lambda: processes.healthy(3), 30)

        async def agreed() -> bool:
            return len(await processes.facts(GoldenAgreed)) == CANARIES

        await eventually(agreed, 20)
        assert not await processes.facts(CanaryFailed)
        name = (await processes.status())["workers"][1]["id"]
        said = await processes.ask("chaos", worker=name, fault="corrupt", argument=8)
        assert "error" not in said

        async def convicted() -> bool:
            workers = {w["id"]: w for w in (await processes.status())["workers"]}
            return (workers[name]["health"], workers[name]["weight"]) == ("UNHEALTHY", 0)

        await eventually(convicted, 20)
        failed = await processes.facts(CanaryFailed)
        assert {f.worker for f in failed} == {name}
        assert failed[0].reason == "token_mismatch" and failed[0].confirmed and failed[0].golden == "agreed"
        assert [f.worker for f in await processes.facts(BreakerOpened)] == [name]
        assert [f.fault for f in await processes.facts(ChaosInjected)] == ["corrupt"]
        await scraped(await processes.status(), name)
        await drained_and_resumed(processes, (await processes.status())["workers"][0]["id"], eventually)
        codes = processes.stop()
    assert codes == {"controller": 0, "w": 0}


async def drained_and_resumed(processes: Processes, name: str, eventually: Any) -> None:
    """Drain and resume one worker, as an operator does."""

    async def is_in(health: str, weight: float) -> bool:
        workers = {w["id"]: w for w in (await processes.status())["workers"]}
        return bool(workers[name]["health"] == health and workers[name]["weight"] == weight)

    async def finished() -> bool:
        return [f.worker for f in await processes.facts(DrainFinished)] == [name]

    assert "says" in await processes.ask("drain", worker=name, deadline_s=30)
    await eventually(lambda: is_in("DRAINING", 0.0))
    await eventually(finished)
    assert "says" in await processes.ask("resume", worker=name)
    await eventually(lambda: is_in("HEALTHY", 1.0), 20)
    assert name not in {f.worker for f in await processes.facts(CanaryFailed)}


async def scraped(status: dict[str, Any], worker: str) -> None:
    """Check the metrics of a convicted worker on the controller's admin port."""
    (url,) = [p["url"] for p in status["processes"] if p["role"] == "controller"]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        async with session.get(f"{url}/ready") as answer:
            assert answer.status == 200
            assert json.loads(await answer.text())["leading"] is True
        async with session.get(f"{url}/sd") as answer:
            targets = await answer.json()
    found = {(one["labels"]["role"], f"http://{one['targets'][0]}") for one in targets}
    assert found >= {
        (p["role"], p["url"]) for p in status["processes"] if p["role"] in ("controller", "worker")
    }
    assert f'dynamo_worker_state{{state="unhealthy",worker_id="{worker}"}} 1.0' in text
    assert f'dynamo_circuit_breaker_state{{worker_id="{worker}"}} 1.0' in text
    assert f'dynamo_canary_failures_total{{reason="timeout",worker_id="{worker}"}} 0.0' in text


@pytest.mark.slow
async def test_a_second_controller_stands_by_and_takes_over(
    nats_url: str, tmp_path: Path, eventually: Any
) -> None:
    async with fleet(nats_url, tmp_path) as processes:
        first = processes.start("one", "controller")
        processes.start("w", "worker", "--count", "2")
        await eventually(lambda: processes.healthy(2), 30)
        processes.start("two", "controller")

        async def both() -> bool:
            return [p["role"] for p in (await processes.status())["processes"]].count("controller") == 2

        await eventually(both, 30)
        leader = (await processes.status())["leader"]
        assert ":one:" in leader
        first.send_signal(signal.SIGKILL)
        await asyncio.to_thread(first.wait)

        async def taken_over() -> bool:
            return ":two:" in str((await processes.status())["leader"])

        await eventually(taken_over)
        before = len(await processes.facts(CanaryPassed))

        async def probed() -> bool:
            return len(await processes.facts(CanaryPassed)) > before + 4

        await eventually(probed, 20)
        assert not await processes.facts(CanaryFailed)
        assert await processes.healthy(2)
        processes.children.pop("one")
        assert processes.stop()["two"] == 0


@pytest.mark.slow
async def test_a_controller_that_stops_hands_over_at_once(
    own_nats: EmbeddedServer, tmp_path: Path, eventually: Any
) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    async with fleet(own_nats.url, data) as processes:
        first = processes.start("one", "controller")
        processes.start("w", "worker")
        await eventually(lambda: processes.healthy(1), 30)
        instance = (await processes.facts(WorkerJoined))[0].instance
        processes.start("two", "controller")

        async def controllers() -> dict[str, str]:
            found = (await processes.status())["processes"]
            return {p["name"]: p["url"] for p in found if p["role"] == "controller"}

        async def both() -> bool:
            return len(await controllers()) == 2

        await eventually(both, 30)
        holders: list[str] = []
        await processes.bus.subscribe(
            "$KV.HOLDFAST.controller", lambda _, said: holders.append(said["holder"])
        )
        await eventually(lambda: holders)
        url = (await controllers())["one"]
        await stopped(first, url)
        assert first.returncode == 0
        await eventually(lambda: ":two:" in holders[-1])
        released = holders.index("")
        assert all(":one:" in holder for holder in holders[:released]), (
            "the lease was released, and did not expire"
        )
        assert all(":two:" in holder for holder in holders[released + 1 :])
        journal = await NatsJournal.connect(own_nats.url, "test:speaker")
        journal.observe(EngineFaulted(worker="w", instance=instance, reason="x", fatal=True))
        assert await journal.flush(5)
        await eventually(lambda: decided_by(journal, instance, ":two:"))
        await journal.close()


async def stopped(child: "subprocess.Popen[bytes]", url: str, broker: int = 0) -> list[tuple[str, int]]:
    """Stop a process gracefully; return the answers of its admin port from then on. Let the `broker` hang first."""
    seen: list[tuple[str, int]] = []
    async with aiohttp.ClientSession() as session:

        async def ask(path: str) -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}{path}") as answer:
                    seen.append((path, answer.status))

        await asyncio.gather(
            ask("/ready"), ask("/live")
        )  # two connections: a stopping process accepts no new ones
        assert sorted(seen) == [("/live", 200), ("/ready", 200)]
        seen.clear()
        if broker:
            os.kill(broker, signal.SIGSTOP)
        child.send_signal(signal.SIGTERM)

        async def ended() -> bool:
            await asyncio.gather(ask("/ready"), ask("/live"))
            return child.poll() is not None

        await until(ended, 60, every_s=0.01)
    await asyncio.to_thread(child.wait, 15)
    return seen


async def decided_by(journal: NatsJournal, instance: str, owner: str) -> bool:
    async for batch in journal.read(0, until=await journal.last_seq()):
        for event in batch:
            fact = event.fact
            if isinstance(fact, HealthChanged) and fact.instance == instance and fact.after == "UNHEALTHY":
                return owner in event.source
    return False


async def test_a_controller_that_stops_is_not_ready_at_once_and_lives_until_the_end(
    own_nats: EmbeddedServer, tmp_path: Path, eventually: Any
) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    async with fleet(own_nats.url, data) as processes:
        for name in (
            "one",
            "two",
            "three",
            "four",
        ):  # it lives for half a second more: a busy machine may miss that
            controller = processes.start(name, "controller")
            await eventually(lambda: present(data), 30)
            (shown,) = present(data)
            await eventually(lambda log=data / f"{name}.log": "lease_taken" in log.read_text(), 20)
            try:
                seen = await stopped(controller, shown.url, own_nats.pid)  # its lease cannot be handed over
            finally:
                os.kill(own_nats.pid, signal.SIGCONT)
            ready = [code for path, code in seen if path == "/ready"]
            if len(ready) > 1:
                break
        assert {code for path, code in seen if path == "/live"} == {200}
        assert ready == sorted(ready) and ready[-1] == 503


@pytest.mark.slow
async def test_a_dead_broker_accuses_no_worker(
    own_nats: EmbeddedServer, tmp_path: Path, eventually: Any
) -> None:
    data = tmp_path / "fleet"
    data.mkdir()
    async with fleet(own_nats.url, data) as processes:
        processes.start("controller", "controller")
        processes.start("w", "worker", "--count", "3")
        await eventually(lambda: processes.healthy(3), 30)
        await own_nats.kill()
        await asyncio.sleep(4)  # longer than the silence limit, which is not what is tested
        again = await start_nats(tmp_path / "nats", port=own_nats.port)
        try:
            before = len(await processes.facts(CanaryPassed))

            async def probed() -> bool:
                return len(await processes.facts(CanaryPassed)) > before + 3

            await eventually(probed, 20)
            await eventually(lambda: processes.healthy(3))
            for kind in (CanaryFailed, WorkerSilent, ObserverBlind):
                assert not await processes.facts(kind), kind
            assert set(processes.stop().values()) == {0}
        finally:
            await again.kill()


@pytest.mark.slow
async def test_a_controller_waits_for_a_broker_that_is_not_there_yet(tmp_path: Path, eventually: Any) -> None:
    server = await start_nats(tmp_path / "nats")
    await server.kill()
    data = tmp_path / "fleet"
    data.mkdir()
    async with fleet(server.url, data) as processes:
        child = processes.start("controller", "controller")
        await eventually(
            lambda: "controller" in (data / "controller.log").read_text() or child.poll() is None, 5
        )
        again = await start_nats(tmp_path / "nats", port=server.port)
        try:
            processes.start("w", "worker", "--count", "2")
            await eventually(lambda: processes.healthy(2), 30)
            assert set(processes.stop().values()) == {0}
        finally:
            await again.kill()


@pytest.mark.slow
async def test_a_controller_that_never_reached_a_broker_can_be_stopped(tmp_path: Path) -> None:
    server = await start_nats(tmp_path / "nats")
    await server.kill()
    async with fleet(server.url, tmp_path) as processes:
        child = processes.start("controller", "controller")
        log = tmp_path / "controller.log"  # its imports are done; it must end on a signal at any time
        await until(lambda: "controller" in log.read_text() or child.poll() is not None)
        child.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(child.wait, 10) in (0, -signal.SIGTERM)
        processes.children.clear()


async def test_a_tokenizer_is_loaded_off_the_loop_or_reported_as_missing(tmp_path: Path) -> None:
    vocabulary = await load_vocabulary("builtin:sim")
    assert vocabulary.size == 2048
    assert len(vocabulary.encode("The capital of France is")) > 3
    with pytest.raises(TokenizerMissing):
        await load_vocabulary(str(tmp_path / "nowhere"))
