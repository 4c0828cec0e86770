"""What the renderer writes, the parser reads: for every format, for any split, and for any cut."""

import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_parsing import FORMATS, Parsed, Setup, parse_pieces

from controller.frontend.openai.tools.output_delta import ParsedCall, ParsedOutput, collect
from controller.frontend.openai.tools.output_renderer import render_output
from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS

PROSE = st.text("abc é日😀.,:\n\t*-'`#", max_size=12)
KEYS = st.sampled_from(("a", "city", "b_2", "class"))
NAMES = st.sampled_from(("f", "get_weather", "g2", "look_up"))
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ("</tool_call>", "<|call|>", '{"name": "f"}', "[TOOL_CALLS]", "\\n", '"', "'", "]", "; ")
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9).map(lambda x: x + 0.0)
)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)
TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


class Answer(NamedTuple):
    """An answer, its text, and how to parse it."""

    output: ParsedOutput
    text: str
    setup: Setup


@st.composite
def answers(draw: st.DrawFn, tools: str) -> Answer:
    """Draw an answer that a format can express."""
    style = FORMATS[tools]
    reasoning = "openai_gptoss" if style.channels else draw(st.sampled_from(("", *REASONING_FORMATS)))
    thinking = REASONING_FORMATS.get(reasoning)
    if thinking and thinking.channels and not style.channels:
        reasoning, thinking = "", None
    in_reasoning = bool(thinking) and not style.channels and draw(st.booleans())
    arguments = draw(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), max_size=3))
    if style.tags:  # a tag has no way to write text that looks like one
        arguments = [{k: v for k, v in one.items() if not has_tag(v)} for one in arguments]
    names = draw(st.lists(NAMES, min_size=len(arguments), max_size=len(arguments), unique=True))
    calls = tuple(
        ParsedCall(name, json.dumps(one, ensure_ascii=False))
        for name, one in zip(names, arguments, strict=True)
    )
    schemas = {
        call.name: {
            "properties": {k: {"type": TYPES[type(v)]} for k, v in json.loads(call.arguments).items()}
        }
        for call in calls
    }
    content = draw(PROSE) if not (calls and style.leading) else ""
    content = content if content.strip() else ""
    content = content.lstrip() if thinking and thinking.trim_content else content
    thought = draw(PROSE) if thinking else ""
    thought = thought.rstrip() if thinking and thinking.trim else thought
    output = ParsedOutput(
        content, thought, calls if len({call.name for call in calls}) == len(calls) else calls[:1]
    )
    text = render_output(output, style, thinking, in_reasoning=in_reasoning)
    return Answer(output, text, Setup(tools, reasoning, in_reasoning, schemas))


def has_tag(value: Any) -> bool:
    """Return whether a value has text that begins a tag."""
    return "<" in json.dumps(value)


def same(parsed: ParsedOutput, output: ParsedOutput) -> bool:
    """Compare; arguments that the format writes in another syntax by their values."""
    calls = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    return (
        calls == [(call.name, json.loads(call.arguments)) for call in output.calls]
        and parsed[:2] == output[:2]
    )


def complete_calls(parsed: Parsed) -> list[tuple[str, str]]:
    """Return the calls that a client may run."""
    return [call for index, call in enumerate(parsed.calls()) if index not in parsed.incomplete]


@pytest.mark.slow
@pytest.mark.parametrize("tools", FORMATS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_rendered_answer_is_parsed_to_itself(tools: str, data: st.DataObject) -> None:
    answer = data.draw(answers(tools))
    whole = parse_pieces(answer.setup, [answer.text])
    assert same(whole.output, answer.output)
    assert whole.reason == ("tool_calls" if answer.output.calls else "stop")
    assert parse_pieces(answer.setup, answer.text) == whole
    cut = data.draw(st.integers(0, len(answer.text)))
    partly = parse_pieces(answer.setup, [answer.text[:cut]], "length")
    assert complete_calls(partly) == whole.calls()[: len(complete_calls(partly))]
    assert partly.incomplete in ((), (len(partly.calls()) - 1,))
    sent = collect(answer.setup.parser().feed(answer.text[:cut]))
    for whole_call, sent_call in zip(whole.output.calls, sent.calls, strict=False):
        assert whole_call.arguments.startswith(sent_call.arguments)
    assert whole.output.content.startswith(sent.content)
    assert whole.output.reasoning.startswith(sent.reasoning)


def test_what_a_format_cannot_express_is_refused() -> None:
    call = ParsedOutput(calls=(ParsedCall("f", "[1]"),))
    with pytest.raises(ValueError, match="the arguments of f are no JSON object"):
        render_output(call, FORMATS["hermes"])
    with pytest.raises(ValueError, match="no format"):
        render_output(call, None)
    with pytest.raises(ValueError, match="no format"):
        render_output(ParsedOutput(reasoning="hm"), FORMATS["hermes"])
