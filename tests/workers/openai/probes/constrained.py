"""Probes of answers in a given form: JSON schemas, regular expressions, choices, grammars, tool calls."""

import json
import re

from probe import SAID, Json, Server, content_of, finishes

PERSON: Json = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bo"]}, "tall": {"type": "boolean"}},
    "required": ["name", "tall"],
    "additionalProperties": False,
}
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Look up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {"name": "time", "parameters": {"type": "object", "properties": {}}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED: Json = {"structured_outputs": {"choice": [CALL]}, "max_tokens": 60}
LONG: Json = {"max_tokens": 400}  # the tiny model likes white space between the parts of a JSON text


def _person(text: str) -> str:
    found = json.loads(text)
    assert found["name"] in ("Ann", "Bo") and isinstance(found["tall"], bool) and len(found) == 2
    return text


# --- forms of an answer


def a_schema_of_a_completion(server: Server) -> object:
    return _person(server.completed(structured_outputs={"json": PERSON}, **LONG)["text"])


def a_schema_of_a_chat(server: Server) -> object:
    return _person(server.said(structured_outputs={"json": PERSON}, **LONG))


def a_schema_as_text(server: Server) -> object:
    return _person(server.said(structured_outputs={"json": json.dumps(PERSON)}, **LONG))


def a_schema_by_response_format(server: Server) -> object:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    return _person(server.said(response_format=format, **LONG))


def a_schema_of_a_completion_by_response_format(server: Server) -> object:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    return _person(server.completed(response_format=format, **LONG)["text"])


def a_schema_of_a_stream(server: Server) -> object:
    events = server.chats(structured_outputs={"json": PERSON}, **LONG)
    assert finishes(events) == {0: "stop"}
    return _person(content_of(events))


def any_json_object(server: Server) -> object:
    (choice,) = server.chat(response_format={"type": "json_object"}, max_tokens=24)["choices"]
    assert choice["message"]["content"].lstrip().startswith("{")
    return choice["message"]["content"]


def any_json_object_by_vllms_name(server: Server) -> object:
    text = server.completed(structured_outputs={"json_object": True}, max_tokens=24)["text"]
    assert text.lstrip().startswith("{")
    return text


def a_regular_expression(server: Server) -> object:
    pattern = r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{2}"
    text = server.said(structured_outputs={"regex": pattern}, max_tokens=40)
    assert re.fullmatch(pattern, text)
    return text


def a_regular_expression_of_a_completion(server: Server) -> object:
    text = server.completed(structured_outputs={"regex": r"(yes|no), [a-z]{5}\."}, max_tokens=40)["text"]
    assert re.fullmatch(r"(yes|no), [a-z]{5}\.", text)
    return text


def one_of_some_choices(server: Server) -> object:
    text = server.said(structured_outputs={"choice": ["Python", "Rust", "Ada"]}, max_tokens=20)
    assert text in ("Python", "Rust", "Ada")
    return text


def one_of_some_choices_of_a_completion(server: Server) -> object:
    choice = server.completed(structured_outputs={"choice": ["Python", "Rust"]}, max_tokens=20)
    assert choice["text"] in ("Python", "Rust") and choice["finish_reason"] == "stop"
    return choice["text"]


def a_grammar(server: Server) -> object:
    grammar = 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b"'
    text = server.completed(structured_outputs={"grammar": grammar}, max_tokens=40)["text"]
    assert text in ("SELECT a FROM t", "SELECT b FROM t")
    return text


def a_grammar_in_larks_form(server: Server) -> object:
    grammar = 'start: "SELECT " column " FROM t"\ncolumn: "a" | "b"'
    text = server.completed(structured_outputs={"grammar": grammar}, max_tokens=40)["text"]
    assert text in ("SELECT a FROM t", "SELECT b FROM t")
    return text


def a_structural_tag(server: Server) -> object:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<a>",
            "content": {"type": "const_string", "value": "x"},
            "end": "</a>",
        },
    }
    text = server.said(response_format=tag, max_tokens=20)
    assert text == "<a>x</a>"
    return text


def a_choice_among_two_answers(server: Server) -> object:
    whole = server.chat(n=2, temperature=1, structured_outputs={"choice": ["left", "right"]}, max_tokens=8)
    assert all(one["message"]["content"] in ("left", "right") for one in whole["choices"])
    return None


def a_choice_with_logprobs(server: Server) -> object:
    (choice,) = server.chat(structured_outputs={"choice": ["left", "right"]}, logprobs=True, max_tokens=8)[
        "choices"
    ]
    tokens = "".join(one["token"] for one in choice["logprobs"]["content"])
    assert tokens.startswith(choice["message"]["content"])
    return choice["message"]["content"]


def a_schema_that_is_cut_off(server: Server) -> object:
    (choice,) = server.chat(structured_outputs={"json": PERSON}, max_tokens=3)["choices"]
    assert choice["finish_reason"] == "length"
    return choice["message"]["content"]


def two_forms_are_refused(server: Server) -> object:
    return server.refuses(structured_outputs={"json": PERSON, "regex": "a"})


def an_invalid_schema_is_refused(server: Server) -> object:
    return server.refuses(structured_outputs={"json": {"type": "no such type"}})


def an_invalid_regular_expression_is_refused(server: Server) -> object:
    return server.refuses(structured_outputs={"regex": "[a-"})


def an_invalid_grammar_is_refused(server: Server) -> object:
    return server.refuses(structured_outputs={"grammar": "root ::= missing"})


def no_choices_are_refused(server: Server) -> object:
    return server.refuses(structured_outputs={"choice": []})


def a_format_without_its_schema_is_refused(server: Server) -> object:
    return server.refuses(response_format={"type": "json_schema"}, path="/v1/chat/completions")


def an_unknown_format_is_refused(server: Server) -> object:
    return server.refuses(response_format={"type": "poem"}, path="/v1/chat/completions")


# --- tools


def _call(message: Json) -> tuple[str, Json]:
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"] and isinstance(call["id"], str)
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def tools_that_are_not_called(server: Server) -> object:
    (choice,) = server.chat(tools=[WEATHER])["choices"]
    assert not choice["message"].get("tool_calls") and choice["finish_reason"] == "length"
    return choice["message"]["content"]


def tools_are_in_the_prompt(server: Server) -> object:
    return server.chat(tools=[WEATHER, TIME], return_token_ids=True)["prompt_token_ids"]


def a_call_by_the_models_own_format(server: Server) -> object:
    (choice,) = server.chat(tools=[WEATHER], **CALLED)["choices"]
    assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
    return _call(choice["message"])


def text_before_a_call(server: Server) -> object:
    fields: Json = {"structured_outputs": {"choice": ["Let me see. " + CALL]}, "max_tokens": 80}
    (choice,) = server.chat(tools=[WEATHER], **fields)["choices"]
    return choice["message"]["content"].strip(), _call(choice["message"])


def two_calls_by_the_models_own_format(server: Server) -> object:
    fields: Json = {
        "structured_outputs": {"choice": [CALL + "\n" + CALL.replace("Rome", "Oslo")]},
        "max_tokens": 120,
    }
    calls = server.message(tools=[WEATHER], **fields)["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    return [json.loads(call["function"]["arguments"])["city"] for call in calls]


def one_call_at_most(server: Server) -> object:
    fields: Json = {
        "structured_outputs": {"choice": [CALL + "\n" + CALL.replace("Rome", "Oslo")]},
        "max_tokens": 120,
    }
    return _call(server.message(tools=[WEATHER], parallel_tool_calls=False, **fields))


def a_streamed_call_by_the_models_own_format(server: Server) -> object:
    return _streamed_call(server.chats(tools=[WEATHER], **CALLED))


def _arguments(text: str) -> None:
    """Check the arguments of a forced call: vLLM constrains them to JSON, and not always to their schema."""
    json.loads(text)


def _streamed_call(events: list[Json]) -> object:
    parts = [p for e in events for c in e["choices"] for p in c["delta"].get("tool_calls") or ()]
    assert parts[0]["id"] and parts[0]["function"]["name"] == "weather" and parts[0]["type"] == "function"
    assert all(part["index"] == 0 for part in parts)
    said = "".join((part.get("function") or {}).get("arguments") or "" for part in parts)
    assert not content_of(events).strip()
    return json.loads(said), finishes(events)


def a_required_call(server: Server) -> object:
    (choice,) = server.chat(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **LONG)[
        "choices"
    ]
    calls = choice["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    _arguments(calls[0]["function"]["arguments"])
    return None


def a_streamed_required_call(server: Server) -> object:
    events = server.chats(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **LONG)
    _streamed_call(events)
    return None


def a_named_call(server: Server) -> object:
    (choice,) = server.chat(tools=[WEATHER, TIME], tool_choice=NAMED, **LONG)["choices"]
    assert _call(choice["message"])[0] == "weather"
    return choice["finish_reason"]


def a_streamed_named_call(server: Server) -> object:
    events = server.chats(tools=[WEATHER, TIME], tool_choice=NAMED, **LONG)
    _streamed_call(events)
    return finishes(events)


def no_call_is_wanted(server: Server) -> object:
    fields: Json = {"structured_outputs": {"choice": [CALL]}, "max_tokens": 60}
    message = server.message(tools=[WEATHER], tool_choice="none", **fields)
    assert not message.get("tool_calls") and "weather" in message["content"]
    return message["content"]


def the_result_of_a_call(server: Server) -> object:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
    }
    return server.said(
        [
            *SAID,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ],
        tools=[WEATHER],
    )


def the_result_of_a_call_in_parts(server: Server) -> object:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    return server.said(
        [
            *SAID,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        ]
    )


def a_call_to_an_unknown_tool_is_refused(server: Server) -> object:
    named = {"type": "function", "function": {"name": "no_such_tool"}}
    return server.refuses(path="/v1/chat/completions", tools=[WEATHER], tool_choice=named)


def a_required_call_without_tools_is_refused(server: Server) -> object:
    return server.refuses(path="/v1/chat/completions", tool_choice="required")


def a_malformed_tool_is_refused(server: Server) -> object:
    return server.refuses(path="/v1/chat/completions", tools=[{"type": "function"}])


def an_unknown_choice_of_tools_is_refused(server: Server) -> object:
    return server.refuses(path="/v1/chat/completions", tools=[WEATHER], tool_choice="perhaps")


def a_strict_tool(server: Server) -> object:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    return server.chat(tools=[strict], max_tokens=1, return_token_ids=True)["prompt_token_ids"]
