"""Runs a fleet in its own process, as a user starts it, for the demo, benchmarks and end-to-end tests."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from controller.adapters.embedded.free_port import free_port
from controller.processes.children import die_with
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import Operator, Unreachable, http_ok, read_all
from events.errors import HoldfastError
from events.fact import Recorded
from events.json_types import Json
from events.nats.urls import as_user

STARTS_WITHIN_S = 60.0
STOPS_WITHIN_S = 60.0  # covers the grace periods of all kinds of processes, one after another
ANSWERS_WITHIN_S = 30.0


class NotAsExpected(HoldfastError):
    """The fleet did not reach the expected state in time."""


@dataclass
class DemoFleet:
    """A running fleet, and the process of its `holdfast up`."""

    data: Path
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """The base URL of the fleet's frontends on this host."""
        return f"http://127.0.0.1:{self.port}"

    @classmethod
    def start(
        cls, data: Path, *flags: str, port: int | None = None, environment: Mapping[str, str] | None = None
    ) -> "DemoFleet":
        """Start a fleet, and return without waiting until it is ready. `environment` is added to the environment of this
        process."""
        port = port or free_port()
        data.mkdir(0o700, parents=True, exist_ok=True)
        log = data / "up.log"
        command = [
            sys.executable,
            "-m",
            "controller.cli",
            "up",
            "--data",
            str(data),
            "--port",
            str(port),
            *flags,
        ]
        env = {**os.environ, **(environment or {})}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=env, preexec_fn=die_with(os.getpid())
            )
        return cls(data, port, process, log)

    def nats_url(self, user: str) -> str:
        """Return the broker's URL with the credentials of the account `user`. If `user` is empty, return the URL from which
        each process derives its own account."""
        url = str(FleetDir(self.data).recall()["nats_url"])
        return as_user(url, user) if user else url

    @property
    def ended(self) -> bool:
        """Whether `up` has ended. All processes that it started end with it."""
        return self.process.poll() is not None

    def last_words(self, lines: int = 3) -> str:
        """Return the last lines of the output of `up` as one line."""
        said = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return " / ".join(line.removeprefix("holdfast: ") for line in said)

    async def ready(self) -> "DemoFleet":
        """Wait until /health answers with status 200. If this takes too long, kill the fleet and raise NotAsExpected."""
        deadline = time.monotonic() + STARTS_WITHIN_S
        try:
            while not await http_ok(f"{self.url}/health"):
                if self.ended or time.monotonic() > deadline:
                    raise NotAsExpected(f"the fleet did not start: {self.last_words()}")
                await asyncio.sleep(0.05)
        except BaseException:
            self.end()
            raise
        return self

    async def status(self) -> Json:
        """Return what `holdfast status -o json` prints."""
        async with self._operator() as operator:
            return await operator.ask("status", {}, ANSWERS_WITHIN_S)

    async def act(self, verb: str, worker: str, argument: float | None = None) -> None:
        """Drain or resume a worker, or inject a fault into it."""
        async with self._operator() as operator:
            await operator.act(verb, worker, argument, ANSWERS_WITHIN_S)

    @contextlib.asynccontextmanager
    async def _operator(self) -> AsyncIterator[Operator]:
        """Yield a connection to the fleet's controller. Retry for 30 s, because a busy machine may need more than one
        attempt."""
        deadline = time.monotonic() + ANSWERS_WITHIN_S
        while True:
            try:
                operator = await Operator.connect(self.data)
                break
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
        try:
            yield operator
        finally:
            await operator.close()

    async def until(self, holds: Callable[[Json], bool], within_s: float = 30.0) -> Json:
        """Wait until `holds(status)` is true, and return that status. Raise NotAsExpected if this does not happen within
        `within_s` seconds."""
        deadline, status = time.monotonic() + within_s, {}
        while True:
            with contextlib.suppress(HoldfastError):  # retries if the controller is only starting
                operator = await Operator.connect(self.data)
                try:
                    while True:
                        status = await operator.ask("status", {})
                        if holds(status):
                            return status
                        if time.monotonic() > deadline:
                            break
                        await asyncio.sleep(0.1)
                finally:
                    await operator.close()
            if time.monotonic() > deadline:
                raise NotAsExpected(f"{NotAsExpected.__doc__} {json.dumps(status)}")
            await asyncio.sleep(0.1)

    async def until_reachable(self, within_s: float = 30.0) -> None:
        """Wait until a controller answers. Raise NotAsExpected if none does within `within_s` seconds."""
        await self.until(lambda status: True, within_s)

    async def healthy(self, workers: int) -> Json:
        """Wait until this number of workers is healthy with full weight and a closed breaker, and return that status."""
        return await self.until(lambda s: _serving(s) == workers)

    async def events(self, after: int = 0) -> list[Recorded]:
        """Return the events of the journal with a sequence above `after`."""
        return await read_all(self.data, after)

    def family(self) -> list[psutil.Process]:
        """Return the process of `up` and all processes below it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> int:
        """Stop the fleet by SIGINT (Ctrl-C) and return its exit status. If it does not stop in time, kill it and raise
        TimeoutExpired."""
        if not self.ended:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise

    def end(self) -> None:
        """Kill `up`. All processes that it started end with it."""
        self.process.kill()
        self.process.wait()


def _serving(status: Json) -> int:
    return sum(
        w["health"] == "HEALTHY" and w["weight"] == 1 and w["breaker"] == "closed" for w in status["workers"]
    )


def gone(processes: Sequence[psutil.Process], within_s: float = 10.0) -> bool:
    """Return whether all of these processes have ended after at most `within_s` seconds."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
