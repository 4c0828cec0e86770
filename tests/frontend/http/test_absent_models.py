"""Errors for models without a worker: 503 if one is expected, 404 if no worker serves it or will."""

from datetime import UTC, datetime
from typing import Any

import pytest
from frontend_kit import Kit, frontend
from scripted_worker import ScriptedWorker

from events.decisions import HealthStatus, WorkerForgotten
from events.observations import WorkerAwaited, WorkerJoined, WorkerLeft


async def asked(kit: Kit, model: str) -> set[tuple[int, str, bool]]:
    """Request a model on every path that accepts one. Return status, code, and whether there is a Retry-After."""
    found = set()
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", chat),
        ("/tokenize", {"prompt": "a"}),
    ):
        status, answer, headers = await kit.post(path, model=model, **body)
        found.add((status, answer["error"]["code"], "Retry-After" in headers))
    async with kit.http.get(f"{kit.url}/v1/models/{model}") as answer:
        code = (await answer.json())["error"]["code"]
        found.add((answer.status, code, "Retry-After" in answer.headers))
    return found


ABSENT = {(503, "no_routable_worker", True)}
UNKNOWN = {(404, "model_not_found", False)}


def awaited(worker: str = "w7", instance: str = "i7", **more: Any) -> WorkerAwaited:
    return WorkerAwaited(worker=worker, instance=instance, reason="cannot connect to http://u", **more)


async def test_an_awaited_model_is_a_503_and_unknown_ones_are_a_404() -> None:
    async with frontend(ScriptedWorker()) as kit:
        assert await asked(kit, "llama") == UNKNOWN
        kit.tell(awaited(model="llama"))
        assert await asked(kit, "llama") == ABSENT
        assert await asked(kit, "other") == UNKNOWN
        async with kit.http.get(kit.url + "/v1/models") as answer:
            assert [one["id"] for one in (await answer.json())["data"]] == ["m"]
        kit.tell(WorkerLeft(worker="w7", instance="i7", mode="graceful", exit=0))
        assert await asked(kit, "llama") == UNKNOWN


async def test_no_model_is_unknown_while_an_awaited_worker_has_not_reported_its_models() -> None:
    async with frontend() as kit:
        kit.tell(awaited())
        status, answer, headers = await kit.post("/v1/completions", model="llama", prompt="a")
        assert (status, headers["Retry-After"]) == (503, str(kit.director.settings.retry_after_s))
        said = "no worker serves the model 'llama'; w7 is starting and has not reported its models yet"
        assert answer["error"]["message"] == said
        assert await asked(kit, "llama") == ABSENT
        await kit.add(ScriptedWorker("w7", "i8"))
        assert await asked(kit, "llama") == UNKNOWN


@pytest.mark.parametrize("while_awaited", [False, True])
async def test_a_model_of_dead_workers_is_a_503_until_they_are_forgotten(
    while_awaited: bool,
) -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.add(ScriptedWorker("w2"), model="other")
        kit.director.render_metrics()
        kit.tell(WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=137))
        kit.health(worker, HealthStatus.DEAD, 0.0)
        assert await asked(kit, "m") == ABSENT
        if while_awaited:
            kit.tell(awaited("w1", "i2"))
        kit.tell(WorkerForgotten(worker="w1", instance="i1", decided_at=datetime.now(UTC)))
        assert await asked(kit, "m") == (ABSENT if while_awaited else UNKNOWN)
        gauges = ("dynamo_frontend_queued_requests", "dynamo_frontend_model_total_kv_blocks")
        shown = kit.director.render_metrics().decode()
        assert [f'{one}{{model="m"}}' in shown for one in gauges] == [while_awaited] * 2


async def test_no_model_is_unknown_while_a_fleet_is_starting() -> None:
    async with frontend() as kit:
        assert await asked(kit, "llama") == {(503, "starting", True)}


async def test_a_frontend_that_starts_later_knows_the_same() -> None:
    """The knowledge is in the fold, not in the memory of a process."""
    async with frontend() as kit:
        kit.tell(awaited(model="llama"))
        fleet = kit.fleet
    async with frontend() as kit:
        kit.fleet = fleet
        kit.director.absorb(fleet, ())
        assert await asked(kit, "llama") == ABSENT
        assert not [fact for fact in kit.facts if isinstance(fact, WorkerJoined)]
