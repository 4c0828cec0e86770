"""Grammars of JSON values without a schema, and JSON texts of constants, as in xgrammar 0.2.9."""

import re
import sys
from typing import Any

from events.grammar.json_numbers import DIGIT, DIGITS, NATURAL, NON_ZERO
from events.grammar.model import (
    EMPTY,
    Expression,
    Reference,
    Repeat,
    characters,
    choice,
    literal,
    one_of,
    sequence,
)
from events.grammar.refusals import MAX_NESTING, refuse

WHITESPACE = Repeat(one_of(" \n\r\t"), 0, None)
COMMA = sequence(WHITESPACE, literal(","), WHITESPACE)
COLON = sequence(WHITESPACE, literal(":"), WHITESPACE)
PLAIN = characters(
    ((0, 31), (34, 34), (92, 92)), negated=True
)  # a character of a string that needs no escape
_HEX = characters(((48, 57), (65, 70), (97, 102)))
ESCAPE = sequence(literal("\\"), choice(one_of('"\\/bfnrt'), sequence(literal("u"), Repeat(_HEX, 4, 4))))
EMPTY_OBJECT = sequence(literal("{"), WHITESPACE, literal("}"))
EMPTY_ARRAY = sequence(literal("["), WHITESPACE, literal("]"))

STRING, STRING_REST, NUMBER, INTEGER, BOOLEAN = "string", "string-rest", "number", "integer", "boolean"
NULL, OBJECT, ARRAY, ANY = "null", "object", "array", "any"


def listed(open_with: str, item: Expression, close_with: str) -> Expression:
    """Return an expression for a list of at least one item, in brackets.

    The items are separated by commas, with any whitespace.
    """
    tail = Repeat(sequence(COMMA, item), 0, None)
    return sequence(literal(open_with), WHITESPACE, item, tail, WHITESPACE, literal(close_with))


def basic_rules() -> dict[str, Expression]:
    """Return the rules that all JSON values need, under names such as `string`, `object` and `any`."""
    fraction = choice(EMPTY, sequence(literal("."), Repeat(DIGIT, 1, None)))
    exponent = choice(EMPTY, sequence(one_of("eE"), choice(EMPTY, one_of("+-")), Repeat(DIGIT, 1, None)))
    minus = choice(EMPTY, literal("-"))
    pair = sequence(Reference(STRING), COLON, Reference(ANY))
    return {
        STRING: sequence(literal('"'), Reference(STRING_REST)),
        STRING_REST: sequence(Repeat(choice(PLAIN, ESCAPE), 0, None), literal('"')),
        NUMBER: sequence(minus, NATURAL, fraction, exponent),
        INTEGER: choice(literal("0"), sequence(minus, NON_ZERO, DIGITS)),
        BOOLEAN: choice(literal("true"), literal("false")),
        NULL: literal("null"),
        ARRAY: choice(listed("[", Reference(ANY), "]"), EMPTY_ARRAY),
        OBJECT: choice(listed("{", pair, "}"), EMPTY_OBJECT),
        ANY: choice(*map(Reference, (NUMBER, STRING, BOOLEAN, NULL, ARRAY, OBJECT))),
    }


_ESCAPED = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_TO_ESCAPE = re.compile(r'[\x00-\x1f"\\\x7f]')


def json_string(text: str, where: str) -> str:
    """Return a string as JSON. Raise GrammarRefused for half a surrogate pair."""
    if re.search("[\ud800-\udfff]", text):
        refuse("a text has half a surrogate pair", where, "send valid Unicode")
    escaped = _TO_ESCAPE.sub(lambda found: _ESCAPED.get(found[0], f"\\u{ord(found[0]):04x}"), text)
    return f'"{escaped}"'


def json_text(value: Any, where: str, depth: int = 0) -> str:
    """Return a constant as compact JSON.

    Raise GrammarRefused if the constant is too deeply nested, or is not a JSON value.
    """
    if depth > MAX_NESTING:
        refuse(f"a constant has more than {MAX_NESTING} levels", where, "nest less")
    if isinstance(value, str):
        return json_string(value, where)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return _number(value, where)
    if isinstance(value, list):
        return f"[{','.join(json_text(item, where, depth + 1) for item in value)}]"
    if isinstance(value, dict):
        pairs = (
            f"{json_string(key, where)}:{json_text(item, where, depth + 1)}" for key, item in value.items()
        )
        return f"{{{','.join(pairs)}}}"
    refuse(f"a constant is no JSON value: {value!r:.60}", where, "send JSON")


def _number(value: int | float, where: str) -> str:
    """Return a number as picojson writes it: 64-bit integers exactly, all others as doubles.

    Raise GrammarRefused if the number is too large for a double, or is not finite.
    """
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return str(value)
    if not abs(value) <= sys.float_info.max:
        refuse("a constant is no finite number", where, "send a smaller number")
    number = float(value)
    return f"{number:.0f}" if abs(number) < 2**53 and number == int(number) else f"{number:.17g}"
