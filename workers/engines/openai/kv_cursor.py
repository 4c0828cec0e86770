"""Detects lost batches of KV events, and restarts of the engine that sends them.

An engine numbers its batches from 0 and stamps each with its own clock. Number and time together identify a batch:

    the next number                    it follows
    an earlier number, not newer       a duplicate: a replay and the live stream overlap
    an earlier number, but newer       the engine has restarted, with an empty cache
    any other number                   the batches in between are lost

A replay request starts at the last batch already processed. If that batch is returned with another time, or not at all, the
events since then are unknown.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["follows", "heard", "restarted", "lost"]


@dataclass(slots=True)
class Cursor:
    """The position in one rank's batches. `number` is None before the first batch: any batch may follow."""

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
        """Return whether this is the last processed batch."""
        return (number, at) == (self.number, self.at)

    def take(self, number: int, at: float) -> None:
        """Advance to a batch."""
        self.number, self.at = number, at

    def reset(self) -> None:
        """Reset the position, so that any batch may follow."""
        self.number, self.at = None, 0.0
