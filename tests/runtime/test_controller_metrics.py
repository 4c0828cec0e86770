"""The controller's metrics: the folded fleet, and facts as they arrive."""

from datetime import UTC, datetime

from canary_world import World
from prometheus_client.parser import text_string_to_metric_families

from controller.metrics import REASONS, ControllerMetrics, FleetCollector
from controller.runtime.beats import Beats
from events.fact import Observation
from events.observations import (
    CanaryFailed,
    CanarySlow,
    DrainRequested,
    RequestMigrated,
    WorkerAwaited,
    WorkerLeft,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Scraped:
    """A world with metrics."""

    def __init__(self, cardinality: str = "full") -> None:
        self.world = World()
        self.metrics = ControllerMetrics(cardinality)  # type: ignore[arg-type]
        self.beats = Beats(self.world.clock)
        own = {"leader": 1.0, "spool_depth": 7.0, "appends": 3.0, "journal_full_in_seconds": None}
        self.metrics.registry.register(FleetCollector(lambda: self.world.fleet, self.beats, lambda: own))
        self.world.listen(lambda view, batch: self.metrics.count(batch))

    def say(self, *facts: Observation) -> None:
        for fact in facts:
            self.world.journal.observe(fact)
        self.world.turn()

    def value(self, name: str, **labels: str) -> float | None:
        found = self.samples(name)
        return found.get(tuple(sorted(labels.items())))

    def samples(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        families = text_string_to_metric_families(self.metrics.render().decode())
        return {
            tuple(sorted(s.labels.items())): s.value for f in families for s in f.samples if s.name == name
        }


def failed(worker: str, reason: str) -> CanaryFailed:
    return CanaryFailed(
        worker=worker,
        instance=f"{worker}-1",
        canary_key="k",
        canary="c",
        check_type="scheduled",
        sent_under=0,
        sent_at=NOW,
        latency_ms=5.0,
        reason=reason,  # type: ignore[arg-type]
        confirmed=False,
    )


def migrated(source: str, target: str, method: str = "reprefill") -> RequestMigrated:
    return RequestMigrated(
        frontend="f",
        request="r",
        model="m",
        source=source,
        source_instance="i",
        target=target,
        target_instance="i",
        cause="disconnected",
        method=method,  # type: ignore[arg-type]
        tokens=5,
        gap_ms=12.0,
        attempt=2,
        exact=True,
    )


def test_every_reason_exists_at_zero_when_a_worker_joins() -> None:
    s = Scraped()
    s.world.join("w1")
    for reason in REASONS:
        assert s.value("dynamo_canary_failures_total", worker_id="w1", reason=reason) == 0.0
    assert len(REASONS) == 7
    fresh = Scraped()
    fresh.metrics.set_workers(s.world.fleet)  # a controller that starts from a snapshot
    assert fresh.value("dynamo_canary_failures_total", worker_id="w1", reason="timeout") == 0.0


def test_failures_are_counted_by_reason_and_a_slow_probe_is_a_latency_spike() -> None:
    s = Scraped()
    s.world.join("w1")
    slow = CanarySlow(
        worker="w1", instance="w1-1", canary_key="k", canary="c", check_type="scheduled", sent_under=0,
        sent_at=NOW, latency_ms=500.0, baseline_ms=100.0,
    )  # fmt: skip
    s.say(failed("w1", "timeout"), failed("w1", "timeout"), failed("w1", "token_mismatch"), slow)
    assert s.value("dynamo_canary_failures_total", worker_id="w1", reason="timeout") == 2.0
    assert s.value("dynamo_canary_failures_total", worker_id="w1", reason="token_mismatch") == 1.0
    assert s.value("dynamo_canary_failures_total", worker_id="w1", reason="latency_spike") == 1.0


def test_b27_the_state_is_one_hot_and_dead_workers_are_kept() -> None:
    s = Scraped()
    for name in ("w1", "w2", "w3"):
        s.world.join(name)
    s.say(
        WorkerLeft(worker="w2", instance="w2-1", mode="immediate", exit=-9),
        DrainRequested(worker="w3", instance="w3-1", deadline_s=60),
    )
    states = s.samples("dynamo_worker_state")
    assert len(states) == 15
    for name, state, number in (("w1", "suspicious", 1), ("w2", "dead", 4), ("w3", "draining", 3)):
        hot = [labels for labels, value in states.items() if value and ("worker_id", name) in labels]
        assert hot == [(("state", state), ("worker_id", name))]
        assert s.value("dynamo_worker_status", worker_id=name, tp_group=name) == number
    assert s.value("holdfast_workers_registered") == 2.0
    assert s.value("holdfast_workers_reporting") == 0.0


async def test_the_health_of_a_probed_fleet_is_exposed() -> None:
    s = Scraped()
    s.world.join("w1")
    async with s.world.running():
        await s.world.pass_time(3)
    assert s.value("dynamo_worker_status", worker_id="w1", tp_group="w1") == 0.0
    assert s.value("dynamo_circuit_breaker_state", worker_id="w1") == 0.0
    assert s.value("holdfast_worker_weight", worker_id="w1") == 1.0
    assert s.value("holdfast_model_routable_weight", model="m") == 1.0
    assert s.value("dynamo_degradation_level") == 0.0
    assert s.value("holdfast_degradation_level", model="m") == 0.0


async def test_ready_spares_and_empty_places_are_counted() -> None:
    s = Scraped()
    s.world.join("w1")
    s.world.join("w2")
    s.world.join("s1", spare=True)
    async with s.world.running():
        await s.world.pass_time(3)
        assert s.value("holdfast_spares_ready", model="m") == 1.0
        assert s.value("holdfast_places_empty", model="m") == 0.0
        assert s.value("holdfast_model_routable_weight", model="m") == 2.0
        for worker in ("w1", "w2"):
            s.say(WorkerLeft(worker=worker, instance=f"{worker}-1", mode="immediate", exit=-9))
        await s.world.pass_time(3)
    assert s.value("holdfast_spares_ready", model="m") == 0.0
    assert s.value("holdfast_places_empty", model="m") == 1.0
    assert s.value("holdfast_model_routable_weight", model="m") == 1.0


def test_n07_the_cost_of_canaries_is_published() -> None:
    s = Scraped()
    s.metrics.count_probe("w1", "join", 0.2)
    s.metrics.count_probe("w1", "confirm", 0.3)
    s.metrics.spent("w1", 0.5)
    s.metrics.late(0.25)
    assert s.value("holdfast_canary_gpu_seconds_total", worker_id="w1") == 0.5
    assert s.value("dynamo_health_check_duration_seconds_count", worker_id="w1", check_type="join") == 1.0
    assert s.value("dynamo_health_check_duration_seconds_sum", worker_id="w1", check_type="confirm") == 0.3
    assert s.value("holdfast_canary_lateness_seconds") == 0.25


def test_migrations_are_counted_by_pair() -> None:
    s = Scraped()
    s.say(migrated("w1", "w2"), migrated("w1", "w2"), migrated("w2", "w3", "transfer"))
    pair = {"source_group": "w1", "target_group": "w2", "method": "reprefill"}
    assert s.value("dynamo_migration_total", **pair) == 2.0
    assert s.value("dynamo_migration_duration_seconds_count", method="reprefill") == 2.0
    assert s.value("dynamo_migration_duration_seconds_count", method="transfer") == 1.0


def test_b29_compact_bounds_the_number_of_series_for_any_fleet() -> None:
    s = Scraped("compact")
    for n in range(50):
        s.say(migrated(f"w{n}", f"w{n + 1}"))
        s.metrics.count_probe(f"w{n}", "scheduled", 0.1)
        s.metrics.spent(f"w{n}", 0.1)
    assert s.samples("dynamo_migration_total") == {
        (("method", "reprefill"), ("source_group", "all"), ("target_group", "all")): 50.0
    }
    assert len(s.samples("dynamo_health_check_duration_seconds_count")) == 1
    assert len(s.samples("holdfast_canary_gpu_seconds_total")) == 1


async def test_a_forgotten_workers_series_end_and_a_late_fact_starts_none() -> None:
    s = Scraped()
    for name in ("w1", "w2"):
        s.world.join(name)
        s.metrics.count_probe(name, "scheduled", 0.1)
        s.metrics.spent(name, 0.1)
    s.say(failed("w1", "timeout"), migrated("w1", "w2"), migrated("w2", "w1"))
    assert "w1" in s.metrics.render().decode()
    s.say(WorkerLeft(worker="w1", instance="w1-1", mode="graceful", exit=0))
    await s.world.pass_time(601)
    s.world.turn()
    assert "w1" not in s.world.fleet.workers
    s.metrics.set_workers(s.world.fleet)
    s.say(failed("w1", "timeout"))
    said = s.metrics.render().decode()
    assert "w1" not in said and 'worker_id="w2"' in said


def test_awaited_workers_are_counted() -> None:
    s = Scraped()
    s.say(WorkerAwaited(worker="w1", instance="w1-1", reason="it is loading"))
    assert s.value("holdfast_workers_awaited") == 1.0
    s.world.join("w1")
    assert s.value("holdfast_workers_awaited") == 0.0


def test_process_metrics_are_exported_without_created_series() -> None:
    s = Scraped()
    assert s.value("holdfast_leader") == 1.0
    assert s.value("holdfast_spool_depth") == 7.0
    assert s.value("holdfast_appends_total") == 3.0
    assert s.value("holdfast_facts_dropped_total") == 0.0
    assert s.value("holdfast_journal_full_in_seconds") is None, "an unknown value is not exported as 0"
    assert "_created" not in s.metrics.render().decode()
