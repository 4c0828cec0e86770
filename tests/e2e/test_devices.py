"""A GPU dies in a running fleet: its worker gets no more requests, and no user notices."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import shim
from fleet import client, running
from waits import until

from benchmarks.local_fleet import LocalFleet
from events.observations import DeviceFaulted, DeviceRecovered, WorkerLeft

FLAGS = ("--workers", "2", "--itl-ms", "10", "--canary-interval", "0.5", "--breaker-wait", "0.5")
STREAMS, TOKENS = 16, 150
NO_ACQUITTAL = {"HOLDFAST_CONTROLLER__POLICY__HEALTH__GOOD_TO_ACQUIT": "1000"}
"""The engine of a simulated worker outlives its GPU and answers well. Good canaries would acquit it within seconds."""


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """The environment in which a process finds a driver with the GPUs of `tmp_path / "gpus"`."""
    try:
        shim.build(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(f"needs a C compiler, to build the driver's stand-in: install cc, gcc or clang ({error})")
    return {"LD_LIBRARY_PATH": str(tmp_path), shim.STATE: str(tmp_path / "gpus")}


@pytest.fixture
def beside() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes that are killed in the end."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def worker(fleet: LocalFleet, name: str, *flags: str, driver: dict[str, str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "controller.cli", "worker", "--data", str(fleet.data), "--name", name]
    with (fleet.data / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *flags], env={**os.environ, **driver}, stdout=log, stderr=log)


async def answer(fleet: LocalFleet, prompt: int, started: asyncio.Event | None = None) -> tuple[str, str]:
    """Read one stream to its end; return the worker that began it, and the text."""
    text = ""
    async with client(fleet) as api:
        answer = await api.completions.with_raw_response.create(
            model="sim", prompt=[300 + prompt] * 20, max_tokens=TOKENS, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async for chunk in answer.parse():
            text += chunk.choices[0].text if chunk.choices else ""
            if started is not None:
                started.set()
        return answer.headers.get("X-Holdfast-Worker", ""), text


async def under_xid(fleet: LocalFleet, gpu: shim.Gpu, code: int) -> set[str]:
    """Raise an Xid while streams run; check that none is altered, and return the workers that had begun them."""
    whole = [text for _, text in await asyncio.gather(*(answer(fleet, n) for n in range(STREAMS)))]
    flags = [asyncio.Event() for _ in range(STREAMS)]
    running = [asyncio.ensure_future(answer(fleet, n, flags[n])) for n in range(STREAMS)]
    for flag in flags:
        await flag.wait()
    gpu.raise_xid(code)
    seen = await asyncio.gather(*running)
    assert [text for _, text in seen] == whole
    return {worker for worker, _ in seen}


@pytest.mark.slow
async def test_a_servers_gpu_and_a_workers_own(
    tmp_path: Path, driver: dict[str, str], beside: list["subprocess.Popen[bytes]"]
) -> None:
    servers, own = shim.gpus(tmp_path / "gpus", 2).gpu[:2]
    async with running(tmp_path / "fleet", *FLAGS, environment=NO_ACQUITTAL) as fleet:
        await fleet.healthy(2)
        beside.append(worker(fleet, "w1", "--watch-only", "--gpus", "0", driver=driver))
        await fleet.until(lambda s: "watch" in {p["role"] for p in s["processes"]})
        log = fleet.data / "w1.log"
        await until(lambda: "watch_follows" in log.read_text())
        assert "w1" in await under_xid(fleet, servers, 79)
        await fleet.until(lambda s: {w["id"]: w["health"] for w in s["workers"]}["w1"] == "UNHEALTHY")
        assert {worker for worker, _ in await asyncio.gather(*(answer(fleet, n) for n in range(4)))} == {"w0"}
        servers.lost = 1
        await said(fleet, DeviceFaulted, 2)
        servers.lost = 0  # it was reset
        await said(fleet, DeviceRecovered, 2)
        await fleet.healthy(2)
        beside.append(worker(fleet, "g0", "--gpus", "1", "--itl-ms", "10", driver=driver))
        await fleet.healthy(3)
        assert "g0" in await under_xid(fleet, own, 119)
        assert await asyncio.to_thread(beside[-1].wait, 20) == 1
        left = [e.fact for e in await fleet.events() if isinstance(e.fact, WorkerLeft)]
        assert [(f.worker, f.mode, f.exit) for f in left] == [("g0", "self_initiated", 1)]


async def said(fleet: LocalFleet, kind: type, count: int) -> None:
    async def enough() -> bool:
        return sum(isinstance(e.fact, kind) for e in await fleet.events()) >= count

    await until(enough, 30, every_s=0.1)
