"""Admission by deadlines as clients see it: on both paths, and with OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, frontend
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scripted_worker import ScriptedWorker, undisturbed
from waits import until

PROMPT = [300, 301, 302]
EXACT = TOKENS.decode(undisturbed(PROMPT, 12))
ON: dict[str, Any] = {"admission_control": "deadline"}
WAYS = pytest.mark.parametrize("way", [{}, {"Expect": "100-continue"}], ids=["fast path", "aiohttp"])


async def ask(kit: Kit, headers: dict[str, str], count: int = 12) -> tuple[int, Any, Any]:
    return await kit.post("/v1/completions", headers, model="m", prompt=PROMPT, max_tokens=count)


@asynccontextmanager
async def full(**settings: Any) -> AsyncIterator[tuple[Kit, ScriptedWorker, Callable[[], None]]]:
    """Run a frontend with a worker with eight occupied slots, and yield a function that frees them."""
    worker = ScriptedWorker("w1", step_s=0.05)
    async with frontend(worker, **ON, **settings) as kit:
        taken = [asyncio.create_task(ask(kit, {}, 4000)) for _ in range(8)]
        await until(lambda: worker.active == 8)

        def free() -> None:
            for task in taken:
                task.cancel()

        try:
            yield kit, worker, free
        finally:
            free()
            await asyncio.gather(*taken, return_exceptions=True)
            await until(lambda: not worker.active)


@WAYS
async def test_a_deadline_that_can_be_met_is_applied_silently(way: dict[str, str]) -> None:
    async with frontend(ScriptedWorker("w1"), **ON) as kit:
        code, body, headers = await ask(kit, way | {"X-Holdfast-TTFT-Deadline-Ms": "5000"})
        assert (code, body["choices"][0]["text"]) == (200, EXACT)
        assert "X-Holdfast-Refused" not in headers


@WAYS
async def test_a_refused_request_gets_the_reason_and_a_retry_time(way: dict[str, str]) -> None:
    async with full() as (kit, worker, _):
        asked = way | {"X-Holdfast-TTFT-Deadline-Ms": "5000", "X-Holdfast-Queue-TTL-Ms": "0.001"}
        code, body, headers = await ask(kit, asked, 2000)
        assert (code, body["error"]["code"]) == (429, "deadline")
        assert headers["X-Holdfast-Refused"] == "deadline"
        assert int(headers["Retry-After"]) >= 1 and 0 < int(headers["retry-after-ms"]) <= 30_000
        assert len(worker.requests) == 8
        counted = kit.counted("dynamo_frontend_model_rejection_total", "model", "endpoint")
        assert counted == {("m", "completions"): 1}


@WAYS
async def test_an_invalid_header_is_refused_by_name(way: dict[str, str]) -> None:
    async with frontend(ScriptedWorker("w1"), **ON) as kit:
        code, body, _ = await ask(kit, way | {"X-Holdfast-TTFT-Deadline-Ms": "soon"})
        assert (code, body["error"]["param"]) == (400, "X-Holdfast-TTFT-Deadline-Ms")


@WAYS
async def test_without_admission_by_deadlines_the_headers_are_not_read(way: dict[str, str]) -> None:
    async with frontend(ScriptedWorker("w1")) as kit:
        assert (await ask(kit, way | {"X-Holdfast-TTFT-Deadline-Ms": "soon"}))[0] == 200


async def test_the_official_client_retries_when_told_to_and_is_served() -> None:
    loop, asked, answered = asyncio.get_running_loop(), list[float](), list[float]()
    async with full() as (kit, _, free):

        async def asks(request: object) -> None:
            asked.append(loop.time())

        async def is_answered(response: object) -> None:
            answered.append(loop.time())
            free()

        http = DefaultAsyncHttpxClient(event_hooks={"request": [asks], "response": [is_answered]})
        async with AsyncOpenAI(
            base_url=f"{kit.url}/v1", api_key="none", http_client=http, max_retries=9
        ) as api:
            answer = await api.completions.create(
                model="m",
                prompt=PROMPT,
                max_tokens=12,
                extra_headers={"X-Holdfast-TTFT-Deadline-Ms": "30000", "X-Holdfast-Queue-TTL-Ms": "1"},
            )
        assert answer.choices[0].text == EXACT
        assert len(asked) == len(answered) >= 2 and asked[1] - answered[0] > 0.05
