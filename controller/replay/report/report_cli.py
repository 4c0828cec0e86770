"""Runs `holdfast replay report`, which selects a window of the journal and writes its report."""

import argparse
import json
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.replay import moment_parser
from controller.replay.atomic_file import written
from controller.replay.event_lookup import FleetHistory
from controller.replay.report import window
from controller.replay.report.document import plain, report
from controller.replay.report.lanes import lanes
from controller.replay.report.phases import all_phases
from controller.replay.report.redaction import Redaction
from controller.replay.report.window import HISTORY_EVENTS, ReportWindow
from controller.replay.sentences import count, span
from controller.replay.travel import NoLonger
from controller.replay.whatif.comparison import answers
from controller.replay.whatif.journal_stretch import TooMuch
from controller.replay.whatif.recording import of_incident
from events.errors import UsageError

FORMS = {".html": "html", ".md": "md", ".json": "json"}


async def execute(
    args: argparse.Namespace, history: FleetHistory, now: datetime, echo: Callable[[str], None]
) -> None:
    """Write one report to a file or print it with `echo`.

    Raise UsageError or BadMoment for invalid arguments. Raise NothingToTell, NoSuchEvent or NoLonger if the journal lacks the
    selected events. Raise CannotWrite or NoPlotly if the report cannot be written."""
    began, where = time.perf_counter(), Path(args.output)
    form = args.output if args.output in FORMS.values() else FORMS.get(where.suffix.lower())
    if form is None or (args.output == form == "html"):
        raise UsageError(
            f"-o {args.output}: must be a file name ending in .html, .md or .json, or just `md` or `json`"
        )
    selected = await _window(args, history, now)
    redaction = Redaction(selected.order.shown, selected.events) if args.redact else None
    last = await history.journal.last_seq()
    others = (
        await all_phases(history.archive.select(after=max(0, last - HISTORY_EVENTS)))
        if selected.story
        else {}
    )
    otherwise = await _otherwise(selected, history)
    made = report(selected, list(others.values()))
    document, drawn = plain(made) | {"otherwise": otherwise}, lanes(made)
    if redaction is not None:
        document, drawn = redaction.of(document), redaction.of(drawn)
    text = _text(form, document, drawn)
    if args.output == form:
        echo(text.rstrip("\n"))
        return
    size = written(where, text)
    took = span(time.perf_counter() - began)
    echo(f"{where}: {count(len(selected.events), 'event')}, {size}, in {took}")
    for sentence in document["summary"]:
        echo(f"  {sentence}")


async def _otherwise(selected: ReportWindow, history: FleetHistory) -> list[object]:
    """Return the results of the standard what-if questions about a worker's incident.

    The list is empty if the window is not about a worker's incident. It is also empty if the incident's events are too many,
    or were dropped from the journal."""
    story = selected.story
    if story is None or not story.subject.startswith("worker:"):
        return []
    try:
        recording = await of_incident(history, story)
    except (TooMuch, NoLonger):
        return []
    return answers(recording, story.incident) if recording is not None else []


def _text(form: str, document: dict[str, Any], drawn: dict[str, Any]) -> str:
    if form == "json":
        return json.dumps(document | {"lanes": drawn}, indent=1) + "\n"
    from controller.replay.report import page

    return page.html(document, drawn) if form == "html" else page.markdown(document)


async def _window(args: argparse.Namespace, history: FleetHistory, now: datetime) -> ReportWindow:
    if args.incident and (args.since or args.until):
        raise UsageError("--incident selects its own window: omit --since and --until")
    if args.incident:
        return await window.of_incident(history, args.incident)
    if args.since:
        until = moment_parser.parse(args.until, now) if args.until else None
        return await window.between(history, moment_parser.parse(args.since, now), until)
    if args.until:
        raise UsageError("--until requires --since")
    return await window.latest(history, now)
