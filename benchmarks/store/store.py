"""Measures the state store: delay of events, projection of a history, and historical look-ups.

    python -m benchmarks store [--events 1000000] [--rate 1000] [--seconds 20] [--runs 3]

Beside the delay of events the report shows where slow ones lost their time (`stalls.py`), how long the same disk took
meanwhile to sync a page, and how late another process was woken: a slow disk or a busy machine are no fault of ours.
Real servers in their own directory, the projector in a separate process. Prints one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats

from benchmarks.store import stalls
from benchmarks.store.registered import WORKERS, joined
from controller.adapters.embedded.accounts import DatabaseAccounts
from controller.adapters.embedded.nats import start_nats
from controller.adapters.embedded.postgres import start_postgres
from controller.adapters.embedded.server import EmbeddedServer
from controller.adapters.postgres import migrate
from controller.adapters.postgres.link import SCHEMA
from controller.adapters.postgres.store import PostgresStore
from controller.deciders.fleet import Fleet, FleetPolicy, absorbed, evolve, settle
from controller.processes import collector
from controller.replay import travel
from controller.replay.rebuild import rebuild
from controller.runtime.projection.projector import Projector
from events import codec, subjects
from events import observations as o
from events.fact import Decision, Fact, Observation, Recorded
from events.journal import messages
from events.journal.nats import NatsJournal
from events.order import Order

DECIDE_EVERY = 1_000
EPOCH = datetime(2026, 3, 1, tzinfo=UTC)


# --- a history ------------------------------------------------------------------------------------------------------


def observed(rng: random.Random, now: datetime, number: int) -> Observation:
    """Return a fact that a working fleet reports."""
    worker = f"w{rng.randrange(WORKERS)}"
    of: dict[str, Any] = {"worker": worker, "instance": f"{worker}-a"}
    probe = {"canary_key": "key", "canary": f"c{rng.randrange(4)}", "check_type": "scheduled", "sent_under": number,
             "sent_at": now, "latency_ms": round(rng.uniform(5, 20), 3)}  # fmt: skip
    draw = rng.random()
    if draw < 0.70:
        return o.CanaryPassed(**of, **probe, distance=0.0)  # type: ignore[arg-type]
    if draw < 0.90:
        return o.RequestsServed(
            **of, frontend="frontend-0", count=rng.randrange(1, 50), tokens=rng.randrange(5000), ttft_ms=12.5, itl_ms=20.1,
            routed_under=number, window_s=1.0,
        )  # fmt: skip
    if draw < 0.98:
        return o.RequestMigrated(
            frontend="frontend-0", request=f"req-{rng.getrandbits(48):x}", model="llama", source=worker,
            source_instance=f"{worker}-a", target="w0", target_instance="w0-a", cause="disconnected", method="reprefill",
            tokens=rng.randrange(500), gap_ms=31.5, attempt=2, exact=True,
        )  # fmt: skip
    return o.CanaryFailed(**of, **probe, reason="timeout", confirmed=False)  # type: ignore[arg-type]


@dataclass
class Made:
    """A history under construction, decided on by the real deciders."""

    events: int
    rng: random.Random
    now: datetime = EPOCH
    seq: int = 0
    number: int = 0  # of the source's facts
    decided: int = 0  # the last decision's sequence

    def facts(self) -> Iterator[tuple[Fact, dict[str, str]]]:
        """Yield facts and their headers, in stream order."""
        order: Order[Fleet] = Order(evolve, Fleet())
        policy = FleetPolicy()
        for n in range(WORKERS):
            yield self._said(order, joined(f"w{n}"))
        while self.seq < self.events:
            for _ in range(DECIDE_EVERY):
                self.now += timedelta(milliseconds=10)
                yield self._said(order, observed(self.rng, self.now, order.position.number))
            decided: Sequence[Decision] = settle(policy, order.shown, self.now)
            through = self.seq
            for decision in decided or [absorbed(order.shown, self.now)]:
                yield self._said(order, decision, through)

    def _said(
        self, order: Order[Fleet], fact: Fact, through: int | None = None
    ) -> tuple[Fact, dict[str, str]]:
        self.seq += 1
        of_decision = isinstance(fact, Decision)
        self.number += not of_decision
        number = 0 if of_decision else self.number
        id = codec.new_id()
        source = "controller:c:1" if of_decision else "bench:b:1"
        headers = codec.encode_headers(
            fact, id=id, source=source, source_number=number, said_at=self.now, through=through,
            causation=getattr(fact, "cause", ""), correlation=getattr(fact, "incident", ""),
        )  # fmt: skip
        if of_decision:
            headers |= messages.fence(self.decided)
            self.decided = self.seq
        order.take(Recorded(self.seq, self.now, fact, id, source, number, through or 0))
        return fact, headers


async def fill(url: str, events: int) -> int:
    """Write a generated history to the stream and return its last sequence."""
    journal = await NatsJournal.connect(url, "bench:fill")  # creates the stream
    client = await nats.connect(url)
    made = Made(events, random.Random(1))
    for n, (fact, headers) in enumerate(made.facts()):
        await client.publish(subjects.subject(fact), codec.encode_body(fact), headers=headers)
        if n % 5_000 == 0:
            await client.flush()
    await client.flush()
    while (last := await journal.last_seq()) < made.seq:  # noqa: ASYNC110 (the broker sends no notification)
        await asyncio.sleep(0.05)
    await client.close()
    await journal.close()
    return last


# --- published to committed -----------------------------------------------------------------------------------------


async def child_follow(nats_url: str, database_url: str, events: int) -> None:
    """Project, and report when each event was published and how long it took until it was committed, stage by stage."""
    took: list[stalls.Took] = []
    journal = await NatsJournal.connect(nats_url, "projector:bench")

    class Noting(PostgresStore):
        async def project(self, batch: Any, *rest: Any) -> None:
            began = datetime.now(UTC)
            await super().project(batch, *rest)
            ended = datetime.now(UTC)
            for event in batch:
                said, at, picked, done = (
                    moment.timestamp() * 1000 for moment in (event.said_at, event.at, began, ended)
                )
                took.append((said, at - said, picked - at, done - picked))

    store = Noting(database_url)
    projector = Projector(journal, store)
    collector.freeze_and_tune()  # as in the projector's process
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(projector.run())
        while len(took) < events:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        running.cancel()
    batches = projector.progress.batches
    print(json.dumps({"took": took, "batches": batches}), flush=True)
    await store.close()
    await journal.close()


async def published_to_committed(
    nats_url: str, database_url: str, rate: int, seconds: int, directory: Path
) -> dict[str, Any]:
    """Publish `rate` events per second and get from the projector's process when each was committed."""
    events = rate * seconds
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.store.store", "--child", "follow", nats_url, database_url, str(events + WORKERS),
        stdout=asyncio.subprocess.PIPE, limit=1 << 28,
    )  # fmt: skip
    assert child.stdout is not None
    await child.stdout.readline()
    journal = await NatsJournal.connect(nats_url, "bench:load")
    for n in range(WORKERS):
        journal.observe(joined(f"w{n}"))
    rng = random.Random(2)
    collector.freeze_and_tune()  # as in a publishing process
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.store.stalls", str(directory),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    began = time.monotonic()
    for n in range(events):
        due = began + n / rate
        while (left := due - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left)
        journal.observe(observed(rng, datetime.now(UTC), 0))
    await journal.flush(10)
    found = json.loads(await child.stdout.readline())
    await child.wait()
    await journal.close()
    probed, _ = await probe.communicate(b"")
    took = found["took"][WORKERS:]
    of = {"events": len(took), "rate_per_s": rate, "batches": found["batches"]}
    return {**of, **stalls.told(took), "machine": json.loads(probed), "load": os.getloadavg()[0]}


# --- replay ---------------------------------------------------------------------------------------------------------


async def child_catch_up(nats_url: str, database_url: str) -> None:
    """Project the whole journal into an empty store, as a projector does after a long absence: in one process."""
    journal = await NatsJournal.connect(nats_url, "projector:bench")
    store = PostgresStore(database_url)
    last = await journal.last_seq()
    began = time.monotonic()
    projector = Projector(journal, store)
    await projector.catch_up(last)
    took = time.monotonic() - began
    print(json.dumps({"seconds": round(took, 2), "events": last, "events_per_s": round(last / took),
                      "batches": projector.progress.batches, "cpu_s": cpu_s(), "rss_mb": peak_mb()}))  # fmt: skip
    await store.close()
    await journal.close()


async def child_rebuild(nats_url: str, database_url: str) -> None:
    """Rebuild beside the existing projection, as `holdfast replay rebuild` does."""
    journal = await NatsJournal.connect(nats_url, "replay:bench")
    store = PostgresStore(database_url)
    collector.freeze_and_tune(collector.COLLECT_HISTORY_AT)
    done = await rebuild(journal, store)
    print(json.dumps({"seconds": round(done.seconds, 2), "events": done.events, "cpu_s": cpu_s(),
                      "rss_mb": peak_mb()}))  # fmt: skip
    await store.close()
    await journal.close()


async def child_at(nats_url: str, database_url: str) -> None:
    """Look up 50 past positions."""
    journal = await NatsJournal.connect(nats_url, "replay:bench")
    store = PostgresStore(database_url)
    last, rng = await journal.last_seq(), random.Random(3)
    took, folded = [], []
    for _ in range(50):
        began = time.monotonic()
        found = await travel.at(journal, store, rng.randrange(1, last))
        took.append((time.monotonic() - began) * 1000)
        folded.append(found.folded)
    took.sort()
    print(json.dumps({"events": last, "p50_ms": round(took[25], 1), "max_ms": round(took[-1], 1),
                      "folded_max": max(folded)}))  # fmt: skip
    await store.close()
    await journal.close()


def peak_mb() -> int:
    """Return the largest resident size of this process, and of its helper process."""
    used = [resource.getrusage(scope).ru_maxrss for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used) // 1024


def cpu_s() -> list[float]:
    """Return the CPU seconds of this process, and of its helper process."""
    used = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [round(one.ru_utime + one.ru_stime, 2) for one in used]


def child(*arguments: str) -> dict[str, Any]:
    """Run one measurement in a separate process and return what it printed."""
    command = [sys.executable, "-m", "benchmarks.store.store", "--child", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def fresh_database(server: EmbeddedServer) -> str:
    """Create the tables and return their owner's URL."""
    import asyncpg

    url = DatabaseAccounts.kept(server.directory / "accounts.json").urls(server.url).owner
    connection = await asyncpg.connect(url)
    await connection.execute(f"DROP SCHEMA IF EXISTS {SCHEMA} CASCADE")
    await connection.close()
    await migrate.upgrade(url)
    return url


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the figures."""
    report: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as place:
        directory = Path(place)
        postgres = await start_postgres(directory / "postgres")
        try:
            if args.seconds:
                runs = []
                for n in range(args.runs):
                    server = await start_nats(directory / f"nats-live-{n}")
                    url = await fresh_database(postgres)
                    runs.append(
                        await published_to_committed(server.url, url, args.rate, args.seconds, directory)
                    )
                    await server.stop()
                report["published_to_committed"] = {
                    **median(runs, "p99_ms"),
                    "runs": [
                        {name: run[name] for name in ("p99_ms", "stalls", "machine", "load")} for run in runs
                    ],
                }
            if args.events:
                server = await start_nats(directory / "nats", sync_interval="2m")
                began = time.monotonic()
                last = await fill(server.url, args.events)
                report["made"] = {"events": last, "seconds": round(time.monotonic() - began, 1)}
                url = await fresh_database(postgres)
                report["catch_up"] = await asyncio.to_thread(child, "catch_up", server.url, url)
                report["at"] = await asyncio.to_thread(child, "at", server.url, url)
                report["rebuild"] = median(
                    [await asyncio.to_thread(child, "rebuild", server.url, url) for _ in range(args.runs)],
                    "seconds",
                )
                await server.stop()
        finally:
            await postgres.stop()
    report["load_after"] = os.getloadavg()[0]
    return report


def median(runs: list[dict[str, Any]], by: str) -> dict[str, Any]:
    """Return the median run by one figure, with the spread of that figure."""
    ordered = sorted(runs, key=lambda run: float(run[by]))
    middle = ordered[(len(ordered) - 1) // 2]
    return {
        **middle,
        f"{by}_of_all": [run[by] for run in runs],
        "median": statistics.median(run[by] for run in runs),
    }


def main() -> None:
    """Measure, or run as one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--events", type=int, default=1_000_000, help="events to replay; 0: skip (default: 1000000)"
    )
    parser.add_argument(
        "--rate", type=int, default=1_000, help="events per second, published to committed (default: 1000)"
    )
    parser.add_argument(
        "--seconds", type=int, default=20, help="seconds of these events; 0: skip (default: 20)"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.child:
        print(json.dumps(asyncio.run(measure(args)), indent=1))
        return
    import structlog
    import uvloop

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    collector.freeze_and_tune()  # as in the projector's process
    name, *rest = args.child
    kinds: dict[str, Any] = {"catch_up": child_catch_up, "rebuild": child_rebuild, "at": child_at}
    work = child_follow(rest[0], rest[1], int(rest[2])) if name == "follow" else kinds[name](*rest)
    uvloop.run(work)


if __name__ == "__main__":
    main()
