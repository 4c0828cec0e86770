"""Measures the post-mortem report: `python -m benchmarks report [--events 10000]`

A real broker holds a generated history of 1,000 workers; `holdfast replay report` renders all of it as one page. Debian's
chromium (`make chromium`) opens the page and moves its slider over the whole time, step by step. Prints one JSON object:

    report     seconds of the command, from its start to its end; megabytes of the page
    page       milliseconds until the first paint, and until the page is complete; of a step of the slider: p50, p99
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import browser
from benchmarks.store.store import fill
from controller.adapters.embedded.nats import start_nats

STEPS = 300
WITHIN_S = 120.0
STEPPED = """steps => {
    const time = document.getElementById("time"), took = [], last = Number(time.max);
    for (let n = 0; n < steps; n += 1) {
        const began = performance.now();
        time.value = String(Math.round(((n * 7919) % steps) / steps * last));
        time.dispatchEvent(new Event("input"));
        document.body.getBoundingClientRect(); // laid out anew
        took.push(performance.now() - began);
    }
    return took;
}"""


async def made(url: str, where: Path) -> float:
    """Run the command, and return its seconds."""
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controller.cli", "replay", "report", "--since", "1", "-o", str(where)),
        env={**os.environ, "HOLDFAST_NATS_URL": url, "HOLDFAST_DATABASE_URL": ""},
        stdout=asyncio.subprocess.DEVNULL,
    )
    async with asyncio.timeout(WITHIN_S):
        if await process.wait():
            raise SystemExit("holdfast replay report failed")
    return time.perf_counter() - began


async def looked_at(page: Path, home: Path) -> dict[str, Any]:
    """Open the page, and use it."""
    async with browser.browser(home) as found:
        began = time.perf_counter()
        async with browser.opened(found, page) as (shown, complaints):
            ready_ms = (time.perf_counter() - began) * 1e3
            paints = await shown.evaluate("performance.getEntriesByType('paint').map(one => one.startTime)")
            took = sorted(await shown.evaluate(STEPPED, STEPS))
    return {
        "first_paint_ms": max(paints),
        "ready_ms": ready_ms,
        "step_ms_p50": took[len(took) // 2],
        "step_ms_p99": took[int(len(took) * 0.99)],
        "complaints": complaints,
    }


async def measure(events: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        server = await start_nats(Path(folder) / "nats", sync_interval="2m")
        try:
            last = await fill(server.url, events)
            seconds = await made(server.url, page)
        finally:
            await server.stop()
        found: dict[str, Any] = {"events": last, "seconds": seconds, "megabytes": page.stat().st_size / 1e6}
        if browser.installed() is None:
            return found | {"page": browser.NONE}
        return found | await looked_at(page, Path(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--events", type=int, default=10_000)
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args.events))
    print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
