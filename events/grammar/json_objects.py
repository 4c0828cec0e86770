"""Grammar of JSON objects: order and number of properties, keys by pattern, undeclared keys.

The declared properties come first, in the order of the schema, and additional ones follow. A schema is refused if it combines
declared properties with `patternProperties` or `propertyNames`, because vLLM does not send such a schema to xgrammar.
"""

from typing import Any, Protocol

from events.grammar.json_values import (
    ANY,
    COLON,
    COMMA,
    EMPTY_OBJECT,
    ESCAPE,
    PLAIN,
    STRING,
    STRING_REST,
    WHITESPACE,
    json_string,
)
from events.grammar.model import (
    EMPTY,
    NOTHING,
    Expression,
    Reference,
    characters,
    choice,
    literal,
    repeat,
    sequence,
)
from events.grammar.refusals import refuse
from events.grammar.regex import parse_json_pattern
from events.json_types import Json

EXPLICIT = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf", "type")
MAX_KEY_DEPTH = 60  # characters that undeclared keys are compared with declared ones


class Values(Protocol):
    """The part of the schema converter that `ObjectGrammar` uses."""

    def value(self, schema: Any, where: str) -> Expression:
        """Return an expression for the values that `schema` allows.

        `where` is the place of the schema, as a JSON pointer for errors.
        """

    def rule(self, body: Expression) -> Expression:
        """Return a reference to a rule with this body."""


class ObjectGrammar:
    """Converts JSON schemas of objects into expressions."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def object(self, schema: Json, where: str) -> Expression:
        """Return an expression for the objects that `schema` allows.

        Raise GrammarRefused if the schema is invalid or unsupported.
        """
        properties = _mapping(schema, "properties", where)
        patterns = _mapping(schema, "patternProperties", where)
        least, most = _bounds(schema, where)
        required = _required(schema, where)
        self._check(schema, properties, patterns, where)
        if most is not None and len(required) > most:
            refuse(
                "maxProperties is less than the number of required properties", where, "correct the schema"
            )
        pairs = [self._pair(name, one, f"{where}/properties/{name}") for name, one in properties.items()]
        if patterns or "propertyNames" in schema:
            required = set()
            item = self._keyed(schema, patterns, where)
            content = _numbered(item, least, most)
        elif properties:
            additional = self._additional(schema, list(properties), where)
            named = list(zip(properties, pairs, strict=True))
            content = _Ordered(named, required, additional, least, most, self._values).content(where)
        else:
            found = self._additional(schema, [], where)
            required = set()
            if found is None and least:
                refuse("minProperties is more than the object may have", where, "correct the schema")
            content = _numbered(found, least, most)
        whole = sequence(literal("{"), WHITESPACE, content, WHITESPACE, literal("}"))
        if content == NOTHING:
            return EMPTY_OBJECT
        return whole if required or least else choice(whole, EMPTY_OBJECT)

    def _check(self, schema: Json, properties: Json, patterns: Json, where: str) -> None:
        """Raise GrammarRefused for a combination of keywords that vLLM does not send to xgrammar."""
        if patterns and (properties or len(patterns) > 1):
            refuse("patternProperties with other properties is not supported", where)
        others = isinstance(schema.get("additionalProperties"), dict) or (
            schema.get("unevaluatedProperties", True) is not True
        )
        if "propertyNames" in schema and (properties or patterns or others):
            refuse("propertyNames with other keywords for properties is not supported", where)

    def _pair(self, name: str, schema: Any, where: str) -> Expression:
        return sequence(literal(json_string(name, where)), COLON, self._values.value(schema, where))

    def _keyed(self, schema: Json, patterns: Json, where: str) -> Expression:
        """Return an expression for a property with a key that `patternProperties` or `propertyNames` allows.

        The schema has one of these two keywords.
        """
        for pattern, one in patterns.items():
            key = parse_json_pattern(pattern, f"{where}/patternProperties")
            quoted = sequence(literal('"'), key, literal('"'))
            value = self._values.value(one, f"{where}/patternProperties/{pattern[:40]}")
            return sequence(quoted, COLON, value)
        names = schema["propertyNames"]
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            refuse("propertyNames must be a schema of strings", where, "correct the schema")
        if not any(keyword in names for keyword in EXPLICIT):
            names = {**names, "type": "string"}
        return sequence(self._values.value(names, f"{where}/propertyNames"), COLON, Reference(ANY))

    def _additional(self, schema: Json, names: list[str], where: str) -> Expression | None:
        """Return an expression for an undeclared property, or None if the schema allows none (strict mode).

        `names` are the declared properties. Raise GrammarRefused if undeclared keys cannot be distinguished from these names.
        """
        keyword = "additionalProperties" if "additionalProperties" in schema else "unevaluatedProperties"
        found = schema.get(keyword, False)
        if found is False:
            return None
        if any(not name.isascii() for name in names):
            refuse("a property with a name outside ASCII, beside properties that are not declared", where)
        value = Reference(ANY) if found is True else self._values.value(found, f"{where}/{keyword}")
        key = self._values.rule(undeclared_key(names, where)) if names else Reference(STRING)
        return sequence(key, COLON, value)


def _numbered(item: Expression | None, least: int, most: int | None) -> Expression:
    """Return an expression for `item` repeated `least` to `most` times, but at least once, with commas between.

    Return NOTHING if `item` is None or `most` is 0.
    """
    if item is None or most == 0:
        return NOTHING
    return sequence(
        item, repeat(sequence(COMMA, item), max(0, least - 1), None if most is None else most - 1)
    )


class _Ordered:
    """The declared properties in their order, and then additional ones.

    `least` and `most` are the bounds of the number of all properties together.
    """

    def __init__(
        self,
        pairs: list[tuple[str, Expression]],
        required: set[str],
        additional: Expression | None,
        least: int,
        most: int | None,
        values: Values,
    ) -> None:
        self._pairs = pairs
        self._required = required
        self._additional = additional
        self._least = least
        self._most = most
        self._values = values
        self._tails: dict[tuple[int, int], Expression] = {}
        self._still_required = [0] * (len(pairs) + 1)
        for at in reversed(range(len(pairs))):
            self._still_required[at] = self._still_required[at + 1] + (pairs[at][0] in required)

    def content(self, where: str) -> Expression:
        """Return an expression for the text between the braces of an object with at least one property.

        Return NOTHING if no property is allowed. Raise GrammarRefused if no such object keeps the bounds.
        """
        if self._most == 0:
            return NOTHING
        for at in reversed(range(len(self._pairs) + 1)):
            for number in self._numbers(at):
                self._tails[at, number] = self._tail(at, number)
        options = []
        for at, (name, pair) in enumerate(self._pairs):
            if self._possible(at + 1, 1):
                options.append(sequence(pair, self._tails[at + 1, self._clip(1)]))
            if name in self._required:
                break
        if self._additional is not None and not self._required:
            options.append(sequence(self._additional, self._more(1)))
        if not options:
            refuse("no object has so many properties", where, "correct the bounds")
        return choice(*options)

    def _clip(self, number: int) -> int:
        """Return `number`, limited to the lower bound (at least 1) if there is no upper bound.

        Without an upper bound, the same properties may follow after any number from the lower bound on. So one rule serves all
        of these numbers.
        """
        return number if self._most is not None else min(number, max(1, self._least))

    def _numbers(self, at: int) -> list[int]:
        """Return the numbers of properties that may precede the declared property at index `at`, from 1 on.

        Numbers that `_clip` would reduce are left out.
        """
        largest = self._clip(at) if self._most is None else min(at, self._most)
        return [number for number in range(1, largest + 1) if self._possible(at, number)]

    def _possible(self, at: int, number: int) -> bool:
        """Return whether the bounds can be kept if `number` properties precede the declared property at index `at`."""
        left = len(self._pairs) - at
        enough = self._additional is not None or self._clip(number) + left >= self._least
        return enough and (self._most is None or number + self._still_required[at] <= self._most)

    def _tail(self, at: int, number: int) -> Expression:
        """Return an expression for what may follow `number` properties.

        The declared properties from index `at` on may follow, and then additional ones.
        """
        if at == len(self._pairs):
            return self._more(number)
        name, pair = self._pairs[at]
        options = []
        if name not in self._required and self._possible(at + 1, number):
            options.append(self._tails[at + 1, self._clip(number)])
        if self._possible(at + 1, number + 1):
            options.append(sequence(COMMA, pair, self._tails[at + 1, self._clip(number + 1)]))
        return self._values.rule(choice(*options))

    def _more(self, number: int) -> Expression:
        """Return an expression for the additional properties that may follow `number` properties."""
        if self._additional is None:
            return EMPTY
        least = max(0, self._least - number)
        most = None if self._most is None else self._most - number
        return repeat(sequence(COMMA, self._additional), least, most)


def undeclared_key(names: list[str], where: str) -> Expression:
    """Return an expression for a JSON string other than these names.

    One of these names written with escapes counts as undeclared. Raise GrammarRefused if a name has more than 60 characters.
    """
    if max(map(len, names)) > MAX_KEY_DEPTH:
        refuse(f"a property's name has more than {MAX_KEY_DEPTH} characters", where, "use shorter names")
    return sequence(literal('"'), _other_text(set(names)))


def _other_text(names: set[str]) -> Expression:
    """Return an expression for the rest of an undeclared key, including its closing quote.

    A part of the key is already read. `names` are the rests that would complete a declared name, and the expression excludes
    them.
    """
    following: dict[str, set[str]] = {}
    for name in names - {""}:
        following.setdefault(name[0], set()).add(name[1:])
    excluded = [(ord(char), ord(char)) for char in following]
    outside = characters((*((first, last) for first, last in _not_plain()), *excluded), negated=True)
    options = [] if "" in names else [literal('"')]
    options += [sequence(outside, Reference(STRING_REST)), sequence(ESCAPE, Reference(STRING_REST))]
    options += [sequence(literal(char), _other_text(rests)) for char, rests in sorted(following.items())]
    return choice(*options)


def _not_plain() -> tuple[tuple[int, int], ...]:
    return characters(PLAIN.ranges, negated=True).ranges


def _mapping(schema: Json, keyword: str, where: str) -> Json:
    found = schema.get(keyword, {})
    if not isinstance(found, dict):
        refuse(f"{keyword} must be an object", where, "correct the schema")
    return found


def _required(schema: Json, where: str) -> set[str]:
    found = schema.get("required", [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        refuse("required must be an array of strings", where, "correct the schema")
    return set(found)


def _bounds(schema: Json, where: str) -> tuple[int, int | None]:
    bounds: list[int | None] = []
    for keyword in ("minProperties", "maxProperties"):
        found = schema.get(keyword)
        if keyword in schema and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            refuse(f"{keyword} must be a whole number of at least 0", where, "correct the schema")
        bounds.append(found)
    least, most = bounds[0] or 0, bounds[1]
    if most is not None and least > most:
        refuse("minProperties is greater than maxProperties", where, "correct the schema")
    return least, most
