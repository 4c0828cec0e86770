"""Counting, close to the token path: per model, with everything looked up once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from controller.frontend.metrics import Buckets, FrontendMetrics
from controller.router.kv_feed import Counts
from controller.router.kv_view import KvView
from controller.router.table import Seat
from events.observations import FrontendObservation, RequestExposed
from events.wire import Load

if TYPE_CHECKING:
    from controller.frontend.flight import Flight

POSITIONS = {"closed": 0, "open": 1, "half_open": 2}


class ModelMeter:
    """What is counted for one model."""

    __slots__ = (
        "cached", "decisions", "duration", "hit_rate", "inputs", "itl", "outputs", "overlap", "rendered", "tokens",
        "ttft",
    )  # fmt: skip

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        self.tokens = 0
        self.rendered = 0  # of them, already in the counter
        self.decisions: Counter[str] = Counter()  # not yet in the counters, by mode
        self.hit_rate: Buckets = metrics.hit_rate.of(model)
        self.overlap: Buckets = metrics.overlap.of(model)
        self.itl: Buckets = metrics.itl.of(model)
        self.ttft: Buckets = metrics.ttft.of(model)
        self.duration: Buckets = metrics.duration.of(model)
        self.inputs: Buckets = metrics.input_tokens.of(model)
        self.outputs: Buckets = metrics.output_sequence.of(model)
        self.cached: Buckets = metrics.cached_tokens.of(model)

    def ended(self, flight: "Flight", now: float) -> None:
        """A flight is over."""
        self.duration.note(now - flight.began_at)
        self.outputs.note(len(flight.accepted))
        if flight.cached_tokens is not None:
            self.cached.note(flight.cached_tokens)


class Meter:
    """All of a frontend's counting that has to do with flights."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._models: dict[str, ModelMeter] = {}
        self._last: dict[str, tuple[int, float, float | None]] = {}  # each worker's, not yet in the gauges

    def of(self, model: str) -> ModelMeter:
        """Return one model's meter."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelMeter(self._metrics, model)
        return found

    def chosen(self, model: str, mode: str, overlap_blocks: float, required_blocks: int) -> None:
        """A worker was chosen that has so many of a prompt's blocks cached, as far as is known."""
        meter = self.of(model)
        meter.decisions[mode] += 1
        if mode == "kv":
            meter.hit_rate.note(min(1.0, overlap_blocks / required_blocks))
            meter.overlap.note(overlap_blocks)

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        """A request has waited for a free worker: `admitted`, `timeout`, `no_worker` or `gone`."""
        self._metrics.queue_s.of(model, outcome).note(seconds)

    def landed(self, worker: str, prompt_tokens: int, ttft_s: float, itl_s: float | None) -> None:
        """An answer ended well at the worker at which it had begun. Without `itl_s` it was one token; that of the answer before
        still stands."""
        if itl_s is None and (before := self._last.get(worker)) is not None:
            itl_s = before[2]
        self._last[worker] = prompt_tokens, ttft_s, itl_s

    def outgrown(self, model: str) -> None:
        """A request that could have moved has become too long for it."""
        self._metrics.over_cap.labels(model).inc()

    def failed(self, model: str, kind: str) -> None:
        """An attempt failed: counted whether or not another one can be made."""
        self._metrics.migrations.labels(model, kind).inc()

    def restored(self, model: str, kind: str, outcome: str, seconds: float) -> None:
        """What began with a failure is over, after any number of attempts: `success`, `failure` or `cancelled`."""
        self._metrics.migration_s.of(model, kind, outcome).add(seconds)

    def resumed(self, cause: str, gap_s: float) -> None:
        """A client's stream goes on after a gap."""
        self._metrics.resume.of(cause).add(gap_s)

    def exposed(self, fact: FrontendObservation) -> None:
        """A request was found to have been fed by a convicted worker."""
        if isinstance(fact, RequestExposed):
            self._metrics.exposed.labels(fact.action).inc()

    def settle(self) -> None:
        """Bring the counters up to date, because somebody looks."""
        for model, meter in self._models.items():
            self._metrics.output_tokens.labels(model).inc(meter.tokens - meter.rendered)
            meter.rendered = meter.tokens
            for mode, count in meter.decisions.items():
                self._metrics.decisions.labels(model, mode).inc(count)
            meter.decisions.clear()
        for worker, last in self._last.items():
            gauge_last(self._metrics, worker, *last)
        self._last.clear()


def gauge_router(metrics: FrontendMetrics, view: KvView | None, guessed: int, before: Counts) -> Counts:
    """Bring the router's figures up to date, `before` being what was counted the last time. Return what is now."""
    metrics.kv_guessed.set(guessed)
    if view is None:
        return before
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
    return replace(counts, applied=counts.applied.copy())


def gauge_model(metrics: FrontendMetrics, model: str, seats: Sequence[Seat], limit: int, queued: int) -> None:
    """Bring one model's gauges up to date. Where all its workers are gone, the last ones' sizes stay."""
    metrics.inflight.labels(model).set(sum(seat.active for seat in seats))
    metrics.queued.labels(model).set(queued)
    if not seats:
        return
    profile = seats[0].joined.profile
    metrics.migration_limit.labels(model).set(limit)
    metrics.context_length.labels(model).set(seats[0].joined.context_tokens)
    metrics.total_kv_blocks.labels(model).set(profile.kv_blocks)
    metrics.max_num_seqs.labels(model).set(profile.max_batch)
    metrics.kv_block_size.labels(model).set(profile.block_tokens)


def gauge_worker(
    metrics: FrontendMetrics, seat: Seat, breaker: str, load: Load | None, prefill_tokens: float
) -> None:
    """Bring one worker's gauges up to date."""
    metrics.shown.add(seat.worker)
    metrics.prefill_tokens.labels(seat.worker).set(prefill_tokens)
    metrics.breakers.labels(seat.worker).set(POSITIONS[breaker])
    if load is not None:
        metrics.waiting.labels(seat.worker).set(load.waiting)
        metrics.decode_blocks.labels(seat.worker).set(load.kv_used)


def gauge_last(
    metrics: FrontendMetrics, worker: str, prompt_tokens: int, ttft_s: float, itl_s: float | None
) -> None:
    """Show how a worker's last answer went."""
    metrics.shown.add(worker)
    metrics.last_input.labels(worker).set(prompt_tokens)
    metrics.last_ttft.labels(worker).set(ttft_s)
    if itl_s is not None:
        metrics.last_itl.labels(worker).set(itl_s)
