"""Generates values for the JSON schemas of /openapi.json. Seeded, so that failures can be reproduced.

It supports `$ref`, `anyOf`, `enum`, `type` and their bounds. It rejects unknown keywords, so that no schema is tested only in
part.
"""

import random
from collections.abc import Mapping
from typing import Any

KNOWN = {
    *(
        "$ref",
        "anyOf",
        "enum",
        "const",
        "type",
        "items",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
    ),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "maxProperties"),
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("title", "description", "default"),
}
NAMES = ("a", "role", "type", "content", "choice", "json", "regex", "schema", "7", "300")
WORDS = ("", "a", "hi", "user", "text", "none", "é😀", "\0", "stop stop", "{", "json_object", "m" * 40)
MANY = 3  # generated entries if more are allowed
DEEP = 3
AT = "#/components/schemas/"


class Maker:
    """Generates values for the schemas of one document."""

    def __init__(self, document: Mapping[str, Any], seed: int) -> None:
        self._schemas = document["components"]["schemas"]
        self.dice = random.Random(seed)

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Return a value allowed by this schema."""
        unknown = schema.keys() - KNOWN
        assert not unknown, f"a schema has {unknown}, which are not supported here"
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].removeprefix(AT)], depth)
        if "enum" in schema:
            return self.dice.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        if "anyOf" in schema:
            return self.value(self.dice.choice(schema["anyOf"]), depth)
        kind = schema.get("type", self.dice.choice(("string", "integer", "boolean", "null", "object")))
        return getattr(self, f"_{kind}")(schema, depth)

    def body(self, schema: Mapping[str, Any], fields: int) -> dict[str, Any]:
        """Return a body with all required fields and at most this many optional ones."""
        properties = schema["properties"]
        chosen = self.dice.sample(sorted(properties), min(fields, len(properties)))
        return {
            name: self.value(properties[name])
            for name in properties
            if name in chosen or name in schema["required"]
        }

    def _null(self, schema: Mapping[str, Any], depth: int) -> None:
        return None

    def _boolean(self, schema: Mapping[str, Any], depth: int) -> bool:
        return self.dice.random() < 0.5

    def _integer(self, schema: Mapping[str, Any], depth: int) -> int:
        low = int(schema.get("minimum", schema.get("exclusiveMinimum", -(2**70)) + 1))
        high = int(schema.get("maximum", schema.get("exclusiveMaximum", 2**70) - 1))
        near = [n for n in (low, high, 0, 1, 2, 5, 17, 300) if low <= n <= high]
        return self.dice.choice(near)

    def _number(self, schema: Mapping[str, Any], depth: int) -> float:
        low, high = (
            schema.get("minimum", schema.get("exclusiveMinimum", -1e308)),
            schema.get("maximum", 1e308),
        )
        values = [low, high, 0, 0.5, 1e-300, self.dice.uniform(max(low, -9.0), min(high, 9.0))]
        open_below = "exclusiveMinimum" in schema
        number: float = self.dice.choice(
            [n for n in values if low <= n <= high and not (open_below and n == low)]
        )
        return number

    def _string(self, schema: Mapping[str, Any], depth: int) -> str:
        if "pattern" in schema:
            return self.dice.choice(("0", "2", "300", "2047"))
        least, most = schema.get("minLength", 0), schema.get("maxLength", 10**9)
        return self.dice.choice([word for word in WORDS if least <= len(word) <= most])

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        count = self.dice.randint(least, max(least, min(MANY, schema.get("maxItems", MANY))))
        return [
            self.value(schema.get("items", {}), depth + 1) for _ in range(count if depth < DEEP else least)
        ]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        properties = schema.get("properties", {})
        for name, of_it in properties.items():
            if name in schema.get("required", ()) or self.dice.random() < 0.5:
                made[name] = self.value(of_it, depth + 1)
        for _ in range(self.dice.randint(0, MANY) if depth < DEEP else 0):
            more = schema.get("additionalProperties", True)
            if patterned := schema.get("patternProperties"):
                made[self._string({"pattern": ""}, depth)] = self.value(
                    next(iter(patterned.values())), depth + 1
                )
            elif isinstance(more, Mapping):
                made[self._string(schema.get("propertyNames", {}), depth)] = self.value(more, depth + 1)
            elif more and (name := self.dice.choice(NAMES)) not in properties:
                made[name] = self.value({}, depth + 1)
        return made
