"""Stored responses: retrieval, deletion, cancellation and continuation, also from another frontend."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from answering import answering, named_events
from frontend_kit import TOKENS, Kit, frontend
from memory_bus import MemoryBus
from scripted_worker import Act, ScriptedWorker
from waits import until

from controller.frontend.http.stored_responses import tag_of
from controller.frontend.metrics import StoredResponseMetrics
from controller.frontend.openai.responses.store import ResponseStore, StoredResponse
from controller.frontend.settings import StoredResponseSettings

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "m", "input": "hello", "max_output_tokens": 4}
KEYS = {name: {"Authorization": f"Bearer sk-{name}-0123456789"} for name in ("ann", "bob")}


async def asked(kit: Kit, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    async with kit.http.request(method, f"{kit.url}{PATH}/{path}", headers=headers) as response:
        return response.status, await response.json()


async def created(kit: Kit, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    status, response, _ = await kit.post(PATH, headers, **BODY | body)
    assert status == 200, response
    return dict(response)


def prompts(kit: Kit) -> list[str]:
    """Return the prompts that the workers of a frontend have received."""
    return [TOKENS.decode(sent.tokens) for worker in kit.workers for sent in worker.requests]


async def test_a_response_is_kept_until_it_is_deleted() -> None:
    async with answering("Yes.") as (kit, _):
        response = await created(kit)
        assert await asked(kit, "GET", response["id"]) == (200, response)
        assert kit.counted("holdfast_stored_responses") == {(): 1}
        deleted = {"id": response["id"], "object": "response.deleted", "deleted": True}
        assert await asked(kit, "DELETE", response["id"]) == (200, deleted)
        for method in ("GET", "DELETE"):
            status, body = await asked(kit, method, response["id"])
            assert (status, body["error"]["code"]) == (404, "response_not_found")


async def test_a_streamed_response_is_kept_too() -> None:
    async with answering("Yes.") as (kit, _):
        *_, last = await named_events(kit, PATH, **BODY)
        assert await asked(kit, "GET", last["response"]["id"]) == (200, last["response"])


async def test_a_response_that_is_not_to_be_stored_is_not_kept() -> None:
    async with answering("Yes.") as (kit, _):
        response = await created(kit, store=False)
        assert (await asked(kit, "GET", response["id"]))[0] == 404


@pytest.mark.parametrize("id", ["resp_1", "x", "resp_" + "0" * 44, "resp_" + "é" * 44])
async def test_an_unknown_id_is_not_found(id: str) -> None:
    async with answering("Yes.") as (kit, _):
        for method, path in (("GET", id), ("DELETE", id), ("POST", f"{id}/cancel")):
            status, body = await asked(kit, method, path)
            assert status == 404 and body["error"]["code"] in ("response_not_found", "response_frontend_gone")


async def test_a_stream_of_a_stored_response_is_refused() -> None:
    async with answering("Yes.") as (kit, _):
        response = await created(kit)
        status, body = await asked(kit, "GET", response["id"] + "?stream=true")
    assert (status, body["error"]["param"]) == (400, "stream")


async def test_another_key_does_not_find_a_response(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("".join(f"{name}:sk-{name}-0123456789\n" for name in KEYS))
    async with frontend(ScriptedWorker(), api_key_file=str(file)) as kit:
        response = await created(kit, KEYS["ann"])
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            assert (await asked(kit, method, response["id"] + path, KEYS["bob"]))[0] == 404
        assert (await asked(kit, "GET", response["id"], KEYS["ann"]))[0] == 200
        status, _, _ = await kit.post(PATH, KEYS["bob"], **BODY, previous_response_id=response["id"])
        assert status == 404


# --- continuation


async def test_a_response_continues_another_one_without_its_instructions() -> None:
    async with answering("Yes.") as (kit, _):
        first = await created(kit, instructions="be kind", input="one")
        second = await created(kit, previous_response_id=first["id"], input="two", instructions="be brief")
        await created(kit, previous_response_id=second["id"], input="three")
        conversations = sorted(prompts(kit), key=len)
    assert second["previous_response_id"] == first["id"]
    one, two, three = (len(prompt) for prompt in conversations)
    assert one < two and one < three
    assert "be kind" not in conversations[1] + conversations[2]
    assert "be brief" in "".join(conversations[1:])
    (last,) = [prompt for prompt in conversations if "three" in prompt]
    assert last.index("one") < last.index("Yes.") < last.index("two") < last.index("three")


async def test_a_reference_stands_for_an_item_of_a_stored_response() -> None:
    """Vercel's AI SDK refers to items of stored responses instead of repeating them."""
    async with answering("Yes.") as (kit, _):
        first = await created(kit, input="one")
        (item,) = first["output"]
        items = [
            {"role": "user", "content": "one"},
            {"type": "item_reference", "id": item["id"]},
            {"role": "user", "content": "two"},
        ]
        await created(kit, input=items)
        (last,) = [prompt for prompt in prompts(kit) if "two" in prompt]
        assert last.index("one") < last.index("Yes.") < last.index("two")
        for id in (item["id"] + "1", "msg_1", item["id"].replace("msg_", "msg_0")):
            items[1]["id"] = id
            status, body, _ = await kit.post(PATH, **BODY | {"input": items})
            assert (status, body["error"]["param"]) == (404, "input")


async def test_a_response_that_does_not_exist_cannot_be_continued() -> None:
    async with answering("Yes.") as (kit, _):
        status, body, _ = await kit.post(PATH, **BODY, previous_response_id="resp_1")
        assert (status, body["error"]["code"], body["error"]["param"]) == (
            404, "response_not_found", "previous_response_id",
        )  # fmt: skip
        assert kit.counted("dynamo_frontend_active_requests", "model") == {}


# --- in progress


@asynccontextmanager
async def running(kit: Kit, **body: Any) -> AsyncIterator[tuple[Any, str]]:
    """Yield a response in progress after its first events, and its id."""
    async with kit.http.post(kit.url + PATH, json=BODY | {"stream": True} | body) as response:
        data = await response.content.readuntil(b"\n\n")
        yield response, msgspec.json.decode(data.split(b"data: ")[1])["response"]["id"]


async def test_a_response_in_progress_is_shown_and_can_be_cancelled() -> None:
    worker = ScriptedWorker(always=Act(after=2, how="quiet"))
    async with frontend(worker) as kit, running(kit) as (response, id):
        _, shown = await asked(kit, "GET", id)
        assert (shown["id"], shown["status"]) == (id, "in_progress")
        status, _, _ = await kit.post(PATH, **BODY, previous_response_id=id)
        assert status == 400, "it cannot be continued yet"
        status, cancelled = await asked(kit, "POST", f"{id}/cancel")
        assert (status, cancelled["status"]) == (200, "cancelled")
        rest = (await response.read()).decode()
        assert '"status":"cancelled"' in rest.strip().rpartition("data: ")[2]
        await until(lambda: not worker.active)
        assert await asked(kit, "GET", id) == (200, cancelled)
        assert await asked(kit, "POST", f"{id}/cancel") == (200, cancelled), "cancelled once"


async def test_a_cancelled_response_is_not_kept_against_its_request() -> None:
    worker = ScriptedWorker(always=Act(after=2, how="quiet"))
    async with frontend(worker) as kit, running(kit, store=False) as (_, id):
        status, cancelled = await asked(kit, "POST", f"{id}/cancel")
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert (await asked(kit, "GET", id))[0] == 404


async def test_a_response_that_has_ended_is_not_cancelled() -> None:
    async with answering("Yes.") as (kit, _):
        response = await created(kit)
        assert await asked(kit, "POST", response["id"] + "/cancel") == (200, response)


async def test_a_response_is_forgotten_when_its_client_disconnects() -> None:
    worker = ScriptedWorker(always=Act(after=2, how="quiet"))
    async with frontend(worker) as kit:
        async with running(kit) as (response, id):
            response.close()
        await until(lambda: not worker.active)
        assert (await asked(kit, "GET", id))[0] == 404


# --- another frontend


@asynccontextmanager
async def two_frontends() -> AsyncIterator[tuple[Kit, Kit, MemoryBus]]:
    """Serve one worker with two frontends that share a bus."""
    worker, bus = ScriptedWorker(), MemoryBus()
    async with frontend(name="f1") as one, frontend(name="f2") as two:
        for kit in (one, two):
            await kit.add(worker, context_tokens=2**20)
        await one.api.openai.responses.serve(bus)
        await two.api.openai.responses.serve(bus)
        yield one, two, bus


async def test_another_frontend_finds_a_response_over_the_broker() -> None:
    async with two_frontends() as (one, two, _):
        response = await created(one, input="long " * 80_000)
        assert response["id"].startswith(f"resp_{tag_of('f1')}")
        assert await asked(two, "GET", response["id"]) == (200, response)
        assert await asked(two, "POST", response["id"] + "/cancel") == (200, response)
        assert (await asked(two, "DELETE", response["id"]))[0] == 200
        for kit in (one, two):
            assert (await asked(kit, "GET", response["id"]))[0] == 404


async def test_another_frontend_continues_a_response() -> None:
    async with two_frontends() as (one, two, _):
        response = await created(one, input="first")
        await created(two, input="second", previous_response_id=response["id"])
        assert any("first" in prompt and "second" in prompt for prompt in prompts(two))


async def test_the_responses_of_a_frontend_that_ended_are_gone() -> None:
    async with two_frontends() as (one, two, bus):
        response = await created(one)
        bus.entries = [entry for entry in bus.entries if tag_of("f1") not in entry[0]]
        status, body = await asked(two, "GET", response["id"])
        assert (status, body["error"]["code"]) == (404, "response_frontend_gone")
        bus.reachable = False
        status, body = await asked(two, "GET", response["id"])
        assert (status, body["error"]["code"]) == (503, "response_unreachable")


# --- the store


def store(**limits: Any) -> tuple[ResponseStore, StoredResponseMetrics]:
    metrics = StoredResponseMetrics()
    return ResponseStore(StoredResponseSettings(**limits), metrics), metrics


def dropped(metrics: StoredResponseMetrics, why: str) -> float:
    return next(
        (
            sample.value
            for family in metrics.dropped.collect()
            for sample in family.samples
            if sample.labels == {"why": why} and sample.name.endswith("_total")
        ),
        0.0,
    )


def test_the_oldest_responses_are_dropped_at_the_limit_of_number() -> None:
    kept, metrics = store(number_max=2)
    for id in ("a", "b", "c"):
        kept.add(StoredResponse(id, "", b"x"), 0.0)
    assert [kept.get(id) is not None for id in "abc"] == [False, True, True]
    assert dropped(metrics, "number") == 1


def test_the_oldest_responses_are_dropped_at_the_limit_of_bytes() -> None:
    kept, metrics = store(mb_max=1)
    for id in ("a", "b"):
        kept.add(StoredResponse(id, "", b"x" * 600_000), 0.0)
    assert kept.get("a") is None and kept.get("b") is not None
    kept.add(StoredResponse("c", "", b"x" * 2_000_000), 0.0)
    assert len(kept) == 0, "a response above the limit is not kept"
    assert dropped(metrics, "bytes") == 3


def test_responses_are_dropped_after_their_time() -> None:
    kept, metrics = store(keep_s=10)
    kept.add(StoredResponse("a", "", b"x"), 0.0)
    kept.add(StoredResponse("b", "", b"x"), 5.0)
    kept.expire(11.0)
    assert kept.get("a") is None and kept.get("b") is not None
    assert dropped(metrics, "age") == 1


async def test_the_time_is_checked_every_second() -> None:
    async with answering("Yes.", responses={"keep_s": 10}) as (kit, _):
        response = await created(kit)
        kit.api.openai.check(kit.director.now() + 11)
        await asyncio.sleep(0)
        assert (await asked(kit, "GET", response["id"]))[0] == 404
