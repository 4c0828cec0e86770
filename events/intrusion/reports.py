"""Counts refused attempts and reports them as `IntrusionRefused` at a limited rate.

The limit keeps a flood of attempts from filling the journal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from events.fact import Observation
from events.observations import IntrusionRefused

EVERY_S = 10.0  # shortest time between two reports of the same sender and kind of attempt
SENDERS_MAX = 256
TRIED_MAX = 200  # characters; limited because the sender may have chosen the text

log = structlog.get_logger(__name__)


class ReportIntrusion(Protocol):
    """Type of a function that reports a refused operation: its sender, and what the sender tried."""

    def __call__(
        self, sender: str, tried: str, *, worker: str = "", instance: str = "", eject: bool = False
    ) -> None: ...


def not_reported(
    sender: str, tried: str, *, worker: str = "", instance: str = "", eject: bool = False
) -> None:
    """Do nothing. For callers that need a `ReportIntrusion` but report no intrusions."""


@dataclass(slots=True)
class _Attempts:
    said_at: float
    times: int = 0


class Intrusions:
    """Reports a sender's first attempt of each kind at once, and its later attempts at most every 10 s.

    Later attempts are counted. The first attempt that is at least 10 s after a report is reported with the number of attempts
    since that report.
    """

    def __init__(self, observe: Callable[[Observation], object], now: Callable[[], float]) -> None:
        self._observe = observe
        self._now = now
        self._known: dict[tuple[str, str, bool], _Attempts] = {}

    def report(
        self, sender: str, tried: str, *, worker: str = "", instance: str = "", eject: bool = False
    ) -> None:
        """Count an attempt. If no attempt of the same sender and kind was reported in the last 10 s, report the count.

        `tried` describes the attempt, and its text before the first colon is the kind. If `eject` is set, `worker` and
        `instance` name the worker instance to eject.
        """
        tried = "".join(c if c.isprintable() else "?" for c in tried[:TRIED_MAX])
        key, now = (sender, tried.partition(":")[0], eject), self._now()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= SENDERS_MAX:
                self._known.pop(next(iter(self._known)))
            known = self._known[key] = _Attempts(float("-inf"))
        known.times += 1
        if now - known.said_at < EVERY_S:
            return
        fact = IntrusionRefused(
            who=sender, tried=tried, times=known.times, worker=worker, instance=instance, eject=eject
        )
        known.said_at, known.times = now, 0
        log.warning("intrusion_refused", who=sender, tried=tried, times=fact.times, eject=eject)
        self._observe(fact)
