"""Properties of the output parser for any text: splits, resumption, and that no text is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_parsing import FORMATS, HARMONY_MARKERS, Parsed, Setup, finished, markers_in, parse_pieces

from controller.frontend.openai.tools.output_delta import ParsedCall, ParsedOutput
from controller.frontend.openai.tools.output_renderer import render_output
from controller.frontend.openai.tools.reasoning_formats import REASONING_FORMATS

FRAGMENTS = (
    '{"name": "f", "arguments": "{\\"a\\": 1}"}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": "x"}',
    *(
        '{"name": "f", "arguments": {"a": [1, "x"]}}',
        '{"arguments": {"b": "}"}, "name": "g"}',
        '"name": "',
        '"f"',
        '{"',
    ),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ": ",
        ";",
        "(",
        ")",
        "=",
        "'",
        "\n",
        " ",
        "\n\n",
        "é",
        "a",
        "1",
        "f(a=1)",
        "null",
    ),
    *(
        '\\"',
        "\\u00e9",
        "\\u",
        "```",
        "to=functions.f",
        "assistant",
        "functions.f:0",
        "f\n```json\n{",
        "\n```",
        "true",
    ),
)
SCHEMAS = {
    "f": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["object", "null"]}}
    }
}


def fragments_of(tools: str, reasoning: str) -> list[str]:
    """Return texts of which outputs in these formats are made, and the beginnings of their markers."""
    markers: set[str] = set()
    if tools:
        one = FORMATS[tools]
        markers |= markers_in(one) | {one.leading, one.separator}
        if one.tags:
            key_ends = {separator for separator, _ in one.tags.separators}
            starts = {f"{one.tags.start}{key}{end}" for key in "abc" for end in key_ends}
            markers |= {
                one.tags.name_end,
                one.tags.start,
                one.tags.end,
                f"{one.call_start[0]}f{one.tags.name_end}",
            } | starts
        if one.header:
            markers |= {
                f"{one.call_start[0]}{name}{one.header_ends[0]}"
                for name in ("functions.f:0", "f", "function<｜tool▁sep｜>f")
            }
        if one.channels:
            markers |= HARMONY_MARKERS
    if reasoning:
        markers |= {*REASONING_FORMATS[reasoning].start, *REASONING_FORMATS[reasoning].end}
    beginnings = {marker[: len(marker) // 2] for marker in markers if len(marker) > 1}
    return sorted(markers - {""}) * 3 + sorted(beginnings) + list(FRAGMENTS)


CALLS = (
    ParsedCall("f", '{"a": 1, "b": "x y\\n{z}", "c": null}'),
    ParsedCall("g", '{"d": {"e": [1, "]", {"h": "\\\\"}]}, "i": "é"}'),
    ParsedCall("k", "{}"),
)


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Setup, str]:
    """Draw formats, and a text: answers in these formats and fragments of them, changed in some places."""
    tools = draw(st.sampled_from(("", *FORMATS, *FORMATS)))
    reasoning = draw(st.sampled_from(("", "", *REASONING_FORMATS)))
    fragments = st.sampled_from(fragments_of(tools, reasoning))
    calls = tuple(draw(st.lists(st.sampled_from(CALLS), min_size=1, max_size=3))) if tools else ()
    answer = ParsedOutput(draw(st.sampled_from(("", "", "hi. "))), "hm" if reasoning else "", calls)
    whole = render_output(answer, FORMATS.get(tools), REASONING_FORMATS.get(reasoning))
    parts = draw(
        st.lists(st.one_of(st.just(whole), fragments), min_size=1, max_size=draw(st.sampled_from((1, 12))))
    )
    text = "".join(parts)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.one_of(st.just(""), fragments)) + text[at + draw(st.integers(0, 9)) :]
    named = draw(st.sampled_from(("",) * 9 + ("f",)))
    in_reasoning = bool(reasoning) and draw(st.booleans())
    return Setup(tools, reasoning, in_reasoning, SCHEMAS, named if tools else ""), text


@given(outputs(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_split_yields_the_same_deltas_as_the_whole(
    output: tuple[Setup, str], data: st.DataObject
) -> None:
    setup, text = output
    reason = data.draw(st.sampled_from(("stop", "length")))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse_pieces(setup, [text], reason)
    assert parse_pieces(setup, pieces, reason) == whole
    assert parse_pieces(setup, text, reason) == whole


@pytest.mark.slow
@given(outputs(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_resumed_parser_continues_without_repeating_or_losing(
    output: tuple[Setup, str], data: st.DataObject
) -> None:
    """What the first parser sent up to the cut, and what the second sends after it, are the whole."""
    setup, text = output
    cut = data.draw(st.integers(0, len(text)))
    first = setup.parser()
    before = [delta for char in text[:cut] for delta in first.feed(char)]
    second = setup.parser()
    second.resume(text[:cut])
    assert finished(second, before + second.feed(text[cut:]), "stop") == parse_pieces(setup, [text])


@pytest.mark.slow
@given(outputs())
@settings(max_examples=150, deadline=None)
def test_an_output_without_calls_keeps_its_text(output: tuple[Setup, str]) -> None:
    setup, text = output
    setup = setup._replace(reasoning="", in_reasoning=False, named="")
    parsed = parse_pieces(setup, [text])
    if parsed.output.calls or setup.tools == "openai":
        return
    assert parsed.output.content == text
    assert parsed == Parsed(parsed.output, "stop", ())


@given(outputs(), st.data())
@settings(max_examples=150, deadline=None)
def test_the_arguments_of_a_complete_call_are_json(output: tuple[Setup, str], data: st.DataObject) -> None:
    """Also if the text was cut anywhere: what a client must not run is among the incomplete calls."""
    setup, text = output
    parsed = parse_pieces(setup, [text[: data.draw(st.integers(0, len(text)))]], "length")
    assert parsed.reason == "length"
    for index, call in enumerate(parsed.output.calls):
        if index not in parsed.incomplete:
            json.loads(call.arguments)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "openai"])
def test_no_marker_of_a_format_contains_another_before_its_end(name: str) -> None:
    """Otherwise the first marker found would depend on how the text is split."""
    one = FORMATS[name]
    together = {*one.openers(), one.section_end, one.call_end, *one.call_start} - {""}
    for reasoning in REASONING_FORMATS.values():
        both = together | {*reasoning.start, *reasoning.end}
        assert not [(a, b) for a in both for b in both if a != b and b in a[:-1]]
