"""Converts tagged parameters from text to the types of a tool's JSON schema, as vLLM does.

A tagged parameter is a call's argument that the model writes as text between tags: `<parameter=size>3</parameter>`.
A text that has none of the types remains a string, so that no value is lost.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from controller.frontend.openai.tools.json_reader import load_json

Schema = Mapping[str, Any]

_TYPE_NAMES = {  # spellings that tools use, besides JSON Schema's own
    "string": ("str", "text", "varchar", "char", "enum"),
    "integer": ("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"),
    "number": ("float", "float32", "float64", "double"),
    "boolean": ("bool",),
    "object": ("dict",),
    "array": ("arr", "list", "sequence"),
}
_CANONICAL = {name: kind for kind, names in _TYPE_NAMES.items() for name in names}
STRING = frozenset(("string",))


class ArgumentType:
    """The types that a JSON schema declares for an argument.

    The types of an object's properties and of an array's elements are computed when they are first needed.
    """

    __slots__ = ("_items", "_properties", "_schema", "declared", "types")

    def __init__(self, schema: object) -> None:
        """Read the types of `schema`. A schema that is not a JSON object declares no type."""
        self._schema: Schema = schema if isinstance(schema, Mapping) else {}
        self.declared = frozenset(_declared(self._schema))
        self.types = self.declared or STRING
        self._properties: dict[str, ArgumentType] = {}
        self._items: ArgumentType | None = None

    def property(self, name: str) -> "ArgumentType | None":
        """Return the type of an object's property, or None if the schema does not describe the property."""
        known = self._properties.get(name)
        if known is None:
            properties = self._schema.get("properties")
            if not isinstance(properties, Mapping) or name not in properties:
                return None
            known = self._properties[name] = ArgumentType(properties[name])
        return known

    def items(self) -> "ArgumentType | None":
        """Return the type of an array's elements, or None if the schema does not describe them."""
        if self._items is None and isinstance(self._schema.get("items"), Mapping):
            self._items = ArgumentType(self._schema["items"])
        return self._items


def _declared(schema: Schema) -> Iterator[str]:
    """Yield the types that a schema and its alternatives declare.

    The search is not recursive, because clients may nest schemas deeply.
    """
    left: list[object] = [schema]
    while left:
        one = left.pop()
        if not isinstance(one, Mapping):
            yield "string"
            continue
        stated = one.get("type")
        names = [
            name.strip().lower()
            for name in (stated if isinstance(stated, list) else [stated])
            if isinstance(name, str)
        ]
        values = _list(one, "enum")
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(one, key)]
        yield from (_CANONICAL.get(name, name) for name in names)
        yield from {_type_of(value) for value in values}
        if not (names or values or parts) and one is not schema:
            yield "string"  # an alternative without a type
        left += parts


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def convert_text(text: str, kind: ArgumentType) -> Any:
    """Return a text converted to one of the types in its schema: the first type that the text fits.

    The types are tried in this order: null, integer, number, boolean, object, array, string. If none fits, the text is
    decoded as JSON or, if it is not JSON, returned unchanged.
    """
    types = kind.types
    if "null" in types and text.lower() == "null":
        return None
    for name, convert in _CONVERSIONS.items():
        if name in types:
            try:
                return convert(text)
            except ValueError:
                continue
    if "string" in types:
        return text
    try:
        return load_json(text)
    except ValueError:
        return text


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"no finite number: {text[:40]}")
    return int(value) if value.is_integer() else value


def _boolean(text: str) -> bool:
    word = text.lower().strip()
    if word not in ("true", "1", "false", "0"):
        raise ValueError(f"no boolean: {text[:40]}")
    return word in ("true", "1")


_CONVERSIONS: dict[str, Callable[[str], Any]] = {  # in the order in which they are tried
    "integer": int,
    "number": _number,
    "boolean": _boolean,
    "object": load_json,
    "array": load_json,
}


def convert_value(value: Any, kind: ArgumentType | None) -> Any:
    """Return a JSON value with its parts converted to the types that the schema declares.

    The recursion is safe, because `load_json` limits how deeply a value is nested.
    """
    if kind is None:
        return value
    if isinstance(value, str):
        return convert_text(value, kind)
    if isinstance(value, dict):
        return {key: convert_value(one, kind.property(key)) for key, one in value.items()}
    if isinstance(value, list):
        return [convert_value(one, kind.items()) for one in value]
    return convert_text(json.dumps(value), kind) if kind.declared else value
