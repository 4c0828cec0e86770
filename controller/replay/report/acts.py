"""What operators did, and which faults were rehearsed, in the window of a post-mortem."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from controller.replay.sentences import sentence
from events.fact import Decision, Recorded
from events.observations import ChaosInjected, CommandRefused, ScaleApplied, ScaleProposed

PLANNED = (ScaleProposed, ScaleApplied)  # their `by` names what carries a proposal out


@dataclass(frozen=True, slots=True)
class OperatorAct:
    """One act of an operator. `rehearsal`: a fault that was injected on purpose, or its end."""

    at: datetime
    seq: int
    by: str  # empty: the command gave no name
    text: str
    rehearsal: bool
    refused: bool


def acts(events: Iterable[Recorded]) -> list[OperatorAct]:
    """Return the acts among these events, in order: each observation with a field `by`, and refused commands."""
    return [
        OperatorAct(
            event.at,
            event.seq,
            str(getattr(event.fact, "by", "")),
            sentence(event.fact),
            isinstance(event.fact, ChaosInjected),
            isinstance(event.fact, CommandRefused),
        )
        for event in events
        if hasattr(event.fact, "by") and not isinstance(event.fact, (Decision, *PLANNED))
    ]
