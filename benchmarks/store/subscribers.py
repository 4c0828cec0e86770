"""Compares FastStream's JetStream subscriber with `events.follow`: speed, cost, order.

    python -m benchmarks faststream [--events 50000] [--runs 3]

Each of them reads one stream through a durable pull consumer with explicit acknowledgement; every event is decoded to a fact.
Each reader is a separate process. Prints a JSON line for each reader:

events_per_s    from the first event to the last
cpu_s           CPU seconds of the reader, user and system, without its imports
retry_order     events delivered between a failed event and its redelivery: 0 keeps the order
goes_on_after_deleted_consumer    whether it continues after its consumer was deleted at the broker
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import structlog
from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, NatsMessage, PullSub
from nats.js.api import ConsumerConfig

from benchmarks.store.registered import WORKERS
from controller.adapters.embedded.nats import start_nats
from events import observations as o
from events.errors import HoldfastError
from events.follow import follow
from events.journal import messages
from events.journal.broker import delivered
from events.journal.nats import NatsJournal
from events.subjects import STREAM

ACK_WAIT_S = 5.0  # as in `events.follow`
FAILS_AT = 25  # the event that fails once, in the test of the order
SEEN = 600  # number of events in the test of the order
AWAY_S = 12.0  # for an event to arrive after the consumer was deleted


class Reached(Exception):
    """The reader has read all events of the measurement."""


Handle = Callable[[int], bool]  # called with a sequence; False: redeliver it


# --- the readers -----------------------------------------------------------------------------------------------------


async def read_followed(url: str, durable: str, handle: Handle) -> None:
    """Read with `events.follow`. A failure is handled as in a following program: the loop is left, and entered again."""
    while True:
        following = follow(url, durable=durable)
        async for event in following:
            if not handle(event.seq):
                break
        await following.aclose()


async def read_faststream(url: str, durable: str, handle: Handle, batch: int) -> None:
    """Read with FastStream."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    broker = NatsBroker(url, logger=None)
    config = ConsumerConfig(ack_wait=ACK_WAIT_S, max_ack_pending=batch)

    @broker.subscriber(
        "fleet.>",
        stream=JStream(STREAM, declare=False),
        durable=durable,
        config=config,
        pull_sub=PullSub(batch_size=batch, timeout=0.2 if batch > 1 else 5.0),
        ack_policy=AckPolicy.MANUAL,
    )
    async def on_event(message: NatsMessage) -> None:
        raw: Any = message.raw_message
        seq, _ = delivered(raw.reply.encode())
        lines = "".join(f"{name}: {value}\r\n" for name, value in (raw.headers or {}).items())
        messages.read(
            seq,
            datetime.now(UTC),
            raw.subject.encode(),
            f"NATS/1.0\r\n{lines}\r\n".encode(),
            raw.data,
        )
        try:
            await (message.ack() if handle(seq) else message.nack())
        except Reached as reached:
            if not ended.done():
                ended.set_exception(reached)

    async with broker:
        await broker.start()
        await ended


READERS: dict[str, Callable[[str, str, Handle], Any]] = {
    "follow": read_followed,
    "faststream batch=200": lambda url, durable, handle: read_faststream(url, durable, handle, 200),
    "faststream batch=1": lambda url, durable, handle: read_faststream(url, durable, handle, 1),
}


# --- measurements ----------------------------------------------------------------------------------------------------


async def speed(url: str, name: str, events: int) -> dict[str, float]:
    """Read all events once."""
    times: list[float] = []
    cpu: list[float] = []

    def handle(seq: int) -> bool:
        if not times:
            cpu.append(_cpu_s())
        times.append(time.perf_counter())
        if len(times) >= events:
            raise Reached
        return True

    with contextlib.suppress(Reached):
        await READERS[name](url, f"speed-{os.getpid()}", handle)
    return {
        "events_per_s": round((events - 1) / (times[-1] - times[0])),
        "cpu_s": round(_cpu_s() - cpu[0], 2),
    }


async def order(url: str, name: str) -> dict[str, int]:
    """Fail one event once; count the events delivered between the failure and its redelivery."""
    seen: list[int] = []

    def handle(seq: int) -> bool:
        seen.append(seq)
        if seen.count(FAILS_AT) > 1 or len(seen) > SEEN:
            raise Reached
        return seq != FAILS_AT

    with contextlib.suppress(Reached):
        await READERS[name](url, f"order-{os.getpid()}", handle)
    return {"retry_order": len(seen) - 2 - seen.index(FAILS_AT)}


async def deleted(url: str, name: str) -> dict[str, bool]:
    """Delete the reader's consumer; return whether it continues reading."""
    durable, seen = f"deleted-{os.getpid()}", [0]

    def handle(seq: int) -> bool:
        seen[0] += 1
        return True

    client = await nats.connect(url)
    reading = asyncio.create_task(READERS[name](url, durable, handle))
    await reached(lambda: seen[0] >= SEEN, 60.0)
    await client.jetstream().delete_consumer(STREAM, durable)
    await asyncio.sleep(1.0)
    before = seen[0]
    goes_on = await reached(lambda: seen[0] > before, AWAY_S)
    reading.cancel()
    await asyncio.wait({reading}, timeout=5)
    await client.close()
    return {"goes_on_after_deleted_consumer": goes_on}


async def reached(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition holds within `seconds`."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:  # noqa: ASYNC110 (another task reads)
        await asyncio.sleep(0.05)
    return holds


MEASURES: dict[str, Callable[..., Any]] = {"speed": speed, "order": order, "deleted": deleted}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def fill(url: str, spool: Path, events: int) -> None:
    """Write a history of canaries."""
    journal = await NatsJournal.connect(url, "controller:filler", spool)
    for n in range(events):
        journal.observe(
            o.CanaryPassed(
                worker=f"w{n % WORKERS}",
                instance="i",
                canary_key="key",
                canary="c0",
                check_type="scheduled",
                sent_under=0,
                sent_at=datetime.now(UTC),
                latency_ms=12.0,
            )
        )
        if n % 500 == 499:
            await asyncio.sleep(0.01 if journal.spool_depth > 20_000 else 0)
    assert await journal.flush(120)
    await journal.close()


def child(url: str, name: str, measure: str, events: int) -> dict[str, Any]:
    """Measure one thing of one reader in a separate process."""
    words = ["--child", url, name, measure, "--events", str(events)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.store.subscribers", *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        raise HoldfastError(f"{name}, {measure}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


async def main_async(events: int, runs: int, names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = await start_nats(Path(folder) / "nats")
        try:
            await fill(server.url, Path(folder) / "spool", events)
            for name in names:
                taken = [
                    await asyncio.to_thread(child, server.url, name, "speed", events) for _ in range(runs)
                ]
                line: dict[str, Any] = {"reader": name, "events": events}
                for figure in ("events_per_s", "cpu_s"):
                    values = [one[figure] for one in taken]
                    line[figure], line[f"{figure}_runs"] = statistics.median(values), values
                for measure in ("order", "deleted"):
                    line |= await asyncio.to_thread(child, server.url, name, measure, events)
                print(json.dumps(line), flush=True)
        finally:
            await server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks faststream", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--events", type=int, default=50_000, help="events to read (default: 50000)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each reader (default: 3)")
    parser.add_argument("--readers", nargs="*", choices=READERS, default=list(READERS))
    parser.add_argument("--child", nargs=3, metavar=("URL", "READER", "MEASURE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    if args.child:
        url, name, measure = args.child
        more = (args.events,) if measure == "speed" else ()
        print(json.dumps(asyncio.run(MEASURES[measure](url, name, *more))))
        sys.stdout.flush()
        os._exit(0)
    asyncio.run(main_async(args.events, args.runs, args.readers))


if __name__ == "__main__":
    main()
