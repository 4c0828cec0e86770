"""The HTTP server of a worker process's admin port: /health, /live and /metrics.

This module is not imported before all workers of the process serve frontends.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate, product

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

from events.journal.counters import ObservedJournal
from events.json_types import Json
from events.process.admin_guard import own_hosts, refusal
from events.process.exposition import LARGE_BYTES, LabelSets, packed, written
from events.wire import ERRORS, Load
from workers.counters import (
    CONNECTION_BOUNDS,
    DIRECTIONS,
    DURATION_BOUNDS_S,
    OUTCOMES,
    STOP_BOUNDS_S,
    WorkerCounters,
)
from workers.engines.admission import LimitedEngine, RequestLimit
from workers.listen_socket import listening
from workers.worker import InferenceWorker

REQUEST_BYTES_MAX = 16 * 1024
REQUEST_S_MAX = 5.0
CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class PageAnswer:
    """The HTTP response of one URL path, such as /health."""

    body: bytes
    type: str = "application/json; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


Page = Callable[[], PageAnswer | Awaitable[PageAnswer]]


class Pages:
    """A minimal HTTP server, which answers GET and HEAD requests for a few URL paths.

    Each connection carries one request.
    A web framework is not used, because it would take a third of a worker's memory.
    """

    def __init__(self, pages: Mapping[str, Page], request_s_max: float = REQUEST_S_MAX) -> None:
        """Build a server. `pages` maps each URL path to the function that returns its response.

        A request and its response together may take at most `request_s_max` seconds.
        """
        self._request_s_max = request_s_max
        self._pages = pages
        self._hosts = own_hosts()
        self._server: asyncio.Server | None = None
        self._open = 0
        # connections without a request yet, oldest first
        self._waiting: dict[asyncio.StreamWriter, None] = {}

    async def start(self, host: str, port: int) -> int:
        """Listen on a TCP port, and return the port's number. Raise OSError if the port cannot be bound."""
        sock = listening(host, port)
        self._server = await asyncio.start_server(self._serve, sock=sock, limit=REQUEST_BYTES_MAX)
        return int(sock.getsockname()[1])

    def close(self) -> None:
        """Stop listening. Responses that are being written are finished."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self._waiting[writer] = None
        try:
            if self._open <= CONNECTIONS_MAX or self._abort_oldest_waiting():
                async with asyncio.timeout(self._request_s_max):
                    head = await reader.readuntil(b"\r\n\r\n")
                    self._waiting.pop(writer, None)
                    answer = await self._answer(head)
                    body, coded = answer.body, dict[str, str]()
                    if len(body) >= LARGE_BYTES:
                        body, coded = await asyncio.to_thread(packed, body, _accepts(head))
                    writer.write(_encode(answer, body, coded, head.startswith(b"HEAD ")))
                    await writer.drain()
            writer.close()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # not a request, or its client is gone
        finally:
            self._open -= 1
            self._waiting.pop(writer, None)

    def _abort_oldest_waiting(self) -> bool:
        """Abort the oldest connection that has sent no request yet, and return True.

        Return False if every connection except the newest has sent a request. The newest is never aborted here.
        """
        first = next(iter(self._waiting))
        if len(self._waiting) > 1:
            del self._waiting[first]
            first.transport.abort()
            return True
        return False

    async def _answer(self, head: bytes) -> PageAnswer:
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if why := refusal(_headers(head), self._hosts):
            return PageAnswer(f"{why}\n".encode(), "text/plain; charset=utf-8", HTTPStatus.FORBIDDEN)
        page = self._pages.get(rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1"))
        if method not in (b"GET", b"HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        if page is None:
            return _error(HTTPStatus.NOT_FOUND)
        answer = page()
        return answer if isinstance(answer, PageAnswer) else await answer


def _error(status: HTTPStatus) -> PageAnswer:
    return PageAnswer(f"{status.phrase}\n".encode(), "text/plain; charset=utf-8", status)


def _headers(head: bytes) -> dict[str, str]:
    """Return a request's Host, Origin and Sec-Fetch-Site headers, which show whether a foreign web page sent it.

    `head` holds the request line and all headers. The result has no entry for a header that the request lacks.
    """
    lines = (line.decode("latin-1").partition(":") for line in head.split(b"\r\n")[1:])
    found = {name.strip().lower(): value.strip() for name, _, value in lines}
    return {
        name: found[name.lower()] for name in ("Host", "Origin", "Sec-Fetch-Site") if name.lower() in found
    }


def _accepts(head: bytes) -> str:
    """Return the values of a request's Accept-Encoding headers, joined by commas."""
    names = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return ",".join(
        value.decode("latin-1") for name, _, value in names if name.strip().lower() == b"accept-encoding"
    )


def _encode(answer: PageAnswer, body: bytes, coded: Mapping[str, str], head_only: bool) -> bytes:
    more = "".join(f"{name}: {value}\r\n" for name, value in coded.items())
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.type}\r\n{more}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)


Read = Callable[[InferenceWorker], float]
Labels = tuple[str, ...]
LABELS = ("worker_id", "model")
INLINE_SAMPLES_MAX = 1000  # a larger metric family takes over 2 ms to render, so it is rendered in a thread
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        "dynamo_component_requests",
        "Accepted requests; canaries count only if they are not marked as such.",
        lambda w: w.server.counters.requests,
    ),
    (
        "dynamo_component_cancellation",
        "Streams that no frontend read any more.",
        lambda w: w.server.counters.cancelled,
    ),
    ("holdfast_worker_tokens", "Tokens generated.", lambda w: w.server.counters.tokens),
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
    (
        "holdfast_worker_kv_events",
        "KV events published to the broker.",
        lambda w: w.kv.published if w.kv else 0,
    ),
    (
        "holdfast_worker_kv_events_lost",
        "KV events that could not be published to the broker.",
        lambda w: w.kv.dropped if w.kv else 0,
    ),
)
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("dynamo_component_inflight_requests", "Open streams.", lambda w: w.server.in_flight),
    ("holdfast_worker_waiting_requests", "Requests not yet in the batch.", lambda w: w.engine.load().waiting),
    (
        "holdfast_worker_kv_used_ratio",
        "Share of KV blocks in use (0 to 1).",
        lambda w: _kv_used(w.engine.load()),
    ),
    (
        "holdfast_worker_kv_cached_blocks",
        "KV blocks announced to frontends.",
        lambda w: w.kv.blocks if w.kv else 0,
    ),
    (
        "holdfast_worker_upstream_closed_seconds",
        "Seconds for which the worker accepts no new requests, after a Retry-After of its upstream.",
        lambda w: w.engine.load().closed_s,
    ),
    ("holdfast_worker_moving_out", "Streams moving to another worker.", lambda w: len(w.server.moves.source)),
    (
        "holdfast_worker_moving_in",
        "Streams arriving from another worker.",
        lambda w: len(w.server.moves.target),
    ),
    (
        "holdfast_worker_draining",
        "1 while the worker accepts no new requests.",
        lambda w: w.server.drain.draining,
    ),
    # requests under the worker's own limit (`--engine-request-limit`), with Dynamo's metric names; 0 without a limit
    (
        "dynamo_engine_request",
        "Requests inside the engine, if their number is limited.",
        lambda w: len(_requests(w).inside),
    ),
    ("dynamo_request_queue", "Requests that wait to enter the engine.", lambda w: _requests(w).waiting),
)
COUNTS: tuple[tuple[str, str, tuple[str, ...], Callable[[InferenceWorker], Mapping[Labels, int]]], ...] = (
    (
        "dynamo_component_errors",
        "Streams that ended with an error.",
        ("error_type",),
        # an alert needs a sample of each error before its first
        lambda w: _from_zero(ERRORS, w.server.counters.errors),
    ),
    (
        "holdfast_worker_connection_refusals",
        "Connections closed at a limit: `connections`, `connections_of_address`, the same with `_unused` for a "
        "frontend without a stream, `hello_wait`.",
        ("bound",),
        lambda w: _from_zero(CONNECTION_BOUNDS, w.server.counters.connections_refused),
    ),
    (
        "holdfast_worker_moves",
        "Planned moves of streams with their KV cache: declined at once, failed later, or committed.",
        ("direction", "outcome"),
        lambda w: _moves(w.server.counters),
    ),
    (
        "holdfast_worker_moved_bytes",
        "KV cache bytes of committed moves, over all shards.",
        ("direction",),
        lambda w: _from_zero(DIRECTIONS, w.server.counters.moved_bytes),
    ),
    (
        "holdfast_worker_upstream_kv_events",
        "KV events received from an upstream, by outcome (openai engine).",
        ("outcome",),
        lambda w: _from_zero((), getattr(w.engine, "kv_event_counts", {})),
    ),
)
HISTOGRAMS: tuple[
    tuple[str, str, tuple[float, ...], Callable[[WorkerCounters], tuple[list[int], float]]], ...
] = (
    (
        "dynamo_component_request_duration_seconds",
        "Duration of a request, in seconds.",
        DURATION_BOUNDS_S,
        lambda counters: (counters.durations, counters.duration_sum_s),
    ),
    (
        "holdfast_worker_move_stopped_seconds",
        "Pause of an arriving stream, from its source's last step until it decoded here.",
        STOP_BOUNDS_S,
        lambda counters: (counters.stops, counters.stop_sum_s),
    ),
)
# The load metrics of each DP rank of a simulated engine, with the names that real engines use.
RANKS = {
    "request_active_slots": "Requests in the batch, per DP rank (simulated engine).",
    "request_total_slots": "Capacity of the batch, in requests.",
    "num_requests_waiting": "Requests not yet in the batch.",
    "kv_active_blocks": "KV blocks held by requests.",
    "kv_total_blocks": "KV blocks in total.",
    "gpu_cache_usage_perc": "Share of KV blocks held by requests (0 to 1).",
    "gpu_prefix_cache_hit_rate": "Share of prompt tokens found in the prefix cache by recently admitted requests (0 to 1).",
    "num_preemptions": "Preemptions so far: requests returned to the queue because KV blocks ran out.",
    "scheduled_num_prefill_requests": "Prefill requests in the newest pass.",
    "scheduled_sum_prefill_tokens": "Prompt tokens computed by the newest pass.",
    "scheduled_var_prefill_length": "Variance of the prefill prompts' lengths, as far as computed after the newest pass.",
    "scheduled_sum_prefill_kv_tokens": "Tokens of the prefill prompts that were computed before the newest pass.",
    "scheduled_num_decode_requests": "Decode requests in the newest pass.",
    "scheduled_sum_decode_kv_tokens": "Tokens of the decode requests in the newest pass.",
    "scheduled_var_decode_kv_tokens": "Variance of the decode requests' lengths in the newest pass.",
    "queued_num_prefill_requests": "Waiting requests without output.",
    "queued_sum_prefill_tokens": "Tokens of the waiting requests without output.",
    "queued_var_prefill_length": "Variance of the lengths of the waiting requests without output.",
    "queued_num_decode_requests": "Waiting requests that were preempted.",
    "queued_sum_decode_kv_tokens": "Tokens of the waiting requests that were preempted.",
    "queued_var_decode_kv_tokens": "Variance of the lengths of the waiting requests that were preempted.",
    "wall_time": "Duration of the newest pass, in seconds.",
}


class WorkerMetrics(Collector):
    """Reads the workers' counters at scrape time. Between scrapes, this class does no work."""

    def __init__(self, workers: Sequence[InferenceWorker], journal: ObservedJournal | None = None) -> None:
        self._workers = workers
        self._journal = journal

    def collect(self) -> Iterable[Metric]:
        # counters and gauges are most of a scrape, and `add_metric` would take three times as long to build their labels
        labelled = [(dict(zip(LABELS, _labels(worker), strict=True)), worker) for worker in self._workers]
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.samples += [Sample(f"{name}_total", labels, read(worker)) for labels, worker in labelled]
            yield counter
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.samples += [Sample(name, labels, read(worker)) for labels, worker in labelled]
            yield gauge
        for name, text, more, counts in COUNTS:
            family = CounterMetricFamily(name, text, labels=(*LABELS, *more))
            for labels, worker in labelled:
                for values, count in counts(worker).items():
                    family.add_metric([*labels.values(), *values], count)
            yield family
        for name, text, bounds, read_buckets in HISTOGRAMS:
            histogram = HistogramMetricFamily(name, text, labels=LABELS)
            upper = [*(f"{bound:g}" for bound in bounds), "+Inf"]
            for labels, worker in labelled:
                buckets, total = read_buckets(worker.server.counters)
                cumulated = list(zip(upper, map(float, accumulate(buckets)), strict=True))
                histogram.add_metric([*labels.values()], cumulated, total)
            yield histogram
        if self._journal is not None:
            yield from _journal_metrics(self._journal)
        yield from self.ranks()

    def ranks(self) -> Iterable[Metric]:
        """Yield the load metrics of each DP rank. The metrics have samples only for simulated engines."""
        names = (*LABELS, "dp_rank")
        reported: list[tuple[dict[str, str], dict[str, float]]] = []
        for worker in self._workers:
            stats: Callable[[], Sequence[dict[str, float]]] = getattr(worker.engine, "stats", list)
            labels = _labels(worker)
            reported += [
                (dict(zip(names, (*labels, str(rank)), strict=True)), one) for rank, one in enumerate(stats())
            ]
        for field, text in RANKS.items():
            name = f"holdfast_worker_engine_{field}"
            family = GaugeMetricFamily(name, text, labels=names)
            family.samples += [Sample(name, rank, one[field]) for rank, one in reported]
            yield family


def _journal_metrics(journal: ObservedJournal) -> Iterable[Metric]:
    """Yield the metrics of the journal, which all workers of the process share."""
    reachable = "1 while this process can write to the journal."
    yield GaugeMetricFamily("holdfast_journal_reachable", reachable, value=journal.reachable)
    waiting = "Facts of this process that the journal has not accepted yet."
    yield GaugeMetricFamily("holdfast_spool_depth", waiting, value=journal.spool_depth)
    dropped = (
        "Facts dropped: the spool was full, they were in it for a week, or the broker will never accept them."
    )
    yield CounterMetricFamily("holdfast_facts_dropped", dropped, value=journal.counters.dropped)
    withheld = "Observations not published because their kinds are not yet in force in this fleet."
    yield CounterMetricFamily("holdfast_facts_withheld", withheld, value=journal.counters.withheld)


_UNLIMITED = RequestLimit(0, 0)


def _requests(worker: InferenceWorker) -> RequestLimit:
    """Return the request limit of a worker's engine, which counts running, waiting and refused requests.

    For an engine without a limit, the counts are 0.
    """
    return worker.engine.requests if isinstance(worker.engine, LimitedEngine) else _UNLIMITED


def _from_zero(known: Iterable[str], counts: Mapping[str, int]) -> dict[Labels, int]:
    """Return `counts`, with a count of 0 for each value in `known` that `counts` lacks.

    Each key of the result is a tuple of one label value.
    """
    return {(value,): count for value, count in (dict.fromkeys(known, 0) | dict(counts)).items()}


def _moves(counters: WorkerCounters) -> dict[Labels, int]:
    return {key: counters.moves.get(key, 0) for key in product(DIRECTIONS, OUTCOMES)}


def _labels(worker: InferenceWorker) -> list[str]:
    return [worker.config.name, worker.engine.identity.model]


def _kv_used(load: Load) -> float:
    return load.kv_used / load.kv_total if load.kv_total else 0.0


def health(workers: Sequence[InferenceWorker], stopping: bool) -> PageAnswer:
    """Return the response of /health for a process's workers.

    The HTTP status is 503 if no worker serves, or if the process is `stopping` and at least one worker no longer serves.
    Otherwise the status is 200.

    While the process is not stopping, a worker that does not serve is reported as "restarting".
    """
    states = {worker.config.name: _state(worker, stopping) for worker in workers}
    not_serving = sum(not worker.serving.is_set() for worker in workers)
    if not not_serving:
        status = "healthy"
    elif stopping:
        status = "shutting_down"
    else:
        status = "degraded" if not_serving < len(workers) else "not_ready"
    body = msgspec.json.encode({"status": status, "workers": states})
    ready = status in ("healthy", "degraded")
    return PageAnswer(body, status=HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)


def _state(worker: InferenceWorker, stopping: bool) -> str:
    if not (stopping or worker.serving.is_set()):
        return "restarting"
    return "draining" if worker.server.drain.draining else "serving"


async def serve(
    workers: Sequence[InferenceWorker],
    stopping: Callable[[], bool],
    host: str,
    port: int,
    generate: Callable[[Iterable[Metric], LabelSets], bytes] = written,
    journal: ObservedJournal | None = None,
    upstreams: Callable[[], Json] | None = None,
) -> tuple[Pages, str]:
    """Open the admin port, and return its server and URL. Raise OSError if the port cannot be bound.

    `stopping` returns whether the process is shutting down. `generate` renders metric families as text. `upstreams` returns the
    body of /upstreams, for a process with a file of upstreams.
    """

    async def metrics() -> PageAnswer:
        parts, known = [], LabelSets()
        # one family at a time, so that the event loop sends streams' output in between
        for family in WorkerMetrics(workers, journal).collect():
            if len(family.samples) > INLINE_SAMPLES_MAX:
                parts.append(await asyncio.to_thread(generate, (family,), known))
            else:
                parts.append(generate((family,), known))
                await asyncio.sleep(0)
        return PageAnswer(b"".join(parts), CONTENT_TYPE_LATEST)

    live = PageAnswer(b'{"status":"live"}')
    paths: dict[str, Page] = {
        "/health": lambda: health(workers, stopping()),
        "/live": lambda: live,
        "/metrics": metrics,
    }
    if upstreams is not None:
        paths["/upstreams"] = lambda: PageAnswer(msgspec.json.encode(upstreams()))
    pages = Pages(paths)
    bound = await pages.start(host, port)
    return pages, f"http://{host}:{bound}"
