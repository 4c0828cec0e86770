"""Token buckets that limit a sender's messages and bytes per second. Callers pass the time."""

from collections.abc import Callable
from dataclasses import dataclass

MIB = 1024 * 1024.0
MUTED_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The parameters of a token bucket: the average amount per second, and the largest amount at once (`burst`)."""

    per_s: float
    burst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficLimit:
    """A sender's limit of messages per second, and of bytes per second."""

    messages: Rate
    size: Rate


def traffic(per_s: float, burst: float, mb_per_s: float, mb_burst: float) -> TrafficLimit:
    """Return a sender's limit of messages and of MiB: the average rates and the largest bursts.

    The average is at most `per_s` messages and `mb_per_s` MiB per second. A burst is at most `burst` messages and `mb_burst`
    MiB.
    """
    size = Rate(per_s=mb_per_s * MIB, burst=mb_burst * MIB)
    return TrafficLimit(messages=Rate(per_s=per_s, burst=burst), size=size)


HEARTBEATS = traffic(per_s=20.0, burst=200.0, mb_per_s=0.25, mb_burst=1.0)
"""The default limit of one worker's heartbeats. A worker sends one heartbeat per second."""


class SendBudget:
    """The token bucket of one sender, which is full at the start."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: Rate, now: float) -> None:
        self._rate = rate
        self._left = rate.burst
        self._at = now

    def take(self, amount: float, now: float) -> bool:
        """Take `amount` from the bucket. If the bucket holds less, take nothing and return False."""
        rate = self._rate
        self._left = min(rate.burst, self._left + max(0.0, now - self._at) * rate.per_s)
        self._at = now
        if amount > self._left:
            return False
        self._left -= amount
        return True


class TrafficBudget:
    """The two token buckets of one sender: messages and bytes."""

    __slots__ = ("_messages", "_muted_until", "_size")

    def __init__(self, limit: TrafficLimit, now: float) -> None:
        self._messages, self._size = SendBudget(limit.messages, now), SendBudget(limit.size, now)
        self._muted_until = float("-inf")

    def mute(self, now: float) -> None:
        """Mute the sender for one second: its messages are dropped. A flood thus leads to at most one report per second."""
        self._muted_until = now + MUTED_S

    def muted(self, now: float) -> bool:
        """Return whether the sender's messages are dropped unread at this time."""
        return now < self._muted_until

    def take(self, messages: int, size: int, now: float) -> bool:
        """Take `messages` from the bucket of messages, and then `size` bytes from the bucket of bytes.

        If the bucket of messages holds too little, take nothing and return False. If only the bucket of bytes holds too
        little, return False, but do not put `messages` back.
        """
        return self._messages.take(messages, now) and self._size.take(size, now)


class SubjectBudgets:
    """The token buckets of all senders. The broker reserves a subject for each sender, and the buckets are found by that
    subject.

    If there are more than `most` senders, all buckets are dropped, and every sender starts again with full buckets.
    """

    def __init__(self, limit: TrafficLimit, most: int) -> None:
        """Start without senders. `limit` applies to each sender."""
        self._limit, self._most = limit, most
        self._budgets: dict[str | bytes, TrafficBudget] = {}

    def admits(self, subject: str | bytes, size: int, now: float, flooded: Callable[[], object]) -> bool:
        """Return whether a message of `size` bytes is within its sender's budget. If it is not, call `flooded`, at most once
        a second."""
        budget = self._budgets.get(subject)
        if budget is None:
            if len(self._budgets) >= self._most:
                self._budgets.clear()
            budget = self._budgets[subject] = TrafficBudget(self._limit, now)
        if budget.muted(now):
            return False
        if budget.take(1, size, now):
            return True
        budget.mute(now)
        flooded()
        return False
