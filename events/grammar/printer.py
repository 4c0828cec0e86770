"""Prints grammars as EBNF of xgrammar (vLLM, SGLang) and as GBNF of llama.cpp.

The printed names have only letters, digits and hyphens, and characters outside ASCII are escaped. Both dialects read the
printed text alike, except for repetitions with large bounds. llama.cpp writes repetitions out, and reads an upper bound above
2,000 as no bound.
"""

import re
from functools import partial

from events.grammar.model import (
    LAST,
    Alternation,
    CharClass,
    Expression,
    Grammar,
    Literal,
    Reference,
    Repeat,
    Sequence,
    complement,
    reachable,
    references,
)
from events.grammar.refusals import MAX_PRINTED, refuse

ROOT = "root"
RESERVED = {"true", "false", "token", "regex", "substring", "tagdispatch", "excludetoken", "tokentagdispatch"}
GBNF_REPEATS = (
    2_000  # repetitions times rules inside at which llama.cpp refuses a grammar (MAX_REPETITION_THRESHOLD)
)


def to_ebnf(grammar: Grammar) -> str:
    """Return the grammar as EBNF of xgrammar. Raise GrammarRefused if the text is too large."""
    return _Printer(grammar, gbnf=False).text()


def to_gbnf(grammar: Grammar) -> str:
    """Return the grammar as GBNF of llama.cpp.

    Raise GrammarRefused if the text is too large, or if a repetition has a bound of 2,000 or more.
    """
    return _Printer(grammar, gbnf=True).text()


class _Printer:
    def __init__(self, grammar: Grammar, gbnf: bool) -> None:
        self._grammar = _with_separate_root(reachable(grammar))
        self._gbnf = gbnf
        self._names = {self._grammar.root: ROOT}
        self._taken = {ROOT, *RESERVED}
        self._helpers: dict[Expression, str] = {}
        for name in self._grammar.rules:
            if name not in self._names:
                self._names[name] = self._free_name(name)

    def text(self) -> str:
        """Return the printed grammar: one rule per line, the start rule first."""
        root = self._grammar.root
        rules = {root: self._grammar.rules[root], **self._grammar.rules}
        lines: list[str] = []
        size = 0
        left = [(self._names[name], body) for name, body in reversed(rules.items())]
        while left:
            name, body = left.pop()
            known = len(self._helpers)
            lines.append(f"{name} ::= {self._choice(body)}\n")
            left.extend((helper, item) for item, helper in list(self._helpers.items())[known:])
            size += len(lines[-1])
            if size > MAX_PRINTED:
                refuse(f"the printed grammar has more than {MAX_PRINTED} characters", f"rule {name}")
        return "".join(lines)

    def _free_name(self, wanted: str) -> str:
        """Return an unused rule name, based on `wanted` and valid in both dialects, and register it."""
        base = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
        if not base[:1].isalpha():
            base = f"r{base}"
        name, number = base, 0
        while name in self._taken:
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name

    # --- expressions ------------------------------------------------------------------------------------------------

    def _choice(self, one: Expression) -> str:
        if isinstance(one, Alternation):
            return " | ".join(map(self._sequence, one.options)) or print_class(CharClass(()))
        return self._sequence(one)

    def _sequence(self, one: Expression) -> str:
        if isinstance(one, Sequence):
            return " ".join(map(self._element, one.items)) or '""'
        return self._element(one)

    def _element(self, one: Expression) -> str:
        if isinstance(one, Literal):
            return print_literal(one.text)
        if isinstance(one, CharClass):
            return print_class(one)
        if isinstance(one, Reference):
            return self._names[one.name]
        if isinstance(one, Repeat):
            return self._repeat(one)
        return f"({self._choice(one)})"

    def _repeat(self, one: Repeat) -> str:
        bounds = (one.least, one.most)
        short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(bounds)
        if short is None:
            short = f"{{{one.least}}}" if one.least == one.most else f"{{{one.least},{one.most or ''}}}"
            if self._gbnf and max(one.least, one.most or 0) >= GBNF_REPEATS:
                refuse(f"llama.cpp has no repetition of {GBNF_REPEATS} or more", f"{one.least} to {one.most}")
        if isinstance(one.item, Literal | CharClass | Reference):
            return self._element(one.item) + short
        if self._gbnf and len(short) > 1:  # llama.cpp multiplies the bound by the number of groups inside
            return self._helper(one.item) + short
        return f"({self._choice(one.item)}){short}"

    def _helper(self, item: Expression) -> str:
        """Return the name of the rule for this repeated expression, and add that rule if it is missing."""
        if item not in self._helpers:
            self._helpers[item] = self._free_name("item")
        return self._helpers[item]


def _with_separate_root(grammar: Grammar) -> Grammar:
    """Return a grammar of the same texts in which no rule refers to the start rule.

    Where a rule refers to the start rule, xgrammar 0.2.9 forbids a token such as `}]`, which ends the reference's text and
    continues after it. After a move, the request's grammar is a residual with a different start rule. So without this function,
    the allowed tokens would change with the move.
    """
    if not any(grammar.root in references(body) for body in grammar.rules.values()):
        return grammar
    root = f"{grammar.root}:"  # no front end has a colon in a name
    return Grammar({root: Reference(grammar.root), **grammar.rules}, root)


def _escape(special: str, char: str) -> str:
    """Return a character as it is written in a literal or a class.

    `special` has the characters that have a meaning there and must be escaped.
    """
    code = ord(char)
    if char in "\n\r\t":
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}[char]
    if char in special or not 0x20 <= code < 0x7F:
        if char in '"\\]':
            return f"\\{char}"
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
    return char


_in_literal = partial(_escape, '"\\')
_in_class = partial(_escape, "\\]^-")


def print_literal(text: str) -> str:
    """Return a literal in quotes."""
    return f'"{"".join(map(_in_literal, text))}"'


def print_class(group: CharClass) -> str:
    """Return a class in brackets, or a literal if it is a single character."""
    if len(group.ranges) == 1 and group.ranges[0][0] == group.ranges[0][1]:
        return print_literal(chr(group.ranges[0][0]))
    outside = complement(group.ranges)
    if group.ranges and group.ranges[-1][1] == LAST and outside:
        return f"[^{_ranges(outside)}]"
    return f"[{_ranges(group.ranges)}]" if group.ranges else f"[^{_ranges(((0, LAST),))}]"


def _ranges(ranges: tuple[tuple[int, int], ...]) -> str:
    parts = []
    for first, last in ranges:
        parts.append(_in_class(chr(first)))
        if last > first:
            parts.append(("-" if last > first + 1 else "") + _in_class(chr(last)))
    return "".join(parts)
