"""`holdfast replay report`: which part of history, in which form, and where to."""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.ports import Archive, StateStore
from controller.replay import moment
from controller.replay.report import window
from controller.replay.report.document import plain, report
from controller.replay.report.lanes import lanes
from controller.replay.report.phases import all_phases
from controller.replay.report.redaction import Redaction
from controller.replay.report.window import HISTORY_EVENTS, ReportWindow
from controller.replay.sentences import count, span
from events.errors import HoldfastError, UsageError
from events.journal.port import Journal

FORMS = {".html": "html", ".md": "md", ".json": "json"}
USUAL = "report.html"
WHEN = "a sequence, an instant (2026-03-01T12:00:03Z), a time of day in UTC (12:00:03), or how long ago (10m)"


class CannotWrite(HoldfastError):
    """The report cannot be written there."""


def add_arguments(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    text = "a post-mortem to look at: one page that needs no network, or Markdown, or JSON"
    command = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    command.add_argument(
        "--incident",
        metavar="ID",
        help="one incident, by its id or an event that led to it (default: the last one)",
    )
    command.add_argument("--since", metavar="WHEN", help=f"instead of an incident, all from here on: {WHEN}")
    command.add_argument("--until", metavar="WHEN", help="up to here (default: the end)")
    command.add_argument(
        "--redact", action="store_true", help="without names of requests, workers, hosts, people"
    )
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=USUAL,
        help=f"an .html, .md or .json file; `md` and `json` alone are printed (default: {USUAL})",
    )
    command.set_defaults(replay="report")


async def execute(
    args: argparse.Namespace,
    journal: Journal,
    store: StateStore | None,
    archive: Archive,
    now: datetime,
    say: Callable[[str], None],
) -> None:
    """Write or print one report. Raise UsageError, CannotWrite, NoPlotly, and what `controller.replay.report.window` raises."""
    began, where = time.perf_counter(), Path(args.output)
    form = args.output if args.output in FORMS.values() else FORMS.get(where.suffix.lower())
    if form is None or (args.output == form == "html"):
        raise UsageError(
            f"-o {args.output}: a file that ends in .html, .md or .json, or `md` or `json` alone"
        )
    told = await _window(args, journal, store, archive, now)
    redaction = Redaction(told.order.shown, told.events) if args.redact else None
    last = await journal.last_seq()
    others = await all_phases(archive.select(after=max(0, last - HISTORY_EVENTS))) if told.story else {}
    made = report(told, list(others.values()))
    document, drawn = plain(made), lanes(made)
    if redaction is not None:
        document, drawn = redaction.of(document), redaction.of(drawn)
    text = _text(form, document, drawn)
    if args.output == form:
        say(text.rstrip("\n"))
        return
    _write(where, text)
    size = (
        f"{len(text.encode()) / 1e6:.1f} MB" if len(text) > 100_000 else f"{len(text.encode()) / 1e3:.1f} kB"
    )
    took = span(time.perf_counter() - began)
    say(f"{where}: {count(len(told.events), 'event')}, {size}, in {took}")
    for sentence in document["summary"]:
        say(f"  {sentence}")


def _text(form: str, document: dict[str, Any], drawn: dict[str, Any]) -> str:
    if form == "json":
        return json.dumps(document | {"lanes": drawn}, indent=1) + "\n"
    from controller.replay.report import page

    return page.html(document, drawn) if form == "html" else page.markdown(document)


async def _window(
    args: argparse.Namespace, journal: Journal, store: StateStore | None, archive: Archive, now: datetime
) -> ReportWindow:
    if args.incident and (args.since or args.until):
        raise UsageError("--incident is a part of history of its own: leave --since and --until out")
    if args.incident:
        return await window.of_incident(journal, store, archive, args.incident)
    if args.since:
        until = moment.parse(args.until, now) if args.until else None
        return await window.between(journal, store, archive, moment.parse(args.since, now), until)
    if args.until:
        raise UsageError("--until wants --since, too")
    return await window.latest(journal, store, archive, now)


def _write(where: Path, text: str) -> None:
    """Put a file in its place in one step."""
    beside = where.with_name(f".{where.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(where)
    except OSError as error:
        raise CannotWrite(f"{where}: {error.strerror or error}. {CannotWrite.__doc__}") from None
