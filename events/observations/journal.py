"""What an operator says of the journal itself."""

from dataclasses import dataclass
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
