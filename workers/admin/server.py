"""A worker process's admin port: /health, /live and /metrics. Imported once the worker serves."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from itertools import accumulate, product
from operator import attrgetter
from typing import Any

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    Sample,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from events.journal.counters import SpeakingJournal
from events.process.exposition import LabelSets, written
from events.wire import ERRORS, Load
from workers.admin.pages import PageAnswer, Pages
from workers.counters import CONNECTION_BOUNDS, DIRECTIONS, DURATION_BOUNDS_S, OUTCOMES, STOP_BOUNDS_S
from workers.engines.admission import LimitedEngine, RequestLimit
from workers.worker import InferenceWorker

Read = Callable[[InferenceWorker], float]
LABELS = ("worker_id", "model")
AT_ONCE_MAX = 1000  # lines of a family, two milliseconds: to hand them to a thread takes longer
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        "dynamo_component_requests",
        "Requests taken; canaries count only where they carry no mark.",
        lambda w: w.server.counters.requests,
    ),
    ("dynamo_component_cancellation", "Streams that nobody read.", lambda w: w.server.counters.cancelled),
    ("holdfast_worker_tokens", "Tokens said.", lambda w: w.server.counters.tokens),
    (
        "holdfast_worker_strangers_refused",
        "Connections refused because they did not know the fleet's key.",
        lambda w: w.server.counters.strangers,
    ),
    (
        "dynamo_rejection_request",
        "Requests refused because the worker was at its capacity (--engine-request-limit).",
        lambda w: _requests(w).refused,
    ),
    ("holdfast_worker_kv_events", "KV events given to the broker.", lambda w: w.kv.said if w.kv else 0),
    (
        "holdfast_worker_kv_events_lost",
        "KV events that the broker did not take.",
        lambda w: w.kv.dropped if w.kv else 0,
    ),
)
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("dynamo_component_inflight_requests", "Streams in the air.", lambda w: w.server.in_flight),
    ("holdfast_worker_waiting_requests", "Not yet in the batch.", lambda w: w.engine.load().waiting),
    ("holdfast_worker_kv_used_ratio", "KV blocks in use, of all.", lambda w: _kv_used(w.engine.load())),
    (
        "holdfast_worker_kv_cached_blocks",
        "KV blocks that frontends are told of.",
        lambda w: w.kv.blocks if w.kv else 0,
    ),
    (
        "holdfast_worker_upstream_closed_seconds",
        "Seconds for which it takes no new requests, because its upstream said when to retry.",
        lambda w: w.engine.load().closed_s,
    ),
    ("holdfast_worker_moving_out", "On their way out.", lambda w: len(w.server.moves.source)),
    ("holdfast_worker_moving_in", "On their way in.", lambda w: len(w.server.moves.target)),
    ("holdfast_worker_draining", "1 while nothing new is taken.", lambda w: w.server.draining),
)
# Of the worker's own admission (`--engine-request-limit`), under Dynamo's names. Without it all are 0.
ADMISSION = (
    (
        "dynamo_engine_request",
        "Requests inside the engine, where their number is limited.",
        lambda w: len(_requests(w).inside),
    ),
    (
        "dynamo_request_queue",
        "Requests that wait for a place inside the engine.",
        lambda w: _requests(w).waiting,
    ),
)
# What each DP rank of a simulated engine reports, under the names of real engines' load metrics.
RANKS = (
    ("request_active_slots", "Requests in the batch, of each DP rank (the simulated engine)."),
    ("request_total_slots", "Places in the batch."),
    ("num_requests_waiting", "Requests that are not yet in the batch."),
    ("kv_active_blocks", "KV blocks that requests hold."),
    ("kv_total_blocks", "KV blocks."),
    ("gpu_cache_usage_perc", "KV blocks that requests hold, of all (0 to 1)."),
    (
        "gpu_prefix_cache_hit_rate",
        "Prompt tokens found in the prefix cache by the requests admitted last (0 to 1).",
    ),
    ("num_preemptions", "Requests that went back to waiting because KV blocks ran out, so far."),
    ("scheduled_num_prefill_requests", "Requests whose prompts the newest pass computes."),
    ("scheduled_sum_prefill_tokens", "Prompt tokens that it computes."),
    (
        "scheduled_var_prefill_length",
        "The variance of these prompts' lengths, as far as they are computed with it.",
    ),
    ("scheduled_sum_prefill_kv_tokens", "Tokens of these prompts that were there before."),
    ("scheduled_num_decode_requests", "Requests that it gives one more token."),
    ("scheduled_sum_decode_kv_tokens", "Tokens that these have."),
    ("scheduled_var_decode_kv_tokens", "The variance of their lengths."),
    ("queued_num_prefill_requests", "Requests that wait and have said nothing yet."),
    ("queued_sum_prefill_tokens", "Tokens that these have."),
    ("queued_var_prefill_length", "The variance of their lengths."),
    ("queued_num_decode_requests", "Requests that wait because they were preempted."),
    ("queued_sum_decode_kv_tokens", "Tokens that these have."),
    ("queued_var_decode_kv_tokens", "The variance of their lengths."),
    ("wall_time", "Seconds that the newest pass takes."),
)


class WorkerMetrics(Collector):
    """Reads the workers' plain counters when somebody scrapes; serving costs nothing for it."""

    def __init__(self, workers: Sequence[InferenceWorker], journal: SpeakingJournal | None = None) -> None:
        self._workers = workers
        self._journal = journal

    def collect(self) -> Iterable[Metric]:
        # most of a scrape is these: `add_metric` would make the labels of each anew, and take three times as long
        labelled = [(dict(zip(LABELS, _who(worker), strict=True)), worker) for worker in self._workers]
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.samples += [Sample(f"{name}_total", who, read(worker)) for who, worker in labelled]
            yield counter
        for name, text, read in (*GAUGES, *ADMISSION):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.samples += [Sample(name, who, read(worker)) for who, worker in labelled]
            yield gauge
        yield self._errors()
        yield self._refusals()
        yield self._durations()
        yield from self._moves()
        yield self._upstream_kv_events()
        if self._journal is not None:
            yield from _said(self._journal)
        yield from self.ranks()

    def _errors(self) -> Metric:
        text = "Streams that ended with an error."
        family = CounterMetricFamily("dynamo_component_errors", text, labels=(*LABELS, "error_type"))
        for worker in self._workers:
            counted = dict.fromkeys(ERRORS, 0) | worker.server.counters.errors  # an alert needs the zeros
            for reason, count in counted.items():
                family.add_metric([*_who(worker), reason], count)
        return family

    def _moves(self) -> Iterable[Metric]:
        moves = CounterMetricFamily(
            "holdfast_worker_moves",
            "Streams that moved with their KV cache, or were to: declined at once, failed later, committed.",
            labels=(*LABELS, "direction", "outcome"),
        )
        size = CounterMetricFamily(
            "holdfast_worker_moved_bytes",
            "Bytes of KV cache of committed moves, over all shards.",
            labels=(*LABELS, "direction"),
        )
        stops = HistogramMetricFamily(
            "holdfast_worker_move_stopped_seconds",
            "How long a stream that came had stopped, from its source's last step until it decoded here.",
            labels=LABELS,
        )
        for worker in self._workers:
            who, counters = _who(worker), worker.server.counters
            for direction, outcome in product(DIRECTIONS, OUTCOMES):
                moves.add_metric([*who, direction, outcome], counters.moves.get((direction, outcome), 0))
            for direction in DIRECTIONS:
                size.add_metric([*who, direction], counters.moved_bytes.get(direction, 0))
            stops.add_metric(who, _buckets(STOP_BOUNDS_S, counters.stops), counters.stop_sum_s)
        return moves, size, stops

    def _upstream_kv_events(self) -> Metric:
        family = CounterMetricFamily(
            "holdfast_worker_upstream_kv_events",
            "What was heard of an upstream's KV events, by what became of it (the openai engine).",
            labels=(*LABELS, "outcome"),
        )
        for worker in self._workers:
            counts: Mapping[str, int] = getattr(worker.engine, "kv_event_counts", {})
            for outcome, count in counts.items():
                family.add_metric([*_who(worker), outcome], count)
        return family

    def ranks(self) -> Iterable[Metric]:
        """Yield what each DP rank reports of its load."""
        labels = (*LABELS, "dp_rank")
        reported: list[tuple[dict[str, str], Any]] = []
        for worker in self._workers:
            stats: Callable[[], Sequence[Any]] = getattr(worker.engine, "stats", list)
            who = _who(worker)
            reported += [
                (dict(zip(labels, (*who, str(rank)), strict=True)), one) for rank, one in enumerate(stats())
            ]
        for field, text in RANKS:
            name, read = f"holdfast_worker_engine_{field}", attrgetter(field)
            family = GaugeMetricFamily(name, text, labels=labels)
            family.samples += [Sample(name, rank, read(one)) for rank, one in reported]
            yield family

    def _refusals(self) -> Metric:
        text = (
            "Connections that were broken at a bound: `connections`, `connections_of_address`, the same with `_unused` for a "
            "frontend's without a stream, `hello_wait`."
        )
        family = CounterMetricFamily("holdfast_worker_connection_refusals", text, labels=(*LABELS, "bound"))
        for worker in self._workers:
            counted = dict.fromkeys(CONNECTION_BOUNDS, 0) | worker.server.counters.connections_refused
            for bound, count in counted.items():
                family.add_metric([*_who(worker), bound], count)
        return family

    def _durations(self) -> Metric:
        name, text = "dynamo_component_request_duration_seconds", "From a request to its end."
        family = HistogramMetricFamily(name, text, labels=LABELS)
        for worker in self._workers:
            counters = worker.server.counters
            family.add_metric(
                _who(worker), _buckets(DURATION_BOUNDS_S, counters.durations), counters.duration_sum_s
            )
        return family


def _said(journal: SpeakingJournal) -> Iterable[Metric]:
    """Yield what the process cannot say; a process has one journal, however many workers are in it."""
    reachable = "1 while this process can write to the journal."
    yield GaugeMetricFamily("holdfast_journal_reachable", reachable, value=journal.reachable)
    waiting = "Facts of this process that the journal has not taken yet."
    yield GaugeMetricFamily("holdfast_spool_depth", waiting, value=journal.spool_depth)
    dropped = (
        "Facts that did not fit into the spool, lay there for a week, or that the broker will never take."
    )
    yield CounterMetricFamily("holdfast_facts_dropped", dropped, value=journal.counters.dropped)
    withheld = "Observations of kinds that are not in force in this fleet yet: they were not published."
    yield CounterMetricFamily("holdfast_facts_withheld", withheld, value=journal.counters.withheld)


_UNLIMITED = RequestLimit(0, 0)


def _requests(worker: InferenceWorker) -> RequestLimit:
    """Return who is inside a worker's engine, and who waits; nobody where that is not limited."""
    return worker.engine.requests if isinstance(worker.engine, LimitedEngine) else _UNLIMITED


def _who(worker: InferenceWorker) -> list[str]:
    return [worker.config.name, worker.engine.identity.model]


def _kv_used(load: Load) -> float:
    return load.kv_used / load.kv_total if load.kv_total else 0.0


def _buckets(upper: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    return list(zip(_bounds(tuple(upper)), map(float, accumulate(counts)), strict=True))


@cache
def _bounds(upper: tuple[float, ...]) -> tuple[str, ...]:
    return (*(f"{bound:g}" for bound in upper), "+Inf")


def health(workers: Sequence[InferenceWorker], stopping: bool) -> PageAnswer:
    """Say how the process's workers fare. Of many that do not stop, one that does not serve is between two lives."""
    states = {worker.config.name: _state(worker, stopping) for worker in workers}
    away = sum(not worker.serving.is_set() for worker in workers)
    if not away:
        status = "healthy"
    elif stopping:
        status = "shutting_down"
    else:
        status = "degraded" if away < len(workers) else "not_ready"
    body = msgspec.json.encode({"status": status, "workers": states})
    ready = status in ("healthy", "degraded")
    return PageAnswer(body, status=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _state(worker: InferenceWorker, stopping: bool) -> str:
    if not (stopping or worker.serving.is_set()):
        return "restarting"
    return "draining" if worker.server.draining else "serving"


async def serve(
    workers: Sequence[InferenceWorker],
    stopping: Callable[[], bool],
    host: str,
    port: int,
    generate: Callable[[Iterable[Metric], LabelSets], bytes] = written,
    journal: SpeakingJournal | None = None,
) -> tuple[Pages, str]:
    """Open the admin port; return what closes it, and its URL. Raise OSError if the port cannot be had.

    `stopping` says whether the process is on its way out; `generate` writes a family of metrics down.
    """

    def live() -> PageAnswer:
        return PageAnswer(b'{"status":"live"}')

    async def metrics() -> PageAnswer:
        parts, known = [], LabelSets()
        for family in WorkerMetrics(workers, journal).collect():  # a part at a time: streams go on in between
            if len(family.samples) > AT_ONCE_MAX:
                parts.append(await asyncio.to_thread(generate, (family,), known))
            else:
                parts.append(generate((family,), known))
                await asyncio.sleep(0)
        return PageAnswer(b"".join(parts), CONTENT_TYPE_LATEST)

    pages = Pages({"/health": lambda: health(workers, stopping()), "/live": live, "/metrics": metrics})
    bound = await pages.start(host, port)
    return pages, f"http://{host}:{bound}"
