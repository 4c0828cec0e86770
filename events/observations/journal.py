"""Observations about the journal: quarantines by operators, snapshots by a controller."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuarantined(Observation):
    """An operator quarantined the event at the stream sequence `event`. Every reader skips this event from now on. Later
    events are not affected."""

    entity: ClassVar[str] = "event"
    event: int  # stream sequence of the quarantined event
    why: str
    by: str = ""  # name of the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKept(Observation):
    """One part of a snapshot of the fleet's settled state. A reader starts from a snapshot when older events are no longer on
    the journal.

    This event changes no state, and no audit table stores it.
    """

    entity: ClassVar[str] = "fleet"
    snapshot: str  # the snapshot's id, the same in all of its parts
    part: int  # number of this part, from 1
    parts: int  # number of parts of the snapshot
    shape: int  # version of the form of the serialized states; releases may use different forms
    through: int  # stream sequence of the last observation in the snapshot
    decided: int  # stream sequence of the last decision in the snapshot
    number: int  # number of the last decision in the snapshot
    since: datetime  # the stream's time; a reader of the snapshot needs no older events
    data: str  # serialized states of this part, in base64
