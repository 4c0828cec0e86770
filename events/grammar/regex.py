r"""Parses regular expressions as xgrammar 0.2.9 reads them.

A pattern must match a whole text, so `^` and `$` are ignored. xgrammar has two readers, with small differences:

- The patterns of vLLM's `structured_outputs.regex` are *converted* to EBNF.
- A `pattern` in a JSON schema becomes an *automaton*. Its classes exclude the characters that a JSON string must escape.

A `pattern` is converted instead in three cases: it has characters other than printable ASCII, the automaton does not support
it, or the automaton would match no text. Neither reader supports back references, word boundaries, Unicode properties and
look-behind. Look-ahead is not supported in a converted pattern, and an automaton ignores it.
"""

import re
from enum import Enum

from events.grammar.escapes import IN_CLASS, class_ranges, read_escape
from events.grammar.model import (
    ANY_CHARACTER,
    EMPTY,
    Alternation,
    Expression,
    Grammar,
    Range,
    Repeat,
    Sequence,
    characters,
    check,
    choice,
    complement,
    literal,
    productive_rules,
    repeat,
    sequence,
)
from events.grammar.refusals import MAX_NESTING, MAX_PATTERN, refuse

DIGITS: tuple[Range, ...] = ((48, 57),)
WORD: tuple[Range, ...] = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: tuple[Range, ...] = (  # of ECMAScript
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F),
    (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
SETS = {"d": DIGITS, "w": WORD, "s": SPACE}  # an upper-case letter is the complement
JSON_SPECIAL: tuple[Range, ...] = ((0, 31), (34, 34), (92, 92))  # what a JSON string must escape
MAX_UNROLLED = 5_000  # product of nested bounds in a `pattern`, above which xgrammar may read it differently


class Flavour(Enum):
    """How xgrammar reads a regular expression."""

    CONVERTED = "converted to EBNF"
    AUTOMATON = "an automaton"
    JSON_STRING = "an automaton without the characters that a JSON string must escape"


class _Invalid(Exception):
    """xgrammar does not accept the pattern."""


def grammar_of_regex(pattern: str) -> Grammar:
    """Return the grammar of `structured_outputs.regex`. Raise GrammarRefused if the pattern is not supported."""
    return check(Grammar({"root": parse_regex(pattern, Flavour.CONVERTED, "regex")}))


def parse_regex(pattern: str, flavour: Flavour, where: str) -> Expression:
    """Return the expression of a pattern. Raise GrammarRefused if the pattern is not supported."""
    try:
        return _parse(pattern, flavour, where)
    except _Invalid as invalid:
        refuse(f"the pattern {pattern[:60]!r} is not supported: {invalid}", where, "change the pattern")


def parse_json_pattern(pattern: str, where: str) -> Expression:
    """Return the expression of a `pattern` in a JSON schema.

    The expression does not include the quotes around the string. Raise GrammarRefused if the pattern is not supported.
    """
    if all(" " <= char <= "~" for char in pattern):
        try:
            found = _parse(pattern, Flavour.JSON_STRING, where)
        except _Invalid:
            return parse_regex(pattern, Flavour.CONVERTED, where)
        if productive_rules(Grammar({"root": found})):
            _check_unrolled(found, 1, where)
            return found
    return parse_regex(pattern, Flavour.CONVERTED, where)


def _check_unrolled(expression: Expression, factor: int, where: str) -> None:
    if factor > MAX_UNROLLED:
        refuse(f"a pattern repeats something more than {MAX_UNROLLED} times", where, "reduce the bounds")
    if isinstance(expression, Repeat):
        _check_unrolled(expression.item, factor * max(1, expression.least, expression.most or 0), where)
    elif isinstance(expression, Sequence | Alternation):
        for part in expression.items if isinstance(expression, Sequence) else expression.options:
            _check_unrolled(part, factor, where)


def _parse(pattern: str, flavour: Flavour, where: str) -> Expression:
    if len(pattern) > MAX_PATTERN:
        refuse(f"a pattern has more than {MAX_PATTERN} characters", where, "make it shorter")
    if flavour is Flavour.CONVERTED:
        if "\0" in pattern:
            raise _Invalid("it contains a NUL character")
        return _Converted(pattern, where).parse()
    return _Automaton(pattern, where, flavour is Flavour.JSON_STRING).parse()


class _RegexParser:
    """What both readers have in common: groups, alternatives and quantifiers."""

    _GROUP = re.compile(r"\((\?:|\?<[A-Za-z]*>)?")
    _COUNT = re.compile(r"\{([0-9]+)(,?)([0-9]*)\}")

    def __init__(self, pattern: str, where: str) -> None:
        self.text = pattern
        self.at = 0
        self.where = where
        self.depth = 0

    def parse(self) -> Expression:
        found = self.options()
        if self.at < len(self.text):
            raise _Invalid("a parenthesis is closed that was not opened")
        return found

    def options(self) -> Expression:
        found = [self.items()]
        while self.text.startswith("|", self.at):
            self.at += 1
            found.append(self.items())
        return choice(*found)

    def items(self) -> Expression:
        found: list[Expression] = []
        stacked = 0  # quantifiers of the last item
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "|)":
                break
            if char in "^$":
                self.at += 1
            elif char in "*+?{":
                if not found:
                    raise _Invalid("there is nothing to repeat")
                if (stacked := stacked + 1) > MAX_NESTING:
                    refuse(f"more than {MAX_NESTING} quantifiers follow each other", self.where, "write one")
                found[-1] = self.quantified(found[-1])
            else:
                found.append(self.atom(char))
                stacked = 0
        return sequence(*found)

    def atom(self, char: str) -> Expression:
        if char == "(":
            return self.group()
        if char == "[":
            return self.bracket()
        if char == "\\":
            return self.escape()
        self.at += 1
        return self.any() if char == "." else literal(char)

    def group(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_NESTING:
            refuse(f"a pattern has more than {MAX_NESTING} nested groups", self.where, "nest less")
        found = self._GROUP.match(self.text, self.at)
        assert found, "a group begins with a parenthesis"
        self.at = found.end()
        if self.text.startswith("?", self.at):
            raise _Invalid("a group has an unknown modifier")
        inner = self.options()
        if not self.text.startswith(")", self.at):
            raise _Invalid("a parenthesis is not closed")
        self.at += 1
        self.depth -= 1
        return inner

    def quantified(self, item: Expression) -> Expression:
        char = self.text[self.at]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) or self.count()
        self.at += char != "{"
        self.at += self.text.startswith("?", self.at)  # not greedy: the language is the same
        if most is not None and most < least:
            raise _Invalid("the bounds of a repetition are reversed")
        return repeat(item, least, most)

    def count(self) -> tuple[int, int | None]:
        found = self._COUNT.match(self.text, self.at)
        if not found:
            raise _Invalid("the bounds of a repetition are not valid")
        self.at = found.end()
        least = int(found[1][:9])
        if max(len(found[1]), len(found[3])) > 9:
            raise _Invalid("the bounds of a repetition are too large")
        return least, int(found[3]) if found[3] else None if found[2] else least

    def any(self) -> Expression:
        return ANY_CHARACTER

    def bracket(self) -> Expression:
        raise NotImplementedError

    def escape(self) -> Expression:
        raise NotImplementedError

    def check_escape(self, char: str) -> None:
        """Raise _Invalid for an escape that neither reader supports."""
        if char == "":
            raise _Invalid("an escape is not finished")
        if char in "123456789k":
            raise _Invalid("a back reference")
        if char in "pP":
            raise _Invalid("a Unicode property")
        if char in "bB":
            raise _Invalid("a word boundary")


class _Converted(_RegexParser):
    """The reader that converts to EBNF (`structured_outputs.regex`)."""

    def quantified(self, item: Expression) -> Expression:
        found = super().quantified(item)
        if self.text[self.at : self.at + 1] in tuple("*+?{"):
            raise _Invalid("two repetitions follow each other")
        return found

    def escape(self) -> Expression:
        char = self.text[self.at + 1 : self.at + 2]
        if char.lower() in SETS and char:
            self.at += 2
            return characters(SETS[char.lower()], negated=char.isupper())
        self.check_escape(char)
        return literal(chr(self.character()))

    def character(self) -> int:
        """Return the code point of the escape at the current offset, and move past it."""
        further = self.text[self.at + 1 : self.at + 2]
        found = read_escape(self.text, self.at, IN_CLASS)
        if found is not None:
            code, self.at = found
            return code
        match = re.compile(r"u\{([0-9a-fA-F]{1,6})\}|c([A-Za-z])").match(self.text, self.at + 1)
        if match:
            self.at = match.end()
            code = int(match[1], 16) if match[1] else ord(match[2]) % 32
            if code > 0x10FFFF:
                raise _Invalid("an escape is beyond Unicode")
            return code
        if further in ("", "u", "c", "U", "x"):
            raise _Invalid("an escape is not valid")
        self.at += 2
        return ord(further)

    def bracket(self) -> Expression:
        self.at += 1
        if self.text.startswith("]", self.at):
            raise _Invalid("a class is empty")
        items: list[int | None] = []
        # the conversion loses the backslash of an escaped `^`, so that at the start of a class it negates the class
        negated = False
        while not self.text.startswith("]", self.at):
            before = len(items)
            self.item(items)
            if before == 0 and items == [ord("^")]:
                negated, items = True, []
        self.at += 1
        return characters(class_ranges(items, self.where), negated)

    def item(self, items: list[int | None]) -> None:
        char = self.text[self.at : self.at + 1]
        if char in ("", "\n", "\r"):
            raise _Invalid("a class has no end")
        if char == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if following and following.lower() in SETS:
                self.at += 2
                ranges = SETS[following.lower()]
                for first, last in complement(ranges) if following.isupper() else ranges:
                    items.extend((first, None, last) if last > first else (first,))
                return
            items.append(self.character())
            return
        self.at += 1
        items.append(None if char == "-" else ord(char))


class _Automaton(_RegexParser):
    """The reader that builds an automaton (`pattern` in a JSON schema, and the macro Regex)."""

    _GROUP = re.compile(r"\((\?:|\?P?<[A-Za-z0-9_]+>)?")
    _COUNT = re.compile(r"\{ *([0-9]+) *(,?) *([0-9]*) *\}")
    _SINGLE = {  # noqa: RUF012 - a constant
        "n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "a": 7, "e": 27, "0": 0,
    }  # fmt: skip
    _CODE = re.compile(r"x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]{1,6})\}|u([0-9a-fA-F]{4})")

    def __init__(self, pattern: str, where: str, json_string: bool) -> None:
        super().__init__(pattern, where)
        self._excluded = JSON_SPECIAL if json_string else ()
        self._ignore_case = pattern.startswith("(?i)")
        self.at = 4 if self._ignore_case else 0

    def atom(self, char: str) -> Expression:
        if char == "]":
            raise _Invalid("a bracket is closed that was not opened")
        if self.text.startswith(("(?=", "(?!"), self.at):
            return self.look_ahead()
        if char in "([\\.":
            return super().atom(char)
        self.at += 1
        return self.characters(((ord(char), ord(char)),))

    def any(self) -> Expression:
        return self.characters(ANY_CHARACTER.ranges)

    def characters(self, ranges: tuple[Range, ...], negated: bool = False) -> Expression:
        """Return the class of these ranges or, if `negated`, of all other code points.

        If the pattern ignores case, the ranges are extended to both cases. In a JSON string, the class excludes the characters
        that must be escaped.
        """
        if self._ignore_case:
            ranges = (*ranges, *_other_case(ranges))
        group = characters(ranges, negated)
        outside = complement(group.ranges)
        kept = characters((*outside, *self._excluded), negated=True)
        if len(kept.ranges) == 1 and kept.ranges[0][0] == kept.ranges[0][1]:
            return literal(chr(kept.ranges[0][0]))
        return kept

    def look_ahead(self) -> Expression:
        """Skip a look-ahead, which xgrammar ignores."""
        depth, self.at = 1, self.at + 3
        while depth:
            char = self.text[self.at : self.at + 1]
            if char == "":
                raise _Invalid("a parenthesis is not closed")
            if char == "[":
                self.skip_bracket()
                continue
            self.at += 2 if char == "\\" else 1
            depth += {"(": 1, ")": -1}.get(char, 0)
        return EMPTY

    def skip_bracket(self) -> int:
        """Move past the class at the current offset. Return the offset of its closing bracket."""
        at = self.at + 1
        at += self.text.startswith("^", at)
        while not self.text.startswith("]", at):
            if at >= len(self.text):
                raise _Invalid("a class has no end")
            at += 2 if self.text[at] == "\\" else 1
        self.at = at + 1
        return at

    def escape(self) -> Expression:
        self.check_escape(self.text[self.at + 1 : self.at + 2])
        found = self.escaped(self.at, in_class=False)
        self.at = found[1]
        ranges, negated = found[0]
        return self.characters(ranges, negated)

    def escaped(self, at: int, in_class: bool) -> tuple[tuple[tuple[Range, ...], bool], int]:
        """Return the ranges of the escape at `at`, whether they are negated, and the offset after the escape."""
        char = self.text[at + 1 : at + 2]
        if char and char.lower() in SETS:
            return (SETS[char.lower()], char.isupper()), at + 2
        if in_class and char == "b":
            return (((8, 8),), False), at + 2
        self.check_escape(char)
        match = self._CODE.match(self.text, at + 1)
        if match:
            code = int(next(filter(None, match.groups())), 16)
            if code > 0x10FFFF:
                raise _Invalid("an escape is beyond Unicode")
            return (((code, code),), False), match.end()
        if char in "xu":
            raise _Invalid("an escape is not valid")
        if char == "c":
            letter = self.text[at + 2 : at + 3]
            if not (letter.isascii() and letter.isalpha()):
                raise _Invalid("an escape is not valid")
            return (((ord(letter) & 31, ord(letter) & 31),), False), at + 3
        code = self._SINGLE.get(char, ord(char))
        return (((code, code),), False), at + 2

    def bracket(self) -> Expression:
        at = self.at + 1
        end = self.skip_bracket()
        negated = self.text.startswith("^", at)
        at += negated
        if at >= end:
            raise _Invalid("a class is empty")
        ranges: list[Range] = []
        while at < end:
            (unit, inverted), at = self.unit(at)
            single = len(unit) == 1 and unit[0][0] == unit[0][1] and not inverted
            if not single or not (self.text[at] == "-" and at + 1 < end):
                ranges.extend(complement(unit) if inverted else unit)
                continue
            (upper, inverted), at = self.unit(at + 1)
            if inverted or len(upper) != 1 or upper[0][0] != upper[0][1] or upper[0][0] < unit[0][0]:
                raise _Invalid("a range of a class is not valid")
            ranges.append((unit[0][0], upper[0][0]))
        return self.characters(tuple(ranges), negated)

    def unit(self, at: int) -> tuple[tuple[tuple[Range, ...], bool], int]:
        if self.text[at] == "\\":
            return self.escaped(at, in_class=True)
        code = ord(self.text[at])
        return (((code, code),), False), at + 1


def _other_case(ranges: tuple[Range, ...]) -> list[Range]:
    """Return the ASCII letters in the ranges, each in its other case."""
    found = []
    for first, last in ranges:
        for low, high, shift in ((97, 122, -32), (65, 90, 32)):
            if max(first, low) <= min(last, high):
                found.append((max(first, low) + shift, min(last, high) + shift))
    return found
