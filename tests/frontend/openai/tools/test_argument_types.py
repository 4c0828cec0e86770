"""The types that texts of tagged parameters get from a tool's JSON schema."""

from typing import Any

import pytest

from controller.frontend.openai.tools.argument_types import ArgumentType, convert_text, convert_value


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("5.0", {"type": "integer"}, 5.0),
        ("5.0", {"type": "number"}, 5),
        ("2.5", {"type": "number"}, 2.5),
        ("1e999", {"type": "number"}, "1e999"),
        ("nan", {"type": "number"}, "nan"),
        ("True", {"type": "boolean"}, True),
        ("0", {"type": "bool"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[1e999]", {"type": "array"}, "[1e999]"),
        ("7", {"enum": [1, 7]}, 7),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("x", {"type": "date"}, "x"),
        ("3", {"type": "date"}, 3),
    ],
)
def test_a_text_becomes_the_first_type_that_it_has(text: str, schema: Any, value: Any) -> None:
    converted = convert_text(text, ArgumentType(schema))
    assert (converted, type(converted)) == (value, type(value))


def test_the_parts_of_a_value_get_their_types() -> None:
    schema = {
        "properties": {
            "n": {"type": "integer"},
            "list": {"items": {"type": "number"}},
            "s": {"type": "string"},
        }
    }
    value = {"n": "1", "list": ["2.5", 3], "s": 4, "other": "5"}
    assert convert_value(value, ArgumentType(schema)) == {"n": 1, "list": [2.5, 3], "s": "4", "other": "5"}


def test_a_value_keeps_its_type_if_the_schema_declares_none() -> None:
    kind = ArgumentType({"description": "anything", "properties": {"a": {}}})
    assert convert_value(5, kind) == 5
    assert convert_value({"a": [1, None]}, kind) == {"a": [1, None]}


@pytest.mark.parametrize(
    "schema", [None, 3, {"type": 7}, {"type": [None]}, {"enum": []}, {"anyOf": 1}, {"properties": []}]
)
def test_a_schema_of_another_shape_means_a_string(schema: Any) -> None:
    kind = ArgumentType(schema)
    assert kind.types == {"string"}
    assert convert_text("1", kind) == "1"
    assert convert_value({"a": ["1"]}, kind) == {"a": ["1"]}


def test_a_deep_schema_is_read_and_a_deep_value_remains_a_string() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(50_000):
        schema = {"anyOf": [schema]}
    assert ArgumentType(schema).types == {"integer"}
    assert convert_text("[" * 5000 + "]" * 5000, ArgumentType({"type": "array"})) == "[" * 5000 + "]" * 5000
    assert convert_text("[" * 200 + "]" * 200, ArgumentType({"type": "array"})) != "[" * 200 + "]" * 200


@pytest.mark.parametrize("text", ["[NaN]", "[Infinity]", "[-Infinity]", "[1e999]", '{"a": -1e999}'])
def test_numbers_that_json_does_not_have_remain_a_string(text: str) -> None:
    assert convert_text(text, ArgumentType({"type": ["array", "object"]})) == text
