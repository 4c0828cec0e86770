"""`holdfast scale`: sets the number of workers of a model, or returns control to the planner."""

import argparse
from pathlib import Path

from controller.commands.plan_now import fetch_plan
from controller.processes.operator_client import Operator, find, operator_name
from events.errors import HoldfastError, UsageError
from events.journal.nats import NatsJournal
from events.journal.port import JournalUnavailable
from events.observations import ScaleSet
from events.process.presence import present
from events.versions import Known

REACH_S = 5.0
WRITE_S = 5.0


async def run(args: argparse.Namespace) -> int:
    """Record the number of workers that the operator sets, or its release.

    Raise UsageError, NoFleet, Unreachable, NoAnswer or JournalUnavailable.
    """
    if (args.workers is None) != args.release:
        raise UsageError("give either the number of workers, or --release")
    await _check_model(args.data, args.model)
    journal = await NatsJournal.connect(
        find(args.data)["nats_url"], "operator:scale", wait_s=REACH_S, make=False, known=Known.ours()
    )
    try:
        journal.observe(
            ScaleSet(model=args.model, workers=args.workers, by=operator_name(), reason=args.reason)
        )
        if not await journal.flush(WRITE_S):
            raise JournalUnavailable(
                f"nothing is set: the journal did not acknowledge the write within {WRITE_S:g} s"
            )
        if journal.counters.withheld:
            raise JournalUnavailable(
                "nothing is set: a process of an older release is running and would stop at a `scale_set`. "
                "`holdfast fleet versions` shows it."
            )
    finally:
        await journal.close()
    print(_result(args.model, args.workers, args.data))
    return 0


async def _check_model(data: Path, model: str) -> None:
    operator = await Operator.connect(data)
    try:
        known = (await operator.ask("status", {}))["levels"]
    finally:
        await operator.close()
    if model not in known:
        raise UsageError(
            f"unknown model {model!r}: the fleet serves {', '.join(sorted(known)) or 'none yet'}"
        )


def _result(model: str, workers: int | None, data: Path) -> str:
    if workers is None:
        return f"the planner controls the number of workers of {model} again"
    return f"{model} shall have {workers} workers until --release{why_no_effect(data)}"


def why_no_effect(data: Path) -> str:
    """Return why no worker will be started or stopped; empty if a planner that acts runs on this host."""
    if not any(one.role == "planner" for one in present(data)):
        return " (no planner is running on this host, so nothing changes: start one with `holdfast planner --mode act`)"
    try:
        mode = fetch_plan(data)["mode"]
    except HoldfastError:
        return ""  # the setting is on the journal; a planner that is starting reads it
    if mode == "act":
        return ""
    return f" (the planner runs in mode {mode}, which changes nothing: `up --planner-mode act` applies it)"
