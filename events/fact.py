"""Defines the base classes of facts, and the envelope in which the journal keeps a fact.

A fact is a frozen value, named in the past tense. There are two families of facts. An *observation* is reported by any process
(`events.observations`). A *decision* is made by the controller (`events.decisions`). `Recorded` is a fact on the journal
together with its position in the order of events. The fleet's state is computed (folded) from `Recorded` values only.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from events.frozen import fast_constructor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened. Each subclass is one kind of fact. The fields of a fact are the body of its event."""

    @classmethod
    def kind(cls) -> str:
        """Return the kind's name on the wire. For example, the kind of `CanaryFailed` is `canary_failed`."""
        return _KINDS.get(cls) or _KINDS.setdefault(cls, _snake(cls.__name__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(Fact):
    """A fact that a process reported.

    `entity` is what the fact is about: a worker, a frontend, a model, an event, or the whole fleet. The fact's subject contains
    the entity, and then the value of the field with the entity's name. For example, the entity of `WorkerLeft` is `worker`. If
    the field `worker` is w3, the subject is `fleet.observed.worker.w3.worker_left`. After the entity `fleet`, the subject has
    `all` instead of a value.
    """

    entity: ClassVar[str] = "worker"  # one of worker, frontend, model, fleet, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Fact):
    """Something that the controller decided. A decision carries its consequence, so the fleet state computed from it does not
    depend on the current policy.

    `number` counts the decisions of the fleet from 1 without a gap. `decided_at` is the time by the deciding controller's
    clock. `cause` names the event that led to the decision: its `ce-id`, or `decision:N` for decision number N. All events of
    one incident share the id `incident`.
    """

    number: int = 0  # counts the fleet's decisions from 1 without a gap
    decided_at: datetime  # by the deciding controller's clock
    cause: str = ""  # the event that led to this decision: its ce-id, or decision:N
    incident: str = ""  # id of the incident that this decision belongs to; empty: no incident


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Fact):
    """Placeholder for a message that is not an event of Holdfast, or that was quarantined. A Skipped never changes the fleet's
    state.

    No process writes a Skipped to the journal. Each reader creates it from the message (`events.journal.messages`), so that
    every position has an event and all readers skip the same messages.
    """

    why: str  # why the message is skipped, in words
    subject: str  # on which the message was published, in printable characters
    bytes: int  # size of the message's body
    decided: bool = False  # the message is on a decision's subject, so the fence of decisions counts it
    unknown: bool = False  # a newer version may know this event, so a reader that folds must stop at it
    quarantined: bool = False  # an operator has quarantined this event


@fast_constructor
@dataclass(frozen=True, slots=True)
class Recorded:
    """A fact that the journal holds, with its position, its time and its source.

    `seq` is the fact's position in the stream, and `at` is the stream's own timestamp. `source` is the process instance that
    published the fact. `source_number` counts the facts of that source from 1, so that `source` and `source_number` identify a
    duplicate. For a decision, `through` is the last stream sequence that the controller had read when it decided.

    `correlation` is the id of the incident that the fact belongs to. `causation` names the event that caused the fact: its
    `ce-id`, or `decision:N`. `said_at` is the time by the source's own clock, for display only.
    """

    seq: int
    at: datetime
    fact: Fact
    id: str
    source: str = ""
    source_number: int = 0
    through: int = 0
    correlation: str = ""
    causation: str = ""
    said_at: datetime | None = field(default=None)  # ce-time: the source's own clock, for display only


_KINDS: dict[type, str] = {}


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
