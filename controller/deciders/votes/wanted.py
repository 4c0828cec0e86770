"""Since when a golden has its status, and what an operator wants of it, until a decision has answered."""

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from controller.deciders.votes.camps import Vote
from events.observations import GoldenAnswer

OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class OperatorWish:
    """An operator's request about one golden."""

    act: Literal["approve", "retire", "record"]
    by: str  # the operator
    vote: Vote | None = None  # approve: the answer that is to be the golden; None: the provisional one
    answer: GoldenAnswer | None = None  # approve: the question with that answer, where the operator brings it
    worker: str = ""  # record: whose next answer is the provisional golden

    @property
    def operator(self) -> str:
        """The operator, as goldens and decisions name it beside workers. No worker has a name with a space."""
        return f"{OPERATOR} {self.by}".rstrip()


@dataclass(frozen=True, slots=True)
class GoldenMoves:
    """How a golden came to its status, and what is to move it next."""

    since: datetime | None = None  # of the status, by the clock of the controller that decided so
    outvoted_by: int = 0  # number of the decision by which another answer outvoted the one before
    wanted: OperatorWish | None = None  # what an operator wants, until a decision has answered
    recorder: str = ""  # the worker whose next answer is the provisional golden, as an operator wants
