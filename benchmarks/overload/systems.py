"""The fleets under overload in `benchmarks.overload.fleet`, each started as its users start it.

Both have workers that simulate the same engine, Dynamo's mocker, slowed down so that a small machine can run many of them,
with an equally large batch and KV cache.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Protocol

from benchmarks.peers.peer_systems import Dynamo, make_model
from controller.demo.fleet import DemoFleet, NotAsExpected

BATCH, KV_BLOCKS, BLOCK_TOKENS = 4, 96, 16
SPEED = 0.25  # of the mocker's
CONTROLS = ("none", "token-capacity", "deadline")
STARTS_WITHIN_S = 120.0
# niceness of workers above the frontend's: they stand for other machines, and must not delay it here
NICER = 10


class OverloadedSystem(Protocol):
    """One fleet, with one admission control."""

    name: str
    serves: str  # the model's name

    @property
    def url(self) -> str:
        """Return its URL."""

    async def start(self) -> None:
        """Start it, and wait until all its workers serve. Raise NotAsExpected."""

    async def stop(self) -> None:
        """End all of its processes."""


class HoldfastFleet:
    """`holdfast up` with one frontend, and simulated workers in one process."""

    def __init__(self, folder: Path, workers: int, control: str) -> None:
        self.name, self.serves = f"holdfast {control}", ""
        self._folder, self._workers, self._control = folder, workers, control
        self._fleet: DemoFleet | None = None

    async def start(self) -> None:
        count = str(self._workers)
        environment = {
            "HOLDFAST_WORKER_PERF_MODEL": "polynomial-v2",
            "HOLDFAST_WORKER_SPEEDUP_RATIO": str(SPEED),
            "HOLDFAST_WORKER_BATCH_MAX": str(BATCH),
            "HOLDFAST_WORKER_KV_BLOCKS": str(KV_BLOCKS),
            "HOLDFAST_WORKER_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "HOLDFAST_WORKER_CONTEXT_TOKENS": str(KV_BLOCKS * BLOCK_TOKENS),
        }
        self._fleet = DemoFleet.start(
            self._folder, "--workers", count, "--workers-per-process", count, "--admission-control", self._control,
            "--planner-mode", "off", environment=environment,
        )  # fmt: skip
        await self._fleet.ready()
        await self._fleet.until(
            lambda status: sum(one["health"] == "HEALTHY" for one in status["workers"]) == self._workers,
            STARTS_WITHIN_S,
        )
        workers = (await self._fleet.status())["workers"]
        self.serves = workers[0]["model"]
        for pid in {one["pid"] for one in workers}:
            _let_others_first(pid)

    @property
    def url(self) -> str:
        assert self._fleet is not None, "it has been started"
        return self._fleet.url

    async def stop(self) -> None:
        if self._fleet is not None:
            await asyncio.to_thread(self._fleet.stop)


def _let_others_first(pid: int) -> None:
    """Let a process and all its threads run only when others are idle."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), NICER)


class DynamoFleet(Dynamo):
    """NVIDIA Dynamo: one frontend, with its thresholds if a control is requested, and its mocker's workers in one process."""

    def __init__(self, folder: Path, python: Path, workers: int, control: str) -> None:
        super().__init__(folder, python, flat=True)
        self.name, self.serves = f"dynamo {control}", "m"
        self._count, self._control = workers, control

    async def start(self) -> None:
        make_model(self._folder / "model")
        (self._folder / "discovery").mkdir()
        thresholds = (
            "--admission-control", "token-capacity", "--active-decode-blocks-threshold", "0.85",
            "--active-prefill-tokens-threshold", "10000",
        )  # fmt: skip
        self._frontend = self._run(
            "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self._port),
            "--discovery-backend", "file", *(thresholds if self._control == "token-capacity" else ()),
        )  # fmt: skip
        self._workers.append(self._run(
            "-m", "dynamo.mocker", "--model-path", str(self._folder / "model"), "--model-name", "m", "--num-workers",
            str(self._count), "--speedup-ratio", str(SPEED), "--max-num-seqs", str(BATCH), "--num-gpu-blocks-override",
            str(KV_BLOCKS), "--block-size", str(BLOCK_TOKENS), "--discovery-backend", "file",
        ))  # fmt: skip
        deadline = time.monotonic() + STARTS_WITHIN_S
        while (listed := await self._listed()) != self._count:
            if time.monotonic() > deadline:
                raise NotAsExpected(
                    f"Dynamo lists {listed} of {self._count} workers: {self._log().read_text()[-1000:]}"
                )
            await asyncio.sleep(0.5)
        _let_others_first(self._workers[0].pid)
