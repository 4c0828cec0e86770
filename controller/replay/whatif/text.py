"""Formats a what-if answer as text for terminals of 80 or more columns."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from controller.replay.sentences import count, span
from controller.replay.whatif.comparison import (
    INFINITY,
    MEASURES,
    Comparison,
    Estimate,
    FaultCompared,
    TotalCompared,
)
from controller.replay.whatif.question import TIMES
from controller.replay.whatif.recording import Recording, instant

FAULTS_SHOWN, DECISIONS_SHOWN = 20, 12  # `-o json` prints all of them


def lines(answer: Comparison) -> Iterator[str]:
    """Yield the answer, line by line."""
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
    """Describe the recorded period: number of events, duration, dates."""
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
        yield f"    {_cut(words, 40):<40}{one.again:>7}{one.would:>10}"
    if len(answer.decisions) > DECISIONS_SHOWN:
        yield f"    and {len(answer.decisions) - DECISIONS_SHOWN} more: use -o json for all"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _range(estimate: Estimate, shown: Any) -> str:
    low, likely, high = (shown(one) for one in (estimate.low, estimate.likely, estimate.high))
    return str(likely) if low == high else f"{likely} ({low} to {high})"


def _after(seconds: float) -> str:
    return "–" if seconds == INFINITY else span(max(0.0, seconds))


def _number(value: float) -> str:
    return f"{value:,.0f}"


def setting(name: str, value: Any) -> str:
    """Format a setting's value for reading."""
    return span(value) if name in TIMES and isinstance(value, int | float) else str(value)


def _time(at: float) -> str:
    return datetime.strftime(instant(at), "%H:%M:%S")
