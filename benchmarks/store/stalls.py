"""Attributes the delay of events to stages, and to the machine, for `benchmarks.store.store`.

    published ── publishing ──▶ stored ── delivery ──▶ written ── commit ──▶ committed

`stored` is the broker's own time, before it syncs: the sync belongs to `delivery`, and an event that waits for the sync
of the one before it belongs to `publishing`. All on one machine, so that one clock applies.
"""

import json
import os
import select
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STALL_MS = 20.0  # an event that took longer is part of a stall
QUIET_MS = 20.0  # an event published this long after the last event of a stall belongs to another one
PROBE_EVERY_S = 0.02
PAGE = b"x" * 4096
STAGES = ("publishing", "delivery", "commit")

Took = tuple[float, float, float, float]  # time of publication, and duration of each stage: milliseconds


def told(events: Sequence[Took]) -> dict[str, Any]:
    """Return the figures of events in the order of publication."""
    return {
        **percentiles([sum(event[1:]) for event in events]),
        "stages_p99_ms": {
            name: percentiles([event[n] for event in events])["p99_ms"]
            for n, name in enumerate(STAGES, start=1)
        },
        "stalls": stalls(events),
    }


def stalls(events: Sequence[Took]) -> dict[str, Any]:
    """Count the stalls, the events in them, and the slowest stage of the most delayed event of each."""
    found: list[list[Took]] = []
    for event in events:
        if sum(event[1:]) > STALL_MS:
            if found and event[0] - found[-1][-1][0] <= QUIET_MS:
                found[-1].append(event)
            else:
                found.append([event])
    worst = [max(stall, key=lambda event: sum(event[1:])) for stall in found]
    by = Counter(STAGES[event.index(max(event[1:]), 1) - 1] for event in worst)
    return {"count": len(found), "events": sum(map(len, found)), "by_stage": dict(by)}


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the tail and the worst."""
    took = sorted(milliseconds)
    at = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}
    return {
        **{name: round(took[len(took) * p // 100], 2) for name, p in at.items()},
        "max_ms": round(took[-1], 2),
    }


def probe(directory: Path) -> None:
    """Sleep, append a page to a file and sync it, until stdin ends; then print how long syncs took, and how late it woke.

    It runs in a separate process beside the measurement, on the same disk: slow syncs are the disk's fault, and a late
    wake-up means that the process had to wait for a processor.
    """
    synced, late = [], []
    file = os.open(directory / "probe", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    slept = time.monotonic()
    while not select.select([sys.stdin], [], [], PROBE_EVERY_S)[0]:
        woke = time.monotonic()
        late.append((woke - slept - PROBE_EVERY_S) * 1000)
        os.write(file, PAGE)
        began = time.monotonic()
        os.fdatasync(file)
        slept = time.monotonic()
        synced.append((slept - began) * 1000)
    os.close(file)
    print(json.dumps({"fdatasync": percentiles(synced), "woken_late": percentiles(late)}))


if __name__ == "__main__":
    probe(Path(sys.argv[1]))
