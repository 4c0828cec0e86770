"""Measures a frontend's cost of scrapes and an open console: `python -m benchmarks watched`

A fleet of two simulated workers relays for `--concurrency` streams. In turns the frontend is unwatched, and Prometheus
scrapes its metrics every five seconds while a console is open. A relay that runs flat out uses a whole core, so the share of
a core that watching uses is its share of `relay flat`. A comparison of the tokens of two runs would not show it: they differ
by a fifth anyway. Prints one JSON object:

    core_percent        of one core that the frontend uses more while it is watched: the median over the turns
    core_percent_each   of every turn
    alone_percent       that it uses anyway, on average
"""

import argparse
import asyncio
import json
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.local_fleet import LocalFleet
from benchmarks.serving.console import core
from benchmarks.serving.relay import load
from events.process.presence import present

SCRAPE_S = 5.0  # as in `holdfast scrape-config`
WITHIN_S = 20.0
SETTLE_S = 2.0


@contextmanager
def watching(admin: str) -> Iterator[None]:
    """Scrape a frontend's metrics as Prometheus does, and keep its console open."""
    over = threading.Event()

    def scrape() -> None:
        asked = urllib.request.Request(f"{admin}/metrics", headers={"Accept-Encoding": "gzip"})
        while not over.is_set():
            with urllib.request.urlopen(asked, timeout=WITHIN_S) as answer:
                answer.read()
            over.wait(SCRAPE_S)

    def look() -> None:
        with urllib.request.urlopen(f"{admin}/console/events", timeout=WITHIN_S) as answer:
            while not over.is_set():
                answer.readline()

    watchers = [threading.Thread(target=one) for one in (scrape, look)]
    for one in watchers:
        one.start()
    try:
        yield
    finally:
        over.set()
        for one in watchers:
            one.join()


async def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    fleet = LocalFleet.start(folder, "--workers", "2", "--itl-ms", "20")
    try:
        await fleet.ready()
        await fleet.healthy(2)
        frontend = next(one for one in present(folder) if one.role == "frontend")
        lasts = 2 * a.turns * (a.seconds + SETTLE_S)
        wanted = {"model": "sim", "concurrency": a.concurrency, "osl": 128, "warmup": 0, "duration": lasts}
        loading = asyncio.create_task(asyncio.to_thread(load, fleet.url, **wanted))
        alone, more = [], []
        for _ in range(a.turns):
            await asyncio.sleep(SETTLE_S)
            alone.append(await core(frontend.pid, a.seconds))
            with watching(frontend.url):
                await asyncio.sleep(SETTLE_S)
                more.append(100 * (await core(frontend.pid, a.seconds) - alone[-1]))
        await loading
    finally:
        fleet.end()
    return {
        "core_percent": round(median(more), 2),
        "core_percent_each": [round(one, 2) for one in more],
        "alone_percent": round(100 * fmean(alone), 2),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks watched",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--concurrency", type=int, default=16, help="streams at once (default: 16)")
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of each turn (default: 15)")
    parser.add_argument("--turns", type=int, default=6, help="number of turns (default: 6)")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"row": "watched", **vars(a), **asyncio.run(measure(a, Path(folder)))}))


if __name__ == "__main__":
    main()
