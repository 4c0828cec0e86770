"""The `overload` benchmark with real fleets: processes, sockets, and open-loop clients.

    python -m benchmarks overload_fleet [--trace FILE] [--workers 64] [--loads 0.5 1 2 4] [--seconds 30] [--seed 1]
                                        [--controls none token-capacity deadline] [--dynamo] [--dynamo-python PATH]

Each fleet is started anew for each admission control: `holdfast up` with `--workers` simulated workers in one process, and one
frontend; with `--dynamo` NVIDIA Dynamo as well, without and with its thresholds (`make peer` installs it). All workers simulate
the same engine, Dynamo's mocker, slowed down so that a small machine can run many of them. Requests are those of the trace
(Mooncake's, with 16 tokens in place of each block's 512), at its own arrivals, accelerated. Answers have at most 32 tokens, and
requests that fit no worker are left out. Tiers, deadlines and clients are those of `overload`. A client gives up without a first
token after 20 s. A load is a share of the fleet's throughput under saturation.
Prints one JSON object per row:

    capacity   requests per second that the fleet completes, without control
    run        one load (see `figures` for the columns); rejections are timed by the client, which serves hundreds of requests,
               and by a client that does nothing else (`alone_…`: benchmarks/overload/refusal_client.py)
    step       from 4 times the capacity to half of it: seconds until the last rejection after that (Holdfast)
    result     by fleet: goodput at 2 and 4 times the capacity, relative to that at 1
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import uvloop

from benchmarks.overload.clients import WARM_S, Arrivals, Attempt, Coming, arrive, both, figures, recovery
from benchmarks.overload.refusal_client import RefusalClient
from benchmarks.peers.peer import MISSING, PYTHON
from benchmarks.peers.peer_systems import Dynamo, make_model
from benchmarks.router.routing import TRACE
from benchmarks.router.virtual.fleet import percentile
from benchmarks.router.virtual.trace import positive, recorded, whole
from benchmarks.rows import Row, command_line, show
from controller.demo.fleet import DemoFleet, NotAsExpected
from controller.trace.replay.endpoint import ReplayTarget
from controller.trace.rows import TraceRow
from events.errors import HoldfastError

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


PATIENCE_S = 20.0
ANSWER_S = 120.0  # the longest time for an answer
ANSWER_MAX = 32
READS_PER_S = 1000.0 / 0.015 * SPEED  # prompt tokens, by the polynomial's linear part
FLOOD_S, FLOOD_WARM_S = 24.0, 8.0
REST_S = 2.0
WARM_UP_S = 15.0  # of a fleet at full load: caches fill, and estimates converge
RUNS = itertools.count()  # so that an id rejected in an earlier run is no repetition in this one
WAITED = "no worker became free"  # the message of a rejection after waiting


class RealClients:
    """Clients of one fleet."""

    def __init__(self, system: OverloadedSystem) -> None:
        self._system = system
        self._session = ReplayTarget(system.url)
        self.attempts: list[Attempt] = []
        self._number = next(RUNS)

    async def run(self, coming: Iterable[Coming]) -> None:
        """Send all requests at their times, and wait until the last one has ended."""
        await arrive(coming, self.ask)

    async def ask(self, coming: Coming, began: float) -> None:
        """Send one request."""
        now = asyncio.get_running_loop().time
        sent = now()
        attempt = Attempt(coming, 0, sent - began)
        self.attempts.append(attempt)

        def take(event: bytes, at: float) -> None:
            if attempt.first_s is None:
                attempt.first_s = now() - sent
            if event.startswith(b'{"error"'):
                attempt.failed = True

        headers = {
            "X-Request-Id": f"r{self._number}-{coming.key}",
            "X-Priority": coming.tier,
            "X-Holdfast-Client": coming.client,
            "X-Holdfast-TTFT-Deadline-Ms": f"{1000 * coming.deadline_s:.0f}",
        }
        body, path = json.dumps(coming.body(self._system.serves)).encode(), "/v1/completions"
        reading = self._session.ask("POST", path, body, take=take, deadline_s=ANSWER_S, headers=headers)
        asking = asyncio.ensure_future(reading)
        await asyncio.wait({asking}, timeout=PATIENCE_S)
        if not asking.done() and attempt.first_s is None:
            asking.cancel()
            await asyncio.wait({asking})
            attempt.ended_s, attempt.refused = now() - sent, "gave up"
            return
        reply = await asking
        attempt.ended_s = now() - sent
        attempt.status = reply.status
        attempt.failed |= bool(reply.fault)
        if reply.status == 200:
            return
        attempt.refused = reply.header("X-Holdfast-Refused") or reply.fault
        attempt.note = reply.body[:200].decode("utf-8", "replace")
        attempt.at_once = bool(reply.status) and WAITED not in attempt.note
        attempt.took_s = reply.ended - reply.began


class FleetTrial:
    """The requests and settings for all fleets."""

    def __init__(self, rows: Sequence[TraceRow], args: argparse.Namespace) -> None:
        self._args = args
        self._arrivals = Arrivals([*_held(rows)], BLOCK_TOKENS, READS_PER_S)

    async def of(self, system: OverloadedSystem, capacity: float, loads: Sequence[float]) -> list[Row]:
        """Return the rows of one fleet, each printed as soon as it is known. `capacity` 0: it is measured."""
        try:
            await system.start()
            said = [] if capacity else [show(await self._flood(system))]
            capacity = capacity or said[0]["requests_per_s"]
            await RealClients(system).run(self._arrivals.coming(capacity, WARM_UP_S, self._args.seed + 1))
            said += [show(await self._run(system, load, capacity)) for load in loads]
            if loads and system.name.startswith("holdfast"):
                said.append(show(await self._step(system, capacity)))
        finally:
            await system.stop()
        return said

    async def _flood(self, system: OverloadedSystem) -> Row:
        """Keep more requests in flight than fit."""
        clients, arrivals, numbers = RealClients(system), self._arrivals, itertools.count()
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def user() -> None:
            while loop.time() < began + FLOOD_S:
                n = next(numbers)
                at_s, prompt, answer = loop.time() - began, arrivals.prompt(n), arrivals.answer(n)
                await clients.ask(Coming(n, at_s, prompt, answer, "standard", "c", PATIENCE_S), began)

        await asyncio.gather(*(user() for _ in range(self._args.workers * (BATCH + 1))))
        ends = [one.at_s + one.ended_s for one in clients.attempts if one.status == 200 and not one.failed]
        rate = sum(FLOOD_WARM_S <= end < FLOOD_S for end in ends) / (FLOOD_S - FLOOD_WARM_S)
        workers = self._args.workers
        return {"row": "capacity", "system": system.name, "workers": workers, "requests_per_s": rate}

    async def _run(self, system: OverloadedSystem, load: float, capacity: float) -> Row:
        args, began = self._args, time.perf_counter()
        await asyncio.sleep(REST_S)
        clients = RealClients(system)
        coming = [*self._arrivals.coming(load * capacity, args.seconds, args.seed)]
        moments = sorted({one.at_s for one in coming if one.at_s >= WARM_S})
        gc.collect()
        gc.disable()  # the time of this process's collector is not the fleet's
        alone = await RefusalClient.start(system.url, system.serves, moments)
        await clients.run(coming)
        gc.enable()
        took = sorted(await alone.took_s())
        row = {"row": "run", "system": system.name, "load": load, **figures(clients.attempts, args.seconds)}
        row |= {"alone_refusals": len(took)}
        row |= {f"alone_ms_p{100 * at:.0f}": percentile(took, at) * 1e3 for at in (0.5, 0.99)}
        return row | {"wall_s": time.perf_counter() - began}

    async def _step(self, system: OverloadedSystem, capacity: float) -> Row:
        """Drop the load from four times the capacity to half of it."""
        await asyncio.sleep(REST_S)
        clients, half, seed = RealClients(system), self._args.seconds / 2, self._args.seed
        high = self._arrivals.coming(4 * capacity, half, seed)
        await clients.run(both(high, self._arrivals.coming(capacity / 2, half, seed + 1, half)))
        return {"row": "step", "system": system.name, **recovery(clients.attempts, half)}


def _held(rows: Sequence[TraceRow]) -> Iterator[TraceRow]:
    """Yield the requests of which a worker can hold several, with answers that are not too long."""
    for row in rows:
        answer = min(row.output_length, ANSWER_MAX)
        if row.input_length * BLOCK_TOKENS // 512 + answer <= KV_BLOCKS * BLOCK_TOKENS // 2:
            yield msgspec.structs.replace(row, output_length=answer)


def result(rows: Sequence[Row]) -> Row:
    """Return how much of each fleet's goodput remains under overload."""
    found: Row = {"row": "result"}
    for name in dict.fromkeys(row["system"] for row in rows):
        runs = {row["load"]: row for row in rows if row["row"] == "run" and row["system"] == name}
        if 1.0 in runs and runs[1.0]["goodput"] > 0:
            found[name] = {
                f"{load:g}": runs[load]["goodput"] / runs[1.0]["goodput"] for load in runs if load > 1
            }
    return found


async def run(rows: Sequence[TraceRow], args: argparse.Namespace, folder: Path) -> None:
    """Run all fleets."""
    trial, said = FleetTrial(rows, args), list[Row]()
    capacities: dict[str, float] = {}
    for control in ("none", *(one for one in args.controls if one != "none")):
        loads = args.loads if control in args.controls else ()
        fleets: dict[str, OverloadedSystem] = {
            "holdfast": HoldfastFleet(folder / control, args.workers, control)
        }
        if args.dynamo and control != "deadline":
            peer = DynamoFleet(folder / f"dynamo-{control}", args.dynamo_python, args.workers, control)
            fleets["dynamo"] = peer
        for kind, fleet in fleets.items():
            found = await trial.of(fleet, capacities.get(kind, 0.0), loads)
            if kind not in capacities:
                capacities[kind] = found[0]["requests_per_s"]
            said += found
    show(result(said))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all."""
    parser = command_line("overload_fleet", __doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--workers", type=whole, default=64)
    parser.add_argument("--loads", type=positive, nargs="+", default=[0.5, 1.0, 2.0, 4.0])
    parser.add_argument("--controls", choices=CONTROLS, nargs="+", default=list(CONTROLS))
    parser.add_argument("--seconds", type=positive, default=30.0)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--dynamo-python", type=Path, default=PYTHON)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    if args.dynamo and not args.dynamo_python.exists():
        parser.error(MISSING)
    rows = recorded(parser, args.trace)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(run(rows, args, Path(folder)))
    except HoldfastError as error:
        print(f"overload_fleet: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
