"""Parses GBNF, the grammars of llama.cpp (`grammar`).

GBNF differs from xgrammar's EBNF:

- A rule ends with its line, unless a group is open.
- A name may have hyphens, but no underscores.
- `.` is any character.
- An alternative may be empty.
- A later rule replaces an earlier one of the same name.
- llama.cpp reads an upper bound above 2,000 as no bound.

Token literals (`<…>`, `<[id]>`), left recursion, and too many repetitions are refused.
"""

import re

from events.grammar.choices import factored_choice
from events.grammar.model import (
    ANY_CHARACTER,
    Expression,
    Grammar,
    Reference,
    Sequence,
    characters,
    check,
    children,
    is_nullable,
    literal,
    nullable_rules,
    repeat,
    sequence,
)
from events.grammar.printer import GBNF_REPEATS
from events.grammar.refusals import MAX_NESTING, MAX_SOURCE, refuse

_NAME = re.compile(r"[A-Za-z0-9-]+")
_COUNT = re.compile(r"[0-9]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_FIX = "correct the grammar"


def parse_gbnf(text: str) -> Grammar:
    """Return the grammar that a GBNF text defines.

    Raise GrammarRefused if the text is invalid, is too large, or uses something unsupported.
    """
    if len(text) > MAX_SOURCE:
        refuse(f"the grammar has more than {MAX_SOURCE} characters", "the grammar", "make it smaller")
    grammar = check(_GbnfParser(text).grammar())
    _check_left_recursion(grammar)
    return grammar


class _GbnfParser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._groups = 0  # rules that llama.cpp makes of groups and repetitions
        self._rules: dict[str, Expression] = {}

    def grammar(self) -> Grammar:
        """Return the parsed grammar. Raise GrammarRefused if it is not valid."""
        self._skip(lines=True)
        while self._at < len(self._text):
            name = self._name()
            self._skip(lines=False)
            if not self._text.startswith("::=", self._at):
                refuse("expected ::=", self._place(), _FIX)
            self._at += 3
            self._skip(lines=True)
            self._rules[name] = self._choice()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                refuse("expected the end of the line", self._place(), _FIX)
            self._skip(lines=True)
        if "root" not in self._rules:
            refuse("there is no rule root", "the grammar", "name the start rule root")
        return Grammar(self._rules)

    def _place(self) -> str:
        line = self._text.count("\n", 0, self._at) + 1
        return f"line {line}, column {self._at - self._text.rfind(chr(10), 0, self._at)}"

    def _skip(self, lines: bool) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self._text, self._at)
        assert found, "whitespace may be empty"
        self._at = found.end()

    def _next_is(self, mark: str) -> bool:
        return self._text.startswith(mark, self._at)

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if not found:
            refuse("expected a name", self._place(), _FIX)
        self._at = found.end()
        return found[0]

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._next_is("|"):
            self._at += 1
            self._skip(lines=True)
            options.append(self._sequence())
        return factored_choice(options)

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        rules_inside, stacked = 1, 0  # `stacked`: quantifiers of the last item
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "*+?{":
                if not items:
                    refuse("there is nothing to repeat", self._place(), _FIX)
                if (stacked := stacked + 1) > MAX_NESTING:
                    refuse(
                        f"more than {MAX_NESTING} quantifiers follow each other", self._place(), "write one"
                    )
                least, most, times = self._bounds(char)
                rules_inside *= times
                if rules_inside >= GBNF_REPEATS:
                    refuse("llama.cpp refuses so many repetitions", self._place(), "reduce the bounds")
                items[-1] = repeat(items[-1], least, most)
            elif char in "<!":
                refuse("a token literal depends on the tokeniser", self._place())
            else:
                item, rules_inside = self._element(char)
                if item is None:
                    break
                items.append(item)
                stacked = 0
            self._skip(lines=self._depth > 0)
        return sequence(*items)

    def _bounds(self, char: str) -> tuple[int, int | None, int]:
        """Read the quantifier that begins with `char`.

        Return the bounds of the repetition, and how many copies of the repeated item llama.cpp makes.
        """
        self._at += 1
        if char != "{":
            self._groups += 1
            return *_QUANTIFIERS[char], 1
        lines = self._depth > 0
        self._skip(lines)
        least = self._count()
        most: int | None = least
        if self._next_is(","):
            self._at += 1
            self._skip(lines)
            most = self._count() if self._text[self._at : self._at + 1].isdigit() else None
        if not self._next_is("}"):
            refuse("expected }", self._place(), _FIX)
        self._at += 1
        if least > GBNF_REPEATS:
            refuse(
                f"llama.cpp refuses more than {GBNF_REPEATS} repetitions", self._place(), "reduce the bound"
            )
        most = None if most is not None and most > GBNF_REPEATS else most
        self._groups += 1 if most is None else most - least
        return least, most, most or max(1, least)

    def _count(self) -> int:
        found = _COUNT.match(self._text, self._at)
        if not found or len(found[0]) > 9:
            refuse("expected a number", self._place(), _FIX)
        self._at = found.end()
        self._skip(lines=self._depth > 0)
        return int(found[0])

    def _element(self, char: str) -> tuple[Expression | None, int]:
        """Read the next element. Return it, and the number of rules that llama.cpp makes of it.

        The element is None at the end of the sequence.
        """
        if char == '"':
            self._at += 1
            return literal("".join(self._chars('"'))), 1
        if char == "[":
            return self._class(), 1
        if char == ".":
            self._at += 1
            return ANY_CHARACTER, 1
        if char == "(":
            return self._group()
        return (Reference(self._name()), 1) if _NAME.match(char) else (None, 1)

    def _group(self) -> tuple[Expression, int]:
        before = self._groups
        self._groups += 1
        self._depth += 1
        if self._depth > MAX_NESTING:
            refuse(f"more than {MAX_NESTING} nested groups", self._place(), "nest less")
        self._at += 1
        self._skip(lines=True)
        inner = self._choice()
        if not self._next_is(")"):
            refuse("expected )", self._place(), _FIX)
        self._at += 1
        self._depth -= 1
        return inner, max(1, self._groups - before)

    def _class(self) -> Expression:
        self._at += 1
        negated = self._next_is("^")
        self._at += negated
        ranges = []
        while not self._next_is("]"):
            first = last = self._char()
            if self._next_is("-") and not self._text.startswith("]", self._at + 1):
                self._at += 1
                last = self._char()
            if last >= first:
                ranges.append((first, last))
        self._at += 1
        if not ranges:
            refuse("a class is empty", self._place(), _FIX)
        return characters(ranges, negated)

    def _chars(self, end: str) -> list[str]:
        found = []
        while not self._next_is(end):
            found.append(chr(self._char()))
        self._at += 1
        return found

    def _char(self) -> int:
        char = self._text[self._at : self._at + 1]
        if not char:
            refuse("a literal or a class has no end", self._place(), _FIX)
        if char != "\\":
            self._at += 1
            return ord(char)
        code = _CODE.match(self._text, self._at + 1)
        following = self._text[self._at + 1 : self._at + 2]
        if code:
            self._at = code.end()
            value = int(next(filter(None, code.groups())), 16)
            if value > 0x10FFFF:
                refuse("an escape is beyond Unicode", self._place(), _FIX)
            return value
        if following not in _ESCAPES or not following:
            refuse(f"unknown escape {following!r}", self._place(), _FIX)
        self._at += 2
        return ord(_ESCAPES[following])


def _check_left_recursion(grammar: Grammar) -> None:
    """Raise GrammarRefused if a rule can begin with itself. llama.cpp refuses such a grammar."""
    nullable = nullable_rules(grammar)
    first = {name: _first(body, nullable) for name, body in grammar.rules.items()}
    done: set[str] = set()
    for start in grammar.rules:
        path: dict[str, list[str]] = {start: sorted(first[start])}
        while path and start not in done:
            name = next(reversed(path))
            if not path[name]:
                del path[name]
                done.add(name)
            elif (following := path[name].pop()) in path:
                refuse("a rule begins with itself, which llama.cpp refuses", f"rule {following}", _FIX)
            elif following not in done:
                path[following] = sorted(first[following])


def _first(expression: Expression, nullable: frozenset[str]) -> set[str]:
    """Return the names of the rules with which an expression can begin.

    `nullable` are the names of the rules that match the empty text.
    """
    if isinstance(expression, Reference):
        return {expression.name}
    found: set[str] = set()
    if isinstance(expression, Sequence):
        for item in expression.items:
            found |= _first(item, nullable)
            if not is_nullable(item, nullable):
                break
        return found
    for part in children(expression):
        found |= _first(part, nullable)
    return found
