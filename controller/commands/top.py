"""`holdfast top`: shows the fleet and its latest events in a terminal, until q or Ctrl-C."""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator

from rich.console import Console
from rich.live import Live

from controller.commands.status import fetch_status
from controller.commands.top_view import FleetSeen, picture
from controller.processes.operator_client import Operator, find
from controller.replay.recent import TOLD_MAX
from controller.runtime.bounded_read import held
from controller.terminal_text import columns
from events.errors import HoldfastError
from events.journal.nats import NatsJournal

AGAIN_S = 2.0  # delay before reconnecting to a missing fleet
ONCE_LINES = 40  # height of the screen with --once
CATCH_UP_S = 0.5  # time within which the events that exist already arrive


async def run(args: argparse.Namespace) -> int:
    """Redraw until the user quits. With --once, raise HoldfastError if there is no fleet."""
    seen = FleetSeen()
    if args.once or not sys.stdout.isatty():
        return await _once(args, seen)
    find(args.data)  # fails at once if there has never been a fleet
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
    """Poll the fleet's status."""
    while True:
        try:
            operator = await Operator.connect(args.data)
            try:
                while True:
                    seen.status, seen.fault = await operator.ask("status", {}), ""
                    await asyncio.sleep(args.every)
            finally:
                await operator.close()
        except HoldfastError as error:
            seen.fault = str(error)
            await asyncio.sleep(AGAIN_S)


async def _follow(args: argparse.Namespace, seen: FleetSeen) -> None:
    """Follow the journal, starting with the latest events."""
    while True:
        try:
            async with _journal(args) as journal:
                last = await journal.last_seq()
                after = seen.last if seen.last <= last else 0  # a shorter journal is another one
                async for batch in journal.read(max(await journal.first_seq() - 1, last - TOLD_MAX, after)):
                    seen.take(batch)
        except HoldfastError as error:
            seen.fault = str(error)
        await asyncio.sleep(AGAIN_S)


@contextlib.asynccontextmanager
async def _journal(args: argparse.Namespace) -> AsyncIterator[NatsJournal]:
    url = find(args.data)["nats_url"]
    journal = await NatsJournal.connect(url, "reader", None, make=False, stops_at="nothing")
    try:
        yield journal
    finally:
        await journal.close()


def _pressed(terminal: int, enough: asyncio.Event) -> None:
    keys = os.read(terminal, 64)
    if not keys or b"q" in keys.lower():
        enough.set()


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Yield an event that is set when the user presses q."""
    enough, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, enough.set)  # restores the terminal on SIGTERM
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
