"""What is shown of one worker, model, incident or event: values that compare, and that a page draws as they are."""

from datetime import datetime
from typing import Literal

import msgspec

from controller.console.memory import EndedIncident
from controller.deciders.awaiting import AwaitedWorker
from controller.deciders.degradation import Degradation
from controller.deciders.incident import Incident
from controller.deciders.worker import SPARE, Worker
from controller.replay import sentences
from controller.replay.recent import URGENCY, EventTold
from controller.replay.report.frames import WorkerShown
from controller.replay.sentences import about

AWAITED = "AWAITED"  # it is no part of the fleet yet
TEXT_MAX = 400  # characters of what somebody has said at length

Level = Literal["ok", "warn", "bad"]


class PageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base of all of them. What has its default is left out."""


class WorkerRow(PageRow, frozen=True):
    """One worker."""

    state: str  # as the lanes of a post-mortem colour it
    urgency: int  # the lower, the more somebody should look at it
    health: str = ""
    weight: float = 0.0  # share of the traffic, 0 to 1
    breaker: str = ""
    model: str = ""
    engine: str = ""
    host: str = ""
    why: str = ""  # it has not its full share
    canary: str = ""  # how the last one ended: passed, slow, or why it failed
    canary_at: str = ""
    canary_ms: int = 0
    spare: bool = False
    place: str = ""  # of which worker it has taken
    incident: str = ""
    since: str = ""  # when this life of it joined


class ModelRow(PageRow, frozen=True):
    """One model: what its workers carry, and what was promised."""

    serving: int  # workers that get requests
    workers: int  # that are to, spares left out
    spares: int = 0
    share: float = 0.0  # of them that serves: weights, by their GPUs
    level: int = 0  # of degradation
    given_up: str = ""  # at that level
    capacity_rps: float | None = None  # that they carry within the objective; None: nothing is promised
    promised_rps: float | None = None
    answers: float = 0.0  # a second, and so the next two
    tokens: float = 0.0
    refused: float = 0.0
    ttft_ms: float | None = None
    streams: int = 0


class IncidentRow(PageRow, frozen=True):
    """One incident, open or over."""

    subject: str
    symptom: str
    opened: str = ""
    closed: str = ""
    outcome: str = ""


class EventRow(PageRow, frozen=True):
    """One event in words."""

    at: str
    kind: str
    text: str
    times: int = 1  # so many came together that say the same of other requests


class Headline(PageRow, frozen=True):
    """Is anybody hurt?"""

    level: Level
    text: str


def instant(at: datetime) -> str:
    """Return a time as pages read it: UTC, to the second."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def _short(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def worker_row(worker: Worker, shown: WorkerShown) -> WorkerRow:
    """Return what is shown of a worker."""
    joined, last = worker.joined, worker.last_canary
    why = _short("; ".join(reason for reason in worker.reasons if reason != SPARE))
    place = URGENCY.index(shown.health) if shown.health in URGENCY else len(URGENCY)
    return WorkerRow(
        state=shown.state,
        urgency=2 * place + (not why),
        health=shown.health,
        weight=round(shown.weight, 3),
        breaker=shown.breaker,
        model=joined.model,
        engine=joined.engine,
        host=joined.topology.host,
        why=why,
        canary="" if last is None else _short(last.reason or last.outcome),
        canary_at="" if last is None else instant(last.at),
        canary_ms=0 if last is None else round(last.latency_ms),
        spare=worker.spare.kept,
        place=worker.spare.place,
        incident=worker.incident,
        since=instant(worker.joined_at),
    )


def awaited_row(one: AwaitedWorker, dead: WorkerRow | None) -> WorkerRow:
    """Return what is shown of a worker that is awaited; `dead`: of its last life, where the fleet knows it."""
    why = _short(f"awaited: {one.reason}")
    if dead is not None:
        return msgspec.structs.replace(dead, why=f"{dead.why}; {why}" if dead.why else why)
    place = URGENCY.index("DEAD")
    return WorkerRow(AWAITED, 2 * place, AWAITED, model=one.model, why=why, since=instant(one.since))


def given_up(state: Degradation) -> str:
    """Return what a degradation level costs, in words; empty: nothing."""
    knobs, said = state.knobs, []
    if knobs.batch_size < 1:
        said.append(f"batches at {100 * knobs.batch_size:.0f} %")
    if knobs.shed_tier is not None:
        said.append(f"{knobs.shed_tier} is turned away")
    if knobs.latency > 1:
        said.append(f"latencies may be {knobs.latency:g} times as long")
    if not knobs.accept_new:
        said.append("nobody new is let in")
    return ", ".join(said)


def open_incident(one: Incident) -> IncidentRow:
    """Return what is shown of an incident that is not over."""
    return IncidentRow(about(one.subject), _short(one.symptom), instant(one.opened_at))


def ended_incident(one: EndedIncident) -> IncidentRow:
    """Return what is shown of one that is over."""
    opened = "" if one.opened_at is None else instant(one.opened_at)
    return IncidentRow(about(one.subject), _short(one.symptom), opened, instant(one.closed_at), one.outcome)


def event_row(told: EventTold) -> EventRow:
    """Return an event in words."""
    event = told.event
    text = _short(sentences.sentence(event.fact))
    return EventRow(event.at.isoformat(timespec="milliseconds"), event.fact.kind(), text, told.more + 1)
