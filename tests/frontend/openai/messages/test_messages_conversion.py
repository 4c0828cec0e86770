"""Bodies of the Messages API become chats: each field is obeyed, refused, ignored or reported."""

import json
from typing import Any

import pytest

from controller.frontend.errors import ApiError
from controller.frontend.openai.field_names import in_terms_of
from controller.frontend.openai.messages.conversion import parse_count_tokens, parse_messages
from controller.frontend.openai.messages.models import IGNORED_BY_COUNT_TOKENS, IGNORED_BY_MESSAGES
from controller.frontend.openai.request_kinds import KINDS
from controller.frontend.openai.request_parser import ParsedRequest

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL: dict[str, Any] = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "ä"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "a cat"}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def parsed(**body: Any) -> ParsedRequest:
    return parse_messages({"model": "m", "max_tokens": 5, "messages": HELLO, **body})


def chat(*messages: tuple[str, Any], **body: Any) -> list[Any]:
    """Return the chat of a conversation, given as roles with contents."""
    found = parsed(messages=[{"role": role, "content": content} for role, content in messages], **body)
    assert found.messages is not None
    return found.messages


def test_a_message_is_a_chat() -> None:
    found = parsed(stream=True)
    assert (found.api, found.chat, found.model, found.max_tokens, found.stream) == (
        "messages", True, "m", 5, True,
    )  # fmt: skip
    assert found.messages == [{"role": "user", "content": "hello"}]
    assert not found.include_usage and found.n == 1 and not found.unknown


def test_sampling_fields_are_obeyed() -> None:
    found = parsed(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["a", "b"], metadata={"user_id": "u"})
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 4)
    assert (found.stop, found.user) == (("a", "b"), "u")


@pytest.mark.parametrize("system", ["be kind", [text("be kind", cache_control={"type": "ephemeral"})]])
def test_the_system_prompt_comes_first(system: Any) -> None:
    assert chat(("user", "hello"), system=system)[0] == {"role": "system", "content": "be kind"}


def test_the_billing_block_of_claude_code_is_left_out() -> None:
    """It differs in each request, so no request would find its prefix in the cache."""
    system = [text("x-anthropic-billing-header: cc_version=1; cch=abc;"), text("be kind")]
    assert chat(("user", "hello"), system=system)[0] == {"role": "system", "content": "be kind"}


def test_several_texts_are_parts() -> None:
    assert chat(("user", [text("a"), text("b")])) == [{"role": "user", "content": [text("a"), text("b")]}]


def test_consecutive_messages_of_one_role_are_one() -> None:
    assert chat(("user", "a"), ("user", [text("b")])) == [{"role": "user", "content": [text("a"), text("b")]}]


def test_tool_use_and_its_result_are_a_call_and_a_tools_message() -> None:
    found = chat(
        ("user", "look"),
        ("assistant", [text("I look."), CALL]),
        ("user", [RESULT, text("and now?")]),
        tools=[TOOL],
    )
    function = {"name": "look", "arguments": json.dumps({"at": "ä"}, ensure_ascii=False)}
    assert found[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a cat"},
        {"role": "user", "content": "and now?"},
    ]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_may_return_nothing(content: Any) -> None:
    found = chat(("user", "look"), ("assistant", [CALL]), ("user", [RESULT | {"content": content}]))
    assert found[2] == {"role": "tool", "tool_call_id": "t1", "content": ""}


def test_thinking_of_earlier_turns_is_kept_for_templates_that_read_it() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "redacted_thinking", "data": "?"},
        text("Yes."),
    ]
    assert chat(("user", "so?"), ("assistant", blocks), ("user", "why?"))[1] == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
    }


def test_an_assistants_last_message_is_continued() -> None:
    found = parsed(messages=[*HELLO, {"role": "assistant", "content": "It is "}])
    assert found.continues and found.template_extra == {"add_generation_prompt": False}


@pytest.mark.parametrize(
    ("choice", "chosen", "name"),
    [
        (None, "auto", ""),
        ({"type": "auto"}, "auto", ""),
        ({"type": "any"}, "required", ""),
        ({"type": "tool", "name": "look"}, "named", "look"),
    ],
)
def test_tools_and_their_choice(choice: Any, chosen: str, name: str) -> None:
    use = parsed(tools=[TOOL], tool_choice=choice).tool_use
    assert use is not None
    assert (use.choice, use.name, use.parallel) == (chosen, name, True)
    assert use.schemas == {"look": {"type": "object"}}


def test_no_tool_may_be_chosen_and_calls_may_be_limited_to_one() -> None:
    assert parsed(tools=[TOOL], tool_choice={"type": "none"}).tool_use is None
    use = parsed(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}).tool_use
    assert use is not None and not use.parallel


def test_the_chat_template_gets_the_tools_as_functions() -> None:
    function = {"name": "look", "parameters": {"type": "object"}, "description": "Looks."}
    extra = parsed(tools=[TOOL]).template_extra
    assert extra is not None and extra["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(("kind", "on"), [("enabled", True), ("disabled", False)])
def test_thinking_sets_variables_of_the_chat_template(kind: str, on: bool) -> None:
    found = parsed(thinking={"type": kind, "budget_tokens": 2000})
    assert found.template_extra == {"enable_thinking": on, "thinking": on}
    assert found.template_reads == {"thinking": ("enable_thinking", "thinking")}
    assert found.unknown == ("thinking.budget_tokens",), "it has no effect, and the client is told"
    assert found.include_reasoning is on


def test_adaptive_thinking_is_the_templates_default() -> None:
    found = parsed(thinking={"type": "adaptive", "display": "omitted"})
    assert found.template_extra is None and not found.template_reads
    assert not found.include_reasoning


def test_the_output_has_an_effort_and_a_format() -> None:
    schema = {"type": "object"}
    found = parsed(output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}})
    assert found.template_extra == {"reasoning_effort": "high"}
    assert found.template_reads == {"output_config.effort": ("reasoning_effort",)}
    assert found.guided == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    }


@pytest.mark.parametrize("name", IGNORED_BY_MESSAGES)
def test_an_ignored_field_is_not_reported(name: str) -> None:
    assert parsed(**{name: "anything"}).unknown == ()


def test_unknown_fields_are_reported() -> None:
    assert parsed(temprature=1, output_config={"x": 1}).unknown == ("temprature", "output_config.x")


def test_counting_needs_no_max_tokens_and_ignores_what_does_not_change_the_prompt() -> None:
    body = {"model": "m", "messages": HELLO, "system": "be kind", "odd": 1}
    found = parse_count_tokens(body | dict.fromkeys(IGNORED_BY_COUNT_TOKENS, "anything"))
    assert found.unknown == ("odd",) and found.messages is not None and len(found.messages) == 2


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "'user', 'assistant' or 'system'"),
        ({"messages": [{"role": "user"}]}, "messages", "required"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content", "must have content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0", "needs text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0", "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0", "'document'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0", "'tool_use'"),
        ({"messages": [{"role": "user", "content": [RESULT | {"tool_use_id": ""}]}]}, "messages.0.content.0", "tool_use_id"),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "messages.0.content.0.content.0",
            "'image'",
        ),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL | {"id": ""}]}]}, "messages.1.content.0", "id and name"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [CALL]}]}, "messages.1.content", "tool_result after it"),
        ({"system": [{"type": "image"}]}, "system.0", "'image'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "'bash_20250124'"),
        ({"tools": [{"name": "look"}]}, "tools", "needs input_schema"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "needs a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "no function 'x'"),
        ({"tool_choice": "auto"}, "tool_choice", "valid dictionary"),
        ({"stop_sequences": [""]}, "stop_sequences", "must not be empty"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences", "at most 16"),
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"thinking": {"type": "on"}}, "thinking", "'enabled', 'disabled' or 'adaptive'"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config", "json_schema"),
        ({"container": "c"}, "container", "not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
    ],
)  # fmt: skip
def test_what_is_not_valid_is_refused_by_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**body)
    error = in_terms_of("messages", refused.value)
    assert (error.status, error.param) == (400, param), error
    assert words in error.message


def test_both_bodies_have_a_parser() -> None:
    assert {"messages", "count_tokens"} < KINDS.keys()
