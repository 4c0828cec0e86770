"""Measures the cost and throughput of a thousand simulated workers on one machine.

    python -m benchmarks many [--workers 1000] [--processes 4] [--concurrency 1000] [--itl-ms 25] [--seconds 10]

Starts a fleet (`holdfast up` with one equal worker: broker, controller, projector, database, one frontend), then the
workers, in several processes. Measured: the time from their start until the frontend has all of them healthy and is connected
to them; memory and threads of their processes. Also measured: output tokens per second that the one frontend relays from them
under load, by its own counter. Also reported: processors used, idle and under load; the time of `holdfast status` under load;
and accusations against workers, of which there should be none. Beside our figures are those of Dynamo 1.6.1's mocker with
etcd and NATS: 1,000 engines in one process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.relay import HOLDFAST, load
from controller.adapters.embedded.free_port import free_port
from controller.processes.operator_client import read_all
from events.decisions import BreakerOpened, HealthChanged, HealthStatus
from events.observations import CanaryFailed, EngineFaulted, RequestMigrated, WorkerLeft, WorkerSilent

ACCUSATIONS = (BreakerOpened, CanaryFailed, EngineFaulted, RequestMigrated, WorkerLeft, WorkerSilent)
READY_S = 120.0
POLL_S = 0.1
COUNT_EVERY_S = 0.5
STATUS_EVERY_S = 3.0
PEER = {"routable_s": 22.7, "rss_mb": 1600, "threads": 8009, "tokens_per_s": 15_700}
WANTED = {"routable_s": "<= 5", "rss_mb": "<= 400", "threads": "<= 64", "tokens_per_s": ">= 20,000"}


@contextlib.contextmanager
def fleet(data: Path, port: int, itl_ms: float) -> Iterator[str]:
    """Run a fleet with one worker, w0, as slow as those to come (a faster one would get most of the load); yield its URL."""
    up = [HOLDFAST, "up", "--workers", "1", "--itl-ms", str(itl_ms), "--port", str(port), "--data", str(data)]
    with (data / "up.log").open("wb") as log:
        process = subprocess.Popen(up, stdout=log, stderr=log, env=_environment())
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: served(url) >= 1, "the fleet is ready")
        yield url
    finally:
        _end([process])


@contextlib.contextmanager
def thousand(data: Path, workers: int, processes: int, itl_ms: float) -> Iterator[list[int]]:
    """Start the workers; yield the PIDs of their processes."""
    share = -(-workers // processes)
    running = []
    for first in range(0, workers, share):
        count = min(share, workers - first)
        words = (
            "worker",
            "--name",
            f"x{first}",
            "--count",
            str(count),
            "--itl-ms",
            str(itl_ms),
            "--data",
            str(data),
        )
        with (data / f"x{first}.log").open("wb") as log:
            running.append(subprocess.Popen([HOLDFAST, *words], stdout=log, stderr=log, env=_environment()))
    try:
        yield [process.pid for process in running]
    finally:
        _end(running)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(90)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def served(url: str) -> int:
    """Return the number of workers that the frontend may send requests to, and can reach."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            known = json.load(answer).get("workers", ())
    except OSError:
        return 0
    return sum(worker["reachable"] and worker["weight"] > 0 for worker in known)


def _until(condition: Any, what: str) -> float:
    """Wait for a condition; return the seconds it took."""
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > READY_S:
            sys.exit(f"{what}: not within {READY_S:g} s")
        time.sleep(POLL_S)
    return time.perf_counter() - began


def sizes(pids: list[int]) -> dict[str, float]:
    """Return the total memory and threads of these processes. A keeper shares its worker's memory."""
    processes = [psutil.Process(pid) for pid in pids]
    rss = sum(process.memory_info().rss for process in processes)
    return {"rss_mb": round(rss / 1e6), "threads": sum(process.num_threads() for process in processes)}


class Watch:
    """Polls, while the load runs, the frontend's relayed tokens, and every few seconds `holdfast status`."""

    def __init__(self, data: Path, frontend: str) -> None:
        self.status_s: list[float] = []
        self._relayed: list[tuple[float, float]] = []  # time, and tokens until then
        self._data, self._metrics = data, f"{frontend}/metrics"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=work) for work in (self._ask, self._count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        command = [HOLDFAST, "status", "--data", str(self._data)]
        while not self._over.wait(STATUS_EVERY_S):
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, env=_environment(), check=False)
            if done.returncode == 0:
                self.status_s.append(round(time.perf_counter() - began, 2))

    def _count(self) -> None:
        while not self._over.wait(COUNT_EVERY_S):
            with urllib.request.urlopen(self._metrics, timeout=30) as answer:
                text = answer.read().decode()
            tokens = sum(
                float(value)
                for value in re.findall(r"^dynamo_frontend_output_tokens_total{.*} (\S+)", text, re.M)
            )
            self._relayed.append((time.perf_counter(), tokens))

    def end(self) -> None:
        """Stop polling."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def rate(self, since: float, until: float) -> float:
        """Return the relayed tokens per second between two instants."""
        seen = [(at, tokens) for at, tokens in self._relayed if since <= at <= until]
        if len(seen) < 2:
            sys.exit("the frontend reported its relayed tokens too rarely: increase --seconds")
        (first, before), (last, after) = seen[0], seen[-1]
        return (after - before) / (last - first)


def accused(data: Path) -> dict[str, int]:
    """Return the facts on the journal against workers, by kind and reason."""
    facts = [event.fact for event in asyncio.run(read_all(data))]
    bad = [fact for fact in facts if isinstance(fact, ACCUSATIONS)]
    lost = [f for f in facts if isinstance(f, HealthChanged) and f.after is not HealthStatus.HEALTHY]
    return dict(Counter(f"{f.kind()} {getattr(f, 'reason', '')}".strip() for f in (*bad, *lost)))


def measure(a: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Return everything about one run."""
    port = free_port()
    with fleet(data, port, a.itl_ms) as url:
        known = [json.loads(path.read_text()) for path in (data / "run").glob("*.json")]
        groups = {
            one["role"]: [one["pid"]] for one in known if one["role"] in ("frontend", "controller", "nats")
        }
        frontend = next(one["url"] for one in known if one["role"] == "frontend")
        began = time.perf_counter()
        with thousand(data, a.workers, a.processes, a.itl_ms) as pids:
            groups["workers"] = pids
            found: dict[str, Any] = {
                "join_cpu": _spent(
                    groups, lambda: _until(lambda: served(url) >= a.workers + 1, "all workers are routable")
                ),
                "routable_s": round(time.perf_counter() - began, 2),
            }
            found["idle_cpu"] = _spent(groups, lambda: time.sleep(a.idle)) if a.idle else {}
            watch = Watch(data, frontend)
            begun = time.perf_counter()
            wanted = {
                "model": "sim",
                "concurrency": a.concurrency,
                "osl": a.osl,
                "duration": a.seconds,
                "warmup": a.warmup,
            }
            got: dict[str, Any] = {}
            try:
                found["load_cpu"] = _spent(
                    groups, lambda: got.update(load(url, **wanted, procs=a.clients, itl=True))
                )
            finally:
                watch.end()
            found |= sizes(pids)
            found["tokens_per_s"] = round(watch.rate(begun + a.warmup, begun + a.warmup + a.seconds))
            return {**found, "status_s": watch.status_s, "accused": accused(data), "load": got}


def _spent(groups: dict[str, list[int]], work: Callable[[], object]) -> dict[str, float]:
    """Return how many processors each group of processes used during some work."""

    def used() -> dict[str, float]:
        return {
            name: sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
            for name, pids in groups.items()
        }

    before, began = used(), time.perf_counter()
    work()
    after, lasted = used(), time.perf_counter() - began
    return {name: round((after[name] - before[name]) / lasted, 2) for name in groups}


def main() -> None:
    """Measure, and print one JSON object and the table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = flags.add_argument
    add("--workers", type=int, default=1000)
    add("--processes", type=int, default=4, help="processes of the workers (default: 4)")
    add("--concurrency", type=int, default=1000, help="streams at once (default: 1000)")
    add("--osl", type=int, default=128, help="output tokens per request (default: 128)")
    add("--itl-ms", type=float, default=25.0, help="milliseconds per step (default: 25)")
    add("--seconds", type=float, default=10.0, help="seconds of load (default: 10)")
    add("--warmup", type=float, default=5.0, help="seconds of load before the measurement (default: 5)")
    add(
        "--idle",
        type=float,
        default=5.0,
        help="seconds over which the idle fleet's processors are measured (default: 5)",
    )
    add("--clients", type=int, default=1, help="processes that generate the load (default: 1)")
    a = flags.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(a, Path(folder))
    print(json.dumps({"row": "many", **vars(a), **found}), flush=True)
    print(f"{'':<14}{'Holdfast':>12}{'to reach':>12}{'Dynamo':>12}", file=sys.stderr)
    for name, peer in PEER.items():
        print(f"{name:<14}{found[name]:>12,}{WANTED[name]:>12}{peer:>12,}", file=sys.stderr)


if __name__ == "__main__":
    main()
