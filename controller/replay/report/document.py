"""Builds the content of a report, independent of the output format."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

from controller.deciders.fleet import FleetPolicy, dump, load
from controller.replay import sentences, timeline
from controller.replay.event_lookup import as_json, cause, name
from controller.replay.report.frames import Frame, Stretch, frames, stretches
from controller.replay.report.impact import Impact, user_impact
from controller.replay.report.phases import Phases, PhaseTimes, compared
from controller.replay.report.window import ReportWindow
from controller.replay.sentences import about, count, sentence, span
from controller.replay.timeline import Story
from events import observations as o
from events.decisions import IncidentOpened
from events.fact import Decision, Fact, Recorded

Document = dict[str, Any]  # a report or a part of it, as plain JSON types

# in these facts, the field `by` names a process instead of an operator
PLANNED = (o.ScaleProposed, o.ScaleApplied)
# fields of a worker that the page shows; their values are those that `holdfast replay at` prints
WORKER_FIELDS = ("health", "weight", "breaker", "reason", "incident", "state", "spare", "gpus", "model")
REQUEST_FIELDS = ("request", "model", "workers", "gaps_ms", "put_off", "exact", "lost", "lost_tokens")
NODES_MAX = 400  # maximum number of nodes shown in causal trees; further nodes are only counted


@dataclass(frozen=True, slots=True)
class OperatorAct:
    """One command of an operator. `rehearsal` is true if the command injected or ended a fault for a test."""

    at: datetime
    seq: int
    by: str  # the operator's name; empty: the command gave no name
    text: str
    rehearsal: bool
    refused: bool


class CauseNode(NamedTuple):
    """An event and its depth in a causal tree."""

    depth: int  # number of causes above the event
    event: Recorded


class Causes(NamedTuple):
    """The causal trees of a report as one list of nodes, one tree after the other.

    Each tree begins with its root, and each event is followed by its effects (depth first).
    """

    nodes: Sequence[CauseNode]
    left_out: int  # number of further nodes that are not shown


@dataclass(frozen=True, slots=True)
class Report:
    """The content of one post-mortem."""

    story: Story | None
    events: Sequence[Recorded]
    frames: Sequence[Frame]
    states: Sequence[Stretch]
    breakers: Sequence[Stretch]
    causes: Causes
    hurt: Impact
    acts: Sequence[OperatorAct]  # operators' commands, including rehearsals
    phases: Sequence[PhaseTimes]  # phases of the incident; empty if the report is not about an incident
    policy: Document | None  # policy in force at the end of the window; None: no policy was adopted
    # policy settings that differ from their default: (name, value, default)
    unusual: Sequence[tuple[str, Any, Any]]
    cut: bool  # whether events at the end are missing because the window has too many

    @property
    def start(self) -> datetime:
        return self.events[0].at

    @property
    def end(self) -> datetime:
        return self.events[-1].at

    @property
    def title(self) -> str:
        if self.story is not None:
            return f"Incident {self.story.incident}: {about(self.story.subject)}, {self.story.symptom}"
        return f"The fleet from {self.start:%Y-%m-%d %H:%M:%S} to {self.end:%H:%M:%S} UTC"

    def summary(self) -> list[str]:
        """Return three texts: what happened, the user impact, and how fast the fleet reacted."""
        return [self._what(), _user_impact(self.hurt), self._how()]

    def _what(self) -> str:
        if (story := self.story) is not None:
            end = "has not recovered yet"
            if story.recovered_s is not None:
                outcome = "was recorded as dead" if story.outcome == "dead" else story.outcome
                end = f"{outcome} {span(story.recovered_s)} after its incident was opened"
            began = f"{story.events[0].at:%Y-%m-%d %H:%M:%S} UTC"
            return f"At {began} {about(story.subject)} failed ({story.symptom}); it {end}."
        opened = sum(isinstance(event.fact, IncidentOpened) for event in self.events)
        took = span((self.end - self.start).total_seconds())
        return f"In these {took} the journal recorded {count(len(self.events), 'event')}, and {count(opened, 'incident')} opened."

    def _how(self) -> str:
        found = self.hurt
        took = [f"{one.phase} after {span(one.here_s)}" for one in self.phases if one.here_s is not None]
        phases = f"It was {', '.join(took)}; " if took else ""
        share = f"{100 * found.least_capacity:.0f} %"
        lacked = f"{found.gpu_s:.1f} GPU-seconds were missing, and at least {share} of the fleet served throughout."
        return phases + lacked if phases else lacked[0].upper() + lacked[1:]


def report(window: ReportWindow, others: Sequence[Phases]) -> Report:
    """Build the report of a window.

    `others` holds the phases of other incidents, with which the window's incident is compared. The window's events are added to
    the fleet state in `window.order`. Each window can therefore be used for only one report."""
    found = frames(window.order, window.events, window.start)
    story = window.story
    policy = window.order.shown.policy
    return Report(
        story,
        window.events,
        found,
        stretches(found, window.end, "state"),
        stretches(found, window.end, "breaker"),
        causes(story.events if story is not None else window.events),
        user_impact(_impact_events(window), found, window.end),
        acts(window.events),
        compared(story, others) if story is not None else (),
        dict(policy) if policy is not None else None,
        _unusual(dump(load(policy))) if policy is not None else (),
        window.cut,
    )


def _impact_events(window: ReportWindow) -> Sequence[Recorded]:
    """Return the events from which user impact is computed.

    These are the events of the window's incident, or all events of a window without an incident. The events of a model's incident
    are only about capacity. For such an incident, the window's events about requests for the model are added.
    """
    if (story := window.story) is None:
        return window.events
    subject = story.subject
    kind, _, model = subject.partition(":")
    if kind == "worker":
        return story.events
    by_seq = {event.seq: event for event in story.events}
    by_seq |= {event.seq: event for event in window.events if _of_users(event.fact, model)}
    return [by_seq[seq] for seq in sorted(by_seq)]


def _of_users(fact: Fact, model: str) -> bool:
    about = getattr(fact, "model", None) == model
    return about and (hasattr(fact, "request") or isinstance(fact, o.RequestsRejected))


def acts(events: Iterable[Recorded]) -> list[OperatorAct]:
    """Return the operators' commands among the events.

    These are the observations with a field `by`, except those of the planner.
    """
    found = [e for e in events if hasattr(e.fact, "by") and not isinstance(e.fact, (Decision, *PLANNED))]
    return [
        OperatorAct(
            event.at,
            event.seq,
            str(getattr(event.fact, "by", "")),
            sentence(event.fact),
            isinstance(event.fact, o.ChaosInjected),
            isinstance(event.fact, o.CommandRefused),
        )
        for event in found
    ]


def causes(events: Sequence[Recorded]) -> Causes:
    """Return the causal trees of the events.

    An event that has neither a cause nor an effect among the events is left out.
    """
    named: dict[str, Recorded] = {}
    for event in events:
        named.setdefault(name(event), event)  # a repeated event counts once
    below: dict[str, list[Recorded]] = {}
    tops: list[Recorded] = []
    for event in named.values():
        before = named.get(cause(event))
        if before is not None and before.seq < event.seq:
            below.setdefault(name(before), []).append(event)
        else:
            tops.append(event)
    nodes: list[CauseNode] = []
    waiting = [CauseNode(0, event) for event in reversed(tops) if name(event) in below]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += [CauseNode(node.depth + 1, event) for event in reversed(below.get(name(node.event), []))]
    return Causes(nodes[:NODES_MAX], max(0, len(nodes) - NODES_MAX))


def _unusual(policy: Document) -> list[tuple[str, Any, Any]]:
    defaults = _flat(dump(FleetPolicy()))
    flat = _flat(policy)
    return [(key, flat[key], defaults.get(key)) for key in flat if flat[key] != defaults.get(key)]


def _flat(value: Any, path: str = "") -> Document:
    if isinstance(value, dict) and value:
        found: Document = {}
        for key, item in value.items():
            found |= _flat(item, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _user_impact(found: Impact) -> str:
    moved = [one for one in found.requests if one.gaps_ms]
    exposed = [one for one in found.requests if one.exposed]
    lost = [one for one in found.requests if one.lost]
    parts = []
    if moved:
        gap = span(max(max(one.gaps_ms) for one in moved) / 1000)
        parts.append(f"{count(len(moved), 'request')} migrated (longest gap {gap})")
    if exposed:
        tokens = count(found.tokens_exposed, "token")
        parts.append(
            f"{count(len(exposed), 'request')} {_be(len(exposed))} exposed to {tokens} from a convicted worker"
        )
    if lost:
        parts.append(f"{count(len(lost), 'request')} {_be(len(lost))} lost")
    if rejected := sum(found.rejected.values()):
        parts.append(f"{count(rejected, 'request')} {_be(rejected)} rejected")
    if not parts:
        return "No request migrated, none was lost, and none received a token from a convicted worker."
    none_lost = "" if lost else "; none was lost"
    return f"{'; '.join(parts)}{none_lost}."


def _be(number: int) -> str:
    return "was" if number == 1 else "were"


def _node(depth: int, event: Recorded) -> Document:
    text = sentences.sentence(event.fact)
    return {"depth": depth, "event": name(event), "seq": event.seq, "at": event.at.isoformat(), "text": text}


def _event(event: Recorded) -> Document:
    """Return an event as plain JSON types. For a snapshot event, leave out the data, which is a whole fleet state."""
    found = as_json(event) | {"routine": timeline.is_routine(event.fact)}
    if isinstance(event.fact, o.SnapshotKept):
        found["body"] = found["body"] | {"data": ""}
    return found


def _fields(one: object, names: Iterable[str]) -> dict[str, object]:
    return {name: getattr(one, name) for name in names}


def _first(found: Report) -> int:
    """Return the index of the first frame at or after the opening of the incident; 0 if the report has no incident."""
    if found.story is None:
        return 0
    opened = next(event.seq for event in found.story.events if isinstance(event.fact, IncidentOpened))
    return next((n for n, frame in enumerate(found.frames) if frame.seq >= opened), 0)


def plain(found: Report) -> Document:
    """Return a report as plain JSON types."""
    hurt_, story = found.hurt, found.story
    return {
        "title": found.title,
        "summary": found.summary(),
        "incident": None if story is None else story.summary(),
        "from": found.start.isoformat(),
        "to": found.end.isoformat(),
        "phases": [
            {"phase": one.phase, "seconds": one.here_s, "median_s": one.median_s, "mean_s": one.mean_s, "of": len(one.others)}
            for one in found.phases
        ],
        "acts": [asdict(one) | {"at": one.at.isoformat()} for one in found.acts],
        "cost": {
            "gpu_seconds_missing": hurt_.gpu_s, "least_capacity": hurt_.least_capacity, "tokens_read_again": hurt_.tokens_again,
            "tokens_exposed": hurt_.tokens_exposed, "kv_bytes_moved": hurt_.bytes_moved, "rejected": dict(hurt_.rejected),
        },
        "requests": [_fields(one, REQUEST_FIELDS) | {"exposed": [asdict(e) for e in one.exposed]} for one in hurt_.requests],
        "unknown_exposure": [
            {"worker": one.worker, "frontend": one.frontend, "since": one.since.isoformat(), "until": one.until.isoformat()}
            for one in hurt_.unknown
        ],
        "causes": [_node(node.depth, node.event) for node in found.causes.nodes],
        "causes_left_out": found.causes.left_out,
        "frames": [
            {"seq": one.seq, "at": one.at.isoformat(), "capacity": one.capacity, "levels": dict(one.levels),
             "workers": {name: shown and _fields(shown, WORKER_FIELDS) for name, shown in one.workers.items()}}
            for one in found.frames
        ],
        "first_frame": _first(found),
        "policy": found.policy,
        "policy_unusual": [{"setting": key, "value": value, "default": default} for key, value, default in found.unusual],
        "cut": found.cut,
        "events": [_event(event) for event in found.events],
    }  # fmt: skip
