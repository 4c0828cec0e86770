"""A worker process's admin port: /health, /live and /metrics. Imported after the worker serves: aiohttp takes its time."""

from collections.abc import Callable, Iterable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from events.wire import ERRORS, Load
from workers.counters import DURATION_BOUNDS_S
from workers.worker import Worker

SHUTDOWN_S = 0.2


Read = Callable[[Worker], float]
LABELS = ("worker_id", "model")
COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("dynamo_component_requests", "Requests taken.", lambda w: w.server.counters.requests),
    ("dynamo_component_cancellation", "Streams that nobody read.", lambda w: w.server.counters.cancelled),
    ("holdfast_worker_tokens", "Tokens said.", lambda w: w.server.counters.tokens),
)
GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("dynamo_component_inflight_requests", "Streams in the air.", lambda w: w.server.in_flight),
    ("holdfast_worker_waiting_requests", "Not yet in the batch.", lambda w: w.engine.load().waiting),
    ("holdfast_worker_kv_used_ratio", "KV blocks in use, of all.", lambda w: _kv_used(w.engine.load())),
    ("holdfast_worker_draining", "1 while nothing new is taken.", lambda w: w.server.refusal is not None),
)


class WorkerMetrics(Collector):
    """Reads the workers' plain counters when somebody scrapes; serving costs nothing for it."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for worker in self._workers:
                counter.add_metric(_who(worker), read(worker))
            yield counter
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for worker in self._workers:
                gauge.add_metric(_who(worker), read(worker))
            yield gauge
        yield self._errors()
        yield self._durations()

    def _errors(self) -> Metric:
        text = "Streams that ended with an error."
        family = CounterMetricFamily("dynamo_component_errors", text, labels=(*LABELS, "error_type"))
        for worker in self._workers:
            counted = dict.fromkeys(ERRORS, 0) | worker.server.counters.errors  # an alert needs the zeros
            for reason, count in counted.items():
                family.add_metric([*_who(worker), reason], count)
        return family

    def _durations(self) -> Metric:
        name, text = "dynamo_component_request_duration_seconds", "From a request to its end."
        family = HistogramMetricFamily(name, text, labels=LABELS)
        for worker in self._workers:
            counters = worker.server.counters
            family.add_metric(_who(worker), _buckets(counters.durations), counters.duration_sum_s)
        return family


def _who(worker: Worker) -> list[str]:
    return [worker.place.name, worker.engine.identity.model]


def _kv_used(load: Load) -> float:
    return load.kv_used / load.kv_total if load.kv_total else 0.0


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*(f"{bound:g}" for bound in DURATION_BOUNDS_S), "+Inf"]
    total, cumulated = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        total += count
        cumulated.append((bound, float(total)))
    return cumulated


async def serve(workers: Sequence[Worker], host: str, port: int) -> tuple[web.AppRunner, str]:
    """Open the admin port; return what closes it, and its URL."""
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(workers))

    async def health(request: web.Request) -> web.Response:
        ready = all(worker.serving.is_set() for worker in workers)
        states = {w.place.name: "draining" if w.server.refusal else "serving" for w in workers}
        return web.json_response(
            {"status": "healthy" if ready else "shutting_down", "workers": states},
            status=200 if ready else 503,
        )

    async def live(request: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/health", health), web.get("/live", live), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    bound = runner.addresses[0][1]
    return runner, f"http://{host}:{bound}"
