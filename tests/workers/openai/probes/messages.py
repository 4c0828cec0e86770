"""Probes of Anthropic's /v1/messages."""

from typing import Any

from constrained import WEATHER
from probe import SAID, Json, Server

PATH = "/v1/messages"
TOOL = {
    "name": "weather",
    "description": "Look up the weather.",
    "input_schema": WEATHER["function"]["parameters"],
}


def _message(server: Server, messages: list[Json] | None = None, **fields: Any) -> Json:
    asked = {"max_tokens": 6, "temperature": 0} | fields
    whole: Json = server.post(PATH, messages=messages or SAID, **asked).good
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "tiny")
    return whole


def _text(whole: Json) -> str:
    return "".join(block["text"] for block in whole["content"] if block["type"] == "text")


def a_message_of_anthropics_api(server: Server) -> object:
    whole = _message(server)
    assert whole["id"] and whole["stop_reason"] == "max_tokens"
    return _text(whole), whole["usage"]["output_tokens"]


def a_system_prompt(server: Server) -> object:
    return _text(_message(server, system="Be brief."))


def a_system_prompt_in_blocks(server: Server) -> object:
    blocks = [{"type": "text", "text": "Be brief."}]
    text = _text(_message(server, system=blocks))
    assert text == _text(_message(server, system="Be brief."))
    return text


def content_in_blocks(server: Server) -> object:
    said = [{"role": "user", "content": [{"type": "text", "text": "What is the answer?"}]}]
    return _text(_message(server, said))


def a_stop_sequence(server: Server) -> object:
    stop = _text(_message(server, max_tokens=24))[8:12]
    whole = _message(server, max_tokens=24, stop_sequences=[stop])
    return _text(whole), whole["stop_reason"]


def sampling_of_a_message(server: Server) -> object:
    return _text(_message(server, temperature=0.0, top_p=0.5, top_k=1))


def a_streamed_message(server: Server) -> object:
    reply = server.post(PATH, messages=SAID, stream=True, max_tokens=6, temperature=0)
    events = [(name, data) for name, data in reply.named if name != "ping"]
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert all(delta["type"] == "text_delta" for delta in deltas)
    assert events[-2][1]["delta"]["stop_reason"] == "max_tokens"
    assert events[-2][1]["usage"]["output_tokens"] == 6
    return "".join(delta["text"] for delta in deltas)


def tools_of_a_message(server: Server) -> object:
    return _text(_message(server, tools=[TOOL]))


def a_tool_that_must_be_used(server: Server) -> object:
    whole = _message(server, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}, max_tokens=400)
    (block,) = [one for one in whole["content"] if one["type"] == "tool_use"]
    assert block["name"] == "weather" and block["id"]
    return whole["stop_reason"]


def the_result_of_a_tool(server: Server) -> object:
    said: list[Json] = [
        *SAID,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}]},
    ]
    return _text(_message(server, said, tools=[TOOL]))


def the_tokens_of_a_message(server: Server) -> object:
    counted = server.post(f"{PATH}/count_tokens", messages=SAID).good["input_tokens"]
    assert counted == _message(server)["usage"]["input_tokens"]
    return counted


def a_message_without_max_tokens(server: Server) -> object:
    reply = server.post(PATH, messages=SAID)
    assert reply.status == 400 and reply.json["error"]["message"]
    return reply.status


def a_message_of_an_unknown_model(server: Server) -> object:
    reply = server.post(PATH, model="no-such-model", messages=SAID, max_tokens=4)
    assert reply.json["error"]["message"]
    return reply.status


def a_message_without_messages(server: Server) -> object:
    return server.post(PATH, max_tokens=4).status
