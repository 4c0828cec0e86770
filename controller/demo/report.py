"""The demo's report: how each fault affected users, from the received streams and from the journal."""

import argparse
import statistics
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.table import Table
from rich.text import Text

from controller.demo.clients import Received, TokenDifference, compare
from controller.processes.operator_client import closing
from controller.replay import sentences, timeline
from controller.replay.event_lookup import FleetHistory, JournalArchive
from controller.replay.pages import NoPlotly
from controller.replay.report import report_cli
from controller.terminal_text import escape_controls
from events.decisions import IncidentOpened, SpareActivated
from events.fact import Recorded
from events.journal.nats import NatsJournal
from events.observations import CanaryResult, ExposureUnknown, RequestExposed, RequestFailed, RequestMigrated

WIDTH = 80  # terminal columns that the table needs
AFTERMATH = timedelta(seconds=10)  # time after a fault's end in which it can still have effects


@dataclass(slots=True)
class Injected:
    """One injected fault: its worker, its start, its end (None if it has not ended), and the requests that it affected."""

    fault: str
    worker: str
    began: datetime
    ended: datetime | None = None
    hit: dict[str, float] = field(default_factory=dict)  # affected request -> gap in ms
    exposed: set[str] = field(default_factory=set)
    back_ms: float | None = None  # time until a spare replaced the worker; None: no spare replaced it


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One row of the report's table, about one fault. Tokens are compared with the undisturbed answer."""

    fault: str
    worker: str
    hit: int
    lost: int
    difference: TokenDifference
    p50_ms: float | None
    p99_ms: float | None
    back_ms: float | None = None


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The result of the demo.

    `unnamed` lists each stream that received wrong tokens and is named by no RequestExposed event; it must be empty.
    `others_hit` is the number of streams that moved away from a worker without an injected fault. A possible cause is a machine
    that is too busy for the worker to answer in time.
    """

    requests: int
    tokens: int
    failed: Sequence[Received]
    rows: Sequence[ReportRow]
    total: TokenDifference
    altered_streams: int
    unnamed: Sequence[str]
    others_hit: int

    @property
    def clean(self) -> bool:
        """Whether no stream failed, and a RequestExposed event names every stream with lost, doubled or altered tokens."""
        return not (self.failed or self.total.lost or self.total.doubled or self.unnamed)


def attribute(events: Iterable[Recorded], injected: Sequence[Injected]) -> int:
    """Assign each affected stream to the injected fault that affected it.

    A fault affected a stream if the stream moved away from the fault's worker, or received tokens that the worker may have
    altered. Return the number of streams that moved away from a worker without an injected fault.
    """
    others: set[str] = set()
    for event in events:
        fact = event.fact
        if isinstance(fact, RequestMigrated):
            due = _at(injected, fact.source, event.at)
            if not due:
                others.add(fact.request)
            for one in due:
                one.hit[fact.request] = max(fact.gap_ms, one.hit.get(fact.request, 0.0))
        elif isinstance(fact, RequestExposed):
            for one in injected:
                if one.worker == fact.worker and one.began <= event.at:
                    one.exposed.add(fact.request)
        elif isinstance(fact, SpareActivated):
            for one in _at(injected, fact.replaces, event.at):
                one.back_ms = (event.at - one.began).total_seconds() * 1000
    return len(others)


def _at(injected: Sequence[Injected], worker: str, at: datetime) -> list[Injected]:
    """Return a list with the fault that can have affected this worker's requests at time `at`, or an empty list.

    This is the last fault that began before `at`, unless it ended more than 10 s before `at`.
    """
    begun = [one for one in injected if one.worker == worker and one.began <= at]
    return [one for one in begun[-1:] if one.ended is None or at <= one.ended + AFTERMATH]


def assess(
    streams: Sequence[Received],
    answers: Sequence[Sequence[str]],
    injected: Sequence[Injected],
    others_hit: int = 0,
) -> DemoReport:
    """Compare every stream with the undisturbed answer to its prompt, and sum up the differences for each fault."""
    differences = {s.request: _difference(s, answers) for s in streams}
    failed = [s for s in streams if s.error]
    broken = {s.request for s in failed}
    named = set().union(*(one.exposed for one in injected)) if injected else set()
    altered = {r for r, d in differences.items() if d.altered or d.doubled or d.lost}
    rows = [_row(one, differences, broken) for one in injected]
    return DemoReport(
        requests=len(streams),
        tokens=sum(len(s.pieces) for s in streams),
        failed=failed,
        rows=rows,
        total=_sum(d for r, d in differences.items() if r not in named),
        altered_streams=len(altered),
        unnamed=sorted(altered - named - broken),
        others_hit=others_hit,
    )


def _difference(stream: Received, answers: Sequence[Sequence[str]]) -> TokenDifference:
    if stream.error:
        return TokenDifference()  # the stream counts as lost, not its tokens
    return compare(stream.pieces, answers[stream.prompt][: stream.wanted])


def _row(one: Injected, differences: dict[str, TokenDifference], broken: set[str]) -> ReportRow:
    hit = set(one.hit) | (one.exposed if one.fault == "corruption" else set())
    gaps = sorted(one.hit.values())
    return ReportRow(
        fault=one.fault,
        worker=one.worker,
        hit=len(hit),
        lost=len(hit & broken),
        difference=_sum(differences.get(r, TokenDifference()) for r in hit),
        p50_ms=statistics.median(gaps) if gaps else None,
        p99_ms=gaps[min(len(gaps) - 1, round(0.99 * (len(gaps) - 1)))] if gaps else None,
        back_ms=one.back_ms,
    )


def _sum(differences: Iterable[TokenDifference]) -> TokenDifference:
    lost = doubled = altered = 0
    for d in differences:
        lost, doubled, altered = lost + d.lost, doubled + d.doubled, altered + d.altered
    return TokenDifference(lost, doubled, altered)


def unknown(events: Iterable[Recorded]) -> int:
    """Return the number of times that a frontend did not know which requests a convicted worker had served."""
    return sum(isinstance(e.fact, ExposureUnknown) for e in events)


def table(report: DemoReport) -> Table:
    """Return the report as a table of 80 columns for the terminal."""
    shown = Table(title="User impact", title_justify="left", padding=(0, 1, 0, 0))
    shown.add_column("", overflow="fold")
    for heading in (
        "streams\nhit",
        "\nlost",
        "tokens\nlost",
        "\ndoubled",
        "\naltered",
        "resume\np50 ms",
        "\np99 ms",
        "spare\nin ms",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        d = row.difference
        times = (_ms(row.p50_ms), _ms(row.p99_ms), _ms(row.back_ms))
        numbers = (row.hit, row.lost, d.lost, d.doubled, d.altered, *times)
        shown.add_row(Text(escape_controls(f"{row.fault} {row.worker}")), *(str(n) for n in numbers))
    t = report.total
    shown.add_section()
    rest = (report.others_hit, len(report.failed), t.lost, t.doubled, t.altered, "", "", "")
    shown.add_row("all others", *(str(n) for n in rest))
    return shown


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


STEPS_MAX = 12  # most lines of one incident
_COUNTED = (RequestMigrated, RequestExposed, RequestFailed)  # these kinds are only counted in the headline


async def incident_lines(nats_url: str, events: Sequence[Recorded]) -> AsyncIterator[str]:
    """Yield a headline and the events of every incident that was opened in `events`."""
    async with closing(NatsJournal.connect(nats_url, "demo", None, make=False)) as journal:
        archive = JournalArchive(journal)
        for event in events:
            if isinstance(event.fact, IncidentOpened):
                story = await timeline.story(journal, archive, event.fact.incident)
                yield story.headline()
                for line in steps(story.events):
                    yield f"    {line}"


async def write_report(nats_url: str, where: Path) -> str:
    """Write a report of the whole journal as an HTML page, or as Markdown if plotly is missing.

    Return a line that names the file."""
    wanted = argparse.Namespace(incident=None, since="1", until=None, redact=False, output=str(where))
    printed: list[str] = []
    async with closing(NatsJournal.connect(nats_url, "demo", None, make=False)) as journal:
        now, history = datetime.now(UTC), FleetHistory(journal, None)
        try:
            await report_cli.execute(wanted, history, now, printed.append)
        except NoPlotly:
            wanted.output = str(where.with_suffix(".md"))
            await report_cli.execute(wanted, history, now, printed.append)
    return f"Post-mortem with charts: {printed[0]}"


def steps(events: Sequence[Recorded]) -> list[str]:
    """Return the events of an incident as lines of text.

    If there are more than STEPS_MAX lines, the line before the last states how many lines are omitted there."""
    shown = [e for e in events if not isinstance(e.fact, _COUNTED)]
    first_canary = next((e for e in shown if isinstance(e.fact, CanaryResult)), None)
    shown = [e for e in shown if e is first_canary or not isinstance(e.fact, CanaryResult)]
    lines = [sentences.line(e, date=False) for e in shown]
    left_out = len(lines) - STEPS_MAX
    return lines if left_out <= 0 else [*lines[: STEPS_MAX - 1], f"… {left_out} more …", lines[-1]]
