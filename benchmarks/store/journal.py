"""Measures the journal: append latency, view delay, read rate, takeover by another controller.

    python -m benchmarks journal [--events 200000] [--rate 1000] [--seconds 10] [--runs 3]

A real nats-server that syncs always, in its own directory; publisher, view and controllers are separate
processes. Prints one JSON object: medians of the runs, with the disk's own fdatasync beside them.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
import uvloop

from benchmarks.store.registered import WORKERS, joined
from controller.adapters.clock import SystemClock
from controller.adapters.embedded.nats import start_nats
from controller.deciders.fleet import FleetPolicy
from controller.processes import collector
from controller.runtime.lease import Lease
from controller.runtime.reconciler import Reconciler
from controller.runtime.view import FleetView
from events import observations as o
from events.decisions import Absorbed, HealthChanged, HealthStatus
from events.journal.nats import NatsJournal

APPENDS = 1000
TAKEOVERS = 5


def passed(worker: str, canary: str = "c0", check: o.CheckType = "scheduled") -> o.CanaryPassed:
    """Return a successful probe; the measured data is in `canary`."""
    return o.CanaryPassed(
        worker=worker, instance=f"{worker}-a", canary_key="key", canary=canary, check_type=check, sent_under=0,
        sent_at=datetime.now(UTC), latency_ms=12.0,
    )  # fmt: skip


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99}
    return {name: round(ordered[int(share * (len(ordered) - 1))] * 1000, 3) for name, share in at.items()}


def fdatasync_ms(directory: Path) -> float:
    """Return the disk's own time to sync 400 bytes (median)."""
    took = []
    with (directory / "sync").open("wb") as file:
        for _ in range(200):
            file.write(bytes(400))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return round(statistics.median(took) * 1000, 3)


# --- one run --------------------------------------------------------------------------------------------------------


async def measure_appends(
    journal: NatsJournal, size: int, after: int, number: int
) -> tuple[list[float], int, int]:
    """Append, one after another; return the times, the last sequence and the last number."""
    took = []
    for _ in range(APPENDS // size):
        batch = [Absorbed(number=number + n + 1, decided_at=datetime.now(UTC)) for n in range(size)]
        began = time.perf_counter()
        after = await journal.append(batch, through=after, after=after)
        took.append(time.perf_counter() - began)
        number += size
    return took, after, number


async def measure_read(journal: NatsJournal, events: int, spool: Path) -> dict[str, float]:
    """Write a history and read it back."""
    first = await journal.last_seq()
    speaker = await NatsJournal.connect(journal.connection.url, "worker:filler", spool)
    began = time.perf_counter()
    for n in range(events):
        speaker.observe(passed(f"w{n % WORKERS}"))
        if n % 500 == 499:
            await asyncio.sleep(0.01 if speaker.spool_depth > 20_000 else 0)
    assert await speaker.flush(120)
    written = time.perf_counter() - began
    await speaker.close()
    began = time.perf_counter()
    async for batch in journal.read(first, until=first + events):
        last = batch[-1].seq
    assert last == first + events
    return {
        "published_per_s": round(events / written),
        "read_per_s": round(events / (time.perf_counter() - began)),
    }


async def measure_view(url: str, rate: int, seconds: float) -> dict[str, float]:
    """Publish at a steady rate from this process; a view in another process reports its delay."""
    view = await child("view", url, str(int(rate * seconds)))
    assert view.stdout is not None
    assert (await asyncio.wait_for(view.stdout.readline(), 30)).strip() == b"ready"
    with tempfile.TemporaryDirectory() as spool:
        journal = await NatsJournal.connect(url, "worker:steady", Path(spool))
        began = time.monotonic()
        for n in range(int(rate * seconds)):
            wait = began + n / rate - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            journal.observe(passed(f"w{n % WORKERS}", f"at {time.monotonic()}"))
        found = json.loads(await asyncio.wait_for(view.stdout.readline(), 30))
        await journal.close()
    await view.wait()
    return dict(found)


async def measure_takeover(url: str) -> list[float]:
    """Kill the controller that decides, and measure the time until another one has decided."""
    names = iter(range(100))
    leader = await child("controller", url, f"c{next(names)}")
    took = []
    journal = await NatsJournal.connect(url, "worker:takeover")
    for n in range(TAKEOVERS):
        standby = await child("controller", url, f"c{next(names)}")
        await decided(journal, f"t{n}-before")
        await asyncio.sleep(0.5 + n * 0.13)  # at any point between two renewals
        began = time.monotonic()
        leader.send_signal(signal.SIGKILL)
        await leader.wait()
        await decided(journal, f"t{n}-after")
        took.append(time.monotonic() - began)
        leader = standby
    leader.kill()
    await leader.wait()
    await journal.close()
    return took


async def decided(journal: NatsJournal, worker: str) -> None:
    """Let a worker join and wait for the decision that it is healthy."""
    after = await journal.last_seq()
    journal.observe(joined(worker))
    journal.observe(passed(worker, check="join"))
    async with asyncio.timeout(30):
        async for batch in journal.read(after):
            for event in batch:
                fact = event.fact
                if (
                    isinstance(fact, HealthChanged)
                    and fact.worker == worker
                    and fact.after is HealthStatus.HEALTHY
                ):
                    return


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything once, on a fresh server."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        server = await start_nats(directory / "nats", monitor=0)
        try:
            journal = await NatsJournal.connect(server.url, "controller:bench")
            single, after, number = await measure_appends(journal, 1, 0, 0)
            batch, _, _ = await measure_appends(journal, 5, after, number)
            found: dict[str, Any] = {
                "fdatasync_ms": fdatasync_ms(directory),
                "sync_interval": server.effective["sync_interval"],
                "append_ms": quantiles(single),
                "append_batch_of_5_ms": quantiles(batch),
                **await measure_read(journal, arguments.events, directory / "spool"),
            }
            await journal.close()
        finally:
            await server.kill()
        server = await start_nats(directory / "nats-2")
        try:
            found["published_to_view_ms"] = await measure_view(server.url, arguments.rate, arguments.seconds)
            found["takeover_s"] = round(max(await measure_takeover(server.url)), 2)
        finally:
            await server.kill()
    return found


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of every figure."""
    merged: dict[str, Any] = {}
    for name, value in runs[0].items():
        if isinstance(value, dict):
            merged[name] = medians([each[name] for each in runs])
        elif isinstance(value, str):
            merged[name] = value
        else:
            merged[name] = statistics.median(each[name] for each in runs)
    return merged


# --- the other processes --------------------------------------------------------------------------------------------


async def child(*arguments: str) -> asyncio.subprocess.Process:
    """Start one of the processes below."""
    command = [sys.executable, "-m", "benchmarks.store.journal", "--child", *arguments]
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def follow(url: str, count: int) -> None:
    """Run a view, and report its delay for each of `count` facts."""
    journal = await NatsJournal.connect(url, "frontend:bench")
    for n in range(WORKERS):
        journal.observe(joined(f"w{n}"))
    await journal.flush(10)
    late: list[float] = []
    view, done = FleetView(journal), asyncio.Event()

    def changed(view: FleetView, batch: Sequence[Any]) -> None:
        view.fleet.workers  # noqa: B018 (the fold itself is part of what is measured)
        now = time.monotonic()
        facts = [event.fact for event in batch if isinstance(event.fact, o.CanaryPassed)]
        late.extend(now - float(fact.canary.removeprefix("at ")) for fact in facts)
        if len(late) >= count:
            done.set()

    view.listen(changed)
    following = asyncio.create_task(view.run())
    await view.ready(10)
    print("ready", flush=True)
    await done.wait()
    print(json.dumps(quantiles(late)), flush=True)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await journal.close()


async def control(url: str, name: str) -> None:
    """Run a controller."""
    clock = SystemClock()
    journal = await NatsJournal.connect(url, f"controller:{name}")
    lease = Lease(journal.cell("leader"), journal.source, clock)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(lease.run())
        tasks.create_task(Reconciler(journal, lease, FleetPolicy(), clock).run())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--events", type=int, default=200_000, help="events to write and read back (default: 200000)"
    )
    parser.add_argument(
        "--rate", type=int, default=1000, help="facts per second for the view (default: 1000)"
    )
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds of facts for the view (default: 10)"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    collector.freeze_and_tune()  # as in every role's process
    if arguments.child:
        role, url, what = arguments.child
        uvloop.run(follow(url, int(what)) if role == "view" else control(url, what))
        return
    runs = [uvloop.run(run(arguments)) for _ in range(arguments.runs)]
    print(json.dumps({**medians(runs), "runs": arguments.runs, "load_average": os.getloadavg()[0]}, indent=2))


if __name__ == "__main__":
    main()
