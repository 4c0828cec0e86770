"""Measures how long after a failed canary on the journal the worker is out of every router's table.

    python -m benchmarks verdict [--trials 30]

A whole fleet (`holdfast up`, three workers). This process publishes the failed canary itself and holds three views as routers
hold them. Measured: from observe() until the last of the views shows weight 0. The controller's decision is in between.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.failures.faults import spread
from benchmarks.local_fleet import LocalFleet
from controller.runtime.view import FleetView
from events.journal.nats import NatsJournal
from events.observations import CanaryFailed, ResumeRequested, WorkerJoined

FLAGS = ("--workers", "3", "--canary-interval", "0.5", "--breaker-wait", "0.5", "--breaker-backoff", "1")
VIEWS = 3
WITHIN_S = 30.0


def failed(joined: WorkerJoined, number: int) -> CanaryFailed:
    """Return a conviction: a confirmed wrong answer."""
    return CanaryFailed(
        worker=joined.worker, instance=joined.instance, canary_key=joined.canary_key, canary="bench",
        check_type="scheduled", sent_under=number, sent_at=datetime.now(UTC), latency_ms=5.0, attempts=2,
        reason="token_mismatch", confirmed=True, golden="agreed", expected=(1,), got=(2,),
    )  # fmt: skip


async def out_after(journal: NatsJournal, views: Sequence[FleetView], name: str) -> float:
    """Publish a failed canary; return the milliseconds until the last view has the worker at weight 0."""
    gone: list[float] = []
    over = asyncio.Event()

    def heard(view: FleetView, batch: Any) -> None:
        if id(view) in waiting and view.fleet.workers[name].weight == 0:
            waiting.discard(id(view))
            gone.append(time.perf_counter())
            if not waiting:
                over.set()

    waiting = {id(view) for view in views}
    for view in views:
        view.listen(heard)
    began = time.perf_counter()
    journal.observe(failed(views[0].fleet.workers[name].joined, views[0].number))
    async with asyncio.timeout(WITHIN_S):
        await over.wait()
    return (max(gone) - began) * 1000


async def measure(trials: int) -> dict[str, Any]:
    """Convict workers in turn, and reverse each conviction before the next."""
    with tempfile.TemporaryDirectory(prefix="holdfast-verdict-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", *FLAGS)
        try:
            await fleet.ready()
            await fleet.healthy(3)
            url = fleet.nats_url("controller")
            journal = await NatsJournal.connect(url, "bench:verdict", None)
            readers = [await NatsJournal.connect(url, f"bench:view{n}", None) for n in range(VIEWS)]
            views = [FleetView(reader) for reader in readers]
            following = [asyncio.create_task(view.run()) for view in views]
            for view in views:
                await view.ready(10)
            took = []
            for n in range(trials):
                await fleet.healthy(3)
                name = f"w{n % 3}"
                took.append(await out_after(journal, views, name))
                instance = views[0].fleet.workers[name].joined.instance
                journal.observe(ResumeRequested(worker=name, instance=instance, by="bench"))
            for task in following:
                task.cancel()
            for handle in (journal, *readers):
                await handle.close()
            return {"benchmark": "verdict", "views": VIEWS, "out_of_every_table_ms": spread(took)}
        finally:
            fleet.stop()


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=30)
    print(json.dumps(asyncio.run(measure(parser.parse_args().trials))))


if __name__ == "__main__":
    main()
