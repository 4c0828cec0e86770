"""What is said of the journal itself: by an operator, and by a controller for whoever begins to read."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from events.fact import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuarantined(Observation):
    """An operator has decided that what stands at this place of the journal does not count: everybody steps over it, whoever
    reads it from now on. It has no effect on what stands behind it."""

    entity: ClassVar[str] = "event"
    event: int  # the stream sequence
    why: str
    by: str = ""  # who decided it


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotKept(Observation):
    """A part of the fleet's settled state, for whoever begins to fold when what came before is no longer on the journal. It
    changes nothing, and no audit table keeps it."""

    entity: ClassVar[str] = "fleet"
    snapshot: str  # which: all of its parts have the same
    part: int  # from 1
    parts: int  # of the snapshot, in all
    shape: int  # of the states that were written down: another release has another
    through: int  # stream sequence of the last observation in it
    decided: int  # of the last decision in it
    number: int  # of that decision
    since: datetime  # the stream's time: nothing older than this has to be read with it
    data: str  # base64
