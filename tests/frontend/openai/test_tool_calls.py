"""Chats with tools and reasoning: the answers are parsed, also if a worker dies in the middle."""

import json
from typing import Any

import openai
import pytest
from answering import ARGUMENTS, ASKED, CALL, EOS, HERMES, SCHEMA, answering
from frontend_kit import TOKENS, frontend
from scripted_worker import Act, ScriptedWorker
from simulated_frontend import simulated

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": SCHEMA,
    },
}


async def test_a_call_is_returned_as_a_tool_call() -> None:
    async with answering("One moment. " + CALL, tool_call_parsers=HERMES) as (_, client):
        answer = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "One moment. "
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.id.startswith("chatcmpl-tool-")
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("broken_after", [None, *range(1, 40, 3)])
async def test_a_streamed_call_survives_a_broken_worker(broken_after: int | None) -> None:
    """The deltas are the same wherever the worker breaks: none is doubled, lost or altered."""
    acts = [] if broken_after is None else [Act(after=broken_after, how="disconnect")]
    async with answering("One moment. " + CALL, *acts, tool_call_parsers=HERMES) as (_, client):
        stream = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert "".join(choice.delta.content or "" for choice in choices) == "One moment. "
    assert calls[0].function and calls[0].function.name == "get_weather" and calls[0].id
    assert all(call.index == 0 and not call.id for call in calls[1:])
    assert "".join(call.function.arguments or "" for call in calls if call.function) == ARGUMENTS
    assert len(calls) > 5, "the arguments are streamed"
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]


async def test_without_parallel_calls_only_the_first_is_returned() -> None:
    async with answering(CALL + "\n" + CALL, tool_call_parsers=HERMES) as (_, client):
        several = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL])
        one = await client.chat.completions.create(
            model="m", messages=ASKED, tools=[TOOL], parallel_tool_calls=False
        )
    assert len(several.choices[0].message.tool_calls or ()) == 2
    assert len(one.choices[0].message.tool_calls or ()) == 1


async def test_a_call_that_was_cut_off_is_not_announced_as_complete() -> None:
    async with answering(CALL, Act(after=20, finish="length"), tool_call_parsers=HERMES) as (_, client):
        answer = await client.chat.completions.create(model="m", messages=ASKED, tools=[TOOL], max_tokens=20)
    assert answer.choices[0].finish_reason == "length"


async def test_with_tool_choice_none_the_text_is_content() -> None:
    async with answering(CALL, tool_call_parsers=HERMES) as (_, client):
        answer = await client.chat.completions.create(
            model="m", messages=ASKED, tools=[TOOL], tool_choice="none"
        )
    assert answer.choices[0].message.content == CALL and not answer.choices[0].message.tool_calls


async def test_reasoning_is_apart_from_the_content() -> None:
    text = "<think>It rains.</think>Take an umbrella."
    async with answering(text, reasoning_parsers={"m": "qwen3"}) as (kit, client):
        answer = await client.chat.completions.create(model="m", messages=ASKED)
        message = answer.choices[0].message
        assert message.content == "Take an umbrella."
        assert message.model_extra and message.model_extra["reasoning_content"] == "It rains."
        stream = await client.chat.completions.create(model="m", messages=ASKED, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join(delta.content or "" for delta in deltas) == "Take an umbrella."
        thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
        assert "".join(thoughts) == "It rains."
        _, hidden, _ = await kit.post(
            "/v1/chat/completions", model="m", messages=ASKED, include_reasoning=False
        )
        assert "reasoning_content" not in hidden["choices"][0]["message"]


async def test_without_a_format_reasoning_is_content() -> None:
    text = "<think>It rains.</think>Take an umbrella."
    async with answering(text, reasoning_parsers={"m": "none"}) as (_, client):
        answer = await client.chat.completions.create(model="m", messages=ASKED)
    assert answer.choices[0].message.content == text


async def test_a_named_function_gets_the_answer_as_its_arguments() -> None:
    chosen: Any = {"type": "function", "function": {"name": "get_weather"}}
    async with answering(ARGUMENTS) as (kit, client):
        answer = await client.chat.completions.create(
            model="m", messages=ASKED, tools=[TOOL], tool_choice=chosen
        )
        sent = kit.workers[0].requests or kit.workers[1].requests
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "stop"
    assert sent[0].guided and list(sent[0].guided) == ["structured_outputs"]
    assert sent[0].guided_fallback == {"structured_outputs": {"json": TOOL["function"]["parameters"]}}


async def test_a_required_call_is_an_array_of_calls() -> None:
    text = json.dumps([{"name": "get_weather", "parameters": {"city": "Bern"}}])
    async with answering(text) as (_, client):
        answer = await client.chat.completions.create(
            model="m", messages=ASKED, tools=[TOOL], tool_choice="required"
        )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Bern"})
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_logprobs_and_token_ids_of_a_call_are_complete() -> None:
    """Tokens without visible text have events of their own, so that no detail is lost."""
    text = "One moment. " + CALL
    async with answering(text, tool_call_parsers=HERMES) as (_, client):
        stream = await client.chat.completions.create(
            model="m", messages=ASKED, tools=[TOOL], stream=True, extra_body={"return_token_ids": True}
        )
        choices = [chunk.choices[0] async for chunk in stream]
    ids = [token for choice in choices for token in (choice.model_extra or {}).get("token_ids") or ()]
    assert ids == [*TOKENS.encode(text, special=False), EOS]


async def test_an_agent_on_the_simulated_engine_calls_a_tool_and_then_answers() -> None:
    async with (
        simulated() as kit,
        openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        messages = list(ASKED)
        first = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        assert first.choices[0].finish_reason == "tool_calls"
        (call,) = first.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "get_weather"
        assert isinstance(json.loads(call.function.arguments)["city"], str)
        messages += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        second = await client.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], max_tokens=9
        )
        assert second.choices[0].message.content and not second.choices[0].message.tool_calls


async def test_the_simulated_engine_calls_no_tool_with_tool_choice_none() -> None:
    async with simulated() as kit:
        ask: dict[str, Any] = {"model": "m", "messages": ASKED, "max_tokens": 9, "temperature": 0}
        _, plain, _ = await kit.post("/v1/chat/completions", **ask)
        _, body, _ = await kit.post("/v1/chat/completions", **ask, tools=[TOOL], tool_choice="none")
    message = body["choices"][0]["message"]
    assert "<tool_call>" not in message["content"] and "tool_calls" not in message
    assert message["content"] == plain["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{}]}, "tools", "function"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "must be"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "no function 'x'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "constrains the answer already",
        ),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools", "format of this model's tool calls is not known"),
        ({"continue_final_message": True}, "continue_final_message", "add_generation_prompt"),
        (
            {"continue_final_message": True, "add_generation_prompt": False, "messages": []},
            "messages",
            "at least 1 item",
        ),
    ],
)
async def test_tools_that_cannot_be_used_are_refused(body: dict[str, Any], param: str, words: str) -> None:
    asked = {"model": "m", "messages": ASKED} | body
    async with frontend(ScriptedWorker(), tool_call_parsers={"m": "none"}) as kit:
        status, answer, _ = await kit.post("/v1/chat/completions", **asked)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]


async def test_an_answer_continues_the_last_message() -> None:
    asked = [*ASKED, {"role": "assistant", "content": "It is "}]
    async with answering("sunny.") as (kit, client):
        await client.chat.completions.create(
            model="m",
            messages=asked,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
        )
        (sent,) = [*kit.workers[0].requests, *kit.workers[1].requests]
    assert TOKENS.decode(sent.tokens).endswith("assistant: It is ")
