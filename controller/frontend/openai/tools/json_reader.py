"""Reads JSON from a growing text.

Keys and the names of functions are decoded. Other values are validated and copied in pieces.
"""

import json
import math
import re
from typing import Any, NoReturn

from controller.frontend.openai.tools.text_source import Emit, Steps, TextSource

NAME_MAX = 512  # characters of a key or a function's name
SCALAR_MAX = 1000  # characters of a number
NESTING_MAX = 200  # brackets inside each other, in a value that is decoded
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_INSIDE = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r"[a-zA-Z0-9.+\-]+")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}]', re.DOTALL)
_LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_STARTS = frozenset("-0123456789tfn")
_ESCAPES, _HEX = frozenset('"\\/bfnrtu'), frozenset("0123456789abcdefABCDEF")
_ESCAPE_CHAR = 5  # the state after a backslash: `u` and four digits, or another character


def decode_string(text: str) -> str | None:
    """Return the value of a JSON string, which is given with its quotes.

    Return None if the string is malformed, or if its value has no UTF-8 encoding.
    """
    try:
        value = json.loads(text, strict=False)
        return value if isinstance(value, str) and value.encode() is not None else None
    except ValueError:  # no JSON, or half of a surrogate pair, which UTF-8 has no bytes for
        return None


def load_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raise ValueError if the text is malformed or nested too deeply, or if it contains NaN or an infinite number.
    """
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found.group(), 0)
        if depth > NESTING_MAX:
            raise ValueError(f"more than {NESTING_MAX} nested brackets")
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"no finite number: {text[:40]}")
    return value


def is_object(text: str) -> bool:
    """Return whether a text is a JSON object."""
    try:
        return isinstance(load_json(text), dict)
    except ValueError:
        return False


def to_json(value: Any) -> str:
    """Return a value as JSON text, in the form in which vLLM writes it.

    All characters outside ASCII are escaped if one of them has no UTF-8 encoding.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def read_string(source: TextSource) -> Steps[str | None]:
    """Read the JSON string that comes next, and return its value.

    Return None if there is no valid string of at most NAME_MAX characters.
    """
    text = yield from source.match(_STRING, NAME_MAX)
    return None if text is None else decode_string(text)


class JsonScanner:
    """Finds the end of one JSON value, and validates the value. If `done` is set, the value is valid JSON.

    The state says what may come next:

    - `value`: a value
    - `first`: a value, or `]`
    - `key`: a key, or `}`
    - `next key`: a key
    - `colon`: a colon
    - `after`: a comma, or a closing bracket
    """

    def __init__(self, inside: str = "") -> None:
        """Start before the value or, if `inside` is "{" or "[", after this opening bracket of the value."""
        self._open = [*inside]
        self._state = {"": "value", "{": "key", "[": "first"}[inside]
        self._in_string = False
        self._escape = 0  # characters of an escape sequence that are still to come
        self._scalar = ""
        self.done = False
        self.broken = False

    def scan(self, text: str, start: int, end: int) -> int:
        """Scan the next piece, `text[start:end]`. Return the index at which scanning stopped.

        Scanning stops after the value, before a character that is invalid, or at `end`.
        """
        at = start
        while at < end and not (self.done or self.broken):
            if self._in_string:
                at = self._string(text, at, end)
            elif self._scalar or (self._state in ("value", "first") and text[at] in _SCALAR_STARTS):
                at = self._scalar_part(text, at, end)
            else:
                at = self._structure(text[at], at)
        return at

    def _string(self, text: str, at: int, end: int) -> int:
        if self._escape:
            wrong = text[at] not in (_ESCAPES if self._escape == _ESCAPE_CHAR else _HEX)
            if self._escape == _ESCAPE_CHAR and text[at] != "u":
                self._escape = 0
            else:
                self._escape -= 1
            self.broken = wrong
            return at if wrong else at + 1
        found = _INSIDE.search(text, at, end)
        if found is None:
            return end
        if found.group() == "\\":
            self._escape = _ESCAPE_CHAR
        elif found.group() == '"':
            self._in_string = False
            self._end_of(is_key="key" in self._state)
        else:
            self.broken = True  # a control character
            return found.start()
        return found.end()

    def _scalar_part(self, text: str, at: int, end: int) -> int:
        part = _SCALAR.match(text, at, min(end, at + SCALAR_MAX))
        after = part.end() if part else at
        self._scalar += text[at:after]
        if len(self._scalar) >= SCALAR_MAX:
            self.broken = True
        elif after < end:
            self.broken = not _LITERAL.fullmatch(self._scalar)
            self._scalar = ""
            self._end_of(is_key=False)
        return after

    def _end_of(self, *, is_key: bool) -> None:
        """Go to the next state at the end of a key or a value."""
        self._state = "colon" if is_key else "after"
        self.done = not (is_key or self._open or self.broken)

    def _structure(self, char: str, at: int) -> int:
        state, inside = self._state, self._open[-1] if self._open else ""
        match char:
            case " " | "\n" | "\t" | "\r":
                pass
            case '"' if state not in ("colon", "after"):
                self._in_string = True
            case "{" | "[" if state in ("value", "first"):
                self._open.append(char)
                self._state = "key" if char == "{" else "first"
            case "}" | "]" if inside + char in ("{}", "[]") and state in ("key", "first", "after"):
                self._open.pop()
                self._end_of(is_key=False)
            case "," if state == "after" and inside:
                self._state = "next key" if inside == "{" else "value"
            case ":" if state == "colon":
                self._state = "value"
            case _:
                self.broken = True
                return at
        return at + 1


def copy_value(source: TextSource, emit: Emit, limit: int | None = None, *, inside: str = "") -> Steps[bool]:
    """Pass one JSON value to `emit` unchanged, in pieces. Return whether the value is complete and valid.

    It is not complete if the text ends within the value, or if the value is longer than `limit`. `inside` is the
    value's opening bracket if that bracket was already consumed.
    """
    scanner = JsonScanner(inside)
    left = limit
    while (yield from source.peek()):
        piece = source.take_scanned(scanner.scan, left)
        if piece:
            emit(piece)
        if scanner.done or scanner.broken:
            return scanner.done
        if left is not None:
            left -= len(piece)
            if left <= 0:
                return False
    return False
