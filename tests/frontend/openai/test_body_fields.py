"""Every field of a body is applied, refused by name, ignored as harmless, or listed in a warning."""

import json
from typing import Any

import pytest
from frontend_kit import TOKENS, frontend
from scripted_worker import ScriptedWorker, undisturbed

from controller.frontend.errors import ApiError
from controller.frontend.openai.completion import read_prompts
from controller.frontend.openai.intake import Intake
from controller.frontend.openai.request_head import unknown_fields
from controller.frontend.openai.request_models import (
    IGNORED,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    TEXT_CHARS_MAX,
    ChatBody,
    CompletionBody,
)
from controller.frontend.openai.request_parser import ParsedRequest, parse_any_chat, parse_completion
from controller.frontend.openai.text.chat_templates import ChatTemplate
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokenizer
from controller.frontend.settings import FrontendSettings

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "hi"}
KINDS = [
    pytest.param(parse_any_chat, CHAT, REFUSED_BY_CHAT, id="chat"),
    pytest.param(parse_completion, COMPLETION, REFUSED_BY_COMPLETIONS, id="completions"),
]
LONG = "x" * (TEXT_CHARS_MAX + 1)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(("parse", "body", "refused"), KINDS)
def test_fields_that_would_change_the_answer_are_refused_except_for_harmless_values(
    parse: Any, body: dict[str, Any], refused: dict[str, tuple[Any, ...]]
) -> None:
    for name, harmless in refused.items():
        for value in harmless:
            assert parse(body | {name: value}).unknown == ()
        for value in ("x", 7, -0.5, ["x"], {"x": 1}):
            with pytest.raises(ApiError) as found:
                parse(body | {name: value})
            assert (found.value.code, found.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(("parse", "body", "refused"), KINDS)
def test_ignored_fields_are_accepted_and_unknown_ones_cause_a_warning(
    parse: Any, body: dict[str, Any], refused: dict[str, tuple[Any, ...]]
) -> None:
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert (
        parse(body | dict.fromkeys(IGNORED.keys() - {"stream_options.include_obfuscation"}, "x")).unknown
        == ()
    )
    assert parse(body | options).unknown == ()
    odd = {"odd": 1, "temprature": 0, "stream": True, "stream_options": {"odd": 2}}
    assert parse(body | odd).unknown == ("odd", "temprature", "stream_options.odd")


def test_no_field_is_in_two_tables() -> None:
    for model, refused in ((ChatBody, REFUSED_BY_CHAT), (CompletionBody, REFUSED_BY_COMPLETIONS)):
        obeyed = set(model.model_fields)
        assert not obeyed & set(refused) and not obeyed & set(IGNORED) and not set(refused) & set(IGNORED)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_lists_unknown_fields_in_a_warning(stream: bool) -> None:
    async with frontend(ScriptedWorker()) as kit:
        ask = CHAT | {"max_tokens": 2, "stream": stream, "temprature": 0, 'o"dd\n\\é': 1}
        for headers, before in (({}, ""), ({"X-Priority": "gold"}, "unknown X-Priority gold")):
            url = kit.url + "/v1/chat/completions"
            async with kit.http.post(url, json=ask, headers=headers) as answer:
                assert answer.status == 200
                told = answer.headers["Warning"]
            assert told.endswith('299 - "unknown fields, ignored: temprature, odd"')
            assert before in told
        async with kit.http.post(kit.url + "/v1/chat/completions", json=CHAT | {"user": "me"}) as answer:
            assert "Warning" not in answer.headers


def test_the_warning_stays_short_however_many_fields_are_unknown() -> None:
    told = unknown_fields([f"{n}-{'x' * 500}" for n in range(5000)])
    assert len(told) < 600 and "and 4992 more" in told


# --- messages


@pytest.mark.parametrize("calls", [{"tool_calls": [{"id": "1"}]}, {"function_call": {"name": "f"}}])
def test_an_assistants_message_with_calls_needs_no_content(calls: dict[str, Any]) -> None:
    contents: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    for content in contents:
        messages = [*CHAT["messages"], {"role": "assistant", **content, **calls}]
        parsed = parse_any_chat(CHAT | {"messages": messages}).messages
        assert parsed is not None and parsed[1] == {
            "role": "assistant",
            "content": "",
            **calls,
        }


def test_a_message_with_an_empty_text_has_content() -> None:
    parsed = parse_any_chat(CHAT | {"messages": [{"role": "user", "content": ""}]})
    assert parsed.messages == [{"role": "user", "content": ""}]


# --- fields for the chat template


def tokens_of(template: str) -> Tokens:
    return Tokens(load_tokenizer(BUILTIN), ChatTemplate(template, {}))


async def prompt_of(tokens: Tokens, **ask: Any) -> str:
    ((_, text),) = await read_prompts(parse_any_chat(CHAT | ask), tokens, 4096, Intake(FrontendSettings()))
    return text


async def test_tools_that_may_not_be_called_are_passed_to_the_template() -> None:
    telling = tokens_of(
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    )
    assert await prompt_of(telling, tools=TOOLS, tool_choice="none") == "f hi"
    assert await prompt_of(telling, tools=[], tool_choice="none") == "hi"
    assert await prompt_of(telling, tools=[]) == "hi"
    plain = tokens_of("{{ messages[0].content }}")
    assert await prompt_of(plain, tools=TOOLS, tool_choice="none") == "hi"
    choosing = tokens_of("{{ tool_choice or '-' }} {{ messages[0].content }}")
    assert await prompt_of(choosing, tools=TOOLS, tool_choice="none") == "none hi"
    assert await prompt_of(choosing, tools=TOOLS) == "- hi"
    assert await prompt_of(choosing, tool_choice="none") == "- hi"


async def test_reasoning_effort_is_for_templates_that_read_it() -> None:
    thinking = tokens_of(
        "{{ messages[0].content }}{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}"
    )
    assert await prompt_of(thinking, reasoning_effort="low") == "hi low"
    assert await prompt_of(thinking, reasoning_effort=None) == "hi"
    given = {"reasoning_effort": "high"}
    assert await prompt_of(thinking, chat_template_kwargs=given) == "hi high"
    plain = tokens_of("{{ messages[0].content }}")
    assert await prompt_of(plain, chat_template_kwargs=given) == "hi"
    assert await prompt_of(plain, reasoning_effort="low") == "hi"


async def test_a_warning_names_a_field_that_the_chat_template_does_not_read() -> None:
    async with frontend(ScriptedWorker()) as kit:
        status, _, headers = await kit.post(
            "/v1/chat/completions", **CHAT, reasoning_effort="low", odd=1, max_tokens=2
        )
    assert status == 200
    assert headers["Warning"] == (
        '299 - "unknown fields, ignored: odd", '
        '299 - "no effect, because the chat template does not read it: reasoning_effort"'
    )


async def test_the_model_may_be_left_out_if_one_is_served() -> None:
    async with frontend(ScriptedWorker()) as kit:
        _, answer, _ = await kit.post("/v1/completions", prompt="hi", max_tokens=2)
        assert answer["model"] == "m"
        await kit.add(ScriptedWorker("w2", model="other"))
        status, answer, _ = await kit.post("/v1/completions", prompt="hi", max_tokens=2)
        assert (status, answer["error"]["param"]) == (400, "model")
        assert answer["error"]["message"] == "model is required; served models: m, other"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_reason_is_the_stop_string_or_the_stop_token(stream: bool) -> None:
    prompt = TOKENS.encode("hi", special=True)
    answer = undisturbed(prompt, 6)
    texts = [TOKENS.decode([token]) for token in answer]
    cases: list[tuple[dict[str, Any], str, int | str | None]] = [
        ({}, "".join(texts), None),
        ({"stop": [texts[3]]}, "".join(texts[:3]), texts[3]),
        ({"stop": [texts[3]], "include_stop_str_in_output": True}, "".join(texts[:4]), texts[3]),
        ({"stop_token_ids": [answer[3]]}, "".join(texts[:3]), answer[3]),
    ]
    for body, text, reason in cases:
        worker = ScriptedWorker(stop_at=body.get("stop_token_ids", [None])[0])
        async with frontend(worker) as kit:
            asked: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 6} | body
            if stream:
                choices = [event["choices"][0] for event in await kit.stream(**asked) if "choices" in event]
            else:
                choices = (await kit.post("/v1/completions", **asked))[1]["choices"]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["stop_reason"] == reason
        assert choices[-1]["finish_reason"] == ("length" if reason is None else "stop")


async def test_a_prompt_is_cut_to_its_last_tokens() -> None:
    async def sent(**body: Any) -> list[int]:
        worker = ScriptedWorker()
        async with frontend(worker) as kit:
            status, answer, _ = await kit.post("/v1/completions", model="m", max_tokens=2, **body)
            assert status == 200, answer
            return worker.requests[0].tokens

    whole = TOKENS.encode("one two three four", special=True)
    assert await sent(prompt="one two three four", truncate_prompt_tokens=3) == whole[-3:]
    assert await sent(prompt="one two three four", truncate_prompt_tokens=-1) == whole
    assert await sent(prompt=whole, truncate_prompt_tokens=2) == whole[-2:]
    assert len(await sent(prompt="word " * 20_000, truncate_prompt_tokens=-1)) == 4096 - 2
    assert await sent(prompt=whole * 9_000, truncate_prompt_tokens=4) == (2 * whole)[-4:]
    for side, kept in (("left", whole[-3:]), ("right", whole[:3]), (None, whole[-3:])):
        assert await sent(prompt=whole, truncate_prompt_tokens=3, truncation_side=side) == kept


@pytest.mark.parametrize(("parse", "body", "refused"), KINDS)
def test_fields_have_the_values_that_vllm_gives_them(
    parse: Any, body: dict[str, Any], refused: dict[str, tuple[Any, ...]]
) -> None:
    assert parse(body | {"model": None}).model == ""
    bias = {"1": 101, "2": -250.5, "3": 7}
    assert parse(body | {"logit_bias": bias}).sampling.logit_bias == {1: 100.0, 2: -100.0, 3: 7.0}
    lonely = {"continuous_usage_stats": True}
    asked = parse(body | {"stream": True, "stream_options": lonely})
    assert not asked.continuous_usage and not asked.include_usage
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    assert parse(body | {"response_format": tag}).guided == {"response_format": tag}


def test_a_chat_template_gets_tools_as_vllm_passes_them() -> None:
    tools: list[dict[str, Any]] = [
        {"function": {"name": "f", "odd": 1}, "odd": 2},
        {"type": "function", "function": {"parameters": {}, "strict": True, "description": "d", "name": "g"}},
    ]
    given: Any = parse_any_chat(CHAT | {"tools": tools}).template_extra
    first, second = given["tools"]
    assert first == {"type": "function", "function": {"name": "f", "description": None, "parameters": None}}
    shown = {"name": "g", "description": "d", "parameters": {}, "strict": True}
    assert list(second["function"].items()) == list(shown.items())


@pytest.mark.parametrize(
    "parsed",
    [
        parse_completion(COMPLETION | {"prompt": LONG, "truncate_prompt_tokens": 4}),
        parse_any_chat(
            CHAT | {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": -1}
        ),
    ],
    ids=["completions", "chat"],
)
async def test_a_truncated_text_that_is_too_long_to_tokenize_is_refused(parsed: ParsedRequest) -> None:
    tokens = tokens_of("{{ messages[0].content }}")
    with pytest.raises(ApiError) as found:
        await read_prompts(parsed, tokens, 4096, Intake(FrontendSettings()))
    assert (found.value.status, found.value.param) == (400, "truncate_prompt_tokens")
    assert f"may have {TEXT_CHARS_MAX} characters" in str(found.value)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompt_cut_to_nothing_is_refused(path: str) -> None:
    asked = COMPLETION if path == "/v1/completions" else CHAT
    async with frontend(ScriptedWorker()) as kit:
        status, body, _ = await kit.post(path, **asked, max_tokens=2, truncate_prompt_tokens=0)
    assert (status, body["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_template_knows_which_variables_it_reads() -> None:
    for folder in ("", "{% set x = 1 %}{{ x }}{{ y }}{% for z in messages %}{{ z }}{% endfor %}"):
        template = ChatTemplate(folder, {"bos_token": "<s>"})
        assert [name for name in ("x", "y", "z", "messages") if template.reads(name)] == (
            ["y", "messages"] if folder else []
        )


# --- biases and min_p


def test_logit_biases_are_parsed_and_zeros_are_dropped() -> None:
    sampling = parse_completion(
        COMPLETION | {"logit_bias": {"7": 1, "8": 0, "9": -2.5}, "min_p": 0.1}
    ).sampling
    assert (sampling.logit_bias, sampling.min_p) == ({7: 1.0, 9: -2.5}, 0.1)
    for nothing in ({}, {"logit_bias": None, "min_p": None}, {"logit_bias": {}, "min_p": 0}):
        sampling = parse_completion(COMPLETION | nothing).sampling
        assert (sampling.logit_bias, sampling.min_p) == ({}, 0.0)


async def test_biases_and_min_p_reach_the_worker() -> None:
    worker = ScriptedWorker()
    async with frontend(worker) as kit:
        await kit.complete("hi", 2, logit_bias={"300": -3}, min_p=0.25, temperature=0.5)
        await kit.complete("hi", 2)
        assert [(r.sampling.logit_bias, r.sampling.min_p) for r in worker.requests] == [
            ({300: -3.0}, 0.25),
            ({}, 0.0),
        ]


async def test_every_id_of_the_tokenizer_may_be_biased() -> None:
    async with frontend(ScriptedWorker()) as kit:
        await kit.complete("hi", 2, logit_bias={str(TOKENS.size - 1): 1})


def test_a_constraint_may_have_any_name_but_only_one_is_allowed() -> None:
    for name, value in (
        ("guided_choice", ["a"]),
        ("guided_regex", "a"),
        ("guided_json", {"type": "object"}),
        ("guided_json", json.dumps({"type": "object"})),
        ("guided_grammar", "root ::= a"),
        ("structured_outputs", {"choice": ["a"]}),
        ("response_format", {"type": "json_object"}),
    ):
        assert parse_completion(COMPLETION | {name: value}).guided == {name: value}
        other = (
            {"structured_outputs": {"regex": "a"}} if name != "structured_outputs" else {"guided_regex": "a"}
        )
        with pytest.raises(ApiError, match="one field"):
            parse_completion(COMPLETION | {name: value} | other)
    assert parse_completion(COMPLETION | {"response_format": {"type": "text"}}).guided is None
