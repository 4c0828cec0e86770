"""A budget of events and bytes per second, with a burst: a token bucket. Time is an argument."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What one sender may send: on average per second, and at once."""

    per_s: float
    burst: float


class SendBudget:
    """One sender's bucket. Begins full."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._left = rate.burst
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        """Spend so much; False: the budget has not got it, and nothing is spent."""
        rate = self._rate
        self._left = min(rate.burst, self._left + max(0.0, now - self._at) * rate.per_s)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True
