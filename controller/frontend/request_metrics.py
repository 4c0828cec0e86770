"""Request metrics per model. Each label set is looked up only once, to keep the token path fast."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from controller.frontend.errors import FAULTS
from controller.frontend.metrics import WORKER_TYPE, FrontendMetrics
from controller.frontend.request.failures import CAUSES
from controller.router.endpoints import Endpoint, shown_context
from controller.router.index.view import Counts, KvView
from events.wire import Load

ENDPOINTS = ("chat_completions", "completions", "messages", "responses")
KINDS = ("stream", "unary")
MIGRATION_TYPES = ("new_request", "ongoing_request")
ACTIONS = ("continue", "restart", "error", "none")  # values of RequestExposed.action
POSITIONS = {"closed": 0, "open": 1, "half_open": 2}


class ModelTraffic:
    """The traffic of one model since its last report, and the latency objectives against which answers are measured."""

    def __init__(self) -> None:
        self.ttft_s = self.tpot_s = inf
        self.reading_s = 0.0  # seconds that a worker needs to prefill one prompt token
        self.clear()

    def clear(self) -> None:
        """Reset the counts, because they were reported."""
        self.requests = self.prompt_tokens = self.prompt_tokens_squared = self.output_tokens = 0
        self.late = self.rejected = 0

    def began(self, prompt_tokens: int) -> None:
        """Count a request that is sent to its first worker."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_squared += prompt_tokens * prompt_tokens

    def ended(
        self, prompt_tokens: int, tokens: int, ttft_s: float, tpot_s: float, by_s: float | None
    ) -> None:
        """Count an answer that has ended without an error.

        The answer is late if its time to first token or its time per token was too long. `by_s` is the client's
        limit for the time to first token. If `by_s` is None, the limit is the model's objective or twice the prefill
        time of the prompt, whichever is longer.
        """
        self.output_tokens += tokens
        if by_s is None:
            by_s = max(self.ttft_s, 2 * prompt_tokens * self.reading_s)
        self.late += ttft_s > by_s or tpot_s > self.tpot_s


class ModelMetrics:
    """Counts the requests of one model for its metrics."""

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self._model = model
        self._requests = metrics.requests
        self._histograms = metrics.histograms
        self.traffic = ModelTraffic()
        self.tokens = 0
        self.rendered = 0  # tokens that were already added to the counter
        self.decisions: Counter[str] = Counter()  # number of choices by mode, not yet added to the counters
        router, histograms = metrics.router, self._histograms
        self.hit_rate = router.hit_rate.of(model)
        self.overlap = router.overlap.of(model)
        self.itl = histograms.itl.of(model)
        self.ttft = histograms.ttft.of(model)
        self.duration = histograms.duration.of(model)
        self.inputs = histograms.input_tokens.of(model)
        self.outputs = histograms.output_tokens.of(model)
        self.cached = histograms.cached_tokens.of(model)
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Create, with value 0, the series that alerts use.

        Prometheus would miss the increase of a series that first appears with value 1.
        """
        for endpoint in ENDPOINTS:
            self._requests.rejections.labels(self._model, endpoint)
            for kind, fault in product(KINDS, FAULTS):
                self._requests.ended.labels(self._model, endpoint, kind, "error", fault)
        for begun in MIGRATION_TYPES:
            self._histograms.migration_s.of(self._model, begun, "failure")

    def began(self, prompt_tokens: int) -> None:
        """Count a request that is sent to its first worker."""
        self.inputs.note(prompt_tokens)
        self.traffic.began(prompt_tokens)

    def ended(self, duration_s: float, tokens: int, cached_tokens: int | None) -> None:
        """Record an answer that has ended.

        `cached_tokens` is the number of cached prompt tokens, or None if no worker has reported the number.
        """
        self.duration.note(duration_s)
        self.outputs.note(tokens)
        if cached_tokens is not None:
            self.cached.note(cached_tokens)

    def outgrown(self) -> None:
        """Count a request that has become too long to move."""
        self._requests.over_cap.labels(self._model).inc()

    def failed(self, kind: str) -> None:
        """Count a failed attempt, whether or not it can be retried. `kind` is new_request or ongoing_request."""
        self._requests.migrations.labels(self._model, kind).inc()

    def restored(self, kind: str, outcome: str, seconds: float) -> None:
        """Record the end of an outage that lasted `seconds`. An outage with several attempts counts once.

        `outcome` is `success`, `failure` or `cancelled`.
        """
        self._histograms.migration_s.of(self._model, kind, outcome).add(seconds)


class RequestMetrics:
    """The request metrics of a frontend, by model and worker. A scrape copies them into the metric tables."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._requests = metrics.requests
        self._histograms = metrics.histograms
        self._models: dict[str, ModelMetrics] = {}
        self.active: Counter[str] = Counter()  # requests between arrival and end, by model
        # ended requests by labels, not yet added to the counter
        self.ended: Counter[tuple[str, ...]] = Counter()
        for cause in CAUSES:  # create the series with value 0, like those of models
            self._histograms.resume.of(cause)
        self._exposed = metrics.faults.exposed
        for action in ACTIONS:
            self._exposed.labels(action)
        self._kv_counted = Counts()  # KV events that are already in the counters
        # prompt tokens, time to first token and time per token of each worker's last answer, not yet in the gauges
        self._last: dict[str, tuple[int, float, float | None]] = {}

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of one model, creating them for a new model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self._metrics, model)
        return found

    def traffic(self) -> Iterator[tuple[str, ModelTraffic]]:
        """Return an iterator over each model and its traffic."""
        return ((model, metrics.traffic) for model, metrics in self._models.items())

    def chosen(self, model: str, mode: str, overlap_blocks: float, required_blocks: int) -> None:
        """Count the choice of a worker in this mode.

        In the mode `kv`, also record how many of the prompt's blocks the worker is known or assumed to have cached.
        """
        of_model = self.of(model)
        of_model.decisions[mode] += 1
        if mode == "kv":
            of_model.hit_rate.note(min(1.0, overlap_blocks / required_blocks))
            of_model.overlap.note(overlap_blocks)

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        """Record how many seconds a request waited for a free worker.

        `outcome` is `admitted`, `timeout`, `no_worker` or `gone`.
        """
        self._histograms.queue_s.of(model, outcome).note(seconds)

    def served(self, worker: str, prompt_tokens: int, ttft_s: float, itl_s: float | None) -> None:
        """Record an answer that one worker produced completely, without an error.

        `itl_s` is None for an answer of one token. In that case the value of the previous answer is kept.
        """
        if itl_s is None and (before := self._last.get(worker)) is not None:
            itl_s = before[2]
        self._last[worker] = prompt_tokens, ttft_s, itl_s

    def resumed(self, cause: str, gap_s: float) -> None:
        """Record for how many seconds a client's stream had no token before it continued."""
        self._histograms.resume.of(cause).add(gap_s)

    def preempted(self, model: str, tier: str) -> None:
        """Count a running answer that was preempted by a more urgent request."""
        self._requests.preempted.labels(model, tier).inc()

    def exposed(self, action: str) -> None:
        """Count a request that received tokens from a convicted worker. `action` is that of `RequestExposed`."""
        self._exposed.labels(action).inc()

    def settle(self) -> None:
        """Copy the counts into the metric tables before a scrape: counters, and gauges of each worker's last answer."""
        decisions = self._metrics.router.decisions
        for model, of_model in self._models.items():
            self._requests.output_tokens.labels(model).inc(of_model.tokens - of_model.rendered)
            of_model.rendered = of_model.tokens
            for mode, count in of_model.decisions.items():
                decisions.labels(model, mode).inc(count)
            of_model.decisions.clear()
        for model, count in self.active.items():
            self._requests.active.labels(model).set(count)
        for labels, count in self.ended.items():
            self._requests.ended.labels(*labels).inc(count)
        self.ended.clear()
        workers = self._metrics.workers
        for worker, (prompt_tokens, ttft_s, itl_s) in self._last.items():
            self._metrics.shown.add(worker)
            workers.last_input.labels(worker).set(prompt_tokens)
            workers.last_ttft.labels(worker).set(ttft_s)
            if itl_s is not None:
                workers.last_itl.labels(worker).set(itl_s)
        self._last.clear()

    def settle_kv(self, view: KvView | None, guessed: int) -> None:
        """Update the metrics of the workers' KV blocks. `guessed` is the number of blocks assumed to be cached.

        `view` contains the blocks that workers report. If it is None, KV events are not used.
        """
        metrics, before = self._metrics.router, self._kv_counted
        metrics.kv_guessed.set(guessed)
        if view is None:
            return
        health, counts = view.health, view.counts
        metrics.kv_blocks.set(health.blocks)
        metrics.kv_ranks.labels("complete").set(health.complete)
        metrics.kv_ranks.labels("incomplete").set(health.ranks - health.complete)
        for (kind, status), count in counts.applied.items():
            metrics.kv_events.labels(kind, status).inc(count - before.applied.get((kind, status), 0))
        for outcome, now, then in (
            ("gap", counts.gaps, before.gaps),
            ("recovered", counts.recovered, before.recovered),
            ("restored", counts.restored, before.restored),
            ("failed", counts.failed, before.failed),
        ):
            metrics.kv_recoveries.labels(outcome).inc(now - then)
        self._kv_counted = replace(counts, applied=counts.applied.copy())

    def gauge_model(self, model: str, endpoints: Sequence[Endpoint], limit: int, queued: int) -> None:
        """Update the gauges of one model.

        If all workers of the model have left, the size gauges keep their last values.
        """
        self._metrics.shown_models.add(model)
        requests, sizes = self._requests, self._metrics.models
        requests.inflight.labels(model).set(sum(endpoint.active for endpoint in endpoints))
        requests.queued.labels(model).set(queued)
        if not endpoints:
            return
        profile = endpoints[0].joined.profile
        sizes.migration_limit.labels(model).set(limit)
        sizes.context_length.labels(model).set(shown_context(endpoints))
        sizes.total_kv_blocks.labels(model).set(profile.kv_blocks)
        sizes.max_num_seqs.labels(model).set(profile.max_batch)
        sizes.kv_block_size.labels(model).set(profile.block_tokens)

    def gauge_worker(
        self, endpoint: Endpoint, breaker: str, loads: Sequence[Load], prefill_tokens: Sequence[float]
    ) -> None:
        """Update the gauges of one worker.

        `loads` is the reported load of each DP rank of the worker. `prefill_tokens` contains, for each rank, the number
        of prompt tokens that are not prefilled yet, over the requests that this frontend knows.
        """
        self._metrics.shown.add(endpoint.worker)
        workers, breakers = self._metrics.workers, self._metrics.faults.breakers
        breakers.labels(endpoint.worker).set(POSITIONS[breaker])
        for rank, tokens in enumerate(prefill_tokens):
            labels = (endpoint.worker, str(rank), WORKER_TYPE)
            workers.prefill_tokens.labels(*labels).set(tokens)
            if rank < len(loads):
                workers.waiting.labels(*labels).set(loads[rank].waiting)
                workers.decode_blocks.labels(*labels).set(loads[rank].kv_used)
