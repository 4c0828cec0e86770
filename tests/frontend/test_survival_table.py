"""The table of docs/reference/api.md on what survives the loss of a worker: each cell is tried."""

import asyncio
import json
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from answering import ARGUMENTS, CALL, EOS, HERMES, SCHEMA
from frontend_kit import TOKENS, Kit, first_goes_to, frontend
from scripted_worker import Act, spelling
from test_proxied import ServingWorker, events

from controller.frontend.openai.sse import INEXACT
from events.proxied_paths import PATHS
from events.wire import Chunk, Generate, Step

PAGE = Path(__file__).parents[2] / "docs/reference/api.md"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINES: dict[str, dict[str, Any]] = {
    "own engines": {},
    "servers with token ids": {"engine": "openai", "paths": PATHS, "root": "weights"},
    "servers with text": {"engine": "openai", "paths": PATHS, "exact": False},
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is it?"}],
    "max_tokens": 60,
    "temperature": 0,
}
PROMPT: dict[str, Any] = {"prompt": "How is it?", "max_tokens": 60, "temperature": 0}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
PLAIN = "It is mild today, and the rain will come tomorrow."


@dataclass(frozen=True)
class Feature:
    """A request with this feature, and the text that a model answers it with."""

    path: str
    body: dict[str, Any]
    answer: str = PLAIN


def chat(answer: str = PLAIN, **body: Any) -> Feature:
    return Feature(CHATS, ASKED | body, answer)


def completion(answer: str = PLAIN, **body: Any) -> Feature:
    return Feature(COMPLETIONS, PROMPT | body, answer)


FEATURES: dict[str, Feature] = {
    "chats": chat(),
    "completions": completion(),
    "`/v1/messages`": Feature("/v1/messages", ASKED),
    "`/v1/responses`": Feature("/v1/responses", {"input": "How is it?", "temperature": 0}),
    "sampling, with or without `seed`": chat(temperature=0.8, seed=3),
    "`presence_penalty`, `frequency_penalty`": chat(presence_penalty=0.5),
    "`stop`, `min_tokens`, `ignore_eos`, `logit_bias`": chat(stop=["never"], min_tokens=2, logit_bias={"5": 1}),
    "`echo`": completion(echo=True),
    "`logprobs`": completion(logprobs=2),
    "`return_token_ids`": completion(return_token_ids=True),
    "`n` above 1": completion(n=2),
    "`tools`, `auto`": chat(CALL, **TOOLS),
    "`tools`, `required` or named": chat(
        f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}]', tool_choice="required", **TOOLS
    ),
    "`response_format`": chat(ARGUMENTS, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
    "`structured_outputs`, `guided_…` with a grammar": completion(structured_outputs={"regex": "[A-Za-z ,.]+"}),
    "images, audio and video in messages": chat(messages=[{"role": "user", "content": [IMAGE]}]),
    "`use_beam_search`": completion(use_beam_search=True),
    "`/v1/embeddings`, `/pooling`, `/classify`, `/score`, `/rerank`": Feature("/v1/embeddings", {"input": "x"}),
}  # fmt: skip


@dataclass
class AnyWorker(ServingWorker):
    """A worker that answers with a given text: as tokens, as text, or as the response to a proxied request."""

    text: str = ""  # of a server that returns text only

    async def _play(self, writer: asyncio.StreamWriter, request: Generate, act: Act) -> None:
        if not self.text or request.proxied is not None:
            await super()._play(writer, request, act)
            return
        self.rest = next(
            n for n in range(len(self.text), -1, -1) if request.prompt_text.endswith(self.text[:n])
        )
        rest = self.text[self.rest :]
        pieces = [rest[at : at + 4] for at in range(0, len(rest), 4)]
        for piece in pieces if act.after is None else pieces[: act.after]:
            self._say(writer, Step([Chunk(request.stream, [], text=piece)]))
            await asyncio.sleep(0)
        if act.how == "finish":
            self._say(writer, Step([Chunk(request.stream, [], finish="stop")]))
        else:
            await self._fail(writer, request, act)


def workers(feature: Feature, engine: str, acts: Sequence[Act]) -> tuple[AnyWorker, AnyWorker]:
    """Return two workers with the same answer. The first one acts as given."""
    tokens = [*TOKENS.encode(feature.answer, special=False), EOS]
    made = [
        AnyWorker(
            name,
            follow=spelling(tokens),
            stop_at=EOS,
            text=feature.answer if engine == "servers with text" else "",
        )
        for name in ("w1", "w2")
    ]
    for one in made:
        if feature.path in (CHATS, COMPLETIONS):
            one.pieces, one.media = events(6), "text/event-stream"
    made[0].acts = deque(acts)
    return made[0], made[1]


async def response(feature: Feature, engine: str, *acts: Act) -> tuple[int, str]:
    """Return status and body of a streamed response. Ids are left out."""
    first, second = workers(feature, engine, acts)
    async with frontend(tool_call_parsers=HERMES) as kit:
        await first_goes_to(kit, first, second, **ENGINES[engine])
        return await posted(kit, feature)


async def posted(kit: Kit, feature: Feature) -> tuple[int, str]:
    body = {"model": "m", "stream": True} | feature.body
    headers = {"X-Request-Id": "r"}
    async with kit.http.post(kit.url + feature.path, json=body, headers=headers) as found:
        text = await found.text()
        return found.status, re.sub(
            r'"(id|created|item_id|response_id|created_at|completed_at)": ?("[^"]*"|\d+)', "", text
        )


async def outcome(feature: Feature, engine: str) -> str:
    """Return what happens to a stream if its worker is lost after a few tokens, and before the first one."""
    status, undisturbed = await response(feature, engine)
    if status in (400, 404):
        return "not served"
    assert status == 200 and undisturbed, undisturbed
    lost = [Act(after=after, how="disconnect") for after in (0, 3)]
    status, early = await response(feature, engine, lost[0])
    assert status == 200 and content(early) == content(undisturbed), "always retried before the first byte"
    status, late = await response(feature, engine, lost[1])
    if '"error"' in late and "disconnected" in late:
        return "retried"
    assert status == 200
    assert content(late) == content(undisturbed)
    if feature.path not in (CHATS, COMPLETIONS, "/v1/messages", "/v1/responses"):
        return "retried"
    return "continued" if INEXACT.decode() in late else "exact"


def content(response: str) -> str:
    """Return the texts of a stream or, of another response, the whole body."""
    return texts(response) or response


def texts(stream: str) -> str:
    """Return all texts of a stream, however they are cut into events."""
    found = []
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(re.sub(r"{,", "{", re.sub(r",(,|})", r"\1", re.sub(r",,+", ",", line[6:]))))
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or choice
                found.append(delta.get("content") or delta.get("text") or "")
                found += [call["function"].get("arguments", "") for call in delta.get("tool_calls") or ()]
            if event.get("type") in ("content_block_delta", "response.output_text.delta"):
                found.append(
                    event["delta"] if isinstance(event["delta"], str) else event["delta"].get("text", "")
                )
    return "".join(found)


def table() -> dict[tuple[str, str], str]:
    """Return the cells of the page's table, by feature and engine."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    start = next(place for place, row in enumerate(rows) if row[1:] == [*ENGINES])
    found: dict[tuple[str, str], str] = {}
    for row in rows[start + 1 :]:
        if len(row) != len(ENGINES) + 1 or row[0] not in FEATURES:
            break
        found |= {(row[0], engine): cell for engine, cell in zip(ENGINES, row[1:], strict=True)}
    return found


def test_the_table_has_every_feature() -> None:
    assert list(table()) == [(feature, engine) for feature in FEATURES for engine in ENGINES]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("feature", FEATURES)
async def test_the_table_says_what_happens(feature: str, engine: str) -> None:
    assert await outcome(FEATURES[feature], engine) == table().get((feature, engine))
