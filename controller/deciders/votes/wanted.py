"""What an operator wants of a golden, until a decision has answered."""

from dataclasses import dataclass
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
    """What has moved a golden, and what is to move it next."""

    outvoted_by: int = 0  # number of the decision by which another answer outvoted the one before
    wanted: OperatorWish | None = None  # what an operator wants, until a decision has answered
    recorder: str = ""  # the worker whose next answer is the provisional golden, as an operator wants
