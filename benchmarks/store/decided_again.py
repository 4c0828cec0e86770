"""How long does `holdfast replay what-if` take of a million events? `python -m benchmarks decided_again [--events 1000000]`

An hour of 128 simulated workers and all their faults lies on a real broker again and again, each time as the hour after, until
there are so many events: with the stream's times as they would be, not those at which this benchmark has written them. Prints
one JSON object: events, faults among them, and seconds: of reading, of deciding four times and saying it, of both; and of a
sweep over twelve values.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import nats

from controller.adapters.embedded.servers import start_nats
from controller.deciders.fleet import Fleet
from controller.processes import collector
from controller.replay.whatif import sweep as sweeps
from controller.replay.whatif.asked import PolicyAsked, asked
from controller.replay.whatif.comparison import compare
from controller.replay.whatif.recording import recorded
from controller.replay.whatif.text import lines
from controller.runtime.history import history
from controller.simulator.simulation import Simulation, quiet, uncollected
from controller.simulator.world.scenario import draw
from events import codec, subjects
from events.fact import Decision, Fact, Recorded
from events.frozen import replace
from events.journal import messages
from events.journal.nats import NatsJournal

WORKERS, MINUTES, SEED = 128, 60.0, 3
HOUR = timedelta(minutes=MINUTES)
NUMBERS = ("number", "sent_under", "routed_under")  # fields that count decisions


def hour() -> list[Recorded]:
    """Return an hour of a fleet, as it is simulated."""
    with quiet(), uncollected():
        simulation = Simulation(draw(SEED, WORKERS, MINUTES))
        simulation.run()
    return simulation.broker.events


def hours(first: Sequence[Recorded], events: int) -> Iterator[Recorded]:
    """Yield so many events: the same hour again and again, of other lives of the same workers."""
    decisions = sum(isinstance(event.fact, Decision) for event in first)
    for n in range(events):
        times, place = divmod(n, len(first))
        event, later = first[place], HOUR * times
        yield replace(
            event, at=event.at + later, seq=n + 1, fact=_later(event.fact, times, later, decisions * times)
        )


def _later(fact: Fact, times: int, later: timedelta, decisions: int) -> Fact:
    changes: dict[str, Any] = {}
    for one in fields(fact):
        value = getattr(fact, one.name)
        if isinstance(value, datetime):
            changes[one.name] = value + later
        elif one.name in NUMBERS:
            changes[one.name] = value + decisions
        elif one.name == "instance":
            changes[one.name] = f"{value}#{times}"
    return replace(fact, **changes)


async def fill(url: str, events: int) -> int:
    """Put them on the stream, and return the last sequence."""
    journal = await NatsJournal.connect(url, "bench:fill")
    client = await nats.connect(url)
    number = after = 0  # of observations; the last decision's place
    for n, event in enumerate(hours(hour(), events)):
        decided = isinstance(event.fact, Decision)
        number += not decided
        headers = codec.encode_headers(
            event.fact, id=codec.new_id(), source="controller:c:1" if decided else "bench:b:1",
            source_number=0 if decided else number, said_at=event.at, through=n if decided else None, causation="",
            correlation="",
        ) | (messages.fence(after) if decided else {})  # fmt: skip
        after = n + 1 if decided else after
        await client.publish(subjects.subject(event.fact), codec.encode_body(event.fact), headers=headers)
        if n % 5_000 == 0:
            await client.flush()
    await client.flush()
    while (last := await journal.last_seq()) < events:  # noqa: ASYNC110 (the broker has no flag for us)
        await asyncio.sleep(0.05)
    await client.close()
    await journal.close()
    return last


async def _as_said(journal: NatsJournal, last: int) -> AsyncIterator[Sequence[Recorded]]:
    async for batch in history(journal, 0, last):
        yield [replace(event, at=event.said_at or event.at) for event in batch]


async def measure(events: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as folder:
        server = await start_nats(Path(folder) / "nats", sync_interval="2m")
        try:
            last = await fill(server.url, events)
            collector.calm(collector.COLLECT_HISTORY_AT)
            before = time.perf_counter()
            journal = await NatsJournal.connect(server.url, "bench:ask", make=False)
            recording = await recorded(Fleet(), _as_said(journal, last))
            await journal.close()
        finally:
            await server.stop()
    assert recording is not None
    read = time.perf_counter()
    figures: dict[str, Any] = {"events": last, "read_s": round(read - before, 2)}
    for name, what in (("wait", "breaker.wait_min=30s"), ("interval", "canary.interval=3s")):
        began = time.perf_counter()
        answer = compare(recording, asked([what], None))
        said = list(lines(answer))
        figures |= {"faults": len(answer.faults), f"{name}_s": round(time.perf_counter() - began, 2)}
        assert said
        figures[f"{name}_all_s"] = round(figures["read_s"] + figures[f"{name}_s"], 2)
    began = time.perf_counter()
    sweeps.sweep(recording, sweeps.swept("canary.interval=1s..60s", 12, PolicyAsked()))
    figures["sweep_s"] = round(time.perf_counter() - began, 2)
    figures["memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return figures


def main() -> None:
    """Measure, and print."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--events", type=int, default=1_000_000)
    json.dump(asyncio.run(measure(p.parse_args().events)), sys.stdout)
    print()


if __name__ == "__main__":
    main()
