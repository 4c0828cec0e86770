"""`holdfast scale`: sets the number of workers of a model, or lets the planner set this number again."""

import argparse
from pathlib import Path

from controller.commands.plan_now import fetch_plan
from controller.processes.operator_client import ask, closing, find, operator_name
from events.errors import HoldfastError, UsageError
from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable
from events.observations import ScaleSet
from events.process.presence import present
from events.versions import Known

REACH_S = 5.0  # timeout in seconds for connecting to the broker
WRITE_S = 5.0  # timeout in seconds until the journal acknowledges the write


async def run(args: argparse.Namespace) -> int:
    """Record on the journal a model's number of workers, or with --release that the planner sets this number again.

    Raise UsageError for invalid arguments, NoFleet, Unreachable or NoAnswer if no controller answers, and JournalUnavailable if
    nothing could be recorded.
    """
    if (args.workers is None) != args.release:
        raise UsageError("give either the number of workers, or --release")
    models = sorted((await ask(args.data, "status"))["levels"])
    if args.model not in models:
        raise UsageError(f"unknown model {args.model!r}: the fleet serves {', '.join(models) or 'none yet'}")
    fact = ScaleSet(model=args.model, workers=args.workers, by=operator_name(), reason=args.reason)
    url, known = find(args.data)["nats_url"], Known.ours()
    opening = NatsJournal.connect(url, "operator:scale", wait_s=REACH_S, make=False, known=known)
    async with closing(opening) as journal:
        journal.observe(fact)
        if not await journal.flush(WRITE_S):
            raise JournalUnavailable(
                f"nothing is set: the journal did not acknowledge the write within {WRITE_S:g} s"
            )
        if journal.counters.withheld:
            raise JournalUnavailable(
                "nothing is set: a process of an older release is running and would stop at a `scale_set`. "
                "`holdfast fleet versions` shows it."
            )
    if args.release:
        print(f"the planner controls the number of workers of {args.model} again")
    else:
        print(f"{args.model} shall have {args.workers} workers until --release{why_no_effect(args.data)}")
    return 0


def why_no_effect(data: Path) -> str:
    """Return a note that says why no planner on this host applies the new number of workers.

    The result is "" if a planner that applies changes runs on this host, or if the planner's mode cannot be read."""
    if not any(one.role == "planner" for one in present(data)):
        return " (no planner is running on this host, so nothing changes: start one with `holdfast planner --mode act`)"
    try:
        mode = fetch_plan(data)["mode"]
    except HoldfastError:
        return ""  # the setting is on the journal; a planner that is starting reads it
    if mode == "act":
        return ""
    return f" (the planner runs in mode {mode}, which changes nothing: `up --planner-mode act` applies it)"
