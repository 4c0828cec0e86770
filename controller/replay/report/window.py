"""Selects the window of a report: consecutive events, and the fleet state before the first one."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from controller.deciders.fleet import Fleet
from controller.ports import Archive
from controller.replay import timeline, travel
from controller.replay.event_lookup import FleetHistory
from controller.replay.timeline import Story
from events.decisions import IncidentOpened
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal
from events.order import Order

EVENTS_MAX = 100_000  # maximum number of events of one report; later events are left out
# number of events at the journal's end that are searched for incidents to report and compare
HISTORY_EVENTS = 200_000
AROUND = timedelta(seconds=5)  # time included before an incident's first event and after its last event
LATELY = timedelta(minutes=10)  # the default window if the journal holds no recent incident


class NothingToTell(HoldfastError):
    """The journal holds no event of that time."""


@dataclass(slots=True)
class ReportWindow:
    """The events of a report, and the fleet state before them."""

    events: list[Recorded]  # consecutive events, at least one
    order: Order[Fleet]  # the fold up to the event before the first one
    story: Story | None  # the incident that the window is about; None: the window was selected by time
    cut: bool = False  # whether events at the end are missing because there are more than EVENTS_MAX

    @property
    def start(self) -> datetime:
        return self.events[0].at

    @property
    def end(self) -> datetime:
        return self.events[-1].at


async def of_incident(history: FleetHistory, incident: str) -> ReportWindow:
    """Return the window of an incident, which `incident` names by its id or by one of its events.

    Raise NoSuchEvent if there is no such incident, or NoLonger if the fleet state before its first event cannot be restored."""
    journal, archive = history.journal, history.archive
    story = await timeline.story(journal, archive, await timeline.incident_of(archive, journal, incident))
    since, until = story.events[0].at - AROUND, story.events[-1].at + AROUND
    return await between(history, since, until, story)


async def latest(history: FleetHistory, now: datetime) -> ReportWindow:
    """Return the window of the last incident, or of the last 10 minutes before `now` if no recent incident is found.

    Raise NothingToTell or NoLonger as `between` does."""
    found, last = "", await history.journal.last_seq()
    async for batch in history.archive.select(after=max(0, last - HISTORY_EVENTS)):
        found = next((e.fact.incident for e in reversed(batch) if isinstance(e.fact, IncidentOpened)), found)
    if found:
        return await of_incident(history, found)
    return await between(history, now - LATELY, now)


async def between(
    history: FleetHistory, since: int | datetime, until: int | datetime | None, story: Story | None = None
) -> ReportWindow:
    """Return the window from `since` to `until`, both included, as sequence numbers or times.

    `until` None means the journal's end. `story` is the incident that the window is about. Raise NothingToTell if the window
    has no event, or NoLonger if the fleet state before it cannot be restored.
    """
    journal = history.journal
    last = await journal.last_seq()
    first = await _first_since(history.archive, since) if isinstance(since, datetime) else since
    if first is None or first > last:
        raise NothingToTell(f"no event since {since}. {NothingToTell.__doc__}")
    first = max(1, first)
    order = await travel.order_at(journal, history.store, first - 1)
    events: list[Recorded] = []
    cut = False
    async for event in _until(journal, order.last_seq, last, until):
        if cut := len(events) == EVENTS_MAX:
            break
        events.append(event)
    if not events:
        raise NothingToTell(f"no event between {since} and {until}. {NothingToTell.__doc__}")
    return ReportWindow(events, order, story, cut)


async def _until(
    journal: Journal, after: int, last: int, until: int | datetime | None
) -> AsyncIterator[Recorded]:
    end = min(last, until) if isinstance(until, int) else last
    async for event in travel.events(journal, after, end):
        if isinstance(until, datetime) and event.at > until:
            return
        yield event


async def _first_since(archive: Archive, since: datetime) -> int | None:
    async for batch in archive.select(since=since):
        return batch[0].seq
    return None
