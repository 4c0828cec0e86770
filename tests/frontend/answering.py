"""A model with a given answer, and the events of a streamed answer."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
from frontend_kit import TOKENS, Kit, frontend
from scripted_worker import Act, ScriptedWorker, spelling

from events.wire import Chunk, Generate

ARGUMENTS = '{"city": "Zürich 🏔", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather?"}]
EOS = 2
HERMES = {"m": "hermes"}
THINKING = "<think>Is it raining? 🌧</think>"
REASONER = {"m": "qwen3"}


class TextWorker(ScriptedWorker):
    """A worker of a server that returns text without tokens. Its answers must be ASCII."""

    def chunk_of(self, request: Generate, new: list[int], finish: str | None) -> Chunk:
        text = TOKENS.decode([token for token in new if token != EOS])
        return Chunk(stream=request.stream, tokens=[], text=text, finish=finish)


@asynccontextmanager
async def answering(
    text: str, *acts: Act, kind: type[ScriptedWorker] = ScriptedWorker, **settings: Any
) -> AsyncIterator[tuple[Kit, openai.AsyncOpenAI]]:
    """Serve a model that answers with this text, on two workers of which the first acts as scripted."""
    workers = [
        kind(name, follow=spelling([*TOKENS.encode(text, special=False), EOS]), stop_at=EOS)
        for name in ("w1", "w2")
    ]
    workers[0].acts.extend(acts)
    async with (
        frontend(*workers, **settings) as kit,
        openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        yield kit, client


async def named_events(
    kit: Kit, path: str, headers: dict[str, str] | None = None, **body: Any
) -> list[dict[str, Any]]:
    """Return the events of a stream with named events. Check that each has the name of its type."""
    found: list[dict[str, Any]] = []
    asked = kit.http.post(kit.url + path, json=body | {"stream": True}, headers=headers)
    async with asked as response:
        text = await response.text()
        assert (response.status, response.content_type) == (200, "text/event-stream"), text
    for part in text.split("\n\n"):
        if not part or part.startswith(":"):
            continue
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
