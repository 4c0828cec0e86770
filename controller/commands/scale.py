"""`holdfast scale`: an operator sets how many workers a model has, and leaves it to the planner again."""

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

from controller.commands.plan_now import asked
from controller.processes.operator_client import Operator, find, who
from events.errors import HoldfastError, UsageError
from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable
from events.observations import ScaleSet
from events.process.presence import present
from events.versions import Known

REACH_S = 5.0
WRITE_S = 5.0
WORKERS_MAX = 10_000


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= WORKERS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of workers, 1 to {WORKERS_MAX}")
    return int(text)


def prepare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the flags, and return what runs the command."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("workers", metavar="N", nargs="?", type=_workers, help="how many it shall have")
    parser.add_argument("--release", action="store_true", help="leave it to the planner again")
    parser.add_argument("--reason", metavar="TEXT", default="", help="why, for the journal")
    return lambda args: asyncio.run(run(args))


async def run(args: argparse.Namespace) -> int:
    """Write the wish down. Raise UsageError, NoFleet, Unreachable, NoAnswer or JournalUnavailable."""
    if (args.workers is None) != args.release:
        raise UsageError("say how many workers the model shall have, or --release")
    await _check_model(args.data, args.model)
    journal = await NatsJournal.connect(
        find(args.data)["nats_url"], "operator:scale", wait_s=REACH_S, make=False, known=Known.ours()
    )
    try:
        journal.observe(ScaleSet(model=args.model, workers=args.workers, by=who(), reason=args.reason))
        if not await journal.flush(WRITE_S):
            raise JournalUnavailable(f"nothing is set: the journal did not take it in {WRITE_S:g} s")
        if journal.counters.withheld:
            raise JournalUnavailable(
                "nothing is set: a process of an older release runs that stops at a `scale_set`. "
                "`holdfast fleet versions` shows it."
            )
    finally:
        await journal.close()
    print(_said(args.model, args.workers, args.data))
    return 0


async def _check_model(data: Path, model: str) -> None:
    operator = await Operator.connect(data)
    try:
        known = (await operator.ask("status", {}))["levels"]
    finally:
        await operator.close()
    if model not in known:
        raise UsageError(
            f"there is no model {model!r}: the fleet serves {', '.join(sorted(known)) or 'none yet'}"
        )


def _said(model: str, workers: int | None, data: Path) -> str:
    if workers is None:
        return f"how many workers {model} has is the planner's to say again"
    return f"{model} shall have {workers} workers until --release{unheeded(data)}"


def unheeded(data: Path) -> str:
    """Return why no worker is started or stopped by itself; empty if a planner that acts runs here."""
    if not any(one.role == "planner" for one in present(data)):
        return " (no planner runs on this host, so nothing changes: start one with `holdfast planner --mode act`)"
    try:
        mode = asked(data)["mode"]
    except HoldfastError:
        return ""  # the request is on the journal; a planner that is about to start reads it
    if mode == "act":
        return ""
    return f" (the planner's mode is {mode}, so it changes nothing: `up --planner-mode act` carries it out)"
