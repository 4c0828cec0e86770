"""Converts a JSON schema into the grammar that xgrammar 0.2.9 makes of it with the options of vLLM.

The options are any whitespace, and strict mode. Strict mode allows only declared properties and items, unless
`additionalProperties` or `items` says otherwise. The converter keeps the following peculiarities of xgrammar, because an answer
must not depend on which program converts the schema:

- Of `$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type`, only the first in this order counts.
  If it is `type`, the further keywords for that type count, too. Otherwise, all other keywords are ignored.
- `allOf` of several schemas allows any value. `oneOf` means the same as `anyOf`.
- `not`, `if` and `dependentRequired` are ignored.
- `{"type": "object"}` and `{"type": "array"}` allow any content. With a further keyword, they allow only what is declared.
- A string with `minLength` or `maxLength` has no escapes.

A schema that vLLM does not send to xgrammar is refused: see `_UNSUPPORTED` and `json_objects`.
"""

import json
import re
from functools import cache
from typing import Any
from urllib.parse import unquote

from events.grammar.choices import choice_of_texts
from events.grammar.json_formats import FORMATS
from events.grammar.json_numbers import check_bound, integer_range, number_range
from events.grammar.json_objects import ObjectGrammar
from events.grammar.json_values import (
    ANY,
    ARRAY,
    BOOLEAN,
    COMMA,
    EMPTY_ARRAY,
    INTEGER,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    WHITESPACE,
    basic_rules,
    json_text,
)
from events.grammar.model import (
    EMPTY,
    Expression,
    Grammar,
    Literal,
    Reference,
    characters,
    check,
    choice,
    literal,
    repeat,
    sequence,
)
from events.grammar.refusals import MAX_NESTING, MAX_RULES, MAX_SOURCE, refuse
from events.grammar.regex import Flavour, parse_json_pattern, parse_regex
from events.json_types import Json

ANNOTATIONS = (
    "title",
    "default",
    "description",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$schema",
)
BASIC = {
    ANY: {},
    **{name: {"type": name} for name in (INTEGER, NUMBER, STRING, BOOLEAN, NULL, ARRAY, OBJECT)},
}
MAX_INT32 = 2**31 - 1
_BOUNDED = characters(((34, 34), (92, 92), (13, 13), (10, 10)), negated=True)  # of a string with a length
_UNSUPPORTED = {  # keywords that vLLM does not send to xgrammar
    "integer": ("multipleOf",),
    "number": ("multipleOf",),
    "array": ("uniqueItems", "contains", "minContains", "maxContains"),
}


JSON_LEVELS = 3 * MAX_NESTING  # a nested schema has up to three levels of JSON, for example in `properties`
_INDEX = re.compile(r"0|[1-9][0-9]{0,6}")  # of an array, in a JSON pointer


def grammar_of_json_schema(schema: Any) -> Grammar:
    """Return the grammar of a parsed JSON schema.

    Raise GrammarRefused if the schema is invalid or unsupported.
    """
    try:
        size = len(json.dumps(schema))
    except (RecursionError, ValueError, TypeError):
        refuse("the schema is no JSON, or too deeply nested", "#", "correct the schema")
    if size > MAX_SOURCE:
        refuse(f"the schema has more than {MAX_SOURCE} characters", "#", "make it smaller")
    _check_depth(schema)
    return _SchemaConverter(schema).grammar()


def _check_depth(schema: Any) -> None:
    """Raise GrammarRefused if the JSON of a schema is nested too deeply for the recursive functions below."""
    level, depth = [schema], 0
    while level:
        if depth > JSON_LEVELS:
            refuse(f"the schema has more than {JSON_LEVELS} levels of JSON", "#", "nest less")
        nested = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)
        )
        level, depth = [value for values in nested for value in values], depth + 1


def grammar_of_json_object() -> Grammar:
    """Return the grammar of `response_format: {"type": "json_object"}`: any JSON object."""
    return grammar_of_json_schema({"type": "object"})


class _SchemaConverter:
    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._rules: dict[str, Expression] = basic_rules()
        self._cache: dict[str, str] = {_cache_key(one): name for name, one in BASIC.items()}
        self._references: dict[str, str] = {"#": "root"}
        self._depth = 0
        self._names: dict[Expression, str] = {}  # of the rules, so that equal schemas share one
        self._objects = ObjectGrammar(self)

    def grammar(self) -> Grammar:
        """Return the grammar of the whole schema.

        Raise GrammarRefused if the schema is invalid or unsupported.
        """
        key = _cache_key(self._schema)
        if key in self._cache:
            self._rules["root"] = Reference(self._cache[key])
        else:
            self._cache[key] = "root"
            self._rules["root"] = EMPTY  # until the body is known
            if isinstance(self._schema, dict) and "$ref" in self._schema:
                self._resolve(self._schema["$ref"], "#")
            self._rules["root"] = self.generate(self._schema, "#")
        return check(Grammar(self._rules))

    def value(self, schema: Any, where: str) -> Expression:
        """Return a reference or a short literal for the values that `schema` allows.

        Raise GrammarRefused if the schema is invalid or unsupported.
        """
        name = self._cache.get(_cache_key(schema)) if isinstance(schema, dict) else None
        return Reference(name) if name is not None else self.rule(self.generate(schema, where))

    def rule(self, body: Expression) -> Expression:
        """Return a reference to a rule with this body.

        A body that is as short as a reference is returned itself.
        """
        if isinstance(body, Reference) or (isinstance(body, Literal) and len(body.text) < 8):
            return body
        if len(self._rules) > MAX_RULES:
            refuse(f"the schema has more than {MAX_RULES} parts", "#", "make it smaller")
        if body not in self._names:
            self._names[body] = f"r{len(self._rules)}"
            self._rules[self._names[body]] = body
        return Reference(self._names[body])

    def generate(self, schema: Any, where: str) -> Expression:
        """Return an expression for the values that `schema` allows, written out.

        Raise GrammarRefused if the schema is invalid, unsupported, or too deeply nested.
        """
        self._depth += 1
        if self._depth > MAX_NESTING:
            refuse(f"more than {MAX_NESTING} nested schemas", where, "nest less")
        try:
            return self._generate(schema, where)
        finally:
            self._depth -= 1

    def _generate(self, schema: Any, where: str) -> Expression:
        if schema is True:
            return self._rules[ANY]
        if schema is False:
            refuse("the schema `false` allows no value", where, "remove it")
        if not isinstance(schema, dict):
            refuse("a schema must be an object or a boolean", where, "correct the schema")
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        if "const" in schema:
            return literal(json_text(schema["const"], f"{where}/const"))
        if "enum" in schema:
            values = listed(schema, "enum", where)
            return choice_of_texts(json_text(value, f"{where}/enum") for value in values)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                options = listed(schema, keyword, where)
                return choice(*(self.value(one, f"{where}/{keyword}/{at}") for at, one in enumerate(options)))
        if "allOf" in schema:
            parts = schema["allOf"]
            if not isinstance(parts, list):
                refuse("allOf must be an array", where, "correct the schema")
            return self.generate(parts[0], f"{where}/allOf/0") if len(parts) == 1 else self._rules[ANY]
        return self._typed(schema, where)

    def _typed(self, schema: Json, where: str) -> Expression:
        kind = schema.get("type")
        if kind is None and "type" not in schema:
            if schema.keys() & {"properties", "additionalProperties", "unevaluatedProperties"}:
                return self._objects.object(schema, where)
            if schema.keys() & {"items", "prefixItems", "unevaluatedItems"}:
                return self._array(schema, where)
            return self._rules[ANY]
        if isinstance(kind, list):
            rest = {key: value for key, value in schema.items() if key != "type"}
            kinds = [{**rest, "type": one} for one in kind] or [rest]
            return choice(*(self.value(one, where) for one in kinds))
        if not isinstance(kind, str):
            refuse("type must be a string or an array of strings", where, "correct the schema")
        for keyword in _UNSUPPORTED.get(kind, ()):
            if keyword in schema:
                refuse(f"the keyword {keyword} is not supported", where)
        if kind == "integer":
            return self._integer(schema, where)
        if kind == "number":
            return self._number(schema, where)
        if kind == "string":
            return self._string(schema, where)
        if kind == "array":
            return self._array(schema, where)
        if kind == "object":
            return self._objects.object(schema, where)
        if kind not in (BOOLEAN, NULL):
            refuse(f"unknown type {kind!r:.40}", where, "correct the schema")
        return self._rules[kind]

    # --- references -------------------------------------------------------------------------------------------------

    def _reference(self, uri: Any, where: str) -> Expression:
        if uri in self._references if isinstance(uri, str) else False:
            return Reference(self._references[uri])
        target = self._resolve(uri, where)
        name = f"def{len(self._references)}"
        self._references[uri] = name
        self._rules[name] = EMPTY  # until the body is known
        self._rules[name] = self.generate(target, where)
        if isinstance(target, dict):
            self._cache[_cache_key(target)] = name  # xgrammar: also for later schemas like this one
        return Reference(name)

    def _resolve(self, uri: Any, where: str) -> Any:
        """Return the schema to which a `$ref` with the value `uri` refers.

        Raise GrammarRefused if there is no such schema, or if it is a `$ref` that leads back to itself.
        """
        found = self._find(uri, where)
        chain, target = [uri], found
        while isinstance(target, dict) and "$ref" in target:
            if target["$ref"] in chain:
                refuse("a $ref leads back to itself", where, "correct the schema")
            chain.append(target["$ref"])
            target = self._find(target["$ref"], where)
        return found

    def _find(self, uri: Any, where: str) -> Any:
        if not isinstance(uri, str):
            refuse("$ref must be a string", where, "correct the schema")
        if uri == "#":
            return self._schema
        if not uri.startswith("#/"):
            return True  # xgrammar: any value
        found = self._schema
        for part in unquote(uri[2:]).split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and key in found:
                found = found[key]
            elif isinstance(found, list) and _INDEX.fullmatch(key):
                found = found[int(key)] if int(key) < len(found) else None
            else:
                refuse(f"$ref {uri[:80]!r} leads nowhere", where, "correct the schema")
        return found

    # --- scalars ----------------------------------------------------------------------------------------------------

    def _integer(self, schema: Json, where: str) -> Expression:
        bounds = dict[str, int]()
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if keyword in schema:
                bound = number(schema, keyword, where)
                if bound != int(bound):
                    refuse(f"{keyword} of an integer must be a whole number", where, "correct the schema")
                bounds[keyword] = int(bound)
        lows = [
            bounds[key] + extra for key, extra in (("minimum", 0), ("exclusiveMinimum", 1)) if key in bounds
        ]
        highs = [
            bounds[key] - extra for key, extra in (("maximum", 0), ("exclusiveMaximum", 1)) if key in bounds
        ]
        low, high = max(lows, default=None), min(highs, default=None)
        if low is None and high is None:
            return self._rules[INTEGER]
        if low is not None and high is not None and low > high:
            refuse("no integer is within the bounds", where, "correct the bounds")
        return integer_range(low, high)

    def _number(self, schema: Json, where: str) -> Expression:
        keywords = [
            key for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in schema
        ]
        bounds = {key: number(schema, key, where) for key in keywords}
        low, high = bounds.get("minimum"), bounds.get("maximum")
        open_low, open_high = bounds.get("exclusiveMinimum"), bounds.get("exclusiveMaximum")
        low_excluded = open_low is not None and (low is None or open_low >= low)
        high_excluded = open_high is not None and (high is None or open_high <= high)
        low, high = open_low if low_excluded else low, open_high if high_excluded else high
        if low is None and high is None:
            return self._rules[NUMBER]
        if (
            low is not None
            and high is not None
            and (low > high or (low == high and (low_excluded or high_excluded)))
        ):
            refuse("no number is within the bounds", where, "correct the bounds")
        return number_range(low, high, low_excluded, high_excluded)

    def _string(self, schema: Json, where: str) -> Expression:
        lengths = [keyword for keyword in ("minLength", "maxLength") if keyword in schema]
        for keyword in ("format", "pattern"):
            if keyword in schema and not isinstance(schema[keyword], str):
                refuse(f"{keyword} must be a string", where, "correct the schema")
            if keyword in schema and lengths:
                refuse(f"{keyword} with {lengths[0]} is not supported", where)
        quote = literal('"')
        if "format" in schema:
            if schema["format"] not in FORMATS:
                refuse(f"the format {schema['format'][:40]!r} is not supported", where)
            return sequence(quote, _format(schema["format"]), quote)
        if "pattern" in schema:
            return sequence(quote, parse_json_pattern(schema["pattern"], f"{where}/pattern"), quote)
        least, most = count(schema, "minLength", where) or 0, count(schema, "maxLength", where)
        if (least, most) == (0, None):
            return self._rules[STRING]
        return sequence(quote, counted(_BOUNDED, least, most, where), quote)

    # --- arrays -----------------------------------------------------------------------------------------------------

    def _array(self, schema: Json, where: str) -> Expression:
        prefix = self._prefix(schema, where)
        items = self._items(schema, where)
        least, most = count(schema, "minItems", where) or 0, count(schema, "maxItems", where)
        if most is not None and (least > most or most < len(prefix)):
            refuse("maxItems is less than what the array must have", where, "correct the schema")
        if items is None and least > len(prefix):
            refuse("minItems is more than the array may have", where, "correct the schema")
        opening, closing = sequence(literal("["), WHITESPACE), sequence(WHITESPACE, literal("]"))
        if prefix:
            return sequence(opening, self._positions(prefix, items, least, most, where), closing)
        if items is None or most == 0:
            return EMPTY_ARRAY
        upper = None if most is None else most - 1
        tail = counted(sequence(COMMA, items), max(0, least - 1), upper, where)
        nonempty = sequence(opening, items, tail, closing)
        return nonempty if least else choice(nonempty, EMPTY_ARRAY)

    def _prefix(self, schema: Json, where: str) -> list[Expression]:
        found = schema.get("prefixItems", [])
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            refuse("prefixItems must be an array of objects", where, "correct the schema")
        return [self.value(one, f"{where}/prefixItems/{at}") for at, one in enumerate(found)]

    def _items(self, schema: Json, where: str) -> Expression | None:
        """Return an expression for an item after those of `prefixItems`.

        Return None if no such item is allowed (strict mode).
        """
        keyword = "items" if "items" in schema else "unevaluatedItems"
        found = schema.get(keyword, False)
        if not isinstance(found, bool | dict):
            refuse(f"{keyword} must be a boolean or an object", where, "correct the schema")
        return None if found is False else self.value(found, f"{where}/{keyword}")

    def _positions(
        self, prefix: list[Expression], items: Expression | None, least: int, most: int | None, where: str
    ) -> Expression:
        """Return an expression for the items of an array that has `prefixItems`.

        The array may end as soon as it has `minItems` (`least`) items.
        """
        tail: Expression = EMPTY
        if items is not None:
            upper = None if most is None else most - len(prefix)
            tail = counted(sequence(COMMA, items), max(0, least - len(prefix)), upper, where)
        for at in reversed(range(len(prefix))):
            tail = sequence(COMMA if at else EMPTY, prefix[at], tail)
            tail = self.rule(choice(EMPTY, tail)) if at >= least else tail
        return tail


@cache
def _format(name: str) -> Expression:
    """Return the expression of a `format`. The result is cached."""
    return parse_regex(FORMATS[name], Flavour.CONVERTED, f"format {name}")


def listed(schema: Json, keyword: str, where: str) -> list[Any]:
    """Return the value of a keyword that must be an array of at least one element.

    Raise GrammarRefused for any other value.
    """
    found = schema[keyword]
    if not isinstance(found, list) or not found:
        refuse(f"{keyword} must be an array of at least one element", where, "correct the schema")
    return found


def number(schema: Json, keyword: str, where: str) -> int | float:
    """Return the value of a keyword that bounds a number.

    Raise GrammarRefused if the value is not a number, or is too large.
    """
    found = schema[keyword]
    if isinstance(found, bool) or not isinstance(found, int | float):
        refuse(f"{keyword} must be a number", where, "correct the schema")
    check_bound(found, where)
    return found


def count(schema: Json, keyword: str, where: str) -> int | None:
    """Return the value of a keyword that bounds a length, or None if there is no bound.

    An upper bound above 2**31 - 1 counts as no bound. Raise GrammarRefused if the value is not a whole number of at least 0.
    """
    if keyword not in schema:
        return None
    found = schema[keyword]
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        refuse(f"{keyword} must be a whole number of at least 0", where, "correct the schema")
    return None if found > MAX_INT32 and keyword.startswith("max") else found


def counted(item: Expression, least: int, most: int | None, where: str) -> Expression:
    """Return an expression for `item` repeated `least` to `most` times (None: no upper bound).

    Raise GrammarRefused if `most` is less than `least`.
    """
    if most is not None and most < least:
        refuse(f"the upper bound {most} is below the lower bound {least}", where, "correct the bounds")
    return repeat(item, least, most)


def _cache_key(schema: Any) -> str:
    """Return the JSON of a schema without annotations and with sorted keywords.

    xgrammar treats two schemas as the same if these texts are equal.
    """
    return json.dumps(_stripped(schema), separators=(",", ":"))


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")


def _stripped(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_stripped(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key in sorted(schema.keys() - set(ANNOTATIONS)):
        value = schema[key]
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: _stripped(one) for name, one in value.items()}
        else:
            found[key] = value if key in ("const", "enum") else _stripped(value)
    return found
