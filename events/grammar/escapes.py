"""Escape sequences and character classes, as xgrammar reads them in EBNF and regular expressions."""

import re

from events.grammar.refusals import refuse

C_ESCAPES = {
    "'": "'", '"': '"', "?": "?", "\\": "\\", "/": "/", "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
    "v": "\v", "0": "\0", "e": "\x1b",
}  # fmt: skip
IN_CLASS = "^$\\.*+?()[]{}|/-"  # further characters that an escape in a class stands for
_HEX = re.compile(r"x([0-9a-fA-F]+)|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")


def read_escape(text: str, at: int, further: str = "") -> tuple[int, int] | None:
    """Return the code point of the escape sequence that begins at `at`, and the offset after the sequence.

    Return None if the sequence is not valid. After the backslash, each character in `further` stands for itself. The escape `x`
    takes all hexadecimal digits that follow; more than eight are not valid.
    """
    char = text[at + 1 : at + 2]
    if char and char in further:
        return ord(char), at + 2
    if char in C_ESCAPES:
        return ord(C_ESCAPES[char]), at + 2
    found = _HEX.match(text, at + 1)
    if found is None or len(found[0]) > 9:
        return None
    code = int(next(filter(None, found.groups())), 16)
    return (code, found.end()) if code <= 0x10FFFF else None


def class_ranges(items: list[int | None], place: str) -> list[tuple[int, int]]:
    """Return the code point ranges of a character class, given its items in order.

    An item is a code point, or None for an unescaped hyphen. Raise GrammarRefused for a reversed range.
    """
    hyphen = ord("-")
    codes = [hyphen if item is None else item for item in items]
    ranges, at = [], 0
    while at < len(items):
        if at + 2 < len(items) and items[at + 1] is None:
            if codes[at] > codes[at + 2]:
                refuse("a range of a class is reversed", place, "correct the class")
            ranges.append((codes[at], codes[at + 2]))
            at += 3
        else:
            ranges.append((codes[at], codes[at]))
            at += 1
    return ranges
