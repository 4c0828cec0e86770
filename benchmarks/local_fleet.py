"""A fleet that a benchmark or a test runs in processes of its own, operates, and observes."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence

import psutil

from controller.demo.fleet import DemoFleet, NotAsExpected
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import Operator, Unreachable
from events.errors import HoldfastError
from events.json_types import Json
from events.nats.urls import as_user

ANSWERS_WITHIN_S = 30.0


class LocalFleet(DemoFleet):
    """A running fleet that tests and benchmarks operate, and of which they await a status."""

    def nats_url(self, user: str) -> str:
        """Return the broker's URL with the credentials of the account `user`. If `user` is empty, return the URL from which
        each process derives its own account."""
        url = str(FleetDir(self.data).recall()["nats_url"])
        return as_user(url, user) if user else url

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

    async def healthy(self, workers: int, within_s: float = 30.0) -> Json:
        """Wait until this number of workers is healthy with full weight and a closed breaker, and return that status."""
        return await self.until(lambda s: _serving(s) == workers, within_s)

    def family(self) -> list[psutil.Process]:
        """Return the process of `up` and all processes below it."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]


def _serving(status: Json) -> int:
    return sum(
        w["health"] == "HEALTHY" and w["weight"] == 1 and w["breaker"] == "closed" for w in status["workers"]
    )


def gone(processes: Sequence[psutil.Process], within_s: float = 10.0) -> bool:
    """Return whether all of these processes have ended after at most `within_s` seconds."""
    _, alive = psutil.wait_procs(list(processes), timeout=within_s)
    return not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
