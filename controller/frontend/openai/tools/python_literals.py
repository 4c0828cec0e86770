"""Converts the arguments of pythonic tool calls from Python literals to JSON text."""

import ast
import json
import warnings
from typing import Any

from controller.frontend.openai.tools.json_reader import NESTING_MAX, to_json
from controller.frontend.openai.tools.text_source import Steps, TextSource

_NAMES = {"null": None, "true": True, "false": False}  # JSON's names, which some models write
_OPEN, _CLOSE = "([{", ")]}"
_LINE_BREAKS = {"\n": "\\n", "\r": "\\r"}


def literal_to_json(text: str) -> str | None:
    """Return a Python literal as JSON text, or None if `text` is not a literal that JSON can express."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes such as `\\d` remain as they are written
            tree = ast.parse(text.strip(), mode="eval")
        value = _value(tree.body)
        json.dumps(value, allow_nan=False)  # raises ValueError for a number that JSON has no text for
        return to_json(value)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Return the value of a node. Raise ValueError if it is not a literal that JSON can express."""
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [_value(part) for part in parts]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {key.value: _value(value) for key, value in zip(keys, values, strict=True)}  # type: ignore[union-attr]
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(
            op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as number)
        ):
            if not isinstance(number, bool):
                return -number if isinstance(sign, ast.USub) else number
    raise ValueError("not a literal")


def read_argument(source: TextSource, limit: int) -> Steps[str | None]:
    """Read the text of one argument, up to the comma or parenthesis after it.

    Return None if the argument is longer than `limit`, is nested too deeply, or has no end. Line breaks inside strings
    are escaped, because models write them and Python does not allow them.
    """
    parts: list[str] = []
    depth, quote, escaped = 0, "", False
    for _ in range(limit):
        char = yield from source.peek()
        if not char:
            return None
        if quote:
            source.take(1)
            parts.append(char if escaped else _LINE_BREAKS.get(char, char))
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
            continue
        if depth == 0 and char in ",)":
            return "".join(parts)
        if char in "\"'":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        if not 0 <= depth <= NESTING_MAX:
            return None
        parts.append(source.take(1))
    return None
