"""The base classes of facts, and the envelope in which the journal keeps them.

A fact is a frozen value, named in the past tense. There are two families: an *observation* is reported by any process
(`events.observations`); a *decision* is made by the controller (`events.decisions`). `Recorded` is a fact on the journal, with
its position in the order of events. Only `Recorded` values are folded.
"""

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import ClassVar

from events.frozen import fast_constructor


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened. A subclass is one kind; its fields are the body of the event."""

    @classmethod
    def kind(cls) -> str:
        """Return the kind's name on the wire: `CanaryFailed` is `canary_failed`."""
        return _KINDS.get(cls) or _KINDS.setdefault(cls, _snake(cls.__name__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation(Fact):
    """A fact that a process reported. `entity` is the second token of its subject, and names the field that is the third."""

    entity: ClassVar[str] = "worker"  # one of worker, frontend, model, fleet, event


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Fact):
    """Something that the controller decided, with its consequence, so that it folds to the same state under any later policy.

    `number` counts the decisions of the fleet from 1 without a gap. `decided_at` is the deciding controller's
    clock. `cause` is the id of the event that led here: a `ce-id`, or `decision:N` for decision number N.
    `incident` is the id shared by all events of one incident.
    """

    number: int = 0  # of the fleet's decisions, from 1 without a gap
    decided_at: datetime  # the deciding controller's clock
    cause: str = ""  # the event that led here: its ce-id, or decision:N
    incident: str = ""  # id of the incident it belongs to; empty: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped(Fact):
    """Placeholder for a message that is not an event of Holdfast, or that was quarantined. It is not folded.

    It is never written. Each reader creates it from the message (`events.journal.messages`), so that every position has an event
    and all readers skip the same messages.
    """

    why: str  # in words
    subject: str  # on which it was published, as far as it can be displayed
    bytes: int  # of its body
    decided: bool = False  # the message is on a decision's subject: the fence of decisions has moved to it
    unknown: bool = False  # a newer version may know it: a reader that folds must stop here
    quarantined: bool = False  # an operator has quarantined it


@fast_constructor
@dataclass(frozen=True, slots=True)
class Recorded:
    """A fact that the journal holds.

    `seq` is its position in the stream, `at` the stream's own timestamp. `source` is the process instance that published it
    and `source_number` that source's count of its facts, from 1: together they identify a duplicate.
    `through`, on decisions, is the last stream sequence that the controller had read when it decided.
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
