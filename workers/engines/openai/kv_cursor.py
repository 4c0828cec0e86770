"""Detects lost batches of KV events, and restarts of the engine that sends them.

An engine numbers its batches from 0 and stamps each with its own clock. Number and time together identify a batch:

    the next number                    it follows
    an earlier number, not newer       a duplicate: a replay and the live stream overlap
    an earlier number, but newer       the engine has restarted, with an empty cache
    any other number                   the batches in between are lost

A request for a replay starts at the last batch itself. If that batch is returned with another time, or not at all, it is
unknown what happened in between.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["follows", "heard", "restarted", "lost"]


@dataclass(slots=True)
class Cursor:
    """The position in one rank's batches. Before the first, `number` is None: any batch may follow."""

    number: int | None = None
    at: float = 0.0

    def judge(self, number: int, at: float) -> Verdict:
        """Classify a batch by its number and time."""
        if self.number is None or number == self.number + 1:
            return "follows"
        if number > self.number:
            return "lost"
        return "heard" if at <= self.at else "restarted"

    def is_last(self, number: int, at: float) -> bool:
        """Return whether this is the last batch taken."""
        return (number, at) == (self.number, self.at)

    def take(self, number: int, at: float) -> None:
        """Advance to a batch."""
        self.number, self.at = number, at

    def reset(self) -> None:
        """Start again with any batch."""
        self.number, self.at = None, 0.0
