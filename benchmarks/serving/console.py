"""Measures the cost and delay of the console with a thousand workers: `python -m benchmarks console`

A real fleet of a thousand simulated workers in a few processes, under load. Debian's chromium (`make chromium`) opens the
console of its one frontend. The page measures each refresh: from the instant at which the frontend begins to take the
snapshot until the browser has drawn it. The frontend's cost is its process's own CPU time, in turns: while the console is closed,
and while it is open. Prints one JSON object:

    opened_ms     from the address to the first view with all workers
    refresh_ms    p50, p99, max of `--seconds` refreshes
    core_percent  of one core that the frontend uses more while the page is open: the median over the turns, and each
    bytes         of a snapshot; of an event with changes, on average
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from playwright.async_api import Browser, Page

from benchmarks import browser
from benchmarks.serving.many import fleet, served, thousand
from controller.adapters.embedded.free_port import free_port

READY_S = 180.0
WITHIN_MS = 30_000
SETTLE_S = 3.0
WATCH = """() => {
    window.took = [];
    new PerformanceObserver((list) => window.took.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: "measure" });
}"""


async def opened(found: Browser, url: str) -> Page:
    """Open the console, and wait for its first view."""
    context = await found.new_context(viewport={"width": 1280, "height": 1000})
    page = await context.new_page()
    await page.goto(url)
    await page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=WITHIN_MS)
    return page


def spent(pid: int) -> float:
    """Return a process's CPU seconds so far."""
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


async def core(pid: int, seconds: float) -> float:
    """Return the share of a core that a process uses over some seconds."""
    before, began = spent(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return (spent(pid) - before) / (time.perf_counter() - began)


def sizes(url: str, seconds: float) -> dict[str, float]:
    """Return the bytes of a snapshot, and of a change on average."""
    found: dict[str, list[int]] = {"snapshot": [], "changes": []}
    name, until = "", time.monotonic() + seconds
    with urllib.request.urlopen(f"{url}/events", timeout=10) as answer:
        while time.monotonic() < until:
            line = answer.readline()
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: ") and name in found:
                found[name].append(len(line))
    changes = found["changes"]
    return {"snapshot": found["snapshot"][0], "changes": round(sum(changes) / max(1, len(changes)))}


async def looked_at(url: str, pid: int, a: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Open and close the console, in turns."""
    more, took, opened_ms = [], [], []
    async with browser.browser(home) as found:
        for _ in range(a.turns):
            await asyncio.sleep(SETTLE_S)
            alone = await core(pid, a.seconds)
            began = time.perf_counter()
            page = await opened(found, url)
            opened_ms.append(1e3 * (time.perf_counter() - began))
            rows = await page.locator("#workers tbody tr").count()
            if rows < a.workers:
                sys.exit(f"the page shows {rows} of {a.workers} workers")
            await page.evaluate(WATCH)
            await asyncio.sleep(SETTLE_S)
            more.append(100 * (await core(pid, a.seconds) - alone))
            took += await page.evaluate("window.took")
            await page.context.close()
    took.sort()
    return {
        "opened_ms": round(median(opened_ms)),
        "refresh_ms": {
            "p50": round(median(took), 1), "p99": round(took[int(len(took) * 0.99)], 1), "max": round(took[-1], 1)
        },
        "refreshes": len(took),
        "core_percent": round(median(more), 2),
        "core_percent_each": [round(one, 2) for one in more],
    }  # fmt: skip


async def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return all figures."""
    from benchmarks.serving.relay import load

    port = free_port()
    with fleet(folder, port, a.itl_ms) as url, thousand(folder, a.workers, a.processes, a.itl_ms):
        until = time.monotonic() + READY_S
        while served(url) < a.workers + 1:
            if time.monotonic() > until:
                sys.exit(f"the workers were not ready within {READY_S:g} s")
            await asyncio.sleep(0.5)
        known = [json.loads(path.read_text()) for path in (folder / "run").glob("*.json")]
        frontend = next(one for one in known if one["role"] == "frontend")
        console = f"{frontend['url']}/console"
        wanted = {"model": "sim", "concurrency": a.concurrency, "osl": 128, "warmup": 0}
        lasts = a.turns * 2 * (a.seconds + 2 * SETTLE_S) + 30
        loading = (
            asyncio.create_task(asyncio.to_thread(load, url, **wanted, duration=lasts))
            if a.concurrency
            else None
        )
        found = await looked_at(console, frontend["pid"], a, folder)
        found["bytes"] = await asyncio.to_thread(sizes, console, a.seconds)
        if loading is not None:
            await loading
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks console",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=4, help="processes of the workers (default: 4)")
    parser.add_argument(
        "--concurrency", type=int, default=50, help="streams at once; 0: no load (default: 50)"
    )
    parser.add_argument("--itl-ms", type=float, default=100.0, help="milliseconds per step (default: 100)")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each turn (default: 20)")
    parser.add_argument("--turns", type=int, default=3)
    a = parser.parse_args(argv)
    if browser.installed() is None:
        print(json.dumps({"row": "console", "page": browser.NONE}))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({"row": "console", **vars(a), **asyncio.run(measure(a, Path(folder)))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
