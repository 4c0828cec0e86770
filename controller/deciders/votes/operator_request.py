"""An operator's pending request about a golden."""

from dataclasses import dataclass
from typing import Literal

from controller.deciders.votes.camps import Vote
from events.observations import GoldenAnswer

OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class OperatorRequest:
    """An operator's request about one golden."""

    act: Literal["approve", "retire", "record"]
    by: str  # the operator
    vote: Vote | None = None  # approve: the answer to make golden; None: the provisional one
    answer: GoldenAnswer | None = None  # approve: the prompt with that answer, if the operator supplies it
    worker: str = ""  # record: the worker that provides the next provisional golden

    @property
    def operator(self) -> str:
        """The operator's name in goldens and decisions, next to workers' names. No worker's name has a space."""
        return f"{OPERATOR} {self.by}".rstrip()


@dataclass(frozen=True, slots=True)
class GoldenMoves:
    """The last and the next move of a golden that do not follow from votes alone."""

    outvoted_by: int = 0  # number of the decision by which another answer last outvoted it
    wanted: OperatorRequest | None = None  # an operator's request, until a decision has reacted
    recorder: str = ""  # the worker that provides the next provisional golden, by an operator's request
