"""Examples of each tool-call format: a model's text, and the content and calls that a client gets."""

import json
import re
from pathlib import Path

import pytest
from output_parsing import FORMATS, markers_in, parse

from controller.frontend.openai.tools.tool_formats import choose_tool_format

TEMPLATES = Path(__file__).parent.parent / "text" / "chat_templates"
CITY = '{"city": "Zürich", "days": 3}'
NESTED = '{"filter": {"any": [{"k": "}"}, ["]", null]]}, "quote": "\\"\\\\"}'
SCHEMAS = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "quote": {"type": "string"},
            "filter": {"type": "object"},
        }
    }
}

ONE_CALL = [  # format, and the text of one call of `weather` with the arguments CITY
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"city": "Zürich", "days": 3}, "name": "weather"}</tool_call>'),
    ("hermes", '<tool_call>{"id": 7, "name": "weather", "arguments": {"city": "Zürich", "days": 3}}'),
    (
        "granite4",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>',
    ),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}]'),
    ("granite", '<tool_call> [{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}]'),
    ("granite-20b-fc", '<function_call> {"name": "weather", "arguments": {"city": "Zürich", "days": 3}}'),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Zürich", "days": 3}}'),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"city": "Zürich", "days": 3}}',
    ),
    ("llama3_json", '{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}'),
    ("pythonic", "[weather(city='Zürich', days=3)]"),
    ("llama4_pythonic", '<|python_start|>[weather(city="Zürich", days=3)]<|python_end|>'),
    ("llama4_pythonic", "[weather(city='Zürich', days=3)]"),
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich", "days": 3}}]'),
    ("mistral", '[TOOL_CALLS]weather{"city": "Zürich", "days": 3}'),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Zürich", "days": 3}'),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]x8dP2ql0a[ARGS]{"city": "Zürich", "days": 3}'),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "<function=weather><parameter=city>Zürich</parameter><parameter=days>3</parameter></function>",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>Zürich<parameter=days>3</function></tool_call>",
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Zürich</parameter>\n<parameter=days>3</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
    ),
    (
        "glm45",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich<arg_key>days</arg_key><arg_value>3</tool_call>",
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Zürich</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Zürich", "days": 3}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Zürich", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Zürich'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    (
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Zürich'
        '</｜DSML｜parameter><｜DSML｜parameter name="days">3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>',
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Zürich", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    (
        "openai",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich", "days": 3}<|call|>',
    ),
    (
        "openai",
        '<|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Zürich", "days": 3}',
    ),
    ("required", '[{"name": "weather", "parameters": {"city": "Zürich", "days": 3}}]'),
]


@pytest.mark.parametrize(("tools", "text"), ONE_CALL)
def test_one_call(tools: str, text: str) -> None:
    parsed = parse(text, tools, schemas=SCHEMAS)
    assert parsed.calls() == [("weather", CITY)]
    assert parsed.output.content == ""
    assert (parsed.reason, parsed.incomplete) == ("tool_calls", ())


@pytest.mark.parametrize(("tools", "text"), ONE_CALL)
def test_a_call_cut_inside_its_arguments_is_not_complete(tools: str, text: str) -> None:
    """Elsewhere such a call ends with `{}` as its arguments, and runs."""
    cut = text[: text.index("ürich")]
    for reason in ("length", "stop"):
        parsed = parse(cut, tools, reason, schemas=SCHEMAS)
        assert parsed.reason == reason
        assert len(parsed.incomplete) == len(parsed.calls())
        assert all(CITY.startswith(arguments) for _, arguments in parsed.calls())


BEFORE = [
    (tools, text)
    for tools, text in ONE_CALL
    if tools not in ("openai", "required", "pythonic") and text[0] not in "[{"
]


@pytest.mark.parametrize(("tools", "text"), BEFORE)
def test_text_around_a_call_is_content(tools: str, text: str) -> None:
    parsed = parse(f"One moment. {text}\n\nDone.", tools, schemas=SCHEMAS)
    assert parsed.output.content == "One moment. Done."
    assert parsed.calls() == [("weather", CITY)]


SEVERAL = [
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": %s}</tool_call>',
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": %s}]'),
    (
        "granite-20b-fc",
        '<function_call> {"name": "f", "arguments": {}}<function_call> {"name": "g", "arguments": %s}',
    ),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": %s}'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": %s}]'),
    ("mistral", "[TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]%s"),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>%s"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "openai",
        "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.g "
        "<|constrain|>json<|message|>%s<|call|>",
    ),
]


@pytest.mark.parametrize(("tools", "text"), SEVERAL)
def test_several_calls_with_nested_arguments_are_passed_on_as_written(tools: str, text: str) -> None:
    parsed = parse(text % NESTED, tools)
    assert parsed.calls() == [("f", "{}"), ("g", NESTED)]
    ids = [call.id for call in parsed.output.calls]
    if tools == "kimi_k2":
        assert ids == ["functions.f:0", "functions.g:1"]
    elif tools == "mistral":  # its chat template refuses other ids
        assert len({one for one in ids if re.fullmatch(r"[A-Za-z0-9]{9}", one)}) == 2
    else:
        assert len({one for one in ids if re.fullmatch(r"chatcmpl-tool-[0-9a-f]{32}", one)}) == 2


@pytest.mark.parametrize(("tools", "text"), SEVERAL)
def test_markers_inside_strings_are_text(tools: str, text: str) -> None:
    markers = "".join(sorted(markers_in(FORMATS[tools])))
    arguments = json.dumps({"text": f"{markers} <tool_call> \n"}, ensure_ascii=False)
    assert parse(text % arguments, tools).calls() == [("f", "{}"), ("g", arguments)]


def test_pythonic_values_become_json() -> None:
    text = """[a.b(x=-1.5, y=(1, 2), z={'k': None, "l": [True, false]}), g(s='it\\'s', code='x = 1
y = "2"'), h()]"""
    assert parse(text, "pythonic").calls() == [
        ("a.b", '{"x": -1.5, "y": [1, 2], "z": {"k": null, "l": [true, false]}}'),
        ("g", '{"s": "it\'s", "code": "x = 1\\ny = \\"2\\""}'),
        ("h", "{}"),
    ]


def test_tagged_values_have_the_types_of_the_schema_and_keep_their_lines() -> None:
    schemas = {
        "run": {"properties": {"code": {"type": "string"}, "n": {"type": ["integer", "null"]}, "raw": {}}}
    }
    text = (
        "<tool_call>\n<function=run>\n<parameter=code>\nif a < b:\n    print('</tool_call>')\n\n</parameter>\n"
        "<parameter=n>\nnull\n</parameter>\n<parameter=raw>\n[1]\n</parameter>\n<parameter=unknown>5</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert parse(text, "qwen3_coder", schemas=schemas).calls() == [
        (
            "run",
            '{"code": "if a < b:\\n    print(\'</tool_call>\')\\n", "n": null, "raw": "[1]", "unknown": "5"}',
        )
    ]


def test_encoded_arguments_are_decoded() -> None:
    """Some models write the arguments' JSON as a string, or null instead of an empty object."""
    text = '<|tool_call|>[{"name": "f", "arguments": "{\\"a\\": 1}"}, {"name": "g", "arguments": null}]'
    assert parse(text, "granite").calls() == [("f", '{"a": 1}'), ("g", "{}")]


NO_CALL = [
    ("hermes", "Use <tool_call> like this: </tool_call>"),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'.replace("[1]", "1,")),
    ("hermes", '<tool_call>\n{"name": "f", "argu'),
    ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}'),
    ("llama3_json", 'The object is {"name": "f", "parameters": {}}.'),
    ("pythonic", "[see](https://example.com) for f(x=1)"),
    ("pythonic", "[f(x=y)]"),
    ("pythonic", "[f(1)]"),
    ("mistral", "[TOOL_CALLS] nothing here"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<param"),
    ("qwen3_coder", "<tool_call></tool_call>"),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>no id<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    ("required", '["a", "b"]'),
    ("", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
]


@pytest.mark.parametrize(("tools", "text"), NO_CALL)
def test_text_that_is_no_call_is_content_with_its_markers(tools: str, text: str) -> None:
    parsed = parse(text, tools)
    assert (parsed.output.content, parsed.calls(), parsed.reason) == (text, [], "stop")


def test_a_malformed_call_does_not_hide_the_next_one() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    parsed = parse(text.replace("1}", "1,}"), "hermes")
    assert parsed.calls() == [("f", '{"a": 1,}'), ("g", "{}")]
    assert (parsed.incomplete, parsed.reason) == ((0,), "stop")


def test_a_named_function_gets_the_content_as_its_arguments() -> None:
    parsed = parse('{"a": [1]}', "hermes", named="f")
    assert (parsed.calls(), parsed.reason) == ([("f", '{"a": [1]}')], "stop")
    cut = parse('{"a": [1', "hermes", "length", named="f")
    assert (cut.calls(), cut.incomplete, cut.reason) == ([("f", '{"a": [1')], (0,), "length")


CHOSEN = {
    "gpt_oss_harmony": "openai", "hermes3": "hermes", "kimi_k2": "kimi_k2", "llama3_1_tools": "llama3_json",
    "mistral_v3_tools": "mistral", "qwen2_5_tools": "hermes", "qwen3_coder_xml": "qwen3_coder",
}  # fmt: skip


@pytest.mark.parametrize("template", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_the_chat_template_chooses_the_format(template: str) -> None:
    chosen = choose_tool_format((TEMPLATES / f"{template}.jinja").read_text())
    assert (chosen.name if chosen else None) == CHOSEN.get(template)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_coder"),
        ("Qwen/Qwen3-32B", "hermes"),
        ("deepseek-ai/DeepSeek-V3.1", "deepseek_v31"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek_v3"),
        ("ibm-granite/granite-4.0-h-small", "granite4"),
        ("mistralai/Magistral-Small-2509", "mistral"),
        ("google/gemma-3-27b-it", None),
    ],
)
def test_the_model_name_chooses_the_format_without_a_hint(model: str, name: str | None) -> None:
    chosen = choose_tool_format("", model)
    assert (chosen.name if chosen else None) == name
