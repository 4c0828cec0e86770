"""Hostile schemas and grammars: each is answered or refused quickly, without unbounded recursion."""

import contextlib
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from events.grammar.constraint import schema_of_required_tools
from events.grammar.ebnf import parse_ebnf
from events.grammar.gbnf import parse_gbnf
from events.grammar.json_schema import grammar_of_json_schema
from events.grammar.model import Grammar
from events.grammar.printer import to_ebnf
from events.grammar.recogniser import start
from events.grammar.refusals import GrammarRefused, TextRejected
from events.grammar.regex import Flavour, grammar_of_regex, parse_regex
from events.grammar.residual import residual
from events.grammar.structural_tag import grammar_of_structural_tag

SECONDS = 30.0  # far more than any needs, because machines of tests are loaded


def nested(levels: int, inner: Any, key: str) -> Any:
    for _ in range(levels):
        inner = {"type": "object", "properties": {"a": inner}} if key == "a" else {key: [inner]}
    return inner


def chain(length: int) -> Any:
    definitions = {str(at): {"properties": {"a": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(length): {}}}


def doubling(levels: int) -> Any:
    definitions = {
        str(at): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{at + 1}"}] * 2, "minItems": 2}
        for at in range(levels)
    }
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(levels): {"type": "null"}}}


def deep_schema(levels: int, keyword: str) -> Grammar:
    return grammar_of_json_schema(nested(levels, {}, keyword))


SOURCES: dict[str, Callable[[], Grammar]] = {
    "a deep schema": lambda: grammar_of_json_schema(nested(5000, {}, "a")),
    "a schema beyond Python's recursion": lambda: grammar_of_json_schema(nested(100_000, {}, "anyOf")),
    **{
        f"a schema of {levels} levels of {keyword}": partial(deep_schema, levels, keyword)
        for levels in (60, 150, 350, 480, 700)
        for keyword in ("a", "anyOf")
    },
    "quantifiers of quantifiers in a pattern": lambda: grammar_of_regex("a" + "*" * 3000),
    "quantifiers of quantifiers of llama.cpp": lambda: parse_gbnf('root ::= "a"' + "*" * 3000),
    "a count of 5,000 digits": lambda: parse_ebnf('root ::= "a"{' + "9" * 5000 + "}"),
    "an array index of 5,000 digits": lambda: grammar_of_json_schema({"$ref": "#/anyOf/" + "1" * 5000, "anyOf": [{}]}),
    "a deep anyOf": lambda: grammar_of_json_schema(nested(500, {}, "anyOf")),
    "a deep constant": lambda: grammar_of_json_schema({"const": json.loads("[" * 900 + "]" * 900)}),
    "a long chain of references": lambda: grammar_of_json_schema(chain(3000)),
    "references that double": lambda: grammar_of_json_schema(doubling(40)),
    "a long enum": lambda: grammar_of_json_schema({"enum": ["a" * at for at in range(400)]}),
    "many properties": lambda: grammar_of_json_schema({"properties": {f"p{at}": {} for at in range(3000)}}),
    "many properties with bounds": lambda: grammar_of_json_schema(
        {"properties": {f"p{at}": {} for at in range(300)}, "minProperties": 100, "maxProperties": 200}
    ),
    "a huge repetition": lambda: grammar_of_json_schema({"type": "string", "maxLength": 10**9}),
    "many items": lambda: grammar_of_json_schema({"type": "array", "items": {}, "maxItems": 10**6}),
    "a long schema": lambda: grammar_of_json_schema({"description": "x" * 300_000}),
    "deep groups": lambda: parse_ebnf("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "deep groups of llama.cpp": lambda: parse_gbnf("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "deep groups of a pattern": lambda: grammar_of_regex("(" * 1500 + "a" + ")" * 1500),
    "nested repetitions": lambda: parse_ebnf("root ::= " + "(" * 40 + '"a"' + "*)" * 40 + '"b"'),
    "nested counts": lambda: parse_ebnf('root ::= (((("a"{1,99}){1,99}){1,99}){1,99}){1,99}'),
    "counts of the empty text": lambda: parse_ebnf('root ::= (("a"?){0,999999}){0,999999} "b"'),
    "a long chain of rules": lambda: parse_ebnf(
        "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(4000)) + 'r4000 ::= "a"'
    ),
    "a long sequence of calls": lambda: parse_ebnf("root ::= " + "a " * 9000 + '\na ::= "a" | ""'),
    "many rules that refer to all": lambda: parse_ebnf(
        "\n".join(f"r{at} ::= " + " | ".join(f"r{to}" for to in range(90)) for at in range(89))
        + '\nr89 ::= "a"\nroot ::= r0'
    ),
    "an ambiguous sum": lambda: parse_ebnf('root ::= root "+" root | "a" | root root'),
    "ambiguous counts": lambda: parse_ebnf('root ::= ("a" | "aa" | "aaa"){0,100000}'),
    "an exponential pattern": lambda: grammar_of_regex("(a|a)*" * 200 + "b"),
    "the classical subset blow-up": lambda: grammar_of_regex("(a|b)*a(a|b){500}"),
    "nested calls that end everywhere": lambda: parse_ebnf('root ::= x\nx ::= "a" (x x?)?'),
    "a left-recursive cycle": lambda: parse_ebnf('root ::= x "a" | ""\nx ::= y | root\ny ::= x | root'),
    "a reversed class": lambda: parse_ebnf("root ::= [\\U0010ffff-a]"),
    "escapes beyond Unicode": lambda: parse_ebnf('root ::= "\\UFFFFFFFF"'),
    "an endless escape": lambda: parse_ebnf('root ::= "\\x' + "f" * 100_000 + '"'),
    "long triggers": lambda: grammar_of_structural_tag(
        {"format": {"type": "any_text", "excludes": ["a" * 2000, "a" * 1999 + "b"]}}
    ),
    "deep formats": lambda: grammar_of_structural_tag(
        {"format": json.loads('{"type":"star","content":' * 300 + '{"type":"any_text"}' + "}" * 300)}
    ),
}  # fmt: skip
TEXTS = ("a" * 400, "[" * 400, '{"a":' * 200, '"' + "a" * 400, "a+" * 150, "aab" * 100)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_hostile_input_is_answered_or_refused_in_time(name: str) -> None:
    began = time.monotonic()
    try:
        begun = start(SOURCES[name]())
    except GrammarRefused as refused:
        assert str(refused)
    else:
        to_ebnf(begun.automaton.grammar)
        for text in TEXTS:
            try:
                to_ebnf(residual(begun.advance(text)))
            except (GrammarRefused, TextRejected) as refused:
                assert str(refused)
    assert time.monotonic() - began < SECONDS


def test_deep_nesting_of_an_answer_is_followed_and_printed() -> None:
    state = start(grammar_of_json_schema({})).advance("[" * 2000 + "1")
    printed = to_ebnf(residual(state))
    assert len(printed) < 200_000
    assert start(parse_ebnf(printed, "root")).advance("]" * 2000).accepting
    assert state.advance("]" * 2000).accepting


EBNF_PIECES = st.sampled_from(
    ["root ::= ", "\nx ::= ", '"a"', '"', "[a-z]", "[^", "]", "(", ")", "(=", "|", "*", "+", "?", "{2,3}", "{", ",", "}", "x",
     "root", "\\", "\\u00e9", "#", "\n", " ", "-", "Regex(", "TagDispatch(", "excludes=(", "true", "<[5]>", ".", "é", "\0", "1"]
)  # fmt: skip
REGEX_PIECES = st.sampled_from(
    ["a", "[", "]", "^", "-", "(", "(?:", "(?<n>", "(?=", "(?", ")", "|", "*", "+", "?", "{2,3}", "{", "}", "{0}", "\\", "\\d",
     "\\x", "\\u{", "\\c", "1", ",", ".", "$", "\n", "é", "\0", '"', "(?i)"]
)  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(st.lists(EBNF_PIECES, max_size=14).map("".join))
def test_any_text_is_a_grammar_or_refused(text: str) -> None:
    for parse in (parse_ebnf, parse_gbnf):
        try:
            begun = start(parse(text))
            to_ebnf(residual(begun))
            begun.allowed("aaé")
        except GrammarRefused:
            pass


@settings(deadline=None, max_examples=300)
@given(st.lists(REGEX_PIECES, max_size=12).map("".join))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    sources: list[Callable[[], Grammar]] = [
        lambda: grammar_of_regex(text),
        lambda: grammar_of_json_schema({"type": "string", "pattern": text}),
        lambda: Grammar({"root": parse_regex(text, Flavour.AUTOMATON, "here")}),
    ]
    for parse in sources:
        with contextlib.suppress(GrammarRefused):
            to_ebnf(residual(start(parse())))


KEYWORDS = [
    "type", "properties", "required", "items", "prefixItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs",
    "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "pattern", "format",
    "additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedItems",
    "a", "begin", "end", "content", "triggers", "tags", "elements", "rules", "separator", "excludes", "value", "json_schema",
]  # fmt: skip
ATOMS = st.one_of(
    st.sampled_from(["object", "array", "string", "integer", "number", "null", "#", "#/$defs/a", "date", "a", "é", "", "tag",
                     "sequence", "triggered_tags", "dispatch", "any_text", "star", "json_schema", "const_string"]),
    st.integers(-3, 9), st.none(), st.booleans(), st.floats(),
)  # fmt: skip
ANY_SCHEMA = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5)
    ),
    max_leaves=15,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from(KEYWORDS), ANY_SCHEMA, max_size=6))
def test_any_object_is_a_schema_and_a_format_or_refused(schema: dict[str, Any]) -> None:
    sources: list[Callable[[], Grammar]] = [
        lambda: grammar_of_json_schema(schema),
        lambda: grammar_of_structural_tag({"format": schema}),
        lambda: grammar_of_structural_tag({"structures": [schema], "triggers": ["a"]}),
        lambda: grammar_of_json_schema(schema_of_required_tools({"a": schema})),
    ]
    for convert in sources:
        with contextlib.suppress(GrammarRefused):
            to_ebnf(residual(start(convert())))
