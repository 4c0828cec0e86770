"""How much has one answer brought, when, and from whom? Counted once per turn of the loop, however many tokens it had."""

from collections.abc import Callable, Sequence
from math import inf

from controller.frontend.generations.attempt import Attempt
from controller.frontend.generations.provenance import Provenance
from controller.frontend.request.failures import MigrationBudget
from controller.frontend.request.generation_request import GenerationRequest
from controller.frontend.request_metrics import ModelMetrics
from controller.frontend.scheduling.scheduler import KvScheduler
from events.wire import Logprob

LOGPROB_FLOOR = -9.0  # one in 8,000: correct samplers draw few tokens below it, a broken one mostly such


class OutputStats:
    """When one answer's tokens came, and how many of them are counted already."""

    __slots__ = (
        "_budget", "_metrics", "_now", "_provenance", "_tracker", "arrived_at", "attempt_at", "began_at", "cached_tokens",
        "counted", "first_at", "last_at", "movable_max", "unlikely", "weighed",
    )  # fmt: skip

    def __init__(
        self,
        now: Callable[[], float],
        metrics: ModelMetrics,
        provenance: Provenance,
        tracker: KvScheduler | None,
        budget: MigrationBudget,
        request: GenerationRequest,
    ) -> None:
        """Begin with nothing. `tracker` is told how the answer grows, if the router wants to know it."""
        self._now = now
        self._metrics = metrics
        self._provenance = provenance
        self._tracker = tracker
        self._budget = budget
        cap = budget.max_seq_len
        self.movable_max = (
            inf if cap is None else cap - len(request.prompt)
        )  # tokens; inf: or more were counted already
        self.began_at = self.last_at = self.attempt_at = (
            now()
        )  # when it went to its first worker, or its last one
        self.arrived_at = self.began_at if request.arrived is None else request.arrived
        self.first_at: float | None = None
        self.cached_tokens: int | None = None  # of the prompt, at the first worker that has said it
        self.counted = 0  # accepted tokens when the last turn ended
        self.weighed = self.unlikely = 0  # tokens with logprobs, and those of them that are improbable

    def attempted(self) -> None:
        """Another attempt was sent."""
        self.attempt_at = self._now()

    def first_output(self) -> None:
        """The first of the answer has come."""
        self.first_at = self._now()
        self._metrics.ttft.note(self.first_at - self.arrived_at)

    def weigh(self, logprobs: Sequence[Logprob]) -> None:
        """Count tokens that came with logprobs, and those below the floor."""
        self.weighed += len(logprobs)
        self.unlikely += sum(one.chosen < LOGPROB_FLOOR for one in logprobs)

    def count(self, accepted: int, attempt: Attempt) -> None:
        """Count what is new of so many accepted tokens: all of it came from this attempt, in this turn."""
        counted = self.counted
        new = accepted - counted
        if not new:
            return
        now, metrics, provenance = self._now(), self._metrics, self._provenance
        served_span = provenance.own or provenance.begin(attempt.endpoint.key, attempt.rank, counted)
        served_span.add(now, new)
        for source in provenance.sources:
            source.add(now, new)
        if self._tracker is not None:
            self._tracker.output(attempt.slot, new)
        metrics.tokens += new
        if counted:
            metrics.itl.add((now - self.last_at) / new, new)
        self.counted = accepted
        self.last_at = now
        if accepted > self.movable_max:
            self.note_length(accepted)

    def note_length(self, accepted: int) -> None:
        """See whether the request has become too long to move. Counted once, and only if it could have moved before."""
        if accepted > self.movable_max and not self._budget.ended:
            self.movable_max = inf
            self._metrics.outgrown()

    def ended(self, request: GenerationRequest, accepted: int, *, well: bool) -> None:
        """The answer is over: as its client wanted it, or not."""
        self._metrics.ended(self._now() - self.arrived_at, accepted, self.cached_tokens)
        if not well or self.first_at is None:
            return
        by, arrived_at, traffic = request.first_token_by, self.arrived_at, self._metrics.traffic
        traffic.ended(
            len(request.prompt),
            accepted,
            self.first_at - arrived_at,
            (self.last_at - self.first_at) / (accepted - 1) if accepted > 1 else 0.0,
            None if by is None else by - arrived_at,
        )

    def rewind(self, count: int) -> None:
        """Count what comes after the first `count` tokens anew."""
        self.counted = min(self.counted, count)
