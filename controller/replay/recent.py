"""What has happened last, and how much is served: what people see of a fleet at a glance, on a terminal or in the console."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from controller.replay import sentences, timeline
from events.fact import Recorded, Skipped
from events.observations import RequestsRejected, RequestsServed

TOLD_MAX = 200  # events that are remembered
RATES_OVER = timedelta(seconds=10)
URGENCY = ("UNHEALTHY", "SUSPICIOUS", "DRAINING", "DEAD", "HEALTHY")  # of a worker's health, the worst first


@dataclass(slots=True)
class EventTold:
    """An event, and how many came right behind it that say the same of other requests."""

    event: Recorded
    alike: tuple[object, ...] | None  # what those have in common; None: it is of no request
    more: int = 0

    def line(self) -> str:
        """Return it as a line for people."""
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
    """What is served, each a second, over the last `RATES_OVER`."""

    answers: float = 0.0
    tokens: float = 0.0
    ttft_ms: float | None = None  # until the first token, the mean over answers; None: there was none
    refused: float = 0.0


@dataclass(slots=True)
class RecentEvents:
    """What happened last, from the events in their order."""

    told: "deque[EventTold]" = field(default_factory=lambda: deque(maxlen=TOLD_MAX))
    served: deque[tuple[datetime, RequestsServed]] = field(default_factory=deque)
    rejected: deque[tuple[datetime, RequestsRejected]] = field(default_factory=deque)
    now: datetime | None = None  # by the stream's clock, as of the last event
    last: int = 0  # its sequence
    unknown: int = 0  # events of kinds that this release does not know

    def take(self, events: Sequence[Recorded]) -> None:
        """Take events in, in order."""
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
        """Let go of what was served and refused too long before `now`, by the stream's clock, to count for rates."""
        for rates in (self.served, self.rejected):
            while rates and rates[0][0] < now - RATES_OVER:
                rates.popleft()

    def _tell(self, event: Recorded) -> None:
        """Remember an event, together with the last one where that says the same of another request."""
        alike = _alike(event)
        if self.told and alike is not None and self.told[-1].alike == alike:
            self.told[-1].more += 1
        else:
            self.told.append(EventTold(event, alike))

    def rate(self) -> ServedRate:
        """Return what is served, in all."""
        return _rate([fact for _, fact in self.served], [fact for _, fact in self.rejected])

    def rate_by_model(self, model_of: Mapping[str, str]) -> dict[str, ServedRate]:
        """Return what is served of each model of which anything came; `model_of`: each worker's."""
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
        """Return how much is served, as a line for people."""
        rate = self.rate()
        said = [f"{rate.answers:.1f} answers/s", f"{rate.tokens:,.0f} tokens/s"]
        if rate.ttft_ms is not None:
            said.append(f"first token {rate.ttft_ms:.0f} ms")
        if rate.refused:
            said.append(f"{rate.refused:.1f} refused/s")
        return "   ".join(said)


def _rate(served: Sequence[RequestsServed], rejected: Sequence[RequestsRejected]) -> ServedRate:
    over = RATES_OVER.total_seconds()
    answers, tokens = sum(fact.count for fact in served), sum(fact.tokens for fact in served)
    ttft = sum(fact.ttft_ms * fact.count for fact in served) / answers if answers else None
    return ServedRate(answers / over, tokens / over, ttft, sum(fact.count for fact in rejected) / over)
