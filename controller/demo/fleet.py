"""Runs a fleet in a separate process, by `holdfast up`, as a user starts it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from controller.adapters.embedded.free_port import free_port
from controller.adapters.embedded.server import die_with
from controller.processes.operator_client import http_ok, read_all
from events.errors import HoldfastError
from events.fact import Recorded

STARTS_WITHIN_S = 60.0
STOPS_WITHIN_S = 60.0  # covers the grace periods of all kinds of processes, one after another


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
    ) -> Self:
        """Start a fleet, and return without waiting until it is ready.

        The fleet inherits the caller's environment variables. Those in `environment` are added, and replace inherited ones."""
        port = port or free_port()
        data.mkdir(0o700, parents=True, exist_ok=True)
        log = data / "up.log"
        up = [sys.executable, "-m", "controller.cli", "up"]
        command = [*up, "--data", str(data), "--port", str(port), *flags]
        env = {**os.environ, **(environment or {})}
        with log.open("ab") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=env, preexec_fn=die_with(os.getpid())
            )
        return cls(data, port, process, log)

    @property
    def ended(self) -> bool:
        """Whether `holdfast up` has ended. All processes that it started end with it."""
        return self.process.poll() is not None

    def last_words(self, lines: int = 3) -> str:
        """Return the last `lines` lines of the output of `holdfast up`, joined to one line."""
        said = self.log.read_text(errors="replace").strip().splitlines()[-lines:]
        return " / ".join(line.removeprefix("holdfast: ") for line in said)

    async def ready(self) -> Self:
        """Wait until /health answers with status 200.

        Raise NotAsExpected if the fleet ends before that, or if the wait takes too long. The fleet is killed first.
        """
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

    async def events(self, after: int = 0) -> list[Recorded]:
        """Return the events of the journal with a sequence above `after`."""
        return await read_all(self.data, after)

    def stop(self) -> int:
        """Stop the fleet by SIGINT (Ctrl-C) and return its exit status.

        If the fleet does not stop in time, kill it and raise TimeoutExpired."""
        if not self.ended:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOPS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.end()
            raise

    def end(self) -> None:
        """Kill `holdfast up`. All processes that it started end with it."""
        self.process.kill()
        self.process.wait()
