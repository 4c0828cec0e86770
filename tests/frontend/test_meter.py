"""What a frontend's gauges say of each worker's last answer, whenever somebody looks."""

from frontend_kit import frontend
from scripted_worker import ScriptedWorker

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
        assert 'worker_id="w1"' not in kit.desk.render_metrics().decode()
