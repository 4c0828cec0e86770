"""Opt-in (make test-vllm): streamed chats through a fleet in front of two vLLM servers."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest
from constrained import WEATHER
from fronted import Fronted
from probe import CHATS, SAID, Json, Server

CHATS_AT_ONCE = 50
BEGUN_BEFORE = 20  # chats with text before the fault
ROUNDS_MAX = 30  # a busy server may put two tokens into one event
WITHIN_S = 240.0
NOTE: Json = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 150, "maxLength": 200}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
Eventually = Callable[..., Awaitable[None]]


# --- an undisturbed stream in proxied mode


def raw_stream(server: Server, **fields: object) -> bytes:
    """Return a stream's bytes, without the id and the time of the response."""
    asked = {"messages": SAID, "stream": True, "temperature": 0, "max_tokens": 24} | fields
    reply = server.post(CHATS, {"X-Holdfast-Mode": "proxied"}, **asked)
    assert reply.status == 200, reply.text
    known = re.sub(rb'"id":"chatcmpl-[^"]+"', b'"id":""', reply.body)
    return re.sub(rb'"created":[0-9]+', b'"created":0', known)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_options": {"include_usage": True}},
        {"tools": [WEATHER]},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 2, "temperature": 1, "seed": 5},
    ],
    ids=["plain", "usage", "tools", "logprobs", "two answers"],
)
def test_a_proxied_stream_has_the_bytes_of_the_server(fields: Json, texts: Fronted) -> None:
    for _ in range(ROUNDS_MAX):
        direct, through = raw_stream(texts.direct, **fields), raw_stream(texts.through, **fields)
        if direct == through:
            return
    assert direct == through


# --- the loss of a server


@dataclass
class Heard:
    """What a client has received of one streamed chat."""

    text: str = ""
    calls: dict[int, str] = field(default_factory=dict)  # by place: the name and the arguments
    finish: str = ""
    error: str = ""
    done: bool = False

    @property
    def begun(self) -> bool:
        return bool(self.text or self.calls)

    def take(self, event: Json) -> None:
        """Add an event."""
        self.error = self.error or json.dumps(event.get("error") or "").strip('"')
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                said = (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
                self.calls[call["index"]] = self.calls.get(call["index"], "") + said
            self.finish = choice.get("finish_reason") or self.finish


def chat(number: int) -> Json:
    """Return the request of a chat with tools: every second one must call a function with a long argument."""
    fields: Json = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Question {number}: what is {number * 7}?"}],
        "tools": [WEATHER, NOTE],
        "temperature": 0,
        "max_tokens": 120,
        "stream": True,
    }
    if number % 2:
        fields |= {"tool_choice": {"type": "function", "function": {"name": "note"}}, "max_tokens": 400}
    return fields


async def ask(http: aiohttp.ClientSession, url: str, number: int, heard: Heard) -> None:
    headers = {"X-Holdfast-Mode": "exact"}
    async with http.post(url + CHATS, json=chat(number), headers=headers) as answer:
        if answer.status != 200:
            heard.error = await answer.text()
            return
        async for line in answer.content:
            said = line.removeprefix(b"data: ").strip()
            if said == b"[DONE]":
                heard.done = True
            elif line.startswith(b"data: "):
                heard.take(json.loads(said))


async def converse(url: str, eventually: Eventually, strike: Callable[[], None] | None = None) -> list[Heard]:
    """Have all chats at once. Strike once enough of them have begun."""
    every = [Heard() for _ in range(CHATS_AT_ONCE)]
    limits = aiohttp.ClientTimeout(total=None, sock_read=WITHIN_S)
    async with (
        aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as http,
        asyncio.TaskGroup() as group,
    ):
        for number, heard in enumerate(every):
            group.create_task(ask(http, url, number, heard))
        if strike is not None:
            await eventually(lambda: sum(one.begun for one in every) >= BEGUN_BEFORE, WITHIN_S)
            assert not all(one.done for one in every), "all chats are over before the fault"
            strike()
    return every


async def test_no_chat_with_tools_is_lost_with_a_server(texts: Fronted, eventually: Eventually) -> None:
    undisturbed = await converse(texts.through.url, eventually)
    assert [one.error for one in undisturbed] == [""] * CHATS_AT_ONCE
    assert all(one.calls for one in undisturbed[1::2]), "every second chat calls a function"
    try:
        struck = await converse(texts.through.url, eventually, texts.servers[0].kill)
    finally:
        texts.servers[0].revive()
    assert [one.error for one in struck] == [""] * CHATS_AT_ONCE
    assert struck == undisturbed
