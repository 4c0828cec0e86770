"""The `holdfast replay what-if` command."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from controller.replay import moment_parser, timeline
from controller.replay.atomic_file import written
from controller.replay.event_lookup import FleetHistory
from controller.replay.sentences import count, span
from controller.replay.whatif import sweep as sweeps
from controller.replay.whatif.comparison import (
    INFINITY,
    MEASURES,
    Comparison,
    Estimate,
    FaultCompared,
    TotalCompared,
    compare,
)
from controller.replay.whatif.question import INTERVAL, SILENCE, parse_changes, setting, value_of
from controller.replay.whatif.recording import Recording, between, instant, of_incident
from controller.terminal_text import shortened
from events.errors import HoldfastError, UsageError


class NothingToAsk(HoldfastError):
    """The journal holds no event of that time."""


async def execute(
    args: argparse.Namespace, history: FleetHistory, now: datetime, echo: Callable[[str], None]
) -> None:
    """Answer the what-if question in the arguments. Print the answer with `echo`, or write the answer to a file.

    Raise UsageError or BadMoment for invalid arguments. Raise NothingToAsk, NoSuchEvent or NoLonger if the journal lacks the
    selected events, or TooMuch if they are too many. Raise CannotWrite, NoPlotly or HelperGone if the answer
    cannot be computed or written."""
    what = parse_changes(args.set, args.policy)
    sweep = sweeps.swept(args.sweep, args.points, what) if args.sweep else None
    if sweep is None and not what.values:
        raise UsageError("nothing to compare: give --set NAME=VALUE, --policy FILE or --sweep NAME=A..B")
    form = _form(args.output, sweep is not None)
    recording, incident = await _recording(args, history, now)
    _as_it_was(recording, args.recorded)
    if sweep is not None:
        _sweep(recording, sweep, args.output, form, echo)
        return
    answer = compare(recording, what, incident=incident)
    if form == "json":
        _out(json.dumps(answer.as_json(), indent=1), args.output, form, echo)
        return
    for line in lines(answer):
        echo(line)


def _form(output: str, sweep: bool) -> str:
    forms = ("text", "json", "html") if sweep else ("text", "json")
    form = output if output in ("text", "json") else Path(output).suffix.lower().removeprefix(".")
    if form not in forms or (form == "text" and output != "text"):
        page = ", a file name ending in .html" if sweep else ""
        raise UsageError(f"-o {output}: must be text, json, a file name ending in .json{page}")
    return form


def _out(text: str, output: str, form: str, echo: Callable[[str], None]) -> None:
    if output == form:
        echo(text)
        return
    echo(f"{output}: {written(Path(output), text + chr(10))}")


def _sweep(
    recording: Recording, asked_for: sweeps.Swept, output: str, form: str, echo: Callable[[str], None]
) -> None:
    points, notes = sweeps.sweep(recording, asked_for)
    document = sweeps.as_json(asked_for, points) | {"limits": notes}
    about = [period(recording)]
    besides = asked_for.asked.values
    if besides:
        about.append(f"other settings: {', '.join(f'{name} {value}' for name, value in besides.items())}")
    if form == "json":
        _out(json.dumps(document, indent=1), output, form, echo)
        return
    if form == "html":
        from controller.replay.whatif import sweep_page

        page = sweep_page.html(document, sweep_page.figure(asked_for, points), about)
        _out(page, output, form, echo)
        return
    for line in (*about, "", *sweeps.lines(asked_for, points), "", *(f"  * {one}" for one in notes)):
        echo(line)


async def _recording(args: argparse.Namespace, history: FleetHistory, now: datetime) -> tuple[Recording, str]:
    """Read the part of the journal that the arguments select.

    The second result is the id of the selected incident, or "" if the arguments select a time range. Raise UsageError for
    contradictory arguments, or NothingToAsk if the part has no events."""
    if args.incident and (args.since or args.until):
        raise UsageError("--incident selects its own part of history: omit --since and --until")
    incident, found, journal = "", None, history.journal
    if args.incident:
        incident = await timeline.incident_of(history.archive, journal, args.incident)
        story = await timeline.story(journal, history.archive, incident)
        found = await of_incident(history, story)
    else:
        since = moment_parser.parse(args.since, now) if args.since else await journal.first_seq()
        until = moment_parser.parse(args.until, now) if args.until else None
        found = await between(history, since, until)
    if found is None:
        raise NothingToAsk(f"no event in this part of the journal. {NothingToAsk.__doc__}")
    return found, incident


def _as_it_was(recording: Recording, given: Sequence[str]) -> None:
    """Set the recording's canary interval and silence timeout as given by `--recorded`.

    Raise UsageError for invalid values."""
    for one in given:
        name, _, text = one.partition("=")
        value = value_of(text)
        if name not in (INTERVAL, SILENCE) or not isinstance(value, int | float) or value <= 0:
            raise UsageError(
                f"--recorded {one}: must be {INTERVAL} or {SILENCE} with a duration above 0, such as {INTERVAL}=30s"
            )
        if name == INTERVAL:
            recording.interval_s = float(value)
        else:
            recording.silence_s = float(value)


FAULTS_SHOWN, DECISIONS_SHOWN = 20, 12  # `-o json` prints all of them


def lines(answer: Comparison) -> Iterator[str]:
    """Yield the lines that describe a comparison in text output."""
    for name, was, now in answer.changed:
        yield f"what if {name} had been {setting(name, now)} instead of {setting(name, was)}?"
    yield f"{count(len(answer.faults), 'fault')}, {period(answer.recording)}"
    yield ""
    yield f"  {'totals':<25}{'recorded':>10}{'again':>10}  would be"
    for total in answer.totals:
        yield _total(total)
    for fault in answer.faults[:FAULTS_SHOWN]:
        yield ""
        yield from _fault(fault)
    if len(answer.faults) > FAULTS_SHOWN:
        yield f"  and {count(len(answer.faults) - FAULTS_SHOWN, 'fault')} more: use -o json for all"
    yield ""
    yield from _decisions(answer)
    yield ""
    for limit in answer.limits:
        yield f"  * {limit}"


def period(recording: Recording) -> str:
    """Return a description of the recorded period, with its number of events, its duration and its dates."""
    lasted = span(recording.end - recording.start)
    days = f"{instant(recording.start):%Y-%m-%d} {_time(recording.start)} to {_time(recording.end)} UTC"
    return f"{count(recording.events, 'event')} in {lasted}, {days}"


def _total(total: TotalCompared) -> str:
    unit = f", {total.unit}" if total.unit else ""
    would = _range(total.would, _number)
    return f"  {total.name + unit:<25}{_number(total.recorded):>10}{_number(total.again):>10}  {would}"


def _fault(one: FaultCompared) -> Iterator[str]:
    fault = one.fault
    under = f" ({fault.incident})" if fault.incident else ""
    yield f"  {fault.worker}, {_time(fault.likely)}: {fault.what}{under}"
    for name in MEASURES:
        recorded, again = _after(one.recorded[name]), _after(one.again[name])
        yield f"    {name + ' after':<23}{recorded:>10}{again:>10}  {_range(one.would[name], _after)}"


def _decisions(answer: Comparison) -> Iterator[str]:
    if not answer.decisions:
        yield "  the same decisions would have been made"
        return
    yield "  decisions that differ:                      again  would be"
    for one in answer.decisions[:DECISIONS_SHOWN]:
        words = " ".join(filter(None, (one.kind, one.subject, one.what)))
        yield f"    {shortened(words, 40):<40}{one.again:>7}{one.would:>10}"
    if len(answer.decisions) > DECISIONS_SHOWN:
        yield f"    and {len(answer.decisions) - DECISIONS_SHOWN} more: use -o json for all"


def _range(estimate: Estimate, shown: Any) -> str:
    low, likely, high = (shown(one) for one in (estimate.low, estimate.likely, estimate.high))
    return str(likely) if low == high else f"{likely} ({low} to {high})"


def _after(seconds: float) -> str:
    return "–" if seconds == INFINITY else span(max(0.0, seconds))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _time(at: float) -> str:
    return datetime.strftime(instant(at), "%H:%M:%S")
