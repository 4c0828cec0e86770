"""`holdfast status`: shows the current state of the fleet, once or repeatedly."""

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
from typing import Any

from controller.commands.printing import print_processes, print_status
from controller.processes.operator_client import Operator, find
from events.errors import HoldfastError
from events.process.presence import present

AGAIN = "\x1b[H\x1b[2J"  # move the cursor home and clear the screen


async def run(args: argparse.Namespace) -> int:
    """Print the status. Return 1 if no controller answers."""
    if args.watch is None:
        return await _show(args)
    find(args.data)  # fails at once if there has never been a fleet
    while True:
        with contextlib.redirect_stdout(io.StringIO()) as written:
            try:
                await _show(args)
            except HoldfastError as error:  # it may recover
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


async def fetch_status(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fleet's status from its controller. Raise NoFleet, Unreachable, or what `Operator.ask` raises."""
    operator = await Operator.connect(args.data)
    try:
        return await operator.ask("status", {})
    finally:
        await operator.close()
