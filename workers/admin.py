"""A worker process's admin port: /health, /live and /metrics. Imported after the worker serves: aiohttp takes its time."""

from collections.abc import Iterable, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from workers.counters import DURATION_BOUNDS_S
from workers.worker import Worker

SHUTDOWN_S = 0.2


class WorkerMetrics(Collector):
    """Reads the workers' plain counters when somebody scrapes; serving costs nothing for it."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        labels = ["worker_id", "model"]
        counted = {
            "requests": CounterMetricFamily("dynamo_component_requests", "Requests taken.", labels=labels),
            "cancelled": CounterMetricFamily(
                "dynamo_component_cancellation", "Streams nobody read.", labels=labels
            ),
            "tokens": CounterMetricFamily("holdfast_worker_tokens", "Tokens said.", labels=labels),
        }
        errors = CounterMetricFamily(
            "dynamo_component_errors", "Streams that ended with an error.", labels=[*labels, "error_type"]
        )
        durations = HistogramMetricFamily(
            "dynamo_component_request_duration_seconds", "From a request to its end.", labels=labels
        )
        gauges = {
            "in_flight": GaugeMetricFamily(
                "dynamo_component_inflight_requests", "Streams in the air.", labels=labels
            ),
            "waiting": GaugeMetricFamily(
                "holdfast_worker_waiting_requests", "Not yet in the batch.", labels=labels
            ),
            "kv": GaugeMetricFamily(
                "holdfast_worker_kv_used_ratio", "KV blocks in use, of all.", labels=labels
            ),
            "draining": GaugeMetricFamily(
                "holdfast_worker_draining", "1 while nothing new is taken.", labels=labels
            ),
        }
        for worker in self._workers:
            who = [worker.place.name, worker.engine.identity.model]
            counters, load = worker.server.counters, worker.engine.load()
            for name, family in counted.items():
                family.add_metric(who, getattr(counters, name))
            for reason, count in counters.errors.items():
                errors.add_metric([*who, reason], count)
            durations.add_metric(who, _buckets(counters.durations), counters.duration_sum_s)
            gauges["in_flight"].add_metric(who, worker.server.in_flight)
            gauges["waiting"].add_metric(who, load.waiting)
            gauges["kv"].add_metric(who, load.kv_used / load.kv_total if load.kv_total else 0.0)
            gauges["draining"].add_metric(who, worker.server.refusal is not None)
        return [*counted.values(), errors, durations, *gauges.values()]


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
