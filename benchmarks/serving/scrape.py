"""Measures the time and size of a metrics scrape of a thousand workers.

    python -m benchmarks scrape [--workers 1000] [--per-process 250] [--cardinality compact|full] [--times 5]

Starts a fleet of simulated workers, many per process, and requests `/metrics` of each of its processes as Prometheus does (its
Accept and Accept-Encoding), one after another, several times. Reports for each role, and for all, the time of the answers until
their last byte (the mean over the repetitions), the processor time beside normal work, and their size compressed and
uncompressed.
"""

import argparse
import asyncio
import gzip
import json
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.local_fleet import LocalFleet
from controller.processes.observability.scrape_targets import target_groups
from events.process.presence import present

READY_S = 120.0
WITHIN_S = 30.0
IDLE_S, SETTLED_S = (
    5.0,
    15.0,
)  # each worker has answered its first canaries, and frontends know its blocks
ASKS = {  # Prometheus 2.42's
    "Accept": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/2.42.0",
}
WANTED = {"slowest_target_s": "<= 0.25, where cores are free", "mb": "<= 5"}


def scraped(target: str) -> tuple[float, int, int]:
    """Return a target's seconds, its received bytes, and its uncompressed bytes."""
    began = time.perf_counter()
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{target}/metrics", headers=ASKS), timeout=WITHIN_S
    ) as answer:
        body, packed = answer.read(), answer.headers.get("Content-Encoding") == "gzip"
    seconds = time.perf_counter() - began
    return seconds, len(body), len(gzip.decompress(body)) if packed else len(body)


def measured(data: Path, times: int) -> dict[str, object]:
    """Scrape all targets of a fleet `times` times; return the figures of each role, and of all of them."""
    there = [(one, group["targets"][0]) for one in present(data) for group in target_groups([one])]
    idle = {one.pid: _busy(one.pid) for one, _ in there}
    time.sleep(IDLE_S)
    idle = {pid: (_busy(pid) - before) / IDLE_S for pid, before in idle.items()}
    took: dict[str, list[float]] = defaultdict(
        list
    )  # by role: seconds, processor seconds, bytes, and uncompressed bytes
    answers: dict[str, list[float]] = defaultdict(list)  # by target
    for one, target in there * times:
        before = _busy(one.pid)
        seconds, came, plain = scraped(target)
        figures = (seconds, _busy(one.pid) - before - idle[one.pid] * seconds, came, plain)
        known = took.setdefault(one.role, [0.0] * len(figures))
        took[one.role] = [total + figure / times for total, figure in zip(known, figures, strict=True)]
        answers[target].append(seconds)
    slowest, single = max(map(fmean, answers.values())), max(map(max, answers.values()))
    every = [sum(figures) for figures in zip(*took.values(), strict=True)]
    return {
        "targets": len(there),
        "slowest_target_s": round(slowest, 3),
        "slowest_answer_s": round(single, 3),
        **{role: _named(figures) for role, figures in {"all": every, **took}.items()},
    }


def _busy(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _named(figures: list[float]) -> dict[str, float]:
    seconds, busy, came, plain = figures
    return {
        "seconds": round(seconds, 3), "processor_s": round(max(0.0, busy), 3), "mb": round(came / 1e6, 3),
        "unpacked_mb": round(plain / 1e6, 2),
    }  # fmt: skip


async def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scrape", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--workers", type=int, default=1000, help="simulated workers (default: 1000)")
    parser.add_argument("--per-process", type=int, default=250, help="workers per process (default: 250)")
    parser.add_argument(
        "--cardinality",
        choices=("compact", "full"),
        default="compact",
        help="metric cardinality (default: compact)",
    )
    parser.add_argument("--times", type=int, default=5, help="scrapes of each target (default: 5)")
    args = parser.parse_args()
    environment = {"HOLDFAST_CONTROLLER__METRICS_CARDINALITY": args.cardinality}
    flags = (
        "--workers",
        str(args.workers),
        "--workers-per-process",
        str(args.per_process),
        "--ready-timeout",
        str(READY_S),
    )
    with tempfile.TemporaryDirectory() as folder:
        fleet = LocalFleet.start(Path(folder) / "fleet", *flags, environment=environment)
        try:
            await fleet.ready()
            await fleet.until(
                lambda status: sum(w["health"] == "HEALTHY" for w in status["workers"]) == args.workers,
                READY_S,
            )
            await asyncio.sleep(SETTLED_S)
            found = await asyncio.to_thread(measured, fleet.data, args.times)
        finally:
            fleet.end()
    print(json.dumps({"workers": args.workers, "cardinality": args.cardinality, **found, "wanted": WANTED}))


if __name__ == "__main__":
    asyncio.run(main())
