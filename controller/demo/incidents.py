"""The demo's incidents from the journal: one headline each, and the steps from symptom to recovery."""

import argparse
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from controller.replay import sentences, timeline
from controller.replay.pages import NoPlotly
from controller.replay.report import report_cli
from controller.replay.scan import JournalArchive
from events.decisions import IncidentOpened
from events.fact import Recorded
from events.journal.nats import NatsJournal
from events.observations import CanaryResult, RequestExposed, RequestFailed, RequestMigrated

STEPS_MAX = 12  # of one incident
_COUNTED = (RequestMigrated, RequestExposed, RequestFailed)  # these kinds are only counted in the headline


async def incident_lines(nats_url: str, events: Sequence[Recorded]) -> AsyncIterator[str]:
    """Yield the lines of every incident opened in `events`."""
    journal = await NatsJournal.connect(nats_url, "demo", None, make=False)
    try:
        archive = JournalArchive(journal)
        for event in events:
            if isinstance(event.fact, IncidentOpened):
                story = await timeline.story(journal, archive, event.fact.incident)
                yield story.headline()
                for line in steps(story.events):
                    yield f"    {line}"
    finally:
        await journal.close()


async def write_report(nats_url: str, where: Path) -> AsyncIterator[str]:
    """Write a report of the whole journal, as a page, or as Markdown without plotly. Yield its location."""
    journal = await NatsJournal.connect(nats_url, "demo", None, make=False)
    wanted = argparse.Namespace(incident=None, since="1", until=None, redact=False, output=str(where))
    printed: list[str] = []
    try:
        now, archive = datetime.now(UTC), JournalArchive(journal)
        try:
            await report_cli.execute(wanted, journal, None, archive, now, printed.append)
        except NoPlotly:
            wanted.output = str(where.with_suffix(".md"))
            await report_cli.execute(wanted, journal, None, archive, now, printed.append)
    finally:
        await journal.close()
    yield f"Post-mortem with charts: {printed[0]}"


def steps(events: Sequence[Recorded]) -> list[str]:
    """Return an incident's events as at most STEPS_MAX lines, plus one that counts those left out before the last."""
    shown = [e for e in events if not isinstance(e.fact, _COUNTED)]
    first_canary = next((e for e in shown if isinstance(e.fact, CanaryResult)), None)
    shown = [e for e in shown if e is first_canary or not isinstance(e.fact, CanaryResult)]
    lines = [sentences.line(e, date=False) for e in shown]
    left_out = len(lines) - STEPS_MAX
    return lines if left_out <= 0 else [*lines[: STEPS_MAX - 1], f"… {left_out} more …", lines[-1]]
