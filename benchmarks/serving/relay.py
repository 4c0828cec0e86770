"""Measures a frontend's relay: the rows of the figures' table about tokens per second and latency.

    python -m benchmarks relay [flat steady total ttft over itl] [--runs 3] [--seconds 5]

Starts simulated workers and frontends as separate processes (`--static`: no broker), loads them with
`benchmarks.serving.load`, and prints one JSON object per row: the median of the runs, and the runs. Detokenisation,
accounting and metrics are on, as always. `flat`: flat out, c=64, tokens per frontend-CPU-second. `steady`: 20
ms per token, c=256, every token its own write. `total`: two frontends on one port. `ttft`: flat out, c=1.
`over`: 20 ms per token, c=16, in excess of the direct path, which is measured on the same workers in the same run. `itl`:
20 ms per token at c=64.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.serving.load import measure, parser, percentiles
from controller.adapters.embedded.free_port import free_port
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.worker_links import Address
from events.wire import Generate, Sampling

HOLDFAST = str(Path(sys.executable).with_name("holdfast"))
READY_S = 20.0


@contextlib.contextmanager
def rig(workers: int, frontends: int, itl_ms: float) -> Iterator[tuple[str, list[int], list[int], list[int]]]:
    """Run workers and frontends; yield the URL, both kinds' PIDs and the workers' ports."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    ports, port = [free_port() for _ in range(workers)], free_port()
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as data:

        def start(*words: str) -> int:
            command = [HOLDFAST, *words, "--data", data]
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet))
            return running[-1].pid

        try:
            worker = ("worker", "--model", "m", "--admin-port", "-1", "--batch-max", "512")
            served = [
                start(*worker, "--name", f"w{n}", "--port", str(p), "--itl-ms", str(itl_ms))
                for n, p in enumerate(ports)
            ]
            static = ",".join(f"127.0.0.1:{p}" for p in ports)
            front = ("frontend", "--static", static, "--port", str(port), "--migration-limit", "3")
            fronts = [start(*front, "--name", f"f{n}") for n in range(frontends)]
            url = f"http://127.0.0.1:{port}"
            _await_healthy(url, frontends)
            yield url, fronts, served, ports
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def _await_healthy(url: str, frontends: int) -> None:
    until, good = time.monotonic() + READY_S, 0
    while good < 8 * frontends:  # several frontends share the port: ask until all of them must have answered
        try:
            with urllib.request.urlopen(url + "/health", timeout=1) as answer:
                good += answer.status == 200
        except OSError:
            good = 0
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def load(url: str, **options: Any) -> dict[str, Any]:
    """Return one measurement."""
    a = parser().parse_args(["--url", url])
    for name, value in options.items():
        setattr(a, name, value)
    got = measure(a)
    if not got["ok"]:
        raise SystemExit(
            f"no request succeeded within {a.duration:g} s; the last errors: {got['bad'] or 'none'}"
        )
    return got


def _pids(fronts: list[int]) -> str:
    return "frontend=" + "+".join(map(str, fronts))


def flat(seconds: float) -> dict[str, Any]:
    """Tokens per frontend-CPU-second, flat out, c=64."""
    with rig(2, 1, 0) as (url, fronts, *_):
        got = load(url, concurrency=64, duration=seconds, pids=_pids(fronts), reference=url, procs=2)
    return {"value": got["frontend"]["tok_per_cpu_s"], "tok_s": got["tok_s"], "got": got}


def steady(seconds: float) -> dict[str, Any]:
    """The same with every token its own write: 20 ms per token, c=256."""
    with rig(2, 1, 20) as (url, fronts, *_):
        # a fixed number of answers of 1.3 s each, all of them counted: answers cut off by a window's end would not be
        asked = 256 * max(1, round(seconds))
        got = load(url, concurrency=256, requests=asked, warmup=0, duration=seconds * 20, pids=_pids(fronts))
    return {"value": got["frontend"]["tok_per_cpu_s"], "itl_ms": got.get("itl_ms"), "got": got}


def total(seconds: float) -> dict[str, Any]:
    """Relayed tokens per second, two frontends on one port, client and workers on the same machine."""
    out = {}
    with rig(2, 2, 0) as (url, fronts, *_):
        for concurrency in (64, 256):
            got = load(url, concurrency=concurrency, duration=seconds, pids=_pids(fronts), procs=2)
            out[f"c{concurrency}"] = got["tok_s"]
    return {"value": min(out.values()), **out, "got": got}


def ttft(seconds: float) -> dict[str, Any]:
    """Time to the first token, flat out, one client on a keep-alive connection."""
    with rig(2, 1, 0) as (url, *_):
        got = load(url, concurrency=1, duration=seconds)
    return {"value": got["ttft_ms"]["p50"], "p99": got["ttft_ms"]["p99"], "got": got}


async def _direct(ports: list[int], concurrency: int, seconds: float) -> list[float]:
    """Return the times to first token of requests sent to the workers without a frontend, in seconds."""
    plane = RequestPlaneClient("direct")
    plane.set_workers({f"w{n}": Address("", f"tcp://127.0.0.1:{port}") for n, port in enumerate(ports)})
    keeping = asyncio.create_task(plane.run())
    until, found = time.monotonic() + seconds, []

    async def user(number: int) -> None:
        worker = f"w{number % len(ports)}"
        while time.monotonic() < until:
            tokens = [300 + number] * 12
            sampling = Sampling(max_tokens=64, ignore_eos=True)
            ask = Generate(stream=0, request="d", tokens=tokens, prompt_tokens=12, sampling=sampling)
            began, first = time.perf_counter(), 0.0
            async for _ in plane.ask(worker, ask):
                first = first or time.perf_counter()
            found.append(first - began)

    await asyncio.gather(*(user(number) for number in range(concurrency)))
    keeping.cancel()
    return found


def over(seconds: float) -> dict[str, Any]:
    """Time to the first token in excess of the direct path's, 20 ms per token, c=16: p50 and p99, in ms."""
    with rig(2, 1, 20) as (url, _, _, ports):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            direct = percentiles(runner.run(_direct(ports, 16, seconds)), 50, 99)
        got = load(url, concurrency=16, duration=seconds)["ttft_ms"]
    added = {p: round(got[p] - (direct[p] or 0.0), 3) for p in ("p50", "p99")}
    return {"value": added["p50"], "p99": added["p99"], "direct": direct, "got": got}


def itl(seconds: float) -> dict[str, Any]:
    """Time between tokens, p99, 20 ms per token, c=64."""
    with rig(2, 1, 20) as (url, fronts, *_):
        got = load(url, concurrency=64, duration=seconds, pids=_pids(fronts), itl=True)
    return {"value": got["itl_ms"]["p99"], "got": got}


ROWS = {"flat": flat, "steady": steady, "total": total, "ttft": ttft, "over": over, "itl": itl}


def main() -> None:
    """Run the requested rows."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("rows", nargs="*", choices=[*ROWS, []], default=[], metavar="ROW", help=", ".join(ROWS))
    p.add_argument("--runs", type=int, default=3)
    p.add_argument("--seconds", type=float, default=5.0)
    a = p.parse_args()
    for name in a.rows or ROWS:
        runs = [ROWS[name](a.seconds) for _ in range(a.runs)]
        values = [run["value"] for run in runs]
        row = {"row": name, "says": ROWS[name].__doc__, "median": statistics.median(values), "runs": values}
        print(json.dumps(row | {"load_1m": round(os.getloadavg()[0], 2), "last": runs[-1]}), flush=True)


if __name__ == "__main__":
    main()
