"""/load and /docs."""

import asyncio
import re
from typing import Any

from frontend_kit import frontend
from scripted_worker import Act, ScriptedWorker
from waits import until

from controller.frontend.http.routes import ROUTES
from controller.frontend.openai.request_models import ChatBody

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi", "max_tokens": 2}


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
