"""The content of a report, independent of its output format."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from controller.deciders.fleet import FleetPolicy, dump, load
from controller.replay import sentences, timeline
from controller.replay.event_lookup import name
from controller.replay.report.causes import Causes, causes
from controller.replay.report.frames import Frame, Stretch, frames, stretches
from controller.replay.report.impact import Impact, hurt
from controller.replay.report.operator_commands import OperatorAct, acts
from controller.replay.report.phases import Phases, PhaseTimes, compared
from controller.replay.report.window import ReportWindow
from controller.replay.sentences import about, count, span
from controller.replay.timeline import Story
from controller.replay.why import as_json
from events.decisions import IncidentOpened
from events.fact import Fact, Recorded
from events.observations import RequestsRejected, SnapshotKept


@dataclass(frozen=True, slots=True)
class Report:
    """One post-mortem."""

    story: Story | None
    events: Sequence[Recorded]
    frames: Sequence[Frame]
    states: Sequence[Stretch]
    breakers: Sequence[Stretch]
    causes: Causes
    hurt: Impact
    acts: Sequence[OperatorAct]  # operators' commands, including rehearsals
    phases: Sequence[PhaseTimes]  # phases of the incident; empty without an incident
    policy: dict[str, Any] | None  # policy in force at the end of the window
    unusual: Sequence[tuple[str, Any, Any]]  # settings that differ from the default: setting, value, default
    cut: bool  # the window has more events than a report shows

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
        """Return three sentences: what happened, the user impact, and the response."""
        return [self._what(), _user_impact(self.hurt), self._how()]

    def _what(self) -> str:
        if (story := self.story) is not None:
            end = (
                f"recovered {span(story.recovered_s)} after its incident was opened: {story.outcome}"
                if story.recovered_s is not None
                else "has not recovered yet"
            )
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
    """Build the report of a window. `others` are the phases of other incidents, for comparison."""
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
        hurt(_impact_events(window), found, window.end),
        acts(window.events),
        compared(story, others) if story is not None else (),
        dict(policy) if policy is not None else None,
        _unusual(dump(load(policy))) if policy is not None else (),
        window.cut,
    )


def _impact_events(window: ReportWindow) -> Sequence[Recorded]:
    """Return the events that show user impact: all of the window's, or those of its incident.

    An incident of a model only covers capacity, so the impact on the model's users is added from the window.
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
    return about and (hasattr(fact, "request") or isinstance(fact, RequestsRejected))


def _unusual(policy: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    defaults = _flat(dump(FleetPolicy()))
    return [
        (key, value, defaults.get(key)) for key, value in _flat(policy).items() if value != defaults.get(key)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, item in value.items():
            found |= _flat(item, f"{path}.{key}" if path else str(key))
        return found
    return {path: value}


def _user_impact(found: Impact) -> str:
    moved, exposed, lost = found.moved(), found.exposed(), found.lost()
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


def _node(depth: int, event: Recorded) -> dict[str, Any]:
    text = sentences.sentence(event.fact)
    return {"depth": depth, "event": name(event), "seq": event.seq, "at": event.at.isoformat(), "text": text}


def _event(event: Recorded) -> dict[str, Any]:
    """Return an event as JSON types. A snapshot's data is left out: it is the whole fleet in packed form."""
    found = as_json(event) | {"routine": timeline.is_routine(event.fact)}
    if isinstance(event.fact, SnapshotKept):
        found["body"] = found["body"] | {"data": ""}
    return found


def _first(found: Report) -> int:
    """Return the index of the frame at which the incident opened; 0 without an incident."""
    if found.story is None:
        return 0
    opened = next(event.seq for event in found.story.events if isinstance(event.fact, IncidentOpened))
    return next((n for n, frame in enumerate(found.frames) if frame.seq >= opened), 0)


def plain(found: Report) -> dict[str, Any]:
    """Return a report as plain JSON types."""
    hurt_, story = found.hurt, found.story
    return {
        "title": found.title,
        "summary": found.summary(),
        "incident": None
        if story is None
        else {
            "incident": story.incident,
            "subject": story.subject,
            "symptom": story.symptom,
            "closed": story.closed,
            "outcome": story.outcome,
            "lasted_s": story.recovered_s,
            "recovered_s": story.recovered_s,
        },
        "from": found.start.isoformat(),
        "to": found.end.isoformat(),
        "phases": [
            {"phase": one.phase, "seconds": one.here_s, "median_s": one.median_s, "mean_s": one.mean_s,
             "of": len(one.others)}
            for one in found.phases
        ],
        "acts": [asdict(one) | {"at": one.at.isoformat()} for one in found.acts],
        "cost": {
            "gpu_seconds_missing": hurt_.gpu_s,
            "least_capacity": hurt_.least_capacity,
            "tokens_read_again": hurt_.tokens_again,
            "tokens_exposed": hurt_.tokens_exposed,
            "kv_bytes_moved": hurt_.bytes_moved,
            "rejected": dict(hurt_.rejected),
        },
        "requests": [
            {"request": one.request, "model": one.model, "workers": one.workers, "gaps_ms": one.gaps_ms,
             "put_off": one.put_off, "exact": one.exact, "lost": one.lost, "lost_tokens": one.lost_tokens,
             "exposed": [{"worker": e.worker, "first": e.first, "last": e.last} for e in one.exposed]}
            for one in hurt_.requests
        ],
        "unknown_exposure": [
            {"worker": one.worker, "frontend": one.frontend, "since": one.since.isoformat(),
             "until": one.until.isoformat()}
            for one in hurt_.unknown
        ],
        "causes": [_node(node.depth, node.event) for node in found.causes.nodes],
        "causes_left_out": found.causes.left_out,
        "frames": [
            {"seq": one.seq, "at": one.at.isoformat(), "capacity": one.capacity, "levels": dict(one.levels),
             "workers": {name: shown._asdict() if shown is not None else None for name, shown in one.workers.items()}}
            for one in found.frames
        ],
        "first_frame": _first(found),
        "policy": found.policy,
        "policy_unusual": [{"setting": key, "value": value, "default": default} for key, value, default in found.unusual],
        "cut": found.cut,
        "events": [_event(event) for event in found.events],
    }  # fmt: skip
