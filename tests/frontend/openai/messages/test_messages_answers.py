"""Answers of the Messages API: events and whole messages, also if a worker fails in the middle."""

import asyncio
import json
from typing import Any

import pytest
from answering import (
    ARGUMENTS,
    ASKED,
    CALL,
    HERMES,
    REASONER,
    SCHEMA,
    THINKING,
    TextWorker,
    answering,
    named_events,
)
from frontend_kit import TOKENS, Kit, frontend
from scripted_worker import Act, ScriptedWorker
from simulated_frontend import simulated
from waits import until

PATH = "/v1/messages"
TOOL = {"name": "get_weather", "description": "The weather in a city.", "input_schema": SCHEMA}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 200, "messages": ASKED}
WHOLE = f"{THINKING}One moment. {CALL}"
SETTINGS: dict[str, Any] = {"tool_call_parsers": HERMES, "reasoning_parsers": REASONER}
SAME = {"X-Request-Id": "same"}
DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "partial_json"},
}


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client builds from events. Check their order against Anthropic's contract."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == (
        "message_start",
        "message_delta",
        {"type": "message_stop"},
    )
    message = first["message"]
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    block: dict[str, Any] | None = None
    for event in middle:
        if event["type"] == "content_block_start":
            assert block is None, "a block starts before the last one has stopped"
            block = event["content_block"]
            message["content"].append(block)
            partial = ""
        assert block is not None and event["index"] == len(message["content"]) - 1
        if event["type"] == "content_block_delta":
            change = event["delta"]
            name = DELTAS[block["type"]][change["type"]]
            assert change.keys() == {"type", name}
            if name == "partial_json":
                partial += change[name]
            else:
                block[name] += change[name]
        elif event["type"] == "content_block_stop":
            if block["type"] == "tool_use":
                block["input"] = json.loads(partial)
            block = None
    assert block is None, "the last block has no end"
    return dict(message | delta["delta"] | {"usage": message["usage"] | delta["usage"]})


async def streamed(kit: Kit, **body: Any) -> dict[str, Any]:
    return message_of(await named_events(kit, PATH, SAME, **BODY | body))


async def whole(kit: Kit, **body: Any) -> dict[str, Any]:
    status, message, headers = await kit.post(PATH, SAME, **BODY | body)
    assert status == 200, message
    assert headers["request-id"] == headers["X-Request-Id"] == "same"
    return dict(message)


async def test_a_message_has_thinking_text_and_tool_use() -> None:
    async with answering(WHOLE, **SETTINGS) as (kit, _):
        message = await whole(kit, tools=[TOOL])
        assert message == await streamed(kit, tools=[TOOL]), "a stream shows the same message"
    thinking, text, call = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Is it raining? 🌧")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "One moment. "}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", json.loads(ARGUMENTS))
    assert (message["id"], message["type"], message["role"], message["model"]) == (
        "msg_same", "message", "assistant", "m",
    )  # fmt: skip
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    made = len(TOKENS.encode(WHOLE, special=False)) + 1
    assert message["usage"]["output_tokens"] == made


async def test_plain_text_is_one_block() -> None:
    async with answering("It is sunny.") as (kit, _):
        message = await whole(kit)
        assert message == await streamed(kit)
    assert message["content"] == [{"type": "text", "text": "It is sunny."}]
    assert message["stop_reason"] == "end_turn"


async def test_an_engine_that_returns_text_gives_the_same_message() -> None:
    text = "<think>Hm.</think>It is sunny."
    async with answering(text, kind=TextWorker, reasoning_parsers=REASONER) as (kit, _):
        message = await whole(kit)
        assert message == await streamed(kit)
    assert [block.get("text") or block["thinking"] for block in message["content"]] == ["Hm.", "It is sunny."]


async def test_an_empty_answer_has_no_blocks() -> None:
    async with answering("") as (kit, _):
        message = await whole(kit)
        assert message == await streamed(kit)
    assert message["content"] == []


@pytest.mark.parametrize(
    ("body", "reason", "sequence", "text"),
    [
        ({"max_tokens": 3}, "max_tokens", None, None),
        ({"stop_sequences": ["sunny", "x"]}, "stop_sequence", "sunny", "It is "),
    ],
)
async def test_the_stop_reason(body: dict[str, Any], reason: str, sequence: Any, text: str | None) -> None:
    async with answering("It is sunny.") as (kit, _):
        message = await whole(kit, **body)
        assert message == await streamed(kit, **body)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert text is None or message["content"][0]["text"] == text


async def test_a_tool_chosen_by_name_is_used() -> None:
    chosen = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    async with answering(ARGUMENTS) as (kit, _):
        message = await whole(kit, **chosen)
        assert message == await streamed(kit, **chosen)
    assert [(block["type"], block["input"]) for block in message["content"]] == [
        ("tool_use", json.loads(ARGUMENTS))
    ]
    assert message["stop_reason"] == "tool_use"


async def test_a_call_that_was_cut_off_is_not_announced_as_complete() -> None:
    async with answering(CALL, tool_call_parsers=HERMES) as (kit, _):
        cut = len(TOKENS.encode(CALL, special=False)) - 20
        message = await whole(kit, tools=[TOOL], max_tokens=cut)
    assert message["stop_reason"] == "max_tokens"
    assert [block["input"] for block in message["content"]] == [{}]


async def test_omitted_thinking_is_not_shown() -> None:
    async with answering(THINKING + "Yes.", reasoning_parsers=REASONER) as (kit, _):
        message = await whole(kit, thinking={"type": "adaptive", "display": "omitted"})
    assert [block["type"] for block in message["content"]] == ["text"]


FEW, MANY = (1, 30, 70), range(1, len(TOKENS.encode(WHOLE, special=False)), 3)


@pytest.mark.parametrize(
    "after", [*FEW, *(pytest.param(n, marks=pytest.mark.slow) for n in MANY if n not in FEW)]
)
async def test_a_stream_survives_a_broken_worker(after: int) -> None:
    """The events are the same wherever the worker breaks: none is doubled, lost or altered."""
    body = BODY | {"tools": [TOOL]}
    async with answering(WHOLE, Act(after=after, how="disconnect"), **SETTINGS) as (kit, _):
        disturbed = await named_events(kit, PATH, SAME, **body)
        assert kit.counted("dynamo_frontend_model_migration_total", "migration_type")
        assert disturbed == await named_events(kit, PATH, SAME, **body)


@pytest.mark.parametrize("after", FEW)
async def test_a_whole_message_survives_a_broken_worker(after: int) -> None:
    async with answering(WHOLE, Act(after=after, how="disconnect"), **SETTINGS) as (kit, _):
        assert await whole(kit, tools=[TOOL]) == await whole(kit, tools=[TOOL])


async def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    hold = asyncio.Event()
    broken = ScriptedWorker(always=Act(after=3, how="error", hold=hold))
    async with frontend(broken, migration_limit=0) as kit:
        asked = kit.http.post(kit.url + PATH, json=BODY | {"stream": True}, headers=SAME)
        async with asked as response:
            await response.content.readuntil(b"\n\n")
            hold.set()
            *_, name, data, _, _ = (await response.read()).split(b"\n")
    last = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error"
    assert last["type"] == "error" and last["request_id"] == "same"
    assert (last["error"]["type"], last["error"]["code"]) == ("api_error", "engine_error")


async def test_a_request_that_fails_before_its_first_token_gets_an_http_error() -> None:
    broken = ScriptedWorker(always=Act(after=0, how="error"))
    async with frontend(broken, migration_limit=0) as kit:
        for stream in (False, True):
            status, body, _ = await kit.post(PATH, **BODY, stream=stream)
            assert (status, body["type"], body["error"]["type"]) == (500, "error", "api_error")


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "code"),
    [
        (PATH, BODY | {"model": "other"}, 404, "not_found_error", "model_not_found"),
        (PATH, BODY | {"max_tokens": 0}, 400, "invalid_request_error", "invalid_value"),
        (f"{PATH}/count_tokens", BODY | {"model": "other"}, 404, "not_found_error", "model_not_found"),
        (f"{PATH}/count_tokens", {"model": "m"}, 400, "invalid_request_error", "invalid_value"),
        (f"{PATH}/batches", BODY, 404, "not_found_error", "unknown_url"),
    ],
)
async def test_errors_have_anthropics_form(
    path: str, body: dict[str, Any], status: int, kind: str, code: str
) -> None:
    async with frontend(ScriptedWorker()) as kit:
        found, error, headers = await kit.post(path, SAME, **body)
    assert (found, error["type"], error["error"]["type"], error["error"]["code"]) == (
        status,
        "error",
        kind,
        code,
    )
    assert error["error"]["message"]
    assert error["request_id"] == headers["request-id"] == "same"


async def test_overload_is_an_overloaded_error_with_a_time_to_retry() -> None:
    async with frontend(ScriptedWorker(draining=True)) as kit:
        kit.api.openai.drain()
        status, body, headers = await kit.post(PATH, **BODY)
    assert (status, body["error"]["type"], body["error"]["code"]) == (503, "overloaded_error", "draining")
    assert headers["Retry-After"] and headers["X-Holdfast-Refused"] == "draining"


async def test_tokens_are_counted_as_the_message_counts_them() -> None:
    async with answering("Yes.") as (kit, _):
        asked: dict[str, Any] = {"system": "be kind", "tools": [TOOL]}
        status, counted, _ = await kit.post(f"{PATH}/count_tokens", model="m", messages=ASKED, **asked)
        message = await whole(kit, **asked)
    assert status == 200 and counted == {"input_tokens": message["usage"]["input_tokens"]}


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_a_query_in_the_path_changes_nothing(path: str) -> None:
    """Claude Code sends `?beta=true`, also in requests that are not valid."""
    async with answering("Yes.") as (kit, _):
        assert (await kit.post(f"{path}?beta=true", **BODY))[0] == 200
        _, error, headers = await kit.post(f"{path}?beta=true", **BODY | {"model": "other"})
        assert error["type"] == "error" and headers["request-id"] == error["request_id"]


async def test_cached_tokens_are_counted_apart() -> None:
    async with simulated() as kit:
        asked = BODY | {"messages": [{"role": "user", "content": "many words " * 100}], "max_tokens": 2}
        _, first, _ = await kit.post(PATH, **asked)
        events = await named_events(kit, PATH, **asked)
    total = first["usage"]["input_tokens"] + first["usage"]["cache_read_input_tokens"]
    for usage in (events[0]["message"]["usage"], message_of(events)["usage"]):
        assert usage["cache_read_input_tokens"] > 0
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total


async def test_a_field_without_effect_is_named() -> None:
    async with answering("Yes.") as (kit, _):
        _, _, headers = await kit.post(PATH, **BODY, thinking={"type": "enabled", "budget_tokens": 2048})
    assert "thinking.budget_tokens" in headers["Warning"]
    assert "does not read it: thinking" in headers["Warning"]


async def test_a_stream_without_a_token_is_kept_open_by_pings() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(always=Act(after=0, how="error", hold=hold))
    async with frontend(worker, migration_limit=0) as kit:
        request = asyncio.ensure_future(kit.http.post(kit.url + PATH, json=BODY | {"stream": True}))
        await until(lambda: worker.active)
        kit.api.openai.check(kit.director.now() + 16.0)
        async with await request as response:
            ping = await response.content.readuntil(b"\n\n")
            hold.set()
            rest = await response.read()
    assert ping == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert rest.startswith(b"event: error\n")


async def test_an_agent_on_the_simulated_engine_uses_a_tool_and_then_answers() -> None:
    async with simulated() as kit:
        _, first, _ = await kit.post(PATH, **BODY, tools=[TOOL])
        assert first["stop_reason"] == "tool_use"
        call = first["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
        messages = [
            *ASKED,
            {"role": "assistant", "content": first["content"]},
            {"role": "user", "content": [result]},
        ]
        _, second, _ = await kit.post(PATH, **BODY | {"messages": messages, "max_tokens": 9}, tools=[TOOL])
    assert [block["type"] for block in second["content"]] == ["text"]


async def test_a_message_is_counted_under_its_endpoint() -> None:
    async with answering("Yes.") as (kit, _):
        await whole(kit)
        assert kit.counted("dynamo_frontend_requests_total", "endpoint", "status") == {
            ("messages", "success"): 1
        }
