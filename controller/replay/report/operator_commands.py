"""Operator commands and rehearsed faults in the window of a post-mortem."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from controller.replay.sentences import sentence
from events.fact import Decision, Recorded
from events.observations import ChaosInjected, CommandRefused, ScaleApplied, ScaleProposed

PLANNED = (ScaleProposed, ScaleApplied)  # in these facts, `by` names the process that applies a proposal


@dataclass(frozen=True, slots=True)
class OperatorAct:
    """One command of an operator. `rehearsal` marks an injected fault or its end."""

    at: datetime
    seq: int
    by: str  # empty: the command gave no name
    text: str
    rehearsal: bool
    refused: bool


def acts(events: Iterable[Recorded]) -> list[OperatorAct]:
    """Return the operators' commands in these events, in order: observations with a field `by`, and refused commands."""
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
