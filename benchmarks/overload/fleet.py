"""The `overload` benchmark with real fleets: processes, sockets, and open-loop clients.

    python -m benchmarks overload_fleet [--trace FILE] [--workers 64] [--loads 0.5 1 2 4] [--seconds 30] [--seed 1]
                                        [--controls none token-capacity deadline] [--dynamo] [--dynamo-python PATH]

For each admission control, a new fleet is started: `holdfast up` with one frontend, and `--workers` simulated workers in one
process. With `--dynamo`, NVIDIA Dynamo is measured as well, without and with its busy thresholds (`make peer` installs it). All
workers simulate the same engine: Dynamo's mocker, slowed down so that a small machine can run many workers.

The requests are those of Mooncake's trace, with 16 tokens per block instead of 512. They arrive as in the trace, but faster.
Answers have at most 32 tokens. Requests that need more than half of a worker's KV blocks are left out. Tiers, deadlines and
clients are those of the `overload` benchmark. A client gives up if it has no first token after 20 s. A load is a multiple of
the fleet's capacity. Prints one JSON object per row:

    capacity   requests per second that the saturated fleet completes, without admission control
    run        one load (`figures` describes the columns). Rejections are timed by the load's clients, which share a process,
               and by a client that does nothing else (`alone_…`: benchmarks/overload/refusal_client.py)
    step       the load drops from 4 times the capacity to half of it: seconds from the drop to the last rejection (Holdfast)
    result     for each fleet: goodput at each load above 1, relative to the goodput at load 1
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
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import uvloop

from benchmarks.local_fleet import LocalFleet
from benchmarks.overload.clients import WARM_S, Arrivals, Coming, OpenLoop, figures, recovery
from benchmarks.overload.overload import arguments
from benchmarks.overload.refusal_client import rejection_times
from benchmarks.peers.peer import MISSING, PYTHON
from benchmarks.peers.peer_systems import STARTS_WITHIN_S, Dynamo, Holdfast
from benchmarks.router.virtual.fleet import percentiles
from benchmarks.router.virtual.trace import recorded
from benchmarks.rows import Row, show
from controller.trace.replay.endpoint import ReplayTarget
from controller.trace.rows import TraceRow
from events.errors import HoldfastError

BATCH, KV_BLOCKS, BLOCK_TOKENS = 4, 96, 16
SPEED = 0.25  # share of the mocker's speed
# flags of Dynamo's frontend
THRESHOLDS = (
    "--admission-control", "token-capacity", "--active-decode-blocks-threshold", "0.85",
    "--active-prefill-tokens-threshold", "10000",
)  # fmt: skip
# niceness of the workers, which stand for other machines and so must not delay the frontend
NICER = 10


class HoldfastFleet(Holdfast):
    """`holdfast up` with one frontend and one admission control, and simulated workers in one process."""

    serves = ""  # the model's name

    def __init__(self, folder: Path, workers: int, control: str) -> None:
        super().__init__(folder, flat=True)
        self.name = f"holdfast {control}"
        self._workers, self._control = workers, control

    async def start(self) -> None:
        """Start the fleet, and wait until all workers are healthy. Raise NotAsExpected if that fails."""
        count = str(self._workers)
        environment = {
            "HOLDFAST_WORKER_PERF_MODEL": "polynomial-v2",
            "HOLDFAST_WORKER_SPEEDUP_RATIO": str(SPEED),
            "HOLDFAST_WORKER_BATCH_MAX": str(BATCH),
            "HOLDFAST_WORKER_KV_BLOCKS": str(KV_BLOCKS),
            "HOLDFAST_WORKER_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "HOLDFAST_WORKER_CONTEXT_TOKENS": str(KV_BLOCKS * BLOCK_TOKENS),
        }
        self._fleet = LocalFleet.start(
            self._folder, "--workers", count, "--workers-per-process", count, "--admission-control", self._control,
            "--planner-mode", "off", environment=environment,
        )  # fmt: skip
        await self._fleet.ready()
        status = await self._fleet.healthy(self._workers, STARTS_WITHIN_S)
        self.serves = status["workers"][0]["model"]
        for pid in {one["pid"] for one in status["workers"]}:
            _let_others_first(pid)


def _let_others_first(pid: int) -> None:
    """Lower the scheduling priority of all threads of a process, so that the frontend is not delayed."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), NICER)


class DynamoFleet(Dynamo):
    """NVIDIA Dynamo: one frontend, and its mocker's workers in one process. `token-capacity` sets the busy thresholds."""

    serves = "m"

    def __init__(self, folder: Path, python: Path, workers: int, control: str) -> None:
        super().__init__(folder, python, flat=True)
        self.name = f"dynamo {control}"
        self._processes, self._listing = 1, workers
        self._flags = THRESHOLDS if control == "token-capacity" else ()

    async def start(self) -> None:
        await super().start()
        _let_others_first(self._workers[0].pid)

    def _engine(self) -> tuple[str, ...]:
        return self._mocker(
            "--num-workers", str(self._listing), "--speedup-ratio", str(SPEED), "--max-num-seqs", str(BATCH),
            "--num-gpu-blocks-override", str(KV_BLOCKS), "--block-size", str(BLOCK_TOKENS),
        )  # fmt: skip


OverloadedSystem = HoldfastFleet | DynamoFleet
PATIENCE_S = 20.0
ANSWER_S = 120.0  # the longest time for an answer
ANSWER_MAX = 32
# prompt tokens per second, by the linear part of the mocker's polynomial
READS_PER_S = 1000.0 / 0.015 * SPEED
FLOOD_S, FLOOD_WARM_S = 24.0, 8.0
REST_S = 2.0
WARM_UP_S = 15.0  # at full load, before the measurements: caches fill, and estimates converge
# makes request ids differ between runs; otherwise a request could count as a retry of one rejected in an earlier run
RUNS = itertools.count()
WAITED = b"no worker became free"  # the message of a rejection after waiting


class RealClients(OpenLoop):
    """Clients that send their requests to a real fleet over HTTP."""

    def __init__(self, system: OverloadedSystem) -> None:
        super().__init__()
        self._system, self._session = system, ReplayTarget(system.url)
        self._number = next(RUNS)

    async def ask(self, coming: Coming, began: float) -> None:
        now, (attempt, sent) = asyncio.get_running_loop().time, self.sends(coming, 0, began)

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
        attempt.refused = reply.headers.get("X-Holdfast-Refused") or reply.fault
        if reply.status and WAITED not in reply.body:
            attempt.took_s = reply.ended - reply.began


class FleetTrial:
    """Measures fleets, one after another, with the same requests and settings."""

    def __init__(self, rows: Sequence[TraceRow], args: argparse.Namespace) -> None:
        self._args = args
        self._capacities: dict[type[OverloadedSystem], float] = {}
        self._arrivals = Arrivals([*_held(rows)], BLOCK_TOKENS, READS_PER_S)

    async def of(self, system: OverloadedSystem, loads: Sequence[float]) -> list[Row]:
        """Measure one fleet and return its rows, each printed at once. The first fleet of a kind gives its capacity."""
        kind, said = type(system), list[Row]()
        try:
            await system.start()
            if kind not in self._capacities:
                said.append(show(await self._flood(system)))
                self._capacities[kind] = said[0]["requests_per_s"]
            capacity = self._capacities[kind]
            await RealClients(system).run(self._arrivals.coming(capacity, WARM_UP_S, self._args.seed + 1))
            said += [show(await self._run(system, load, capacity)) for load in loads]
            if loads and system.name.startswith("holdfast"):
                said.append(show(await self._step(system, capacity)))
        finally:
            await system.stop()
        return said

    async def _flood(self, system: OverloadedSystem) -> Row:
        """Measure the capacity of a fleet, with more requests in flight than fit. Return the `capacity` row."""
        clients, arrivals, numbers = RealClients(system), self._arrivals, itertools.count()
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def user() -> None:
            while loop.time() < began + FLOOD_S:
                coming = arrivals.request(next(numbers), loop.time() - began, PATIENCE_S)
                await clients.ask(coming, began)

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
        gc.disable()  # garbage collection in this process must not count as the fleet's time
        alone = asyncio.ensure_future(rejection_times(system.url, system.serves, moments))
        await clients.run(coming)
        gc.enable()
        took = await alone
        row = {"row": "run", "system": system.name, "load": load, **figures(clients.attempts, args.seconds)}
        row |= {"alone_refusals": len(took), **percentiles("alone_ms", took, 1e3)}
        return row | {"wall_s": time.perf_counter() - began}

    async def _step(self, system: OverloadedSystem, capacity: float) -> Row:
        """Drop the load from four times the capacity to half of it. Return the `step` row."""
        await asyncio.sleep(REST_S)
        clients, half = RealClients(system), self._args.seconds / 2
        await clients.run(self._arrivals.falling(capacity, half, self._args.seed))
        return {"row": "step", "system": system.name, **recovery(clients.attempts, half)}


def _held(rows: Sequence[TraceRow]) -> Iterator[TraceRow]:
    """Yield the requests that need at most half of a worker's KV blocks, with answers cut to ANSWER_MAX tokens."""
    for row in rows:
        answer = min(row.output_length, ANSWER_MAX)
        if row.input_length * BLOCK_TOKENS // 512 + answer <= KV_BLOCKS * BLOCK_TOKENS // 2:
            yield msgspec.structs.replace(row, output_length=answer)


def result(rows: Sequence[Row]) -> Row:
    """Return each fleet's goodput at the loads above 1, relative to the goodput at load 1."""
    found: Row = {"row": "result"}
    for name in dict.fromkeys(row["system"] for row in rows):
        runs = {row["load"]: row for row in rows if row["row"] == "run" and row["system"] == name}
        if 1.0 in runs and runs[1.0]["goodput"] > 0:
            found[name] = {
                f"{load:g}": runs[load]["goodput"] / runs[1.0]["goodput"] for load in runs if load > 1
            }
    return found


async def run(rows: Sequence[TraceRow], args: argparse.Namespace, folder: Path) -> None:
    """Measure all fleets with all admission controls, and print the result."""
    trial, said = FleetTrial(rows, args), list[Row]()
    for control in ("none", *(one for one in args.controls if one != "none")):
        loads = args.loads if control in args.controls else ()
        said += await trial.of(HoldfastFleet(folder / control, args.workers, control), loads)
        if args.dynamo and control != "deadline":
            peer = DynamoFleet(folder / f"dynamo-{control}", args.dynamo_python, args.workers, control)
            said += await trial.of(peer, loads)
    show(result(said))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = arguments("overload_fleet", __doc__, 64, [0.5, 1.0, 2.0, 4.0], 30.0)
    parser.add_argument("--dynamo", action="store_true")
    parser.add_argument("--dynamo-python", type=Path, default=PYTHON)
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
