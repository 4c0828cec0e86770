"""The official `openai` client works with every call."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from frontend_kit import TOKENS, Kit, frontend
from openai.types.chat import ChatCompletionMessageParam
from scripted_worker import Act, ScriptedWorker, undisturbed

MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
]
CHAT = TOKENS.encode("system: be brief\nuser: hi\nassistant:", special=False)


@asynccontextmanager
async def client_of(kit: Kit) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=6)
        assert answer.choices[0].message.content == TOKENS.decode(undisturbed(CHAT, 6))
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT), 6)


async def test_chat_streamed_with_usage() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            max_completion_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == TOKENS.decode(undisturbed(CHAT, 6))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].choices == [] and chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 6
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_chat_logprobs() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        answer = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=3
        )
        shown = answer.choices[0].logprobs
        assert shown is not None and shown.content is not None
        assert len(shown.content) == 4
        assert "".join(item.token for item in shown.content) == answer.choices[0].message.content
        assert [len(item.top_logprobs) for item in shown.content] == [3] * 4
        assert bytes(shown.content[0].bytes or ()).decode() == shown.content[0].token
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=4, logprobs=True, stream=True
        )
        pieces = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
        assert sum(len(piece.content or ()) for piece in pieces) == 4
        assert [item.top_logprobs for piece in pieces for item in piece.content or ()] == [[]] * 4


async def test_completion_of_text_tokens_and_several_prompts() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        text = await client.completions.create(model="m", prompt="hello", max_tokens=5)
        assert text.choices[0].text == TOKENS.decode(undisturbed(TOKENS.encode("hello", special=True), 5))
        tokens = await client.completions.create(model="m", prompt=[300, 301], max_tokens=5)
        assert tokens.choices[0].text == TOKENS.decode(undisturbed([300, 301], 5))
        several = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=5, n=2)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert several.usage is not None
        assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (2, 20)
        default = await client.completions.create(model="m", prompt="hello")
        assert default.usage is not None and default.usage.completion_tokens == 16


async def test_completion_streamed_and_logprobs() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        stream = await client.completions.create(
            model="m", prompt=[300], max_tokens=5, stream=True, logprobs=2
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == TOKENS.decode(undisturbed([300], 5))
        shown = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        offsets = [offset for item in shown for offset in item.text_offset or ()]
        names = [name for item in shown for name in item.tokens or ()]
        assert offsets == [sum(map(len, names[:place])) for place in range(5)]


async def test_n_choices_streamed() -> None:
    async with frontend(ScriptedWorker(step_s=0.005)) as kit, client_of(kit) as client:
        stream = await client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=5, n=3, stream=True
        )
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [TOKENS.decode(undisturbed(CHAT, 5))] * 3


async def test_stop_and_parameters_reach_the_worker() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit, client_of(kit) as client:
        whole = TOKENS.decode(undisturbed(CHAT, 9))
        answer = await client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            max_tokens=9,
            stop=whole[8:12],
            temperature=0.5,
            top_p=0.9,
            seed=7,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            extra_body={"top_k": 5, "ignore_eos": True, "repetition_penalty": 1.1, "stop_token_ids": [9]},
        )
        assert answer.choices[0].message.content == whole[: whole.index(whole[8:12])]
        assert answer.choices[0].finish_reason == "stop"
        s = worker.requests[0].sampling
        assert (s.temperature, s.top_p, s.seed, s.top_k, s.ignore_eos) == (0.5, 0.9, 7, 5, True)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.1, 0.2, 1.1)
        assert s.stop_token_ids == [9]


async def test_models() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_are_the_clients_own_exceptions() -> None:
    worker = ScriptedWorker(acts=deque([Act(after=2, how="error")]), step_s=0.01)
    async with frontend(worker) as kit, client_of(kit) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="use_beam_search is not supported"):
            await client.chat.completions.create(
                model="m", messages=MESSAGES, extra_body={"use_beam_search": True}
            )
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            async for _ in stream:
                pass


async def test_ids_and_the_workers_name() -> None:
    async with frontend(ScriptedWorker()) as kit, client_of(kit) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=MESSAGES, max_tokens=2, extra_headers={"X-Request-Id": "abc-1"}
        )
        assert raw.headers["X-Request-Id"] == "abc-1"
        assert raw.headers["X-Holdfast-Worker"] == "w1"
        assert raw.parse().id == "chatcmpl-abc-1"
