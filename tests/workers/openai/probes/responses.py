"""Probes of OpenAI's /v1/responses."""

import json
from typing import Any

from constrained import PERSON, WEATHER
from probe import Json, Server

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}


def _response(server: Server, input: object = "What is the answer?", **fields: Any) -> Json:
    asked = {"max_output_tokens": 16, "temperature": 0} | fields
    whole: Json = server.post(PATH, input=input, **asked).good
    assert whole["object"] == "response" and whole["id"].startswith("resp_") and whole["model"] == "tiny"
    return whole


def _text(whole: Json) -> str:
    return "".join(
        part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]
    )


def a_response(server: Server) -> object:
    whole = _response(server)
    assert whole["status"] == "incomplete" and whole["incomplete_details"]["reason"] == "max_output_tokens"
    return _text(whole), whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]


def a_response_to_messages(server: Server) -> object:
    return _text(_response(server, [{"role": "user", "content": "What is the answer?"}]))


def a_response_to_parts(server: Server) -> object:
    part = {"type": "input_text", "text": "What is the answer?"}
    return _text(_response(server, [{"type": "message", "role": "user", "content": [part]}]))


def a_response_with_instructions(server: Server) -> object:
    return _text(_response(server, instructions="Be brief."))


def a_response_in_a_given_form(server: Server) -> object:
    format = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    whole = _response(server, text={"format": format}, max_output_tokens=400)
    assert json.loads(_text(whole))["name"] in ("Ann", "Bo") and whole["status"] == "completed"
    return _text(whole)


def a_response_repeats_its_metadata(server: Server) -> object:
    return _response(server, metadata={"a": "b"})["metadata"]


def a_response_with_a_call(server: Server) -> object:
    choice = {"type": "function", "name": "weather"}
    whole = _response(server, tools=[TOOL], tool_choice=choice, max_output_tokens=400)
    (call,) = [item for item in whole["output"] if item["type"] == "function_call"]
    assert call["name"] == "weather" and json.dumps(json.loads(call["arguments"]))
    assert call["call_id"] and call["id"]
    return None


def a_response_to_the_result_of_a_call(server: Server) -> object:
    items = [
        {"role": "user", "content": "How is the weather?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    return _text(_response(server, items, tools=[TOOL]))


def a_streamed_response(server: Server) -> object:
    reply = server.post(PATH, input="What is the answer?", stream=True, max_output_tokens=16, temperature=0)
    events = reply.named
    kinds = [data["type"] for _, data in events]
    assert all(name == data["type"] for name, data in events)
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    for kind in ("response.output_item.added", "response.content_part.added", "response.output_text.done"):
        assert kinds.count(kind) == 1, kind
    numbers = [data["sequence_number"] for _, data in events]
    assert numbers == list(range(len(numbers)))
    text = "".join(data["delta"] for _, data in events if data["type"] == "response.output_text.delta")
    assert text == _text(events[-1][1]["response"])
    return text


def logprobs_of_a_response(server: Server) -> object:
    whole = _response(server, include=["message.output_text.logprobs"], top_logprobs=2)
    shown = whole["output"][0]["content"][0]["logprobs"]
    return [(one["token"], one["logprob"]) for one in shown]


def a_response_without_input(server: Server) -> object:
    return server.post(PATH, max_output_tokens=16).refused(400)


def a_response_of_an_unknown_model(server: Server) -> object:
    return server.post(PATH, model="no-such-model", input="x").refused(404)


def a_response_that_does_not_exist(server: Server) -> object:
    return server.get(f"{PATH}/resp_no_such_response").refused(404)
