"""`holdfast status`: prints the current state of the fleet, once or repeatedly."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from controller.deciders.worker import SPARE
from controller.processes.operator_client import ask, find
from controller.read_model.fleet_view import FleetStatus, JournalView, ProcessView, WorkerView
from controller.terminal_text import USUAL, columns, fitted, safe_values
from events.errors import HoldfastError
from events.process.presence import Presence, present

AGAIN = "\x1b[H\x1b[2J"  # moves the cursor home and clears the screen
WORKERS_SHOWN_MAX = 40  # maximum number of workers that are listed individually
DAYS_SHOWN_MAX = 1_000
NO_LEADER = "none: no decisions and no commands until a controller leads"
UNKNOWN: Mapping[str, object] = {
    "workers": [], "awaited": [], "levels": {}, "journal": {"last_seq": None}, "spool": {}, "leader": None,
    "projector": {"position": None, "lag": None},
}  # fmt: skip
"""The status that `-o json` prints if no controller answers. The fleet's processes on this host are added to it."""


async def run(args: argparse.Namespace) -> int:
    """Print the status once, or with --watch repeatedly until Ctrl-C. Return 1 if no controller answers."""
    if args.watch is None:
        return await _show(args)
    find(args.data)  # raises an error at once if the data directory has never had a fleet
    while True:
        with contextlib.redirect_stdout(io.StringIO()) as written:
            try:
                await _show(args)
            except HoldfastError as error:  # printed instead of raised, because the fleet may recover
                print(json.dumps({"error": str(error)}) if args.output == "json" else f"holdfast: {error}")
        text = written.getvalue()
        if args.output == "json":
            text = json.dumps(json.loads(text)) + "\n"
        elif sys.stdout.isatty():
            text = AGAIN + text
        print(text, end="", flush=True)
        await asyncio.sleep(args.watch)


async def _show(args: argparse.Namespace) -> int:
    try:
        status = await fetch_status(args)
    except HoldfastError:
        if os.environ.get("HOLDFAST_NATS_URL") or not present(args.data):
            raise
        print_processes(present(args.data), args.output)
        return 1
    if args.output == "json":
        print(json.dumps(status, indent=1))
    else:
        print_status(status)
    return 0


async def fetch_status(args: argparse.Namespace) -> dict[str, object]:
    """Return the status that the fleet's controller reports.

    Raise NoFleet, Unreachable or another HoldfastError if no controller answers or the controller refuses.
    """
    return await ask(args.data, "status")


def print_processes(living: Sequence[Presence], output: str) -> None:
    """Print the fleet's processes on this host, which is all that is known if no controller answers."""
    if output == "json":
        processes = [{"role": p.role, "name": p.name, "pid": p.pid, "url": p.url} for p in living]
        print(json.dumps({**UNKNOWN, "processes": processes}, indent=1))
        return
    print("No controller answers. Running processes of the fleet on this host:")
    for p in living:
        print(fitted(ProcessView(p.name, p.role, p.pid, p.url).line))


def print_status(answer: Mapping[str, object]) -> None:
    """Print a controller's answer to `status` as a table of workers, followed by lines of text."""
    status = FleetStatus.of(safe_values(answer))
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=max(USUAL, columns()))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("worker", "health", "weight", "breaker", "in flight", "model", "last canary"):
        # long names wrap instead of being truncated
        table.add_column(column, overflow="fold", no_wrap=column not in ("worker", "model", "last canary"))
    for w in _shown(status.workers):
        weight = SPARE if w.spare else "–" if w.weight is None else f"{w.weight:g}"
        busy = "–" if w.in_flight is None else str(w.in_flight)
        table.add_row(w.id, w.health, weight, w.breaker, busy, w.model, _canary(w))
    # printed below, because rich would exit by itself when the pipe is closed
    with console.capture() as written:
        if table.rows:
            console.print(table)
    print("\n".join(line.rstrip() for line in written.get().splitlines()), end="\n" if table.rows else "")
    for line in _lines(status):
        print(fitted(line))


def _canary(worker: WorkerView) -> str:
    if (last := worker.last_canary) is None:
        return "–"
    return last.result + ("" if last.latency_ms is None else f", {last.latency_ms:.0f} ms")


def _shown(workers: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Return the workers to list individually.

    In a fleet of at most WORKERS_SHOWN_MAX (40) workers, list all workers. In a larger fleet, list only workers that are not in
    full service, at most 40."""
    if len(workers) <= WORKERS_SHOWN_MAX:
        return workers
    return [w for w in workers if not w.in_service][:WORKERS_SHOWN_MAX]


def _lines(status: FleetStatus) -> Iterator[str]:
    """Yield the lines below the table of workers, from summaries of unlisted workers to this host's processes."""
    shown = _shown(status.workers)
    yield from _rest(status.workers, {w.id for w in shown})
    yield from _troubles(shown)
    for model in sorted({w.model for w in status.workers if w.spare}):
        spares = [w.in_service for w in status.workers if w.model == model and w.spare]
        yield f"spares       {sum(spares)} of {len(spares)} ready for {model}"
    for one in status.awaited[:WORKERS_SHOWN_MAX]:
        yield f"waiting for {one.id}{f' with {one.model}' if one.model else ''} since {one.since}: {one.reason}"
    if (more := len(status.awaited) - WORKERS_SHOWN_MAX) > 0:
        yield f"waiting for {more} more workers; -o json lists all"
    yield from _positions(status)
    # each frontend serves a console, unless its console is disabled
    if console := next((p.console for p in status.processes if p.console), None):
        yield f"console      {console}"
    yield "processes"
    yield from (process.line for process in status.processes)


def _troubles(shown: Sequence[WorkerView]) -> Iterator[str]:
    """Yield a line for each worker that is not at full weight, with the reason, and for each spare that replaces a worker."""
    for w in shown:
        if w.spare and not w.in_service:
            yield f"{w.id} is a spare that is not ready: {w.why}"
        elif w.reasons and not w.spare:
            yield f"{w.id} is not at full weight: {w.reason}"
        if w.place:
            yield f"{w.id} replaces {w.place}"


def _positions(status: FleetStatus) -> Iterator[str]:
    """Yield the lines about degradation levels, the journal, the spools (unsent facts), the projector and the leader."""
    levels = ", ".join(f"{model} level {level}" for model, level in status.levels.items())
    yield f"degradation  {levels or 'no model yet'}"
    yield f"journal      {status.journal.fault or _journal(status.journal)}"
    if (each := status.spool.bytes_max_each) is not None:
        yield f"spools       {_size(status.spool.bytes)} on this host; at most {_size(each)} of each process"
    position, lag = status.projector.position, status.projector.lag
    yield "projector    " + ("no report yet" if position is None else f"at {position}, {lag} behind")
    yield f"leader       {(status.leader or NO_LEADER).removeprefix('controller:')}"


def _rest(workers: Sequence[WorkerView], shown: set[str]) -> Iterator[str]:
    """Summarize the workers not in `shown`: yield a line per model, health and weight (full, reduced, spare)."""
    alike: dict[tuple[str, str, str, bool], list[WorkerView]] = {}
    for w in workers:
        if w.id not in shown:
            share = "as spares" if w.spare else "at full weight" if w.in_service else "not at full weight"
            alike.setdefault((w.model, w.health, share, w.in_service), []).append(w)
    for (model, health, share, _), group in alike.items():
        busy = sum(w.in_flight or 0 for w in group)
        count = f"{len(group)}{' more' if shown else ''}"
        yield f"{count} workers of {model} are {health}, {share}, {busy} in flight; -o json lists all"


def _journal(journal: JournalView) -> str:
    """Return a text about the journal's events, its size, its growth per day, and the time until it is full."""
    last, first, size = journal.last_seq, journal.first_seq or 1, journal.bytes
    dropped = first > 1  # the journal has reached its bounds, and the broker has dropped its oldest events
    text = f"events {first} to {last}" if dropped else f"{last} events"
    if not size:
        return text
    text += f", {_size(size)}" + (f" of {_size(journal.bytes_max)}" if journal.bytes_max else "")
    if journal.bytes_a_day is None:
        return f"{text}, growth not known yet"
    text, days = f"{text}, {_size(journal.bytes_a_day)} a day", journal.days_left
    if dropped:
        return f"{text}, full"
    if days is None:
        return text
    return f"{text}, room for {f'{days:g} days' if days < DAYS_SHOWN_MAX else 'years'}"


def _size(count: float) -> str:
    """Format a number of bytes with a unit from B to TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
