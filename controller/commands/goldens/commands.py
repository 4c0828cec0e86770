"""`holdfast golden`: shows, approves, retires, records, exports and imports the goldens of a fleet."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from controller.adapters.postgres.reader import RowReader
from controller.commands.goldens import file
from controller.deciders.golden import Golden
from controller.processes.operator_client import Operator, ask, closing, find, operator_name
from controller.read_model.rows import read_golden
from controller.terminal_text import escape_controls, fitted
from events.errors import HoldfastError, UsageError

READ_S = 5.0  # timeout in seconds for reading the state store


async def run(args: argparse.Namespace) -> int:
    """Run one subcommand of `holdfast golden`, and return exit code 0. Raise HoldfastError if the subcommand fails."""
    match args.golden:
        case "list":
            known = await stored(args.data)
            found = _selected(known.goldens, args)
            if args.output == "json":
                print(as_json(found, known.decided_at))
            else:
                print(text(found, known.decided_at) or f"no goldens{_filters(args)}")
        case "export":
            _export(_selected((await stored(args.data)).goldens, args), args)
        case "import":
            await _import(args)
        case _:
            await _request(args)
    return 0


@dataclass(frozen=True, slots=True)
class StoredGoldens:
    """The goldens (stored correct answers) in the fleet's state store, and the canary keys of all workers.

    A canary key stands for workers with comparable answers, such as those with the same model, engine and device."""

    goldens: Sequence[Golden]
    keys: frozenset[str]  # the canary keys of all workers
    # by decision number: time of a decision that was the last to change a golden
    decided_at: Mapping[int, datetime]


async def stored(data: Path) -> StoredGoldens:
    """Read the goldens from the fleet's state store, sorted by canary key.

    Raise NoFleet if there is no fleet, UsageError if it has no store, or HoldfastError if the store cannot be read."""
    url = find(data)["database_url"]
    if not url:
        raise UsageError("goldens are stored in the fleet's database: set HOLDFAST_DATABASE_URL or --data")
    reader = RowReader(url)
    try:
        async with asyncio.timeout(READ_S):
            rows = (await reader.read_status()).rows
            goldens = sorted(map(read_golden, rows["goldens"]), key=lambda one: (one.canary_key, one.canary))
            decided_at = await reader.decided_at([one.moved_by for one in goldens])
    except TimeoutError as error:
        raise HoldfastError(f"the fleet's database did not answer within {READ_S:g} s") from error
    finally:
        await reader.close()
    return StoredGoldens(goldens, frozenset(row["canary_key"] for row in rows["workers"]), decided_at)


def _selected(goldens: Sequence[Golden], args: argparse.Namespace) -> list[Golden]:
    return [
        one
        for one in goldens
        if (not args.model or model(one) == args.model) and (not args.key or one.canary_key == args.key)
    ]


def _filters(args: argparse.Namespace) -> str:
    """Return a phrase for messages that names the values of --model and --key, such as " of model 'sim'".

    Return "" if neither flag is given.
    """
    named = ((" of model", args.model), (" under canary key", args.key))
    return "".join(f"{what} {escape_controls(value)!r}" for what, value in named if value)


def model(golden: Golden) -> str:
    """Return the model name in a golden's canary key."""
    return golden.canary_key.partition("|")[0]


def as_json(goldens: Sequence[Golden], decided_at: Mapping[int, datetime]) -> str:
    """Return goldens as a JSON list. `decided_at` maps decision numbers to times."""
    listed = [
        {
            "model": model(one),
            "canary_key": one.canary_key,
            "canary": one.canary,
            "status": one.status,
            "configured": one.configured,
            "since": _instant(decided_at.get(one.moved_by), "T", "milliseconds") or None,
            "by": list(one.by),
            "proposed_by": one.proposed_by,
            "contradicted_by": sorted(vote.worker for vote in one.contradictions),
            "tokens": list(one.tokens),
        }
        for one in goldens
    ]
    return json.dumps(listed, indent=1)


def text(goldens: Sequence[Golden], decided_at: Mapping[int, datetime]) -> str:
    """Return goldens as text: for each canary key a line, followed by a line per canary. Without goldens, return ""."""
    width = max((len(one.canary) for one in goldens), default=0)
    lines, key = [], None
    for one in goldens:
        if one.canary_key != key:
            key = one.canary_key
            lines.append(key.replace("|", " | "))
        since = _instant(decided_at.get(one.moved_by), " ", "seconds")[:19]
        since = f"{since} UTC" if since else "-"
        line = f"  {one.canary.ljust(width)}  {one.status.ljust(11)}  {since.ljust(23)}  {_by(one)}"
        lines.append(line.rstrip())
    return "\n".join(fitted(escape_controls(line)) for line in lines)


def _instant(at: datetime | None, sep: str, timespec: str) -> str:
    """Format `at`, the time of the last decision that changed a golden. Return "" if no decision did (None)."""
    return at.isoformat(sep, timespec) if at is not None else ""


def _by(golden: Golden) -> str:
    """Return the workers that support a golden and those that contradict it, as text."""
    support = (
        "" if golden.status == "retired" else ", ".join(golden.by) or f"proposed by {golden.proposed_by}"
    )
    against = sorted(vote.worker for vote in golden.contradictions)
    return f"{support}; contradicted by {', '.join(against)}" if against else support


def _export(goldens: Sequence[Golden], args: argparse.Namespace) -> None:
    path: Path | None = args.output
    agreed = [one for one in goldens if one.status == "agreed"]
    if not agreed:
        raise HoldfastError(
            f"no agreed golden{_filters(args)} to export; `holdfast golden list` shows all goldens"
        )
    content = file.written(agreed)
    if path is None:
        sys.stdout.write(content)
        return
    try:
        path.write_text(content)
    except OSError as error:
        raise HoldfastError(f"cannot write {path}: {error.strerror}") from error
    print(f"exported {len(agreed)} goldens to {path}")


async def _import(args: argparse.Namespace) -> None:
    goldens = file.read(args.file)
    known = (await stored(args.data)).keys
    async with closing(Operator.connect(args.data)) as operator:
        for key, answers in goldens.items():
            for batch in file.batches(answers):
                body = {"act": "approve", "canary_key": key, "answers": batch, "by": operator_name()}
                print(escape_controls((await operator.ask("golden", body))["says"]))
            if key not in known:
                print(fitted(escape_controls(f"no worker has this canary key at present: {key}")))


async def _request(args: argparse.Namespace) -> None:
    flags = {"worker": "worker", "canary_key": "key", "model": "model"}
    named = {field: getattr(args, flag, "") for field, flag in flags.items()}
    if sum(map(bool, named.values())) != 1:
        choices = "--model, --key or --worker" if args.golden == "approve" else "--model or --key"
        raise UsageError(
            f"select the goldens with exactly one of {choices}; `holdfast golden list` shows them"
        )
    body = {"act": args.golden, "canaries": args.canary, "by": operator_name(), **named}
    print(escape_controls((await ask(args.data, "golden", body))["says"]))
