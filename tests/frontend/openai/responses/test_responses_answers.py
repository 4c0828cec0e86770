"""Answers of the Responses API: events and whole responses, also if a worker fails in the middle.

OpenAI's library parses the answers, and its types validate each event.
"""

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from answering import ARGUMENTS, CALL, HERMES, REASONER, SCHEMA, THINKING, TextWorker, answering, named_events
from frontend_kit import TOKENS, Kit, frontend
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted_worker import Act, ScriptedWorker
from simulated_frontend import simulated

PATH = "/v1/responses"
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
BODY: dict[str, Any] = {"model": "m", "input": "How is the weather?"}
WHOLE = f"{THINKING}One moment. {CALL}"
SETTINGS: dict[str, Any] = {"tool_call_parsers": HERMES, "reasoning_parsers": REASONER}
VALID: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RANDOM = re.compile(r"[0-9a-f]{44}")


def timeless(found: Any) -> Any:
    """Return a response or its events without random ids and times."""
    text = RANDOM.sub("ID", json.dumps(found, ensure_ascii=False))
    text = re.sub(r"chatcmpl-tool-[0-9a-f]+", "CALL", text)
    return json.loads(re.sub(r'"created_at": \d+', '"created_at": 0', text))


async def streamed(kit: Kit, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream. Check their numbers and that OpenAI's types describe them."""
    events = await named_events(kit, PATH, **BODY | body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        VALID.validate_python(event)
    return events


async def whole(kit: Kit, **body: Any) -> dict[str, Any]:
    status, response, _ = await kit.post(PATH, **BODY | body)
    assert status == 200, response
    Response.model_validate(response)
    return dict(response)


def output_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the output that a client builds from the deltas. Check the order of the events."""
    items: list[dict[str, Any]] = []
    part: dict[str, Any] | None = None
    for event in events:
        match event["type"].removeprefix("response."):
            case "created" | "in_progress" | "completed" | "incomplete":
                continue
            case "output_item.added":
                assert event["output_index"] == len(items) and event["item"]["status"] == "in_progress"
                items.append(json.loads(json.dumps(event["item"])))
            case "content_part.added":
                part = dict(event["part"])
                items[-1]["content"].append(part)
            case "output_text.delta" | "reasoning_text.delta":
                assert part is not None
                part["text"] += event["delta"]
                part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert part is not None and part["text"] == event["text"]
            case "function_call_arguments.done":
                assert items[-1]["arguments"] == event["arguments"]
            case "content_part.done":
                if event["part"]["type"] == "reasoning_text":
                    assert part is not None
                    part.pop("logprobs", None)
                assert part == event["part"]
            case "output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
            case other:
                raise AssertionError(f"unexpected event {other}")
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"] and event["output_index"] == len(items) - 1
    return items


async def test_a_response_has_reasoning_text_and_a_call() -> None:
    async with answering(WHOLE, **SETTINGS) as (kit, _):
        response = await whole(kit, tools=[TOOL])
        events = await streamed(kit, tools=[TOOL])
    assert timeless(events[-1]["response"]) == timeless(response), "a stream shows the same response"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert output_of(events) == events[-1]["response"]["output"]
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Is it raining? 🌧"}]
    text = {"type": "output_text", "text": "One moment. ", "annotations": [], "logprobs": []}
    assert (message["role"], message["content"]) == ("assistant", [text])
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", ARGUMENTS)
    assert call["call_id"] and {item["status"] for item in response["output"]} == {"completed"}
    made = len(TOKENS.encode(WHOLE, special=False)) + 1
    assert response["usage"]["output_tokens"] == made
    assert response["status"] == "completed" and response["error"] is None


async def test_openais_library_parses_streams_and_responses() -> None:
    async with answering(WHOLE, **SETTINGS) as (_, client):
        async with client.responses.stream(model="m", input="How?", tools=[TOOL]) as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "One moment. "
        (call,) = [item for item in final.output if item.type == "function_call"]
        assert call.arguments == ARGUMENTS
        response = await client.responses.create(model="m", input="How?", tools=[TOOL])
        assert response.output_text == "One moment. " and response.usage


async def test_the_request_is_repeated_in_the_response() -> None:
    async with answering("Yes.") as (kit, _):
        response = await whole(
            kit, instructions="be kind", metadata={"a": "b"}, temperature=0, max_output_tokens=9, user="u"
        )
    assert (response["instructions"], response["metadata"], response["user"]) == ("be kind", {"a": "b"}, "u")
    assert (response["temperature"], response["max_output_tokens"]) == (0, 9)
    assert (response["background"], response["truncation"], response["object"]) == (
        False,
        "disabled",
        "response",
    )


async def test_an_answer_that_was_cut_off_is_incomplete() -> None:
    async with answering("It is sunny.") as (kit, _):
        response = await whole(kit, max_output_tokens=3)
        events = await streamed(kit, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert timeless(events[-1]["response"]) == timeless(response)
    assert response["status"] == response["output"][0]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_engine_that_returns_text_gives_the_same_response() -> None:
    text = "<think>Hm.</think>It is sunny."
    async with answering(text, kind=TextWorker, reasoning_parsers=REASONER) as (kit, _):
        response = await whole(kit)
        events = await streamed(kit)
    assert timeless(events[-1]["response"]) == timeless(response)
    assert [item["content"][0]["text"] for item in output_of(events)] == ["Hm.", "It is sunny."]


async def test_an_empty_answer_has_no_output() -> None:
    async with answering("") as (kit, _):
        assert (await whole(kit))["output"] == []
        assert output_of(await streamed(kit)) == []


async def test_logprobs_belong_to_the_text() -> None:
    async with answering("It is sunny.") as (kit, _):
        response = await whole(kit, top_logprobs=2)
        events = await streamed(kit, top_logprobs=2)
    assert timeless(events[-1]["response"]) == timeless(response)
    assert output_of(events) == events[-1]["response"]["output"]
    (text,) = response["output"][0]["content"]
    assert "".join(one["token"] for one in text["logprobs"]) == text["text"]
    assert all(len(one["top_logprobs"]) == 2 for one in text["logprobs"])


FEW, MANY = (1, 30, 70), range(1, len(TOKENS.encode(WHOLE, special=False)), 3)


@pytest.mark.parametrize(
    "after", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in MANY if n not in FEW)]
)
async def test_a_stream_survives_a_broken_worker(after: int) -> None:
    """The events are the same wherever the worker breaks: none is doubled, lost or altered."""
    async with answering(WHOLE, Act(after=after, how="disconnect"), **SETTINGS) as (kit, _):
        disturbed = await streamed(kit, tools=[TOOL], top_logprobs=1)
        assert kit.counted("dynamo_frontend_model_migration_total", "migration_type")
        assert timeless(disturbed) == timeless(await streamed(kit, tools=[TOOL], top_logprobs=1))


@pytest.mark.parametrize("after", FEW)
async def test_a_whole_response_survives_a_broken_worker(after: int) -> None:
    async with answering(WHOLE, Act(after=after, how="disconnect"), **SETTINGS) as (kit, _):
        disturbed = await whole(kit, tools=[TOOL], top_logprobs=1)
        assert timeless(disturbed) == timeless(await whole(kit, tools=[TOOL], top_logprobs=1))


async def test_a_stream_that_fails_ends_with_a_failed_response() -> None:
    hold = asyncio.Event()
    broken = ScriptedWorker(always=Act(after=3, how="error", hold=hold))
    async with (
        frontend(broken, migration_limit=0) as kit,
        openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        last: Any = None
        async for event in await client.responses.create(model="m", input="How?", stream=True):
            hold.set()
            last = event
        assert last.type == "response.failed"
        assert (last.response.status, last.response.error.code) == ("failed", "engine_error")
        assert (await client.responses.retrieve(last.response.id)).status == "failed"


async def test_errors_before_the_first_token_have_openais_form() -> None:
    broken = ScriptedWorker(always=Act(after=0, how="error"))
    async with frontend(broken, migration_limit=0) as kit:
        for body, status, code, param in (
            ({"stream": True}, 500, "engine_error", None),
            ({}, 500, "engine_error", None),
            ({"model": "other"}, 404, "model_not_found", "model"),
            ({"max_output_tokens": 10**6}, 400, "context_length_exceeded", "max_output_tokens"),
        ):
            found, error, _ = await kit.post(PATH, **BODY | body)
            assert (found, error["error"]["code"], error["error"]["param"]) == (status, code, param)


async def test_an_agent_on_the_simulated_engine_calls_a_tool_and_then_answers() -> None:
    async with (
        simulated() as kit,
        openai.AsyncOpenAI(base_url=kit.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        first = await client.responses.create(model="m", input="How is the weather?", tools=[TOOL])
        (call,) = [item for item in first.output if item.type == "function_call"]
        second = await client.responses.create(
            model="m",
            previous_response_id=first.id,
            input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
            tools=[TOOL],
            max_output_tokens=9,
        )
        assert second.output_text and second.previous_response_id == first.id


async def test_a_response_is_counted_under_its_endpoint() -> None:
    async with answering("Yes.") as (kit, _):
        await whole(kit)
        assert kit.counted("dynamo_frontend_requests_total", "endpoint", "status") == {
            ("responses", "success"): 1
        }
