"""Structural tags and required tool calls: what they accept and refuse."""

import json
import re
from typing import Any

import pytest
from grammar_samples import FORMATS, FUNCTIONS, tag

from events.grammar.constraint import schema_of_required_tools
from events.grammar.json_schema import grammar_of_json_schema
from events.grammar.model import Grammar
from events.grammar.printer import to_ebnf
from events.grammar.recogniser import start
from events.grammar.refusals import GrammarRefused, TextRejected
from events.grammar.residual import residual
from events.grammar.structural_tag import grammar_of_structural_tag

TEXT = {"type": "any_text"}
CALL = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def grammar(form: Any) -> Grammar:
    return grammar_of_structural_tag({"type": "structural_tag", "format": form})


def accepts(one: Grammar, text: str) -> bool:
    """Return whether a whole text is in the grammar."""
    try:
        return start(one).advance(text).accepting
    except TextRejected:
        return False


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: json.dumps(form)[:60])
def test_each_sample_has_a_grammar(form: Any) -> None:
    assert start(grammar(form)).configurations


def test_a_trigger_starts_a_call_in_free_text() -> None:
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f=x>", CALL, "</f>")]}
    one = grammar(tags)
    assert accepts(one, "no call") and accepts(one, 'a < b <<f=x>{"a": 1}</f> then <f=x>{}</f>')
    assert not accepts(one, "<f=y>") and not accepts(one, "<f=x>{}</f> <f")


def test_a_call_is_continued_inside_its_trigger_and_inside_its_arguments() -> None:
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag("<f=x>", CALL, "</f>")]}
    begun = start(grammar(tags))
    for text, rest, wrong in (("hi <", "f=x>{}</f>", ""), ('<f=x>{"a": 1', "2}</f> bye", "}</g>")):
        after = start(residual(begun.advance(text)))
        assert after.advance(rest).accepting
        assert not wrong or not after.allowed(wrong)
        assert len(to_ebnf(residual(begun.advance(text)))) < 4000


def test_text_inside_a_tag_ends_with_the_tag() -> None:
    one = grammar(tag("<t>", TEXT, "</t>"))
    assert accepts(one, "<t>a</ t></t>") and not accepts(one, "<t></t></t>")


def test_an_excluded_text_is_excluded_inside_a_longer_one() -> None:
    one = grammar({"type": "any_text", "excludes": ["abc", "xabcq"]})
    assert accepts(one, "xab cq") and not accepts(one, "xabc")


def test_the_older_form() -> None:
    structures = [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}]
    one = grammar_of_structural_tag({"structures": structures, "triggers": ["<f"]})
    assert accepts(one, "a <f>3</f>") and not accepts(one, "<f>x")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "token", "token": 3}, "the format 'token' is not supported, at #/format"),
        ({"type": "any_tokens"}, "the format 'any_tokens'"),
        ({"type": "exclude_token"}, "the format 'exclude_token'"),
        ({"type": "token_triggered_tags"}, "the format 'token_triggered_tags'"),
        ({"type": "token_dispatch"}, "the format 'token_dispatch'"),
        ({"type": "qwen_xml_parameter"}, "the format 'qwen_xml_parameter'"),
        ({**CALL, "style": "qwen_xml"}, "the field style of the format json_schema"),
        ({**CALL, "any_order": True}, "the field any_order"),
        ({**CALL, "max_whitespace_cnt": 2}, "the field max_whitespace_cnt"),
        ({**CALL, "excludes": ["x"]}, "excludes of a JSON schema"),
        ({"type": "json_schema", "json_schema": 3}, "json_schema must be an object"),
        ({"type": "grammar", "grammar": "start: x", "syntax": "lark"}, "the field syntax"),
        ({"type": "any_text", "max_tokens": 5}, "the field max_tokens"),
        ({"type": "any_text", "max_chars": 5}, "the field max_chars"),
        ({"type": "any_text", "extra": 5}, "the field 'extra'"),
        ({"type": "any_text", "excludes": [""]}, "excludes must be an array of texts"),
        ({"type": "regex", "pattern": "("}, "not closed, at #/format"),
        (tag({"type": "token", "token": 3}, TEXT, "x"), "begin must be a text: give a text, no token id"),
        (tag("<a>", TEXT, {"type": "token", "token": 3}), "the end of a tag must be"),
        (tag("<a>", TEXT, []), "the end of a tag must be"),
        ({"type": "sequence", "elements": []}, "elements must be an array of at least one"),
        ({"type": "sequence", "elements": [{"value": "x"}]}, "an object with a type, at #/format/elements/0"),
        ({"type": "repeat", "min": 2, "max": 1, "content": TEXT}, "min and max must be whole numbers"),
        (
            {"type": "triggered_tags", "triggers": ["<g"], "tags": [tag("<f>", TEXT, "x")]},
            "exactly one trigger",
        ),
        (
            {"type": "triggered_tags", "triggers": [], "tags": [], "at_least_one": 1},
            "at_least_one must be true",
        ),
        ({"type": "tags_with_separator", "tags": [tag("a", TEXT, "b")]}, "separator must be a text"),
        ({"type": "dispatch", "rules": [["a"]]}, "must be a pair"),
        (tag("<a>", {"type": "sequence", "elements": [3]}, "x"), "must be an object with a type"),
    ],
)
def test_formats_that_are_not_supported_are_refused(form: Any, why: str) -> None:
    with pytest.raises(GrammarRefused) as raised:
        grammar(form)
    assert why in str(raised.value).replace(", at #/format: give", ": give")


@pytest.mark.parametrize(
    "found", [3, {}, {"type": "x", "format": TEXT}, {"structures": 3}, {"structures": [{}]}]
)
def test_structural_tags_that_are_not_valid_are_refused(found: Any) -> None:
    with pytest.raises(GrammarRefused):
        grammar_of_structural_tag(found)


def test_required_tools_are_a_list_of_calls() -> None:
    one = grammar_of_json_schema(schema_of_required_tools(FUNCTIONS))
    whole = '[{"name": "get_weather", "parameters": {"city": "Bern"}}, {"name": "now", "parameters": {}}]'
    assert accepts(one, whole)
    assert not accepts(one, "[]") and not accepts(one, whole.replace("now", "then"))


@pytest.mark.parametrize(
    ("functions", "why"),
    [
        ({"a": {"$defs": 3}}, "$defs must be an object"),
        (
            {name: {"$defs": {"x": {"type": kind}}} for name, kind in (("a", "string"), ("b", "null"))},
            "define 'x' differently",
        ),
        ({"a": {"type": "array", "contains": {}}}, "contains"),
    ],
)
def test_tools_that_are_not_supported_are_refused(functions: Any, why: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(why)):
        grammar_of_json_schema(schema_of_required_tools(functions))
