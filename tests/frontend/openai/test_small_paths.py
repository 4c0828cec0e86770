"""/invocations, /load and /docs."""

import asyncio
import re
from typing import Any

import pytest
from frontend_kit import frontend
from scripted_worker import Act, ScriptedWorker
from waits import until

from controller.frontend.http.routes import ROUTES
from controller.frontend.openai.request_models import ChatBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "kind", "endpoint"),
    [(CHAT, "chat.completion", "chat_completions"), (COMPLETION, "text_completion", "completions")],
)
async def test_an_invocation_is_a_chat_or_a_completion_by_its_body(
    body: dict[str, Any], kind: str, endpoint: str
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, answer, _ = await kit.post("/invocations", **body)
        assert (status, answer["object"]) == (200, kind)
        events = await kit.stream("/invocations", **body)
        assert events[-1] == {"done": True}
        ended = kit.director.request_metrics.ended
        assert {where for _, where, *_ in ended if where == "invocations"} == set()
        assert sum(n for (_, where, *_), n in ended.items() if where == endpoint) == 2


@pytest.mark.parametrize("body", [{}, {"model": "m", "text": "hi"}])
async def test_an_invocation_without_messages_or_prompt_is_refused(body: dict[str, Any]) -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, answer, _ = await kit.post("/invocations", **body)
    assert status == 400 and "messages, a prompt or an input" in answer["error"]["message"]


async def test_the_load_is_the_number_of_requests_in_progress() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(always=Act(after=1, how="error", hold=hold))

    async def load(kit: Any) -> Any:
        async with kit.http.get(kit.url + "/load") as answer:
            return await answer.json()

    async with frontend(worker, migration_limit=0) as kit:
        assert await load(kit) == {"server_load": 0}
        running = [asyncio.ensure_future(kit.post("/v1/completions", **COMPLETION)) for _ in range(2)]
        await until(lambda: worker.active == 2)
        assert await load(kit) == {"server_load": 2}
        hold.set()
        await asyncio.gather(*running)
        assert await load(kit) == {"server_load": 0}


async def test_the_page_lists_every_path_and_field_and_loads_nothing() -> None:
    async with frontend() as kit, kit.http.get(kit.url + "/docs") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.content_type == "text/html" and policy.startswith("default-src 'none'")
    assert not [route for route in ROUTES if f"<code>{route.method} {route.path}</code>" not in page]
    assert not [name for name in ChatBody.model_fields if f"<td><code>{name}</code>" not in page]
    assert (
        set(re.findall(r'(?:src|href)="([^#"][^"]*)"', page)) == {"/openapi.json"} and "<script" not in page
    )
