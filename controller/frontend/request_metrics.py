"""Counting, close to the token path: per model, with everything looked up once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from controller.frontend.errors import FAULTS
from controller.frontend.metrics import WORKER_TYPE, FrontendMetrics
from controller.frontend.request.failures import CAUSES
from controller.router.endpoints import Endpoint, shown_context
from controller.router.index.feed import Counts
from controller.router.index.view import KvView
from events.observations import FrontendObservation, RequestExposed
from events.wire import Load

ENDPOINTS, KINDS = ("chat_completions", "completions"), ("stream", "unary")
MIGRATION_TYPES = ("new_request", "ongoing_request")
ACTIONS = ("continue", "restart", "error", "none")  # of RequestExposed
POSITIONS = {"closed": 0, "open": 1, "half_open": 2}


class ModelTraffic:
    """What came for one model since it was last told of, and what is promised of it."""

    __slots__ = (
        "late", "output_tokens", "prompt_tokens", "prompt_tokens_squared", "reading_s", "rejected", "requests", "tpot_s",
        "ttft_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ttft_s = self.tpot_s = inf
        self.reading_s = 0.0  # that a worker takes to read one token of a prompt
        self.clear()

    def clear(self) -> None:
        """Begin to count anew."""
        self.requests = self.prompt_tokens = self.prompt_tokens_squared = self.output_tokens = 0
        self.late = self.rejected = 0

    def began(self, prompt_tokens: int) -> None:
        """A request is sent to its first worker."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_tokens_squared += prompt_tokens * prompt_tokens

    def ended(
        self, prompt_tokens: int, tokens: int, ttft_s: float, tpot_s: float, by_s: float | None
    ) -> None:
        """An answer has ended well. `by_s`: within which its first token was wanted; None: as of any request of this model, a
        long prompt twice as long as reading it takes."""
        self.output_tokens += tokens
        if by_s is None:
            by_s = max(self.ttft_s, 2 * prompt_tokens * self.reading_s)
        self.late += ttft_s > by_s or tpot_s > self.tpot_s


class ModelMetrics:
    """What is counted for one model."""

    __slots__ = (
        "_histograms", "_model", "_requests", "cached", "decisions", "duration", "hit_rate", "inputs", "itl", "outputs",
        "overlap", "rendered", "tokens", "traffic", "ttft",
    )  # fmt: skip

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self._model = model
        self._requests = metrics.requests
        self._histograms = metrics.histograms
        self.traffic = ModelTraffic()
        self.tokens = 0
        self.rendered = 0  # of them, already in the counter
        self.decisions: Counter[str] = Counter()  # not yet in the counters, by mode
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
        """Show what wakes people up before it happens: the increase of a series that is born at 1 is lost (B26)."""
        for endpoint in ENDPOINTS:
            self._requests.rejections.labels(self._model, endpoint)
            for kind, fault in product(KINDS, FAULTS):
                self._requests.ended.labels(self._model, endpoint, kind, "error", fault)
        for begun in MIGRATION_TYPES:
            self._histograms.migration_s.of(self._model, begun, "failure")

    def began(self, prompt_tokens: int) -> None:
        """A request is sent to its first worker."""
        self.inputs.note(prompt_tokens)
        self.traffic.began(prompt_tokens)

    def ended(self, duration_s: float, tokens: int, cached_tokens: int | None) -> None:
        """An answer is over. `cached_tokens`: of its prompt, if its worker has said so."""
        self.duration.note(duration_s)
        self.outputs.note(tokens)
        if cached_tokens is not None:
            self.cached.note(cached_tokens)

    def outgrown(self) -> None:
        """A request that could have moved has become too long for it."""
        self._requests.over_cap.labels(self._model).inc()

    def failed(self, kind: str) -> None:
        """An attempt failed: counted whether or not another one can be made."""
        self._requests.migrations.labels(self._model, kind).inc()

    def restored(self, kind: str, outcome: str, seconds: float) -> None:
        """What began with a failure is over, after any number of attempts: `success`, `failure` or `cancelled`."""
        self._histograms.migration_s.of(self._model, kind, outcome).add(seconds)


class RequestMetrics:
    """All of a frontend's counting that has to do with answers."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._requests = metrics.requests
        self._histograms = metrics.histograms
        self._models: dict[str, ModelMetrics] = {}
        self.active: Counter[str] = Counter()  # requests between arrival and end, by model
        self.ended: Counter[tuple[str, ...]] = Counter()  # not yet in the counter, by its labels
        for cause in CAUSES:  # at 0, as what is shown of models
            self._histograms.resume.of(cause)
        self._exposed = metrics.faults.exposed
        for action in ACTIONS:
            self._exposed.labels(action)
        self._kv_counted = Counts()  # of KV events, already in the counters
        self._last: dict[str, tuple[int, float, float | None]] = {}  # each worker's, not yet in the gauges

    def of(self, model: str) -> ModelMetrics:
        """Return one model's metrics."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMetrics(self._metrics, model)
        return found

    def traffic(self) -> Iterator[tuple[str, ModelTraffic]]:
        """Yield what came for each model."""
        for model, metrics in self._models.items():
            yield model, metrics.traffic

    def chosen(self, model: str, mode: str, overlap_blocks: float, required_blocks: int) -> None:
        """A worker was chosen that has so many of a prompt's blocks cached, as far as is known."""
        of_model = self.of(model)
        of_model.decisions[mode] += 1
        if mode == "kv":
            of_model.hit_rate.note(min(1.0, overlap_blocks / required_blocks))
            of_model.overlap.note(overlap_blocks)

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        """A request has waited for a free worker: `admitted`, `timeout`, `no_worker` or `gone`."""
        self._histograms.queue_s.of(model, outcome).note(seconds)

    def served(self, worker: str, prompt_tokens: int, ttft_s: float, itl_s: float | None) -> None:
        """An answer ended well at the worker at which it had begun. Without `itl_s` it was one token; that of the answer before
        still stands."""
        if itl_s is None and (before := self._last.get(worker)) is not None:
            itl_s = before[2]
        self._last[worker] = prompt_tokens, ttft_s, itl_s

    def resumed(self, cause: str, gap_s: float) -> None:
        """A client's stream goes on after a gap."""
        self._histograms.resume.of(cause).add(gap_s)

    def preempted(self, model: str, tier: str) -> None:
        """A running answer was put off for a more urgent request."""
        self._requests.preempted.labels(model, tier).inc()

    def exposed(self, fact: FrontendObservation) -> None:
        """A request was found to have been fed by a convicted worker."""
        if isinstance(fact, RequestExposed):
            self._exposed.labels(fact.action).inc()

    def settle(self) -> None:
        """Bring counters and the gauges of each worker's last answer up to date, for a scrape."""
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
        """Bring up to date what is shown of workers' KV blocks: those that `view` knows of, and how many are guessed."""
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


def gauge_model(
    metrics: FrontendMetrics, model: str, endpoints: Sequence[Endpoint], limit: int, queued: int
) -> None:
    """Bring one model's gauges up to date. Where all its workers are gone, the last ones' sizes stay."""
    metrics.shown_models.add(model)
    requests, sizes = metrics.requests, metrics.models
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
    metrics: FrontendMetrics,
    endpoint: Endpoint,
    breaker: str,
    loads: Sequence[Load],
    prefill_tokens: Sequence[float],
) -> None:
    """Bring one worker's gauges up to date. `loads`: what it has said of each of its DP ranks; `prefill_tokens`: of requests that
    we know of, still to be read by each."""
    metrics.shown.add(endpoint.worker)
    workers, breakers = metrics.workers, metrics.faults.breakers
    breakers.labels(endpoint.worker).set(POSITIONS[breaker])
    for rank, tokens in enumerate(prefill_tokens):
        labels = (endpoint.worker, str(rank), WORKER_TYPE)
        workers.prefill_tokens.labels(*labels).set(tokens)
        if rank < len(loads):
            workers.waiting.labels(*labels).set(loads[rank].waiting)
            workers.decode_blocks.labels(*labels).set(loads[rank].kv_used)
