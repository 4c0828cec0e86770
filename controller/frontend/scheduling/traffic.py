"""Says on the journal what came, minute by minute and model by model: the planner reads it.

Minutes are those of the clock. Each is told of, also one in which nothing came; a process that was stopped for some tells of
each of them, and no minute is told of twice, though the clock be set back.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf

from controller.deciders.capacity import attainable
from controller.frontend.request_metrics import RequestMetrics
from controller.ports import Clock
from controller.router.endpoints import EndpointTable
from events.fact import Observation
from events.observations import RequestsRejected, TrafficReported

MINUTE_S = 60
MISSED_MAX = 10  # minutes that are made up for
FORGOTTEN_AFTER = 10  # minutes in which nobody serves a model or asks for it
NO_DEMAND = ("draining", "request_poisonous", "deadline_unattainable")  # no worker more would serve these


@dataclass(eq=False, repr=False)
class TrafficReporter:
    """Reports the traffic of one frontend, once a minute."""

    frontend: str
    observe: Callable[[Observation], object]
    clock: Clock
    table: EndpointTable
    metrics: RequestMetrics
    idle: dict[str, int] = field(default_factory=dict)  # minutes without workers and requests, by model
    promised: set[str] = field(default_factory=set)  # in this minute: see `_promise`

    def __post_init__(self) -> None:
        self.minute = self._number()

    def _number(self) -> int:
        return int(self.clock.now().timestamp() // MINUTE_S)

    def rejected(self, fact: RequestsRejected) -> None:
        """Say that requests were rejected, and count them."""
        if fact.reason not in NO_DEMAND:
            self.metrics.of(fact.model).traffic.rejected += fact.count
        self.observe(fact)

    def tick(self) -> None:
        """Say what is due."""
        if (number := self._number()) > self.minute:
            self._tell(number)
            self.promised.clear()
        for model in self.table.models.keys() - self.promised:
            self._promise(model)
            self.promised.add(model)

    def stop(self) -> None:
        """Say what has come of the minute that is running, and that no more follows."""
        for model in self._models():
            self._say(model, self.minute, last=True)

    def _tell(self, number: int) -> None:
        """Tell of the minute that is over, and of those that were missed."""
        missed = range(max(self.minute + 1, number - MISSED_MAX), number)
        for model in self._models():
            forgotten = self._forgets(model)
            self._say(model, self.minute, last=forgotten and not missed)
            for minute in missed:
                self._say(model, minute, last=forgotten and minute == missed[-1])
        self.minute = number

    def _models(self) -> Iterable[str]:
        """Return the models that are told of: those that are served, and those that are asked for."""
        asked = (name for name, traffic in self.metrics.traffic() if traffic.requests or traffic.rejected)
        return sorted({*self.table.models, *asked, *self.idle})

    def _forgets(self, model: str) -> bool:
        """Say whether a model is told of for the last time."""
        traffic = self.metrics.of(model).traffic
        if model in self.table.models or traffic.requests or traffic.rejected:
            self.idle[model] = 0
            return False
        self.idle[model] = self.idle.get(model, 0) + 1
        if self.idle[model] < FORGOTTEN_AFTER:
            return False
        del self.idle[model]
        return True

    def _say(self, model: str, minute: int, *, last: bool = False) -> None:
        traffic = self.metrics.of(model).traffic
        self.observe(
            TrafficReported(
                frontend=self.frontend,
                model=model,
                minute=datetime.fromtimestamp(minute * MINUTE_S, UTC),
                requests=traffic.requests,
                prompt_tokens=traffic.prompt_tokens,
                prompt_tokens_squared=traffic.prompt_tokens_squared,
                output_tokens=traffic.output_tokens,
                late=traffic.late,
                rejected=traffic.rejected,
                last=last,
            )
        )
        traffic.clear()

    def _promise(self, model: str) -> None:
        """Have what is promised of a model at hand where its answers end: reckoned once a minute, from all its workers."""
        traffic, endpoints = self.metrics.of(model).traffic, self.table.models.get(model, ())
        slo = attainable(self.table.slo(model), [(endpoint.joined.profile, 1.0) for endpoint in endpoints])
        traffic.ttft_s = inf if slo.slo_ttft_ms is None else slo.slo_ttft_ms / 1000
        traffic.tpot_s = inf if slo.slo_tpot_ms is None else slo.slo_tpot_ms / 1000
        rate = endpoints[0].joined.profile.prefill_tokens_per_s if endpoints else 0.0
        traffic.reading_s = 1 / rate if rate > 0 else 0.0
