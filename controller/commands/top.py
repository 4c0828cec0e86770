"""`holdfast top`: shows the fleet and its latest events in a terminal, until q or Ctrl-C."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from controller.commands.status import fetch_status
from controller.deciders.worker import SPARE
from controller.processes.operator_client import Operator, closing, find
from controller.read_model.fleet_view import FleetStatus, WorkerView, counts
from controller.replay.recent import TOLD_MAX, RecentEvents
from controller.replay.sentences import count
from controller.runtime.bounded_read import held
from controller.terminal_text import columns, escape_controls, safe_values
from events.errors import HoldfastError
from events.journal.nats import NatsJournal

AGAIN_S = 2.0  # seconds before the next attempt to connect to a fleet that does not answer
ONCE_LINES = 40  # number of lines printed with --once
HEAD_LINES, EVENT_LINES_LEAST = 5, 5
COLOURS = {
    "HEALTHY": "green",
    "SUSPICIOUS": "yellow",
    "UNHEALTHY": "red",
    "DRAINING": "blue",
    "DEAD": "bright_black",
}


@dataclass(slots=True)
class FleetSeen(RecentEvents):
    """The fleet's last known status and its recent events, from which the screen is drawn."""

    status: Mapping[str, object] | None = None
    fault: str = ""  # why the status is missing or outdated; empty: it is current


async def run(args: argparse.Namespace) -> int:
    """Redraw the screen until the user quits. With --once or without a terminal, print the screen's contents once.

    Raise HoldfastError if the data directory has never had a fleet, or if the contents are printed once and no fleet answers."""
    seen = FleetSeen()
    if args.once or not sys.stdout.isatty():
        return await _once(args, seen)
    find(args.data)  # raises an error at once if the data directory has never had a fleet
    console = Console(highlight=False)
    watching = [asyncio.create_task(one(args, seen)) for one in (_ask, _follow)]
    try:
        with _keys() as enough, Live(console=console, screen=True, auto_refresh=False) as live:
            while not enough.is_set():
                live.update(picture(seen, console.height - 1), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(enough.wait(), args.every)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return 0


async def _once(args: argparse.Namespace, seen: FleetSeen) -> int:
    seen.status = await fetch_status(args)
    async with _journal(args) as journal:
        last = await journal.last_seq()
        async for batch in held(journal, max(0, last - TOLD_MAX), last):
            seen.take(batch)
    Console(highlight=False, width=columns()).print(picture(seen, ONCE_LINES))
    return 0


async def _ask(args: argparse.Namespace, seen: FleetSeen) -> None:
    """Store the fleet's status in `seen` every `args.every` seconds. After an error, connect again."""
    while True:
        try:
            async with closing(Operator.connect(args.data)) as operator:
                while True:
                    seen.status, seen.fault = await operator.ask("status", {}), ""
                    await asyncio.sleep(args.every)
        except HoldfastError as error:
            seen.fault = str(error)
            await asyncio.sleep(AGAIN_S)


async def _follow(args: argparse.Namespace, seen: FleetSeen) -> None:
    """Add the latest events on the journal, and all that follow, to `seen`. After an error, connect again."""
    while True:
        try:
            async with _journal(args) as journal:
                last = await journal.last_seq()
                # a journal that is shorter than before was recreated
                after = seen.last if seen.last <= last else 0
                async for batch in journal.read(max(await journal.first_seq() - 1, last - TOLD_MAX, after)):
                    seen.take(batch)
        except HoldfastError as error:
            seen.fault = str(error)
        await asyncio.sleep(AGAIN_S)


def _journal(args: argparse.Namespace) -> contextlib.AbstractAsyncContextManager[NatsJournal]:
    url = find(args.data)["nats_url"]
    return closing(NatsJournal.connect(url, "reader", make=False, stops_at="nothing"))


def _pressed(terminal: int, enough: asyncio.Event) -> None:
    keys = os.read(terminal, 64)
    if not keys or b"q" in keys.lower():
        enough.set()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Yield an asyncio event that is set when the user presses q or the process receives SIGTERM."""
    enough, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, enough.set)  # a normal end, which restores the terminal
    if not sys.stdin.isatty():
        yield enough
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, _pressed, terminal, enough)
    try:
        yield enough
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def picture(seen: FleetSeen, lines: int) -> RenderableType:
    """Return the contents of the screen, of at most `lines` lines: the status, the workers and the latest events."""
    status = FleetStatus.of(safe_values(seen.status or {}))
    workers = sorted(status.workers, key=lambda worker: (worker.urgency, worker.id))
    room = max(1, lines - HEAD_LINES - 2 - EVENT_LINES_LEAST)
    shown, rest = workers[:room], len(workers[room:])
    used = HEAD_LINES + 1 + len(shown) + (1 if rest else 0)
    latest = [*seen.told][-max(1, lines - used - 1) :]
    parts: list[RenderableType] = [*_head(seen, status, workers), _table(shown)]
    if rest:
        parts.append(Text(f"{rest} more workers", style="dim"))
    return Group(*parts, Text(), *(_line(one.line()) for one in latest))


def _head(seen: FleetSeen, status: FleetStatus, workers: Sequence[WorkerView]) -> Iterator[Text]:
    if seen.fault:
        yield _line(escape_controls(seen.fault), style="bold red")
    elif seen.status is None:
        yield _line("waiting for the fleet", style="dim")
    else:
        found = [(f"{count} {health}  ", COLOURS[health]) for health, count in counts(workers).items()]
        yield Text.assemble(("Holdfast  ", "bold"), *found, overflow="ellipsis", no_wrap=True)
    serving = [worker.weight or 0.0 for worker in workers if not worker.spare]
    busy = sum(worker.in_flight or 0 for worker in workers)
    spares = len(workers) - len(serving)
    extra = f", {count(spares, 'spare')}" if spares else ""
    yield _line(f"serving with {sum(serving):.3g} of {len(serving)}{extra}   {busy} in flight")
    unknown = f"   {seen.unknown} events of unknown kinds skipped" if seen.unknown else ""
    yield _line(seen.rates() + unknown)
    yield _line("" if seen.status is None else _positions(status))
    yield Text()


def _positions(status: FleetStatus) -> str:
    levels = [f"{model} level {level}" for model, level in status.levels.items() if level]
    leader = (status.leader or "none").removeprefix("controller:").partition(":")[0]
    parts = [f"leader {leader}", f"{status.journal.last_seq or 0:,} events"]
    parts += [] if status.projector.lag is None else [f"store {status.projector.lag} behind"]
    return "   ".join([*parts, *(levels or ["no degradation"])])


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)


def _table(workers: Sequence[WorkerView]) -> Table:
    table = Table(expand=True, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("worker", "health", "weight", "breaker", "in flight", "why"):
        justify: JustifyMethod = "right" if name in ("weight", "in flight") else "left"
        table.add_column(
            name, justify=justify, overflow="ellipsis", no_wrap=True, ratio=1 if name == "why" else None
        )
    for worker in workers:
        weight = SPARE if worker.spare else f"{worker.weight or 0:.3g}"
        health = Text(worker.health, style=COLOURS.get(worker.health, ""))
        cells = (weight, worker.breaker or "–", str(worker.in_flight or 0), worker.why)
        # as Text, because names must not be parsed as markup
        table.add_row(Text(worker.id), health, *map(Text, cells))
    return table
