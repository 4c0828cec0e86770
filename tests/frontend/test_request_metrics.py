"""What a frontend's metrics say whenever somebody looks: of each worker's last answer, and of what is counted plainly."""

from frontend_kit import frontend
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from scripted_worker import ScriptedWorker

from controller.frontend.metric_kinds import LabelledCount, LabelledHistogram
from events.decisions import HealthStatus
from events.observations import WorkerLeft

PROMPT = [11, 22, 33, 44, 55]
LAST = "dynamo_frontend_worker_last_"


async def test_metrics_show_each_workers_last_answer() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        await kit.complete(PROMPT[:2], 1)  # a single token says nothing of the time between tokens
        between = kit.counted(f"{LAST}inter_token_latency_seconds", "worker_id")
        assert set(between) == {("w1",)}
        assert kit.counted(f"{LAST}input_sequence_tokens", "worker_id") == {("w1",): 2}
        await kit.complete(PROMPT, 1)  # after somebody has looked
        assert kit.counted(f"{LAST}inter_token_latency_seconds", "worker_id") == between
        assert kit.counted(f"{LAST}input_sequence_tokens", "worker_id") == {("w1",): len(PROMPT)}


async def test_metrics_show_no_last_answer_of_a_worker_that_went_before_anybody_looked() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="crashed", exit=-9))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        assert 'worker_id="w1"' not in kit.director.render_metrics().decode()


def test_what_is_counted_with_each_request_reads_as_the_client_librarys_own_metrics() -> None:
    disable_created_metrics()
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    counter, gauge = (
        Counter("c", "Says.", ("a", "b"), registry=theirs),
        Gauge("g", "So.", ("a",), registry=theirs),
    )
    count = LabelledCount(CounterMetricFamily, "c", "Says.", ("a", "b"))
    level = LabelledCount(GaugeMetricFamily, "g", "So.", ("a",))
    ours.register(count)
    ours.register(level)
    assert generate_latest(ours) == generate_latest(theirs), "nothing was counted yet"
    for name in ("z", 'a"\n', "z"):
        counter.labels(name, "").inc(9_999_999)
        count.add(9_999_999, name, "")
        gauge.labels(name).inc()
        level.add(1, name)
    gauge.labels("z").dec(2)
    level.add(-2, "z")
    assert generate_latest(ours) == generate_latest(theirs)


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40))
def test_a_noted_value_counts_as_an_added_one_whenever_somebody_looks(
    values: list[tuple[float, bool]],
) -> None:
    noted, added = (LabelledHistogram("h", "Says.", (0.5, 1, 30), ()) for _ in range(2))
    for value, looked_at in values:
        noted.of().note(value)
        added.of().add(value)
        if looked_at:
            assert list(noted.collect()) == list(added.collect())
    assert list(noted.collect()) == list(added.collect())


async def test_what_was_noted_does_not_pile_up_until_somebody_looks() -> None:
    async with frontend(ScriptedWorker()) as kit:
        await kit.complete(PROMPT, 4)
        kit.director.tick()
        metrics = kit.director.metrics
        tables = metrics.histograms, metrics.router
        kept = [
            one.of("m")
            for table in tables
            for one in table.labelled("model")
            if isinstance(one, LabelledHistogram)
        ]
        assert sum(sum(buckets.counts) for buckets in kept) > 3 and not any(one.pending for one in kept)
