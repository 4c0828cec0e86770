"""Measures the time from `holdfast up` to the first servable request.

    python -m benchmarks start [--trials 3]

Cold: an empty data directory. Warm: one that was used before. Simulated workers, as a new user starts them.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.local_fleet import LocalFleet
from workers.keeper import NAME


def memory_of(process: psutil.Process) -> int:
    """Return a process's private bytes; 0 if it has ended, or is a keeper, which shares its worker's."""
    with contextlib.suppress(psutil.NoSuchProcess):  # PostgreSQL's helpers are short-lived
        return 0 if process.name() == NAME.decode() else int(process.memory_full_info().uss)
    return 0


async def started(data: Path) -> tuple[float, float]:
    """Start a fleet on a directory; return the seconds until /health answers 200, and its memory in MB."""
    began = time.monotonic()
    fleet = LocalFleet.start(data, "--workers", "3")
    try:
        await fleet.ready()
        took = time.monotonic() - began
        await fleet.healthy(3)
        return took, sum(map(memory_of, fleet.family())) / 1e6
    finally:
        fleet.stop()


async def measure(trials: int) -> dict[str, object]:
    """Return the medians of `trials` cold and warm starts."""
    cold, warm, memory = [], [], []
    for _ in range(trials):
        with tempfile.TemporaryDirectory(prefix="holdfast-start-") as folder:
            cold.append((await started(Path(folder) / "data"))[0])
            took, mb = await started(Path(folder) / "data")
            warm.append(took)
            memory.append(mb)
    return {
        "cold_s": round(statistics.median(cold), 2),
        "cold_s_all": [round(s, 2) for s in cold],
        "warm_s": round(statistics.median(warm), 2),
        "warm_s_all": [round(s, 2) for s in warm],
        "fleet_memory_mb": round(statistics.median(memory)),
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps({"benchmark": "start", **asyncio.run(measure(args.trials))}))


if __name__ == "__main__":
    main()
