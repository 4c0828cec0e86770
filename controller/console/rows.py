"""Converts workers, models, incidents and events to the rows of the console page, and compares rows."""

from collections.abc import Mapping
from datetime import datetime
from typing import Literal

import msgspec

from controller.console.memory import EndedIncident
from controller.deciders.degradation import Degradation
from controller.deciders.fold import AwaitedWorker
from controller.deciders.incident import Incident
from controller.deciders.worker import Worker
from controller.read_model.fleet_view import URGENCY, WorkerView
from controller.replay import sentences
from controller.replay.recent import RecentEvent
from controller.replay.sentences import about
from controller.terminal_text import shortened

AWAITED = "AWAITED"  # state of a worker that has not joined yet
TEXT_MAX = 400  # maximum characters of a text from a worker or operator; longer texts are cut

Level = Literal["ok", "warn", "bad"]


class PageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base class of all rows. A field that has its default value is omitted in the JSON for the page."""


class WorkerRow(PageRow, frozen=True):
    """Row of one worker. Times are in UTC, as `instant` formats them."""

    state: str  # health, but SPARE, RAMPING or CAPPED for a healthy worker that is not at full weight, or AWAITED
    urgency: int  # position in the sorted list: workers with lower values are shown first
    health: str = ""
    weight: float = 0.0  # weight in routing, 0 to 1
    breaker: str = ""
    model: str = ""
    engine: str = ""
    host: str = ""
    why: str = ""  # why the worker is not at full weight; empty: it is, or it is a spare that is ready
    canary: str = ""  # result of the last canary: passed, slow, or why it failed
    canary_at: str = ""  # time of the last canary
    canary_ms: int = 0  # latency of the last canary in milliseconds
    spare: bool = False
    place: str = ""  # the worker that this spare replaces
    incident: str = ""
    since: str = ""  # when this worker instance joined, or began to be awaited


class ModelRow(PageRow, frozen=True):
    """Row of one model: its workers, its capacity compared with the objective, and its service rates."""

    serving: int  # number of workers that get requests
    workers: int  # number of live workers without spares
    spares: int = 0  # number of live spares
    share: float = 0.0  # share of the model's workers that serves, 0 to 1: mean weight, weighted by GPUs
    level: int = 0  # degradation level
    given_up: str = ""  # restrictions of the degradation level, as text
    # requests/s that the workers can serve within the objective; None: no objective
    capacity_rps: float | None = None
    promised_rps: float | None = None  # requests/s of the objective
    answers: float = 0.0  # answers per second
    tokens: float = 0.0  # tokens per second
    refused: float = 0.0  # rejected requests per second
    ttft_ms: float | None = None  # mean time to first token in milliseconds; None: no recent answer
    streams: int = 0  # streams between this frontend and the model's workers


class IncidentRow(PageRow, frozen=True):
    """Row of one incident, open or ended."""

    subject: str
    symptom: str
    opened: str = ""
    closed: str = ""
    outcome: str = ""


class EventRow(PageRow, frozen=True):
    """Row of one event, described in a sentence."""

    at: str
    kind: str
    text: str
    times: int = 1  # number of events that this row stands for; they differ only in the request


class Headline(PageRow, frozen=True):
    """The summary at the top of the page: user impact and fleet health, with a severity."""

    level: Level
    text: str


def instant(at: datetime) -> str:
    """Format a time in UTC as ISO 8601 with whole seconds. The page's JavaScript can parse this format."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def worker_row(worker: Worker, shown: WorkerView) -> WorkerRow:
    """Return the row of a worker that has joined. `shown` is the view of the same worker."""
    joined, last = worker.joined, worker.last_canary
    canary = ("", "", 0)
    if last is not None and shown.last_canary is not None:
        canary = (shortened(shown.last_canary.result, TEXT_MAX), instant(last.at), round(last.latency_ms))
    return WorkerRow(
        shown.state, shown.urgency, shown.health, round(worker.weight, 3), shown.breaker, shown.model, joined.engine,
        joined.topology.host, shortened(shown.why, TEXT_MAX), *canary, shown.spare, worker.spare.place, shown.incident,
        instant(worker.joined_at),
    )  # fmt: skip


def awaited_row(one: AwaitedWorker, dead: WorkerRow | None) -> WorkerRow:
    """Return the row of an awaited worker, which runs but has not joined yet.

    `dead` is the row of the worker's previous instance, or None. If `dead` is given, the result is `dead` with the reason for
    waiting added."""
    why = shortened(f"awaited: {one.reason}", TEXT_MAX)
    if dead is not None:
        return msgspec.structs.replace(dead, why=f"{dead.why}; {why}" if dead.why else why)
    place = URGENCY.index("DEAD")
    return WorkerRow(AWAITED, 2 * place, AWAITED, model=one.model, why=why, since=instant(one.since))


def given_up(state: Degradation) -> str:
    """Return the restrictions of a degradation level as text, or "" if the level restricts nothing."""
    knobs, parts = state.knobs, []
    if knobs.batch_size < 1:
        parts.append(f"batches at {100 * knobs.batch_size:.0f} %")
    if knobs.shed_tier is not None:
        parts.append(f"{knobs.shed_tier} is rejected")
    if knobs.latency > 1:
        parts.append(f"latencies may rise {knobs.latency:g} times")
    if not knobs.accept_new:
        parts.append("no new requests are admitted")
    return ", ".join(parts)


def open_incident(one: Incident) -> IncidentRow:
    """Return the row of an open incident."""
    return IncidentRow(about(one.subject), shortened(one.symptom, TEXT_MAX), instant(one.opened_at))


def ended_incident(one: EndedIncident) -> IncidentRow:
    """Return the row of an ended incident."""
    opened = "" if one.opened_at is None else instant(one.opened_at)
    return IncidentRow(
        about(one.subject), shortened(one.symptom, TEXT_MAX), opened, instant(one.closed_at), one.outcome
    )


def event_row(told: RecentEvent) -> EventRow:
    """Return a single row for an event and the similar events that follow it."""
    event = told.event
    text = shortened(sentences.sentence(event.fact), TEXT_MAX)
    return EventRow(event.at.isoformat(timespec="milliseconds"), event.fact.kind(), text, told.more + 1)


Sections = Mapping[str, Mapping[str, object]]
"""The rows of the page, by section and then by key. Rows are compared by value, and no row is None."""
Changes = dict[str, dict[str, object]]


def changes(before: Sections, after: Sections) -> Changes:
    """Return the rows of `after` that are new or differ from `before`, and None for each key that was removed.

    A section without changes is left out. `before` and `after` must have the same sections."""
    found: Changes = {}
    for section, rows in after.items():
        known = before[section]
        if rows is known:
            continue
        new = {key: row for key, row in rows.items() if (old := known.get(key)) is not row and old != row}
        new |= {key: None for key in known if key not in rows}
        if new:
            found[section] = new
    return found
