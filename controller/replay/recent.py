"""Keeps the recent events and current service rates of a fleet, for `holdfast top` and the console."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from controller.replay import sentences, timeline
from events.fact import Recorded, Skipped
from events.observations import RequestsRejected, RequestsServed

TOLD_MAX = 200  # maximum number of recent events that are kept
RATES_OVER = timedelta(seconds=10)  # service rates are averages over this time


@dataclass(slots=True)
class RecentEvent:
    """An event, and the number of similar events directly after it.

    Similar events differ only in the request."""

    event: Recorded
    # key that events share if they differ only in the request; None: about no request
    alike: tuple[object, ...] | None
    more: int = 0

    def line(self) -> str:
        """Format the event as one line of text.

        If the event stands for N similar events, the line starts with "[N times]"."""
        return (f"[{self.more + 1} times] " if self.more else "") + sentences.line(self.event)


def _alike(event: Recorded) -> tuple[object, ...] | None:
    fact = event.fact
    if not hasattr(fact, "request"):
        return None
    return (type(fact), *(getattr(fact, name, None) for name in ("worker", "source", "target")))


class ServedRate(NamedTuple):
    """Answers, tokens and rejections per second, and the mean time to first token.

    All of them cover the last `RATES_OVER` (10 s)."""

    answers: float = 0.0
    tokens: float = 0.0
    # mean time to first token in milliseconds; None: no answer within `RATES_OVER`
    ttft_ms: float | None = None
    refused: float = 0.0


@dataclass(slots=True)
class RecentEvents:
    """Keeps a fleet's last `TOLD_MAX` non-routine events, and the reports that give its current service rates."""

    told: "deque[RecentEvent]" = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    served: deque[tuple[datetime, RequestsServed]] = field(default_factory=deque)
    rejected: deque[tuple[datetime, RequestsRejected]] = field(default_factory=deque)
    now: datetime | None = None  # time of the last event, by the stream's clock; None: no event yet
    last: int = 0  # sequence number of the last event
    unknown: int = 0  # number of events with a kind that this release does not know

    def take(self, events: Sequence[Recorded]) -> None:
        """Add the next events of the journal, in order."""
        for event in events:
            self.now, self.last = event.at, event.seq
            match event.fact:
                case Skipped(unknown=True):
                    self.unknown += 1
                    continue
                case RequestsServed() as fact:
                    self.served.append((event.at, fact))
                case RequestsRejected() as fact:
                    self.rejected.append((event.at, fact))
                case _:
                    pass
            if not timeline.is_routine(event.fact):
                self._tell(event)
        if self.now is not None:
            self.forget(self.now)

    def forget(self, now: datetime) -> None:
        """Drop the reports of served and rejected requests that are older than `RATES_OVER` at the time `now`.

        `now` is a time by the broker's clock."""
        for rates in (self.served, self.rejected):
            while rates and rates[0][0] < now - RATES_OVER:
                rates.popleft()

    def _tell(self, event: Recorded) -> None:
        """Keep an event as a new entry, or count the event in the last entry.

        The event is counted in the last entry if it differs from that entry's event only in the request."""
        alike = _alike(event)
        if self.told and alike is not None and self.told[-1].alike == alike:
            self.told[-1].more += 1
        else:
            self.told.append(RecentEvent(event, alike))

    def rate(self) -> ServedRate:
        """Return the service rates of the whole fleet."""
        return _rate([fact for _, fact in self.served], [fact for _, fact in self.rejected])

    def rate_by_model(self, model_of: Mapping[str, str]) -> dict[str, ServedRate]:
        """Return the service rates by model. A model without traffic is left out.

        `model_of` maps worker names to models."""
        served: dict[str, list[RequestsServed]] = defaultdict(list)
        rejected: dict[str, list[RequestsRejected]] = defaultdict(list)
        for _, fact in self.served:
            if (model := model_of.get(fact.worker)) is not None:
                served[model].append(fact)
        for _, refusal in self.rejected:
            rejected[refusal.model].append(refusal)
        return {
            model: _rate(served[model], rejected[model]) for model in sorted(served.keys() | rejected.keys())
        }

    def rates(self) -> str:
        """Return the service rates as one line of text."""
        rate = self.rate()
        parts = [f"{rate.answers:.1f} answers/s", f"{rate.tokens:,.0f} tokens/s"]
        if rate.ttft_ms is not None:
            parts.append(f"first token {rate.ttft_ms:.0f} ms")
        if rate.refused:
            parts.append(f"{rate.refused:.1f} refused/s")
        return "   ".join(parts)


def _rate(served: Sequence[RequestsServed], rejected: Sequence[RequestsRejected]) -> ServedRate:
    over = RATES_OVER.total_seconds()
    answers, tokens = sum(fact.count for fact in served), sum(fact.tokens for fact in served)
    ttft = sum(fact.ttft_ms * fact.count for fact in served) / answers if answers else None
    return ServedRate(answers / over, tokens / over, ttft, sum(fact.count for fact in rejected) / over)
