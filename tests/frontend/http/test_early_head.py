"""A streaming client that waits long for its first token gets the head and SSE comments.

They keep proxies from closing the connection.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from frontend_kit import Kit, frontend
from scripted_worker import Act, ScriptedWorker
from waits import until

from controller.frontend.openai.text.tokenizer import Tokens, ready_tokens

COMMENT = b": waiting for the first token\n"
BODY: dict[str, Any] = {"model": "m", "prompt": [300, 301], "max_tokens": 3}


def held(how: str = "finish", after: int = 0) -> tuple[ScriptedWorker, asyncio.Event]:
    """Return a worker that sends nothing until the event is set, and the event."""
    hold = asyncio.Event()
    return ScriptedWorker("w1", always=Act(after, "error", hold=hold, error="engine_error: it broke")), hold


@asynccontextmanager
async def asking(kit: Kit, worker: ScriptedWorker) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a streamed request that received its head before any token."""
    request = asyncio.ensure_future(kit.http.post(kit.url + "/v1/completions", json=BODY | {"stream": True}))
    await until(lambda: worker.active)
    kit.api.openai.check(kit.director.now())
    (completion,) = kit.api.openai.completions
    stream = completion.stream
    assert stream is not None and not stream.started and not request.done()
    kit.api.openai.check(kit.director.now() + 16.0)
    async with asyncio.timeout(20):
        response = await request
    yield response
    response.close()


async def test_the_head_and_comments_are_sent_while_no_token_arrives() -> None:
    """After 15 s, and again every 15 s. The token events follow as usual, and no comment after them."""
    worker = ScriptedWorker("w1", step_s=0.3)
    async with frontend(worker) as kit, asking(kit, worker) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Holdfast-Worker"] == "w1"
        assert await response.content.readline() == COMMENT
        await until(lambda: not worker.active)
        kit.api.openai.check(kit.director.now() + 1000.0)
        lines = (await response.read()).splitlines()
        events = [line for line in lines if line.startswith(b"data: ")]
        assert events[-1] == b"data: [DONE]" and len(events) == 4
        assert COMMENT.strip() not in lines


async def test_an_error_after_the_head_is_an_event_of_the_stream() -> None:
    """The status is already 200: the error is an event with the body that it would otherwise have had."""
    worker, hold = held()
    async with frontend(worker, migration_limit=0) as kit, asking(kit, worker) as response:
        assert await response.content.readline() == COMMENT
        hold.set()
        lines = [line for line in (await response.read()).splitlines() if line]
        assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "engine_error"


@pytest.mark.parametrize(("every_s", "comments"), [(15.0, 3), (0.0, 0)])
async def test_comments_are_repeated_and_can_be_turned_off(every_s: float, comments: int) -> None:
    """With `--early-head 0` nothing is sent before the first token, and an error keeps its status."""
    worker, hold = held()
    async with frontend(worker, migration_limit=0, stream={"early_head_s": every_s}) as kit:
        asked = kit.http.post(kit.url + "/v1/completions", json=BODY | {"stream": True})
        request = asyncio.ensure_future(asked)
        await until(lambda: worker.active)
        for number in range(1, 7):  # in steps of 8 s: 16, 32 and 48 s
            kit.api.openai.check(kit.director.now() + 8.0 * number)
        hold.set()
        response = await request
        assert response.status == (200 if comments else 500)
        assert (await response.read()).count(COMMENT.strip()) == comments


@asynccontextmanager
async def queued(kit: Kit) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a streamed request that waits in the admission queue, after 16 s."""
    request = asyncio.ensure_future(kit.http.post(kit.url + "/v1/completions", json=BODY | {"stream": True}))
    await until(lambda: kit.director.admission.queued("m") == 1)
    kit.api.openai.check(kit.director.now() + 16.0)
    async with asyncio.timeout(20):
        response = await request
    assert response.status == 200 and await response.content.readline() == COMMENT
    yield response
    response.close()


async def test_a_queued_request_gets_the_head_and_comments_and_then_its_answer() -> None:
    first, hold = held(after=1)
    async with frontend(migration_limit=0, admission={"inflight_max": 1}) as kit:
        await kit.add(first)
        busy = asyncio.ensure_future(kit.post("/v1/completions", **BODY))
        await until(lambda: first.active)
        async with queued(kit) as response:
            kit.api.openai.check(kit.director.now() + 32.0)
            first.always = Act()
            hold.set()
            events = [line for line in (await response.read()).splitlines() if line]
        assert events[0] == COMMENT.strip() and events[-1] == b"data: [DONE]"
        assert len(events) == 5
        assert (await busy)[0] == 500
        assert kit.director.admission.queued("m") == 0


async def test_a_request_refused_in_the_queue_after_its_head_ends_with_an_error_event() -> None:
    first, hold = held(after=1)
    settings = {"inflight_max": 1, "queue_s": 1.0}
    async with frontend(first, migration_limit=0, admission=settings) as kit:
        busy = asyncio.ensure_future(kit.post("/v1/completions", **BODY))
        await until(lambda: first.active)
        async with queued(kit) as response:
            lines = [line for line in (await response.read()).splitlines() if line]
        assert json.loads(lines[-1].removeprefix(b"data: "))["error"]["code"] == "queue_timeout"
        hold.set()
        await busy


async def test_a_client_that_leaves_the_queue_after_its_head_is_removed() -> None:
    first, hold = held(after=1)
    async with frontend(first, migration_limit=0, admission={"inflight_max": 1}) as kit:
        busy = asyncio.ensure_future(kit.post("/v1/completions", **BODY))
        await until(lambda: first.active)
        async with queued(kit):
            pass
        await until(lambda: kit.director.admission.queued("m") == 0)
        kit.api.openai.check(kit.director.now() + 64.0)
        hold.set()
        await busy


async def test_a_request_being_tokenized_gets_the_head_and_comments() -> None:
    ready, asked = asyncio.Event(), asyncio.Event()

    async def slowly(name: str) -> Tokens:
        asked.set()
        await ready.wait()
        return await ready_tokens(name)

    async with frontend(ScriptedWorker("w1"), tokens=slowly) as kit:
        request = asyncio.ensure_future(
            kit.http.post(kit.url + "/v1/completions", json=BODY | {"stream": True})
        )
        await asked.wait()
        kit.api.openai.check(kit.director.now() + 16.0)
        response = await request
        assert response.status == 200 and await response.content.readline() == COMMENT
        ready.set()
        assert (await response.read()).rstrip().endswith(b"data: [DONE]")


async def test_an_answer_that_is_not_streamed_gets_no_early_head() -> None:
    """A whole response has one status, which is known only at its end."""
    worker, hold = held()
    async with frontend(worker, migration_limit=0) as kit:
        asking = asyncio.ensure_future(kit.post("/v1/completions", **BODY))
        await until(lambda: worker.active)
        kit.api.openai.check(kit.director.now() + 100.0)
        hold.set()
        status, _, _ = await asking
        assert status == 500
