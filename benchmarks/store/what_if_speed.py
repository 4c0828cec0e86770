"""Measures what-if on a million events: `python -m benchmarks decided_again [--calm 9]`

A real broker holds an hour of 128 simulated workers with a fault in every third, then nine calm hours (`--calm`), and so on,
until there are `--events` events. They have the stream's times as they would be, not those at which this
benchmark wrote them. That is two thousand times the faults of the largest fleet that has published them (419 in 54 days
of 16,384 GPUs); `--calm 0` is twenty thousand times. Prints one JSON object: events, faults among them, and seconds: of
reading, of deciding four times with the report, of both; and of a sweep over twelve values.
"""

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from datetime import datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import nats

from controller.adapters.embedded.nats import start_nats
from controller.deciders.fleet import Fleet
from controller.processes import collector
from controller.replay.whatif import sweep as sweeps
from controller.replay.whatif.comparison import compare
from controller.replay.whatif.question import PolicyChange, parse_changes
from controller.replay.whatif.reading import stretches
from controller.replay.whatif.recording import recorded
from controller.replay.whatif.whatif_cli import lines
from controller.simulator.simulation import Simulation, quiet, uncollected
from controller.simulator.world.scenario import draw
from events import codec, subjects
from events.fact import Decision, Fact, Recorded
from events.frozen import replace
from events.journal import messages
from events.journal.nats import NatsJournal
from events.journal.port import Journal, JournalReads, Reopen

WORKERS, MINUTES, SEED = 128, 60.0, 3
HOUR = timedelta(minutes=MINUTES)
CALM = 9
NUMBERS = ("number", "sent_under", "routed_under")  # fields that count decisions


def hour(*, calm: bool = False) -> list[Recorded]:
    """Return an hour of a simulated fleet; a calm one has no faults."""
    scenario = draw(SEED, WORKERS, MINUTES)
    if calm:
        scenario = replace(scenario, faults={}, corrupt_from_start=0)
    with quiet(), uncollected():
        simulation = Simulation(scenario)
        simulation.run()
    return simulation.broker.events


def hours(calm: int, events: int) -> Iterator[Recorded]:
    """Yield `events` events: an hour with faults, `calm` hours without, and so on, each of other lives of the same workers."""
    faulty, quiet_one = hour(), hour(calm=True) if calm else []
    number = decisions = 0
    for times in count():
        after, later = decisions, HOUR * times
        for event in quiet_one if times % (calm + 1) else faulty:
            if number == events:
                return
            number += 1
            decisions += isinstance(event.fact, Decision)
            yield replace(
                event, at=event.at + later, seq=number, fact=_later(event.fact, times, later, after)
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


async def fill(url: str, events: int, calm: int) -> int:
    """Write the events to the stream, and return the last sequence."""
    journal = await NatsJournal.connect(url, "bench:fill")
    client = await nats.connect(url)
    number = after = 0  # of observations; the last decision's sequence
    for n, event in enumerate(hours(calm, events)):
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
    while (last := await journal.last_seq()) < events:  # noqa: ASYNC110 (the broker sends no notification)
        await asyncio.sleep(0.05)
    await client.close()
    await journal.close()
    return last


class AsSaid:
    """A journal with the times at which its events would have been written, had the hours passed."""

    def __init__(self, reopen: Reopen) -> None:
        self._reopen = reopen

    def reopen(self) -> Reopen:
        """Return a function that opens it in another process."""
        return partial(_as_said, self._reopen)


class AsSaidReads:
    """Its reader."""

    def __init__(self, journal: JournalReads) -> None:
        self._journal = journal

    async def read(self, after: int, *, until: int | None = None) -> AsyncIterator[Sequence[Recorded]]:
        """Yield events, each with the time at which it was published."""
        async for batch in self._journal.read(after, until=until):
            yield [replace(event, at=event.said_at or event.at) for event in batch]


@asynccontextmanager
async def _as_said(reopen: Reopen) -> AsyncIterator[JournalReads]:
    async with reopen() as journal:
        yield AsSaidReads(journal)


async def measure(events: int, calm: int) -> dict[str, Any]:
    """Return all figures."""
    with tempfile.TemporaryDirectory() as folder:
        server = await start_nats(Path(folder) / "nats", sync_interval="2m")
        try:
            last = await fill(server.url, events, calm)
            collector.freeze_and_tune(collector.COLLECT_HISTORY_AT)
            before = time.perf_counter()
            journal = await NatsJournal.connect(server.url, "bench:ask", make=False)
            asked_of = cast(Journal, AsSaid(journal.reopen()))
            recording = await recorded(Fleet(), stretches(asked_of, 0, last, 0))
            await journal.close()
        finally:
            await server.stop()
    assert recording is not None
    read = time.perf_counter()
    figures: dict[str, Any] = {"events": last, "calm_hours": calm, "read_s": round(read - before, 2)}
    for name, what in (("wait", "breaker.wait_min=30s"), ("interval", "canary.interval=3s")):
        began = time.perf_counter()
        answer = compare(recording, parse_changes([what], None))
        said = list(lines(answer))
        figures |= {"faults": len(answer.faults), f"{name}_s": round(time.perf_counter() - began, 2)}
        assert said
        figures[f"{name}_all_s"] = round(figures["read_s"] + figures[f"{name}_s"], 2)
    began = time.perf_counter()
    sweeps.sweep(recording, sweeps.swept("canary.interval=1s..60s", 12, PolicyChange()))
    figures["sweep_s"] = round(time.perf_counter() - began, 2)
    figures["memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return figures


def main() -> None:
    """Measure, and print."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--events", type=int, default=1_000_000)
    p.add_argument(
        "--calm", type=int, default=CALM, help=f"hours between those with faults (default: {CALM})"
    )
    a = p.parse_args()
    json.dump(asyncio.run(measure(a.events, a.calm)), sys.stdout)
    print()


if __name__ == "__main__":
    main()
