"""Reports the traffic of each model per minute to the journal, for the planner.

Minutes are those of the wall clock. A minute without traffic is reported too. A process that was suspended for some
minutes reports the missed minutes late, but at most the last MISSED_MAX of them. No minute is reported twice, even if the
clock is set back.
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
MISSED_MAX = 10  # number of missed minutes that are reported late
FORGOTTEN_AFTER = 10  # minutes without workers and requests after which a model is no longer reported
# reasons for which one more worker would not have served the request
NO_DEMAND = ("draining", "request_poisonous", "deadline_unattainable")


@dataclass(eq=False, repr=False)
class TrafficReporter:
    """Reports the traffic of one frontend to the journal, once a minute."""

    frontend: str
    observe: Callable[[Observation], object]
    clock: Clock
    table: EndpointTable
    metrics: RequestMetrics
    # number of minutes without workers and requests, by model
    idle: dict[str, int] = field(default_factory=dict)
    # models with latency objectives that were set in this minute: see `_set_objectives`
    promised: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.minute = self._number()

    def _number(self) -> int:
        return int(self.clock.now().timestamp() // MINUTE_S)

    def rejected(self, fact: RequestsRejected) -> None:
        """Publish a fact about rejected requests.

        The requests count as traffic if one more worker would have served them.
        """
        if fact.reason not in NO_DEMAND:
            self.metrics.of(fact.model).traffic.rejected += fact.count
        self.observe(fact)

    def tick(self) -> None:
        """Report the minutes that have ended since the last call, and set the objectives of each model once a minute."""
        if (number := self._number()) > self.minute:
            self._report_minutes(number)
            self.promised.clear()
        for model in self.table.models.keys() - self.promised:
            self._set_objectives(model)
            self.promised.add(model)

    def stop(self) -> None:
        """Report the current, incomplete minute. The report is marked as the last one of this frontend."""
        for model in self._models():
            self._report(model, self.minute, last=True)

    def _report_minutes(self, number: int) -> None:
        """Report the minute `self.minute` and the minutes missed since then. `number` is the current minute."""
        missed = range(max(self.minute + 1, number - MISSED_MAX), number)
        for model in self._models():
            forgotten = self._is_last(model)
            self._report(model, self.minute, last=forgotten and not missed)
            for minute in missed:
                self._report(model, minute, last=forgotten and minute == missed[-1])
        self.minute = number

    def _models(self) -> Iterable[str]:
        """Return the models to report: those that are served, those with requests, and those that were served recently."""
        requested = (name for name, traffic in self.metrics.traffic() if traffic.requests or traffic.rejected)
        return sorted({*self.table.models, *requested, *self.idle})

    def _is_last(self, model: str) -> bool:
        """Return whether this is the last report of a model.

        It is the last one if the model has had neither workers nor requests for FORGOTTEN_AFTER minutes.
        """
        traffic = self.metrics.of(model).traffic
        if model in self.table.models or traffic.requests or traffic.rejected:
            self.idle[model] = 0
            return False
        self.idle[model] = self.idle.get(model, 0) + 1
        if self.idle[model] < FORGOTTEN_AFTER:
            return False
        del self.idle[model]
        return True

    def _report(self, model: str, minute: int, *, last: bool = False) -> None:
        traffic = self.metrics.of(model).traffic
        fact = TrafficReported(
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
        self.observe(fact)
        traffic.clear()

    def _set_objectives(self, model: str) -> None:
        """Set the latency objectives against which the answers of a model are measured.

        They are computed once a minute from the profiles of all the model's workers.
        """
        traffic, endpoints = self.metrics.of(model).traffic, self.table.models.get(model, ())
        slo = attainable(self.table.slo(model), [(endpoint.joined.profile, 1.0) for endpoint in endpoints])
        traffic.ttft_s = inf if slo.slo_ttft_ms is None else slo.slo_ttft_ms / 1000
        traffic.tpot_s = inf if slo.slo_tpot_ms is None else slo.slo_tpot_ms / 1000
        rate = endpoints[0].joined.profile.prefill_tokens_per_s if endpoints else 0.0
        traffic.reading_s = 1 / rate if rate > 0 else 0.0
