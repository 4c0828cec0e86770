"""A frontend's metrics at each scrape: each worker's last answer, and plain counts."""

from frontend_kit import frontend
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from scripted_worker import ScriptedWorker

from controller.frontend.metrics import FrontendMetrics, LabelledHistogram, token_histogram
from events.decisions import HealthStatus
from events.observations import WorkerLeft

PROMPT = [11, 22, 33, 44, 55]
LAST = "dynamo_frontend_worker_last_"


async def test_metrics_show_each_workers_last_answer() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        await kit.complete(PROMPT[:2], 1)  # a single token says nothing about the time between tokens
        between = kit.counted(f"{LAST}inter_token_latency_seconds", "worker_id")
        assert set(between) == {("w1",)}
        assert kit.counted(f"{LAST}input_sequence_tokens", "worker_id") == {("w1",): 2}
        await kit.complete(PROMPT, 1)  # after a scrape
        assert kit.counted(f"{LAST}inter_token_latency_seconds", "worker_id") == between
        assert kit.counted(f"{LAST}input_sequence_tokens", "worker_id") == {("w1",): len(PROMPT)}


async def test_metrics_omit_the_last_answer_of_a_worker_that_left_before_the_scrape() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        assert 'worker_id="w1"' not in kit.director.render_metrics().decode()


def test_counts_of_requests_render_like_the_client_library_does() -> None:
    metrics = FrontendMetrics()
    requests = metrics.requests
    assert metrics.render() == generate_latest(metrics.registry), "nothing is counted yet"
    for name in ("z", 'a"\n', "z"):
        requests.ended.labels(name, "completions", "unary", "success", "").inc(9_999_999)
        requests.active.labels(name).inc()
    requests.active.labels("z").dec(2)
    assert metrics.render() == generate_latest(metrics.registry)
    text = metrics.render().decode()
    assert 'dynamo_frontend_active_requests{model="z"} 0.0' in text
    labels = 'endpoint="completions",error_type="",model="z",request_type="unary",status="success"'
    assert f"dynamo_frontend_requests_total{{{labels}}} 1.9999998e+07" in text


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40))
def test_a_noted_value_counts_like_an_added_one_at_any_scrape(
    values: list[tuple[float, bool]],
) -> None:
    row = token_histogram("h", "Says.", bounds=(0.5, 1, 30))
    noted, added = row.make(row), row.make(row)
    for value, looked_at in values:
        noted.of().note(value)
        added.of().add(value)
        if looked_at:
            assert list(noted.collect()) == list(added.collect())
    assert list(noted.collect()) == list(added.collect())


async def test_noted_values_do_not_pile_up_between_scrapes() -> None:
    async with frontend(ScriptedWorker()) as kit:
        await kit.complete(PROMPT, 4)
        kit.director.tick()
        metrics = kit.director.metrics
        tables = metrics.histograms, metrics.router
        rows = [(table, name, row) for table in tables for name, row in table.rows().items()]
        found = [vars(table)[name] for table, name, row in rows if row.labels == ("model",)]
        kept = [one.of("m") for one in found if isinstance(one, LabelledHistogram)]
        assert sum(sum(buckets.counts) for buckets in kept) > 3 and not any(one.noted for one in kept)
