"""Recent events and current service rates of a fleet, for `holdfast top` and the console."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from controller.replay import sentences, timeline
from events.fact import Recorded, Skipped
from events.observations import RequestsRejected, RequestsServed

TOLD_MAX = 200  # maximum number of events that are kept
RATES_OVER = timedelta(seconds=10)


@dataclass(slots=True)
class RecentEvent:
    """An event, and the number of similar events about other requests that directly follow it."""

    event: Recorded
    alike: tuple[object, ...] | None  # the key that similar events share; None: the event is about no request
    more: int = 0

    def line(self) -> str:
        """Return the event as one line of text."""
        return (f"[{self.more + 1} times] " if self.more else "") + sentences.line(self.event)


def _alike(event: Recorded) -> tuple[object, ...] | None:
    fact = event.fact
    if not hasattr(fact, "request"):
        return None
    return (
        type(fact),
        getattr(fact, "worker", None),
        getattr(fact, "source", None),
        getattr(fact, "target", None),
    )


class ServedRate(NamedTuple):
    """Service rates per second over the last `RATES_OVER`."""

    answers: float = 0.0
    tokens: float = 0.0
    ttft_ms: float | None = None  # mean time to first token in milliseconds; None: no answers in this time
    refused: float = 0.0


@dataclass(slots=True)
class RecentEvents:
    """The most recent events of a fleet, and its service rates."""

    told: "deque[RecentEvent]" = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    served: deque[tuple[datetime, RequestsServed]] = field(default_factory=deque)
    rejected: deque[tuple[datetime, RequestsRejected]] = field(default_factory=deque)
    now: datetime | None = None  # the stream's time of the last event
    last: int = 0  # sequence of the last event
    unknown: int = 0  # events of kinds unknown to this release

    def take(self, events: Sequence[Recorded]) -> None:
        """Add events, in order."""
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
        """Drop reports of served and rejected requests that are too old at `now` (the stream's clock) to count for rates."""
        for rates in (self.served, self.rejected):
            while rates and rates[0][0] < now - RATES_OVER:
                rates.popleft()

    def _tell(self, event: Recorded) -> None:
        """Append an event. If it differs from the last one only in the request, increase the last one's count instead."""
        alike = _alike(event)
        if self.told and alike is not None and self.told[-1].alike == alike:
            self.told[-1].more += 1
        else:
            self.told.append(RecentEvent(event, alike))

    def rate(self) -> ServedRate:
        """Return the service rates of the whole fleet."""
        return _rate([fact for _, fact in self.served], [fact for _, fact in self.rejected])

    def rate_by_model(self, model_of: Mapping[str, str]) -> dict[str, ServedRate]:
        """Return the service rates of each model with traffic; `model_of` maps workers to models."""
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
