"""`holdfast status`: the fleet as it is, once or again and again."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
from typing import Any

from controller.commands.printing import print_processes, print_status
from controller.processes.flag_types import positive
from controller.processes.operator_client import Operator, find
from events.errors import HoldfastError
from events.process.presence import present

WATCH_S = 2.0
AGAIN = "\x1b[H\x1b[2J"  # the cursor to the first place, and nothing on the screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.add_argument(
        "-w",
        "--watch",
        type=positive,
        nargs="?",
        const=WATCH_S,
        metavar="S",
        help=f"again every S seconds, until Ctrl-C (default: {WATCH_S:g}); -o json: a line each time",
    )


async def run(args: argparse.Namespace) -> int:
    """Show the status. 1 where no controller answers."""
    if args.watch is None:
        return await _show(args)
    find(args.data)  # where nothing was ever there it is said once
    while True:
        with contextlib.redirect_stdout(io.StringIO()) as written:
            try:
                await _show(args)
            except HoldfastError as error:  # it may come back
                if args.output == "json":
                    print(json.dumps({"error": str(error)}))
                else:
                    print(f"holdfast: {error}")
        text = written.getvalue()
        if args.output == "json":
            text = json.dumps(json.loads(text)) + "\n"
        elif sys.stdout.isatty():
            text = AGAIN + text
        print(text, end="", flush=True)
        await asyncio.sleep(args.watch)


async def _show(args: argparse.Namespace) -> int:
    try:
        status = await asked(args)
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


async def asked(args: argparse.Namespace) -> dict[str, Any]:
    """Return how the fleet is, as its controller says. Raise NoFleet, Unreachable, or what `Operator.ask` raises."""
    operator = await Operator.connect(args.data)
    try:
        return await operator.ask("status", {})
    finally:
        await operator.close()
