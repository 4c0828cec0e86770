"""Lists the event kinds with their fields and emitters, derived from the dataclasses of the facts.

`tests/fixtures/reference_docs.py` generates the event documents from this catalogue.
"""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from events import codec
from events.decisions import Knobs
from events.fact import Decision, Fact, Observation
from events.observations import BreakerMove, GoldenAnswer, KvLayout, Profile, Topology
from events.subjects import DECIDED, OBSERVED

EMITTERS: Mapping[str, str] = {
    "worker_joined": "the worker, once per instance",
    "adapters_changed": "the worker, when its server loads or unloads an adapter, at most every ten seconds",
    "worker_awaited": "the worker, before it joins: once per reason, and every two minutes",
    "worker_left": "the worker on exit; the supervisor if the worker was killed",
    "worker_silent": "the leading controller's liveness watch, once per silence",
    "worker_heard": "the leading controller's liveness watch, once per return",
    "worker_lingered": "the leading controller's watch on dead instances, once per instance",
    "observer_blind": "the leading controller's liveness watch, once per blind period",
    "intrusion_refused": "the supervisor (embedded broker), a controller or a frontend, at most every few seconds per sender",
    "drain_requested": "a controller, on behalf of an operator",
    "resume_requested": "a controller, on behalf of an operator",
    "move_requested": "a controller, on behalf of an operator",
    "restart_requested": "a controller, on behalf of an operator",
    "command_refused": "the controller that refused it, once per command; twice if two controllers both read it late",
    "scale_set": "an operator, by `holdfast scale`",
    "event_quarantined": "an operator, by `holdfast journal quarantine`",
    "snapshot_kept": "the leading controller, once per part of a snapshot; one snapshot per eighth of the journal's bounds",
    "shutdown_began": "the worker, once per instance",
    "drain_finished": "the worker, once per drain",
    "device_faulted": "the worker's device watch, once per change",
    "device_recovered": "the worker's device watch, once per recovery",
    "engine_faulted": "the worker",
    "chaos_injected": "a controller that was started with --chaos",
    "canary_passed": "the leading controller's canary loop, once per probe",
    "canary_slow": "the leading controller's canary loop, once per probe",
    "canary_failed": "the leading controller's canary loop, once per probe",
    "golden_proposed": "the leading controller's canary loop",
    "golden_disputed": "the leading controller's canary loop, once per probe",
    "golden_requested": "a controller, on behalf of an operator",
    "tokens_unlikely": "the leading controller's canary loop: per sampled canary, or once every ten minutes for users' tokens",
    "requests_served": "a frontend, per worker and window with traffic",
    "request_failed": "a frontend, once per failure",
    "request_suspected": "a frontend, once per request that a failed worker had not started to read",
    "request_poisonous": "a frontend, once per worker that the request failed on",
    "worker_slow": "a frontend, repeatedly while the slowness lasts",
    "worker_slow_cleared": "a frontend, once per recovery",
    "request_migrated": "a frontend, once per migration",
    "request_preempted": "a frontend with --park, once per preemption",
    "request_resumed": "a frontend, once per preempted answer that resumed",
    "request_abandoned": "a frontend, once per request",
    "requests_rejected": "a frontend, per window with rejections",
    "traffic_reported": "a frontend, per model and minute, even without traffic",
    "capacity_reported": "the planner, per model: on each change, and once a minute",
    "scale_proposed": "the planner, once per change that it proposes",
    "scale_applied": "the executor of the change, once per proposal: the planner through its hook, or the supervisor",
    "busy_thresholds_set": "a frontend, for each client that posts to its /busy_threshold",
    "request_exposed": "a frontend, per exposed request",
    "exposure_unknown": "a frontend, per span for which it cannot name the exposed requests",
    "panic_began": "a frontend, on entering panic",
    "panic_ended": "a frontend, on leaving panic",
    "frontend_breakers_moved": "a frontend, once per second in which one of its local breakers changed",
}
"""The emitter of each kind of observation, and how often it emits one. The leading controller emits all decisions."""

TRAILING = r"^    (\w+): (?:[^#\n]*\(\n(?: {8}[^#\n]*\n)*(?:    \)| {8}))?[^#\n]*  # (.+)$"  # a field and its trailing comment
ABOVE = (
    r"^    # (.+)\n    (\w+): [^#\n]*$"  # the last line of a comment above a field without a trailing comment
)
LEADER = "the leading controller, when it is due"
# structured types that fields of facts have
SHAPES = (Profile, Topology, KvLayout, GoldenAnswer, Knobs, BreakerMove)


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """One field in the body of an event kind. `note` is the comment of the field in the code."""

    name: str
    type: str
    optional: bool
    note: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """The description of one event kind. `promise` is the docstring of the event kind's class."""

    kind: str
    fact: type[Fact]
    subject: str
    emitter: str
    promise: str
    fields: tuple[FieldEntry, ...]

    @property
    def decided(self) -> bool:
        """Whether the kind is a decision; False for an observation."""
        return issubclass(self.fact, Decision)


def entries() -> tuple[CatalogueEntry, ...]:
    """Return the descriptions of all event kinds: first observations, then decisions, both in order of declaration."""
    return tuple(_entry(kind, fact) for kind, fact in codec.KINDS.items())


def subject_of(fact: type[Fact]) -> str:
    """Return the broker subject of an event kind. A variable token, such as the worker's name, is in angle brackets."""
    if issubclass(fact, Decision):
        return f"{DECIDED}.{fact.kind()}"
    assert issubclass(fact, Observation)
    name = "all" if fact.entity == "fleet" else f"<{fact.entity}>"
    return f"{OBSERVED}.{fact.entity}.{name}.{fact.kind()}"


def _entry(kind: str, fact: type[Fact]) -> CatalogueEntry:
    decided = issubclass(fact, Decision)
    emitter = LEADER if decided else EMITTERS[kind]
    promise = " ".join(inspect.cleandoc(fact.__doc__ or "").split())
    return CatalogueEntry(kind, fact, subject_of(fact), emitter, promise, tuple(fields_of(fact)))


def fields_of(shape: type) -> Iterator[FieldEntry]:
    """Yield the fields of an event kind, or of a structured type in `SHAPES`, each with its comment as the note."""
    notes = notes_of(shape)
    for f in dataclasses.fields(shape):
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        yield FieldEntry(f.name, _type_text(f.type), optional, notes.get(f.name, ""))


def _type_text(annotation: object) -> str:
    text = inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:events(?:\.\w+)+?|datetime|typing)\.(?=[A-Z]|datetime)", "", text)
    text = text.replace("tuple[tuple[tuple[int, float], ...], ...]", "tuple[TopK, ...]")
    return text.replace("tuple[tuple[int, float], ...]", "TopK") if "TopK" not in text else text


def notes_of(shape: type) -> dict[str, str]:
    """Return the comment of each field of a class and its bases, by field name.

    A field's comment is at the end of its definition, or on the line above the field."""
    found: dict[str, str] = {}
    for cls in reversed(shape.__mro__[:-1]):
        source = inspect.getsource(cls)
        found |= {name: note for note, name in re.findall(ABOVE, source, re.MULTILINE)}
        found |= dict(re.findall(TRAILING, source, re.MULTILINE))
    return found
