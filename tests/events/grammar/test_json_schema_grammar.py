"""Grammars of JSON schemas: what they accept and refuse, and which keywords are refused."""

import json
from typing import Any

import pytest
from grammar_samples import PERSON, SCHEMAS, TREE
from hypothesis import given, settings
from hypothesis import strategies as st

from events.grammar.json_numbers import integer_range, number_range
from events.grammar.json_schema import grammar_of_json_object, grammar_of_json_schema
from events.grammar.json_values import json_text
from events.grammar.model import Grammar
from events.grammar.recogniser import State, start
from events.grammar.refusals import GrammarRefused, TextRejected


def accepts(begun: State, text: str) -> bool:
    """Return whether a whole text is in the grammar."""
    try:
        return begun.advance(text).accepting
    except TextRejected:
        return False


def check(schema: Any, accepted: list[str], rejected: list[str]) -> None:
    begun = start(grammar_of_json_schema(schema))
    assert [text for text in accepted if not accepts(begun, text)] == []
    assert [text for text in rejected if accepts(begun, text)] == []


def test_properties_come_in_their_order_and_required_ones_always() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]}
    check(
        schema, ['{"b":1}', '{ "a" : 1 ,\n"b":{}}', '{"a":1,"b":2,"c":3}'], ["{}", '{"a":1}', '{"c":1,"b":2}']
    )


def test_additional_properties_come_last_and_are_not_declared_ones() -> None:
    schema = {
        "type": "object",
        "properties": {"ab": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    }
    check(
        schema,
        ["{}", '{"ab":null,"a":1,"abc":2,"":3}', '{"x":1}', '{"a\\n":1}'],
        ['{"ab":1}', '{"x":1,"ab":2}', '{"x":null}'],
    )


def test_the_number_of_properties_is_bounded() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["b"],
        "additionalProperties": True,
        "minProperties": 2,
        "maxProperties": 3,
    }
    check(
        schema,
        ['{"a":1,"b":1}', '{"b":1,"x":1}', '{"b":1,"x":1,"y":1}'],
        ['{"b":1}', '{"x":1,"y":1}', '{"a":1,"b":1,"x":1,"y":1}'],
    )


def test_array_bounds_and_positions() -> None:
    check(
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2},
        ["[null]", "[null, null]"],
        ["[]"],
    )
    schema = {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "integer"}],
        "items": {"type": "boolean"},
    }
    check(schema, ["[]", "[null]", "[null,1,true,false]"], ["[1]", "[null,true]"])


@pytest.mark.parametrize("index", range(3))
def test_a_reference_leads_to_each_element_of_an_array(index: int) -> None:
    schema = {"$ref": f"#/anyOf/{index}", "anyOf": [{"const": text} for text in "abc"]}
    assert start(grammar_of_json_schema(schema)).advance(f'"{"abc"[index]}"').accepting


def test_recursion_and_references() -> None:
    check(TREE, ['{"value":1,"children":[{"value":2},{"value":3,"children":[]}]}'], ['{"children":[]}'])


def test_a_person() -> None:
    whole = '{"name": "Ada", "age": 36, "tags": ["青", "🟦"], "address": {"street": "x\\ty", "zip": "12345"}}'
    check(
        PERSON,
        [whole],
        [whole.replace("36", "131"), whole.replace("Ada", ""), whole.replace("12345", "1234")],
    )


def test_json_object_is_any_object() -> None:
    begun = start(grammar_of_json_object())
    assert accepts(begun, '{"a": [1.5e3, {"b": null}]}') and not begun.allowed("[")


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:60])
def test_each_sample_has_a_grammar(schema: Any) -> None:
    assert start(grammar_of_json_schema(schema)).configurations


bounds = st.one_of(st.none(), st.integers(-2000, 2000))


@settings(deadline=None)
@given(bounds, bounds, st.lists(st.integers(-3000, 3000), max_size=20))
def test_integers_within_bounds(low: int | None, high: int | None, numbers: list[int]) -> None:
    if low is not None and high is not None and low > high:
        low, high = high, low
    begun = start(Grammar({"root": integer_range(low, high)}))
    edges = [edge + step for edge in (low, high) if edge is not None for step in (-1, 0, 1)]
    for value in [*numbers, *edges, 0]:
        inside = (low is None or value >= low) and (high is None or value <= high)
        assert accepts(begun, str(value)) == inside, value
    assert not any(accepts(begun, text) for text in ("-0", "00", "01", "", "-"))


floats = st.one_of(st.none(), st.decimals(-50, 50, places=2).map(float))


@settings(deadline=None)
@given(
    floats,
    floats,
    st.booleans(),
    st.booleans(),
    st.lists(st.decimals(-60, 60, places=3).map(str), max_size=20),
)
def test_numbers_within_bounds(
    low: float | None, high: float | None, above: bool, below: bool, numbers: list[str]
) -> None:
    if low is not None and high is not None and low >= high:
        low, high = high, low + 1
    if low is None and high is None:
        return
    begun = start(Grammar({"root": number_range(low, high, above, below)}))
    for text in [*numbers, *(f"{edge:.2f}" for edge in (low, high) if edge is not None), "0", "0.0"]:
        value = float(text)
        inside = low is None or value > low or (value == low and not above)
        inside = inside and (high is None or value < high or (value == high and not below))
        zero = value == 0 and text.startswith("-") and not (low is None or low < 0)
        assert accepts(begun, text) == (inside and not zero), text


json_values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    ),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None)
@given(json_values)
def test_any_json_value_is_accepted_and_written_as_json(value: Any) -> None:
    text = json_text(value, "#")
    assert json.loads(text) == value
    assert accepts(start(grammar_of_json_schema({})), text)
    assert accepts(start(grammar_of_json_schema({"const": value})), text)


REFUSED: list[tuple[Any, str]] = [
    ({"type": "integer", "multipleOf": 3}, "multipleOf is not supported, at #"),
    ({"type": "number", "multipleOf": 0.5}, "multipleOf is not supported"),
    (
        {"properties": {"a": {"type": "array", "uniqueItems": True}}},
        "uniqueItems is not supported, at #/properties/a",
    ),
    ({"type": "array", "contains": {}}, "contains is not supported"),
    ({"type": "array", "minContains": 1}, "minContains is not supported"),
    ({"type": "array", "maxContains": 1}, "maxContains is not supported"),
    ({"type": "string", "format": "color"}, "the format 'color' is not supported"),
    ({"type": "string", "pattern": "a", "minLength": 1}, "pattern with minLength is not supported"),
    ({"type": "string", "format": "date", "maxLength": 9}, "format with maxLength is not supported"),
    ({"type": "string", "pattern": r"a\b"}, "a word boundary"),
    ({"type": "string", "pattern": r"(a)\1"}, "a back reference"),
    ({"type": "string", "pattern": r"\p{L}"}, "a Unicode property"),
    ({"type": "string", "pattern": "(?<=a)b"}, "is not supported"),
    ({"type": "string", "pattern": "(a{99}){99}"}, "more than 5000 times"),
    (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}},
        "patternProperties with other",
    ),
    ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties with other"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {}}, "propertyNames with other keywords"),
    ({"properties": {"é": {}}, "additionalProperties": True}, "a name outside ASCII"),
    ({"properties": {"a" * 61: {}}, "additionalProperties": True}, "more than 60 characters"),
    ({"type": "integer", "maximum": 2**60}, "a bound of a number is beyond"),
    ({"const": 10**400}, "no finite number"),
    ({"const": float("inf")}, "no finite number"),
    ({"const": "\ud800"}, "half a surrogate pair"),
    (False, "`false` allows no value"),
    ({"properties": {"a": False}}, "at #/properties/a"),
    ({"anyOf": []}, "anyOf must be an array of at least one element"),
    ({"enum": []}, "enum must be an array"),
    ({"type": "date"}, "unknown type 'date'"),
    ({"type": 3}, "type must be a string"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer is within the bounds"),
    ({"type": "number", "minimum": 3, "exclusiveMaximum": 3}, "no number is within the bounds"),
    ({"type": "integer", "minimum": 0.5}, "must be a whole number"),
    ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum must be a number"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "the upper bound 2 is below the lower bound 3"),
    ({"type": "string", "minLength": -1}, "minLength must be a whole number"),
    ({"type": "string", "pattern": 3}, "pattern must be a string"),
    ({"type": "array", "items": {}, "minItems": 3, "maxItems": 2}, "maxItems is less"),
    ({"type": "array", "minItems": 1}, "minItems is more than the array may have"),
    ({"type": "array", "prefixItems": [True]}, "prefixItems must be an array of objects"),
    ({"type": "array", "items": 3}, "items must be a boolean or an object"),
    ({"type": "object", "minProperties": 2, "maxProperties": 1}, "minProperties is greater"),
    ({"type": "object", "minProperties": 1}, "minProperties is more than the object may have"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "maxProperties is less"),
    ({"properties": {"a": {}}, "minProperties": 2}, "no object has so many properties"),
    ({"type": "object", "properties": []}, "properties must be an object"),
    ({"type": "object", "required": "a"}, "required must be an array of strings"),
    ({"type": "object", "propertyNames": {"type": "integer"}}, "propertyNames must be a schema of strings"),
    ({"$ref": "#/$defs/missing"}, "leads nowhere"),
    ({"$ref": "#"}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads back to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "no text is in the grammar"),
    ({"allOf": {}}, "allOf must be an array"),
    (["integer"], "a schema must be an object or a boolean"),
]


@pytest.mark.parametrize(("schema", "why"), REFUSED, ids=lambda case: case if isinstance(case, str) else "")
def test_what_is_not_supported_is_refused_with_its_place(schema: Any, why: str) -> None:
    with pytest.raises(GrammarRefused) as raised:
        grammar_of_json_schema(schema)
    assert why in str(raised.value)
    assert raised.value.where and raised.value.remedy
