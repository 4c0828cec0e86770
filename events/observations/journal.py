"""Observations about the journal itself: an operator's quarantine, a controller's snapshot."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuarantined(Observation):
    """An operator quarantined the event at this stream sequence: every reader skips it from now on. Later events are not
    affected."""

    entity: ClassVar[str] = "event"
    event: int  # the stream sequence
    why: str
    by: str = ""  # the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKept(Observation):
    """One part of a snapshot of the fleet's settled state, from which a reader starts when older events are no longer on the
    journal. It changes no state, and no audit table keeps it."""

    entity: ClassVar[str] = "fleet"
    snapshot: str  # the snapshot's id, the same in all of its parts
    part: int  # from 1
    parts: int  # number of parts of the snapshot
    shape: int  # version of the serialized states: it differs between releases
    through: int  # stream sequence of the last observation in the snapshot
    decided: int  # stream sequence of the last decision in the snapshot
    number: int  # number of that decision
    since: datetime  # the stream's time: a reader of the snapshot needs nothing older than this
    data: str  # base64
