"""Measures the cost of the request plane over the broker, compared with the plane over TCP.

    python -m benchmarks planes [flat ttft steady kill] [--runs 3] [--seconds 3] [--kills 10]

Both planes in one run, in turn, each with its own fleets (`holdfast up --request-plane tcp|nats`, simulated workers, journals and
canaries on). `flat`: two workers, flat out, c=64: tokens per second, and per CPU-second of the frontend, the workers and the
broker. `ttft`: the same at c=1. `steady`: 20 ms per token, c=64: time to the first token and between tokens. `kill`: SIGKILL to
one of three workers: the time until an affected stream continues. One JSON object per row and plane: the median of the runs, and
the runs.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.failures.faults import PROMPTS, STEP_S, bench, resumed_ms, spread
from benchmarks.local_fleet import LocalFleet
from benchmarks.serving.relay import load

PLANES = ("tcp", "nats")
WORKERS = 2


async def loaded(plane: str, itl_ms: float, options: dict[str, Any]) -> dict[str, Any]:
    """Return one measurement of a new fleet."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        flags = ("--workers", str(WORKERS), "--itl-ms", str(itl_ms), "--request-plane", plane)
        fleet = LocalFleet.start(Path(folder) / "data", *flags)
        try:
            await fleet.ready()
            processes = (await fleet.healthy(WORKERS))["processes"]
            pids = {
                name: "+".join(str(p["pid"]) for p in processes if p["role"] == role)
                for name, role in (("frontend", "frontend"), ("workers", "worker"), ("broker", "nats"))
            }
            named = ",".join(f"{name}={which}" for name, which in pids.items())
            return await asyncio.to_thread(load, fleet.url, model="sim", pids=named, **options)
        finally:
            fleet.stop()


def flat(plane: str, a: argparse.Namespace) -> dict[str, Any]:
    """Flat out, c=64: tokens per second; tokens per CPU-second of each kind of process."""
    got = asyncio.run(loaded(plane, 0, {"concurrency": 64, "duration": a.seconds}))
    costs = {name: got[name]["tok_per_cpu_s"] for name in ("frontend", "workers", "broker")}
    return {"value": got["tok_s"], **costs}


def ttft(plane: str, a: argparse.Namespace) -> dict[str, Any]:
    """Flat out, c=1: the time to the first token, ms."""
    got = asyncio.run(loaded(plane, 0, {"concurrency": 1, "duration": a.seconds}))
    return {"value": got["ttft_ms"]["p50"], "p99": got["ttft_ms"]["p99"]}


def steady(plane: str, a: argparse.Namespace) -> dict[str, Any]:
    """20 ms per token, c=64: the 99th percentile between tokens, and the time to the first one, ms."""
    got = asyncio.run(loaded(plane, 20, {"concurrency": 64, "duration": a.seconds, "itl": True}))
    first = got["ttft_ms"]
    return {"value": got["itl_ms"]["p99"], "ttft_p50": first["p50"], "ttft_p99": first["p99"]}


async def _kills(plane: str, kills: int) -> dict[str, Any]:
    async with bench("--canary-interval", "0.5", "--request-plane", plane) as b:
        resumes: list[float] = []
        exact = 0
        for _ in range(kills):
            status = (await b.fleet.healthy(3))["workers"]
            streams, task = await b.round()
            await asyncio.sleep(random.random() * STEP_S)
            os.kill(random.choice(status)["pid"], signal.SIGKILL)
            fault = time.monotonic()
            await task
            moved = await b.moved(streams)
            resumes += [resumed_ms(s, fault) for s in streams if s.request in moved and not s.error]
            exact += b.exact(streams)
        found = spread(resumes)
        return {"value": found["p50"], **found, "exact": f"{exact} of {kills * len(PROMPTS)}"}


def kill(plane: str, a: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL of a worker, 20 ms per token: the time until an affected stream continues, ms."""
    return asyncio.run(_kills(plane, a.kills))


ROWS: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "flat": flat,
    "ttft": ttft,
    "steady": steady,
    "kill": kill,
}


def main() -> None:
    """Run the requested rows, the planes in turn."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[], metavar="ROW", help=", ".join(ROWS))
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--seconds", type=float, default=3.0)
    p.add_argument("--kills", type=int, default=10, help="kills per run (default: 10)")
    a = p.parse_args()
    for name in a.rows or ROWS:
        runs: dict[str, list[dict[str, Any]]] = {plane: [] for plane in PLANES}
        for _ in range(a.runs):
            for plane in PLANES:
                runs[plane].append(ROWS[name](plane, a))
        for plane, found in runs.items():
            median = statistics.median(run["value"] for run in found)
            row = {"row": name, "plane": plane, "says": ROWS[name].__doc__, "median": median, "runs": found}
            print(json.dumps(row | {"load_1m": round(os.getloadavg()[0], 2)}), flush=True)


if __name__ == "__main__":
    main()
