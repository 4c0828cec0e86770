"""Bodies of the Responses API become chats: each field is obeyed, refused, ignored or reported."""

from typing import Any

import pytest

from controller.frontend.errors import ApiError
from controller.frontend.openai.field_names import in_terms_of
from controller.frontend.openai.request_parser import ParsedRequest, ResponseOptions
from controller.frontend.openai.responses.conversion import joined, parse_responses
from controller.frontend.openai.responses.models import IGNORED_BY_RESPONSES

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object"},
}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a cat"}


def parsed(**body: Any) -> ParsedRequest:
    return parse_responses({"model": "m", "input": "hello", **body})


def options(**body: Any) -> ResponseOptions:
    found = parsed(**body).response
    assert found is not None
    return found


def chat(*items: Any, **body: Any) -> list[Any]:
    """Return the chat of these items."""
    return joined(parsed(input=list(items), **body).messages or ())


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_text_is_a_users_message() -> None:
    found = parsed(stream=True, max_output_tokens=5)
    assert (found.api, found.chat, found.model, found.max_tokens, found.stream) == (
        "responses", True, "m", 5, True,
    )  # fmt: skip
    assert found.messages == [message("user", "hello")]
    assert options() == ResponseOptions(shown=options().shown)


def test_instructions_come_first_and_are_known_as_such() -> None:
    assert parsed(instructions="be kind").messages == [message("system", "be kind"), message("user", "hello")]
    assert options(instructions="be kind").instructed and not options().instructed


def test_sampling_fields_are_obeyed() -> None:
    found = parsed(temperature=0.5, top_p=0.9, user="u", top_logprobs=3)
    assert (found.sampling.temperature, found.sampling.top_p) == (0.5, 0.9)
    assert (found.user, found.logprobs) == ("u", 3)
    assert parsed(include=["message.output_text.logprobs"]).logprobs == 0
    assert parsed(include=["reasoning.encrypted_content"]).logprobs is None


@pytest.mark.parametrize("kind", ["input_text", "output_text", "text"])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "developer"])
def test_a_message_of_each_role(role: str, kind: str) -> None:
    item = {"type": "message", "role": role, "content": [{"type": kind, "text": "hi"}]}
    assert chat(item) == [message(role, "hi")]


def test_several_texts_are_parts_except_an_assistants() -> None:
    texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(message("user", texts), message("assistant", texts)) == [
        message("user", parts),
        message("assistant", "ab"),
    ]


def test_a_refusal_is_an_assistants_text() -> None:
    assert chat(message("assistant", [{"type": "refusal", "refusal": "No."}])) == [
        message("assistant", "No.")
    ]


def test_reasoning_text_and_calls_are_one_message_of_the_assistant() -> None:
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    found = chat(
        message("user", "look"),
        thoughts,
        message("assistant", [{"type": "output_text", "text": "I look."}]),
        CALL,
        CALL | {"call_id": "c2"},
        OUTPUT,
        OUTPUT | {"call_id": "c2", "output": [{"type": "input_text", "text": "a dog"}]},
        thoughts,
        message("assistant", "Two animals."),
        message("assistant", "Really."),
    )
    function = {"name": "look", "arguments": '{"at": 1}'}
    calls = [{"id": id, "type": "function", "function": function} for id in ("c1", "c2")]
    assert found[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        {"role": "tool", "tool_call_id": "c2", "content": "a dog"},
        {"role": "assistant", "content": "Two animals.", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "Really."},
    ]


@pytest.mark.parametrize(
    ("choice", "chosen", "name"),
    [
        (None, "auto", ""),
        ("auto", "auto", ""),
        ("required", "required", ""),
        ({"type": "function", "name": "look"}, "named", "look"),
    ],
)
def test_tools_and_their_choice(choice: Any, chosen: str, name: str) -> None:
    found = parsed(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    use, extra = found.tool_use, found.template_extra
    assert use is not None and extra is not None
    assert (use.choice, use.name, use.parallel) == (chosen, name, False)
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert extra["tools"] == [{"type": "function", "function": function}]
    assert parsed(tools=[TOOL], tool_choice="none").tool_use is None


def test_a_format_constrains_the_answer() -> None:
    schema = {"type": "object"}
    given = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert parsed(text={"format": given}).guided == {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        }
    }
    assert parsed(text={"format": {"type": "json_object"}}).guided
    assert parsed(text={"format": {"type": "text"}, "verbosity": "medium"}).guided is None


def test_the_effort_is_for_the_chat_template() -> None:
    assert parsed(reasoning={"effort": "high"}).template_extra == {"reasoning_effort": "high"}
    off = parsed(reasoning={"effort": "none"})
    assert off.template_extra == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert off.template_reads == {"reasoning.effort": ("reasoning_effort", "enable_thinking", "thinking")}


def test_what_a_response_repeats() -> None:
    shown = options(
        tools=[TOOL], metadata={"a": "b"}, temperature=0, previous_response_id="resp_1", store=False
    ).shown
    assert shown["tools"] == [TOOL | {"strict": False}]
    assert (shown["metadata"], shown["temperature"], shown["store"]) == ({"a": "b"}, 0, False)
    assert (shown["previous_response_id"], shown["text"]) == ("resp_1", {"format": {"type": "text"}})


@pytest.mark.parametrize("name", IGNORED_BY_RESPONSES)
def test_an_ignored_field_is_not_reported(name: str) -> None:
    assert parsed(**{name: "anything"}).unknown == ()


def test_unknown_fields_are_reported() -> None:
    found = parsed(temprature=1, reasoning={"summary": "auto"}, text={"x": 1})
    assert found.unknown == ("temprature", "text.x", "reasoning.summary")


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [message("user", "x")] * 10_001}, "input", "at most 10000 items"),
        ({"input": None}, "input", "valid"),
        ({"input": [{"content": "x"}]}, "input.0", "needs a role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "'developer'"),
        ({"input": [message("user", [{"type": "input_image"}])]}, "input.0.content.0", "'input_image'"),
        ({"input": [message("user", [{"type": "input_text"}])]}, "input.0.content.0", "needs its text"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "'computer_call'"),
        ({"input": [CALL | {"name": ""}]}, "input.0", "call_id and name"),
        ({"input": [OUTPUT | {"call_id": None}]}, "input.0", "needs call_id"),
        ({"input": [{"type": "item_reference"}]}, "input.0", "needs id"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools", "needs a name"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice", "only none, auto"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "no function 'x'"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "text.format.type must be"),
        ({"text": {"verbosity": "low"}}, "text", "'medium'"),
        ({"truncation": "auto"}, "truncation", "not supported"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
    ],
)  # fmt: skip
def test_what_is_not_valid_is_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**body)
    error = in_terms_of("responses", refused.value)
    assert (error.status, error.param) == (400, param), error
    assert words in error.message
