"""Requests for LoRA adapters: which workers get them, also after failures, moves, loads and unloads."""

import asyncio
from collections.abc import Collection
from typing import Any

from frontend_kit import Kit, failing, frontend, keep_busy, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from events.blocks import BlockNames, seed
from events.observations import (
    AdaptersChanged,
    DrainRequested,
    RequestFailed,
    RequestMigrated,
    RequestsRejected,
)
from events.proxied_paths import PATHS

PROMPT = [300, 301, 302]
NOT_SERVING = "not_serving: this worker does not have the adapter of the request"


def text(prompt: list[int], count: int) -> str:
    return load_tokens(BUILTIN).decode(undisturbed(prompt, count))


async def ask(kit: Kit, model: str = "sql", **more: Any) -> tuple[int, Any]:
    """Return status and body of a completion."""
    body: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 4} | more
    status, answer, _ = await kit.post("/v1/completions", **body)
    return status, answer


async def cancel(asked: Collection[asyncio.Future[Any]]) -> None:
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


def adapters(worker: str, *names: str) -> AdaptersChanged:
    return AdaptersChanged(worker=worker, instance="i1", adapters=names)


async def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    async with frontend() as kit:
        plain, sql = ScriptedWorker("w1"), ScriptedWorker("w2")
        await kit.add(plain)
        await kit.add(sql, adapters=("sql", "legal"))
        keep_busy(kit, "w2", "i1")  # by its load alone, no request would go to w2
        for _ in range(3):
            status, body = await ask(kit)
            assert (status, body["model"], body["choices"][0]["text"]) == (200, "sql", text(PROMPT, 4))
        assert [request.adapter for request in sql.requests] == ["sql"] * 3
        assert plain.requests == []
        status, body = await ask(kit, "m")
        assert (status, body["model"], [one.adapter for one in plain.requests]) == (200, "m", [""])


async def test_adapters_are_listed_as_models_with_a_parent() -> None:
    async with frontend(model_aliases={"database": "sql"}) as kit:
        await kit.add(ScriptedWorker("w1"), adapters=("sql", "legal"))
        async with kit.http.get(kit.url + "/v1/models") as answer:
            rows = {row["id"]: (row.get("root"), row.get("parent")) for row in (await answer.json())["data"]}
        assert rows == {
            "m": ("m", None),
            "sql": ("sql", "m"),
            "legal": ("legal", "m"),
            "database": ("sql", "m"),
        }
        status, body = await ask(kit, "database")
        assert (status, body["model"], kit.workers[0].requests[0].adapter) == (200, "database", "sql")


async def test_adapters_are_loaded_and_unloaded_while_workers_serve() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1"))
        await kit.add(ScriptedWorker("w2"))
        one, two = kit.workers
        status, body = await ask(kit)
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        kit.tell(adapters("w1", "sql"))
        assert (await ask(kit))[0] == 200
        kit.tell(adapters("w1"), adapters("w2", "sql"))
        assert (await ask(kit))[0] == 200
        assert (len(one.requests), len(two.requests)) == (1, 1)
        kit.tell(adapters("w2"))
        assert (await ask(kit))[0] == 404
        assert (await ask(kit, "m"))[0] == 200


async def test_a_stream_continues_on_the_other_worker_that_has_its_adapter() -> None:
    async with frontend() as kit:
        first, plain, other = failing("w1", "disconnect"), ScriptedWorker("w2"), ScriptedWorker("w3")
        await kit.add(first, adapters=("sql",))
        await kit.add(plain)
        await kit.add(other, adapters=("legal", "sql"))
        keep_busy(kit, "w3", "i1")
        events = await kit.stream(model="sql", prompt=PROMPT, max_tokens=20)
        assert text_of(events) == text(PROMPT, 20)
        assert (plain.requests, len(other.requests)) == ([], 1)
        assert other.requests[0].adapter == "sql" and len(other.requests[0].tokens) > len(PROMPT)
        [moved] = kit.said(RequestMigrated)
        assert (moved.model, moved.target) == ("m", "w3")


async def test_without_another_worker_that_has_its_adapter_a_stream_ends_with_the_error() -> None:
    async with frontend(reroute_s=0.2) as kit:
        await kit.add(failing("w1", "disconnect"), adapters=("sql",))
        await kit.add(ScriptedWorker("w2"))
        kit.workers[0].always = Act(after=0, how="disconnect")
        events = await kit.stream(model="sql", prompt=PROMPT, max_tokens=20)
        assert events[-1]["error"]["code"] == "disconnected"
        assert kit.workers[1].requests == []


async def test_requests_of_one_lost_worker_move_to_the_workers_of_their_own_adapters() -> None:
    async with frontend() as kit:
        lost = ScriptedWorker("w1", always=Act(after=5, how="quiet"))
        await kit.add(lost, adapters=("sql", "legal"))
        asked = [
            asyncio.ensure_future(kit.stream(model=model, prompt=PROMPT, max_tokens=12))
            for model in ("sql", "legal") * 2
        ]
        await until(lambda: len(lost.requests) == 4)
        for name, adapter in (("w2", "sql"), ("w3", "legal")):
            await kit.add(ScriptedWorker(name), adapters=(adapter,))
        await kit.add(ScriptedWorker("w4"))
        await until(lambda: all(live.state.has_output for live in kit.running("w1")))
        lost.drop()
        for events in await asyncio.gather(*asked):
            assert text_of(events) == text(PROMPT, 12)
        _, sql, legal, plain = kit.workers
        assert [one.adapter for one in sql.requests] == ["sql"] * 2
        assert [one.adapter for one in legal.requests] == ["legal"] * 2
        assert plain.requests == []


async def test_a_drained_worker_hands_its_streams_to_workers_that_have_their_adapter() -> None:
    async with frontend() as kit:
        drained = ScriptedWorker("w1", always=Act(after=5, how="quiet"))
        await kit.add(drained, adapters=("sql",))
        asked = asyncio.ensure_future(kit.stream(model="sql", prompt=PROMPT, max_tokens=12))
        await until(lambda: any(live.state.has_output for live in kit.running("w1")))
        await kit.add(ScriptedWorker("w2"))
        await kit.add(ScriptedWorker("w3"), adapters=("sql",))
        keep_busy(kit, "w3", "i1")
        kit.tell(DrainRequested(worker="w1", instance="i1"))
        drained.draining = True
        assert text_of(await asked) == text(PROMPT, 12)
        assert [len(worker.requests) for worker in kit.workers] == [1, 0, 1]


async def test_a_worker_that_has_just_unloaded_the_adapter_is_not_blamed() -> None:
    async with frontend() as kit:
        stale = ScriptedWorker("w1", always=Act(after=0, how="error", error=NOT_SERVING))
        await kit.add(stale, adapters=("sql",))
        await kit.add(ScriptedWorker("w2"), adapters=("sql",))
        keep_busy(kit, "w2", "i1")
        for _ in range(4):
            status, body = await ask(kit)
            assert (status, body["choices"][0]["text"]) == (200, text(PROMPT, 4))
        assert len(stale.requests) == 4
        assert kit.said(RequestFailed) == [] and set(kit.director.breakers.positions().values()) == {"closed"}


async def test_an_adapter_unloaded_everywhere_is_not_found_as_soon_as_that_is_known() -> None:
    async with frontend() as kit:
        stale = ScriptedWorker("w1", always=Act(after=0, how="error", error=NOT_SERVING))
        await kit.add(stale, adapters=("sql",))
        asked = asyncio.ensure_future(ask(kit))
        await until(lambda: len(kit.director.driver.waiting.parked) == 1)
        kit.tell(adapters("w1"))
        status, body = await asked
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_requests_for_an_adapter_without_room_do_not_block_those_of_its_model() -> None:
    async with frontend() as kit:
        full = ScriptedWorker("w1", always=Act(how="quiet", after=1))
        await kit.add(full, adapters=("sql",), waiting_max=0)
        await kit.add(ScriptedWorker("w2"))
        asked = [asyncio.ensure_future(ask(kit)) for _ in range(10)]  # the batch has 8 slots
        await until(lambda: kit.director.admission.queued("m") == 2)
        assert kit.director.admission.waiting() == {"m": 2}
        assert (await ask(kit, "m"))[0] == 200
        kit.tell(adapters("w1", "sql"), adapters("w2", "sql"))
        await until(lambda: kit.director.admission.queued("m") == 0)
        assert [one.adapter for one in kit.workers[1].requests] == ["", "sql", "sql"]
        await cancel(asked)


async def test_a_queued_request_is_refused_when_its_adapter_is_unloaded() -> None:
    async with frontend() as kit:
        full = ScriptedWorker("w1", always=Act(how="quiet", after=1))
        await kit.add(full, adapters=("sql",), waiting_max=0)
        asked = [asyncio.ensure_future(ask(kit)) for _ in range(9)]
        await until(lambda: kit.director.admission.queued("m") == 1)
        kit.tell(adapters("w1"))
        done, running = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        status, body = done.pop().result()
        assert (status, body["error"]["code"], len(running)) == (404, "model_not_found", 8)
        kit.director.report()
        assert kit.said(RequestsRejected) == []
        await cancel(running)


async def test_adapters_share_no_names_of_blocks() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1", always=Act(after=1, how="quiet")), adapters=("sql", "legal"))
        prompt = PROMPT * 10
        asked = [asyncio.ensure_future(ask(kit, model, prompt=prompt)) for model in ("m", "sql", "legal")]
        await until(lambda: len(kit.running("w1")) == 3)
        names = {live.request.adapter: live.request.names for live in kit.running("w1")}
        assert len({names[adapter].of(16)[0] for adapter in ("", "sql", "legal")}) == 3
        assert names["sql"].of(16) == BlockNames(prompt, seed(lora="sql")).of(16)
        await cancel(asked)


async def test_metrics_count_an_adapter_as_its_model() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1"), adapters=("sql",))
        await ask(kit)
        await ask(kit, "m")
        counted = kit.counted("dynamo_frontend_requests_total", "model")
        assert counted == {("m",): 2.0}


async def test_a_proxied_request_keeps_the_name_of_its_adapter() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1"), engine="openai", paths=PATHS)
        error = Act(after=0, how="error", error="invalid_request: no")
        await kit.add(ScriptedWorker("w2", always=error), engine="openai", paths=PATHS, adapters=("sql",))
        body = b'{"model":"sql","input":"a"}'
        async with kit.http.post(kit.url + "/v1/embeddings", data=body) as response:
            assert response.status == 400
        [request] = kit.workers[1].requests
        assert request.proxied is not None
        assert (request.adapter, request.proxied.body) == ("sql", body)
        assert kit.workers[0].requests == []


async def test_a_model_has_precedence_over_an_adapter_of_its_name() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1"), adapters=("other",))
        await kit.add(ScriptedWorker("w2", model="other"))
        assert (await ask(kit, "other"))[0] == 200
        assert [len(worker.requests) for worker in kit.workers] == [0, 1]


async def test_a_request_does_not_follow_its_adapters_name_to_another_model() -> None:
    async with frontend(reroute_s=0.2) as kit:
        fails = asyncio.Event()
        await kit.add(failing("w1", "disconnect", hold=fails), adapters=("sql",))
        asked = asyncio.ensure_future(kit.stream(model="sql", prompt=PROMPT, max_tokens=20))
        await until(lambda: len(kit.workers[0].requests) == 1)
        others = [ScriptedWorker(name, model="other") for name in ("w2", "w3")]
        for other in others:
            await kit.add(other, adapters=("sql",))
        fails.set()
        await asked
        assert [other.requests for other in others] == [[], []]


async def test_the_route_of_a_prompt_for_an_adapter_is_explained() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1"))
        await kit.add(ScriptedWorker("w2"), adapters=("sql",))
        async with kit.http.post(kit.admin + "/route", json={"model": "sql", "tokens": PROMPT}) as response:
            said = await response.json()
        assert (said["model"], said["chosen"]["worker"]) == ("sql", "w2")
        assert said["left_out"] == [{"worker": "w1", "why": "it does not have the adapter"}]
