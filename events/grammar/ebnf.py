"""Parses EBNF in the dialect of xgrammar 0.2.9.

vLLM (`structured_outputs.grammar`) and SGLang (`ebnf`) accept this dialect. A rule is `name ::= expression`. An expression
consists of literals, character classes, references, groups, `|` and `* + ? {m,n}`. Comments begin with `#`.

The macros `Regex` and `TagDispatch` are supported. A look-ahead `(=…)` is dropped, because it is a hint for xgrammar's caches
and does not change the language.

These are refused:

- The macros `Token`, `ExcludeToken` and `TokenTagDispatch`, because they need token ids, and the macro `Substring`.
- Attributes of rules such as `[max_tokens=5]`, because they need control of the sampling.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from events.grammar.choices import factored_choice
from events.grammar.escapes import IN_CLASS, class_ranges, read_escape
from events.grammar.model import (
    EMPTY,
    CharClass,
    Expression,
    Grammar,
    Reference,
    characters,
    check,
    literal,
    repeat,
    sequence,
)
from events.grammar.refusals import MAX_NESTING, MAX_SOURCE, refuse
from events.grammar.regex import Flavour, parse_regex
from events.grammar.triggers import TagDispatch, add_dispatch

_TOKEN = re.compile(
    r"""(?P<space>(?:[ \t\r\n]+|\#[^\r\n]*)+)|(?P<define>::=)|(?P<ahead>\(=)|(?P<mark>[(){}|,*+?=])
    |(?P<string>")|(?P<class>\[)|(?P<name>[A-Za-z_.\-][A-Za-z0-9_.\-]*)|(?P<number>[+\-]?[0-9]{1,9}(?![0-9]))""",
    re.VERBOSE,
)
_UNSUPPORTED = {
    "Token": "a macro of token ids depends on the tokeniser",
    "ExcludeToken": "a macro of token ids depends on the tokeniser",
    "TokenTagDispatch": "a macro of token ids depends on the tokeniser",
    "Substring": "the macro Substring is not supported",
}
_ATTRIBUTES = re.compile(
    r"\[\s*(max_tokens|max_chars|capture|stop_capture|lazy|temperature)[^\]\n]*\]\s*::=|\[\s*\]\s*::="
)
_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # the mark itself, or: name, rule, number, string, class, ::=, (=, end
    value: str | CharClass
    line: int
    column: int

    @property
    def place(self) -> str:
        return f"line {self.line}, column {self.column}"


def parse_ebnf(text: str, root: str = "root") -> Grammar:
    """Return the grammar that an EBNF text defines, with the start rule `root`.

    Raise GrammarRefused if the text is invalid, is too large, or uses something unsupported.
    """
    if len(text) > MAX_SOURCE:
        refuse(f"the grammar has more than {MAX_SOURCE} characters", "the grammar", "make it smaller")
    return check(_EbnfParser(_Lexer(text).tokens(), root).grammar())


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._line_start = 0

    def tokens(self) -> list[_Token]:
        """Return the tokens of the text. A name before `::=` gets the kind `rule`."""
        found: list[_Token] = []
        while self._at < len(self._text):
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                refuse(f"unexpected character {self._text[self._at]!r}", self._place(), "correct the grammar")
            kind = match.lastgroup or ""
            line, column = self._line, self._at - self._line_start + 1
            if kind == "space":
                self._skip(match)
                continue
            if kind == "string":
                value: str | CharClass = self._string()
            elif kind == "class":
                value = self._class()
            else:
                value, self._at = match[0], match.end()
            if kind == "name" and _ATTRIBUTES.match(self._text, self._at):
                refuse("a rule has attributes, which only the server can follow", self._place())
            found.append(
                _Token(match[0] if kind in ("mark", "define", "ahead") else kind, value, line, column)
            )
        found.append(_Token("end", "", self._line, self._at - self._line_start + 1))
        return _mark_rules(found)

    def _place(self) -> str:
        return f"line {self._line}, column {self._at - self._line_start + 1}"

    def _skip(self, match: re.Match[str]) -> None:
        breaks = list(re.finditer(r"\r\n|\r|\n", match[0]))
        if breaks:
            self._line += len(breaks)
            self._line_start = match.start() + breaks[-1].end()
        self._at = match.end()

    def _string(self) -> str:
        chars: list[str] = []
        self._at += 1
        while (char := self._char("", '"')) is not None:
            chars.append(chr(char))
        return "".join(chars)

    def _class(self) -> CharClass:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items: list[int | None] = []  # None is an unescaped hyphen
        plain = self._text.startswith("-", self._at)
        while (char := self._char(IN_CLASS, "]")) is not None:
            items.append(None if plain else char)
            plain = self._text.startswith("-", self._at)
        return characters(class_ranges(items, self._place()), negated)

    def _char(self, further: str, end: str) -> int | None:
        """Return the next code point of a literal or a class, or None after the character `end`.

        A backslash before one of the characters in `further` makes that character literal.
        """
        char = self._text[self._at : self._at + 1]
        if char in ("", "\n", "\r"):
            refuse("a literal or a class has no end", self._place(), "correct the grammar")
        if char == end:
            self._at += 1
            return None
        if char != "\\":
            self._at += 1
            return ord(char)
        found = read_escape(self._text, self._at, further)
        if found is None:
            refuse(
                f"unknown escape {self._text[self._at : self._at + 2]!r}",
                self._place(),
                "correct the grammar",
            )
        self._at = found[1]
        return found[0]


def _mark_rules(tokens: list[_Token]) -> list[_Token]:
    """Turn each name before `::=` into a token of kind `rule`.

    Raise GrammarRefused if such a name is not the first token of its line.
    """
    for at, token in enumerate(tokens):
        if token.kind != "::=":
            continue
        before = tokens[at - 1] if at else token
        if before.kind != "name" or (at > 1 and tokens[at - 2].line == before.line):
            refuse("`::=` needs a name before it, at the start of a line", token.place, "correct the grammar")
        tokens[at - 1] = _Token("rule", before.value, before.line, before.column)
    return tokens


class _EbnfParser:
    def __init__(self, tokens: list[_Token], root: str) -> None:
        self._tokens = tokens
        self._at = 0
        self._root = root
        self._depth = 0
        self._rules: dict[str, Expression] = {}
        self._names = {token.value for token in tokens if token.kind == "rule"}
        self._macros: dict[str, Callable[[_Token], Expression]] = {
            "Regex": self._regex,
            "TagDispatch": self._tag_dispatch,
        }

    def grammar(self) -> Grammar:
        """Return the parsed grammar. Raise GrammarRefused if it is not valid."""
        while self._peek().kind != "end":
            name = self._take("rule")
            if name.value in self._rules:
                refuse(f"the rule {name.value} is defined twice", name.place, "remove one")
            self._take("::=")
            self._rules[str(name.value)] = self._choice()
            if self._peek().kind == "(=":
                self._next()
                self._choice()
                self._take(")")
        if self._root not in self._rules:
            refuse(f"there is no rule {self._root}", "the grammar", f"name the start rule {self._root}")
        return Grammar(self._rules, self._root)

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _next(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def _take(self, kind: str) -> _Token:
        token = self._next()
        if token.kind != kind:
            refuse(f"expected {kind}, found {token.value or token.kind}", token.place, "correct the grammar")
        return token

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._peek().kind == "|":
            self._next()
            options.append(self._sequence())
        return factored_choice(options)

    def _sequence(self) -> Expression:
        items = [self._quantified()]
        while self._peek().kind not in ("|", ")", "(=", "rule", "end"):
            items.append(self._quantified())
        return sequence(*items)

    def _quantified(self) -> Expression:
        item = self._element()
        token = self._peek()
        if token.kind in _QUANTIFIERS:
            self._next()
            return repeat(item, *_QUANTIFIERS[token.kind])
        if token.kind == "{":
            self._next()
            return self._counted(item)
        return item

    def _counted(self, item: Expression) -> Expression:
        least = int(str(self._take("number").value))
        most: int | None = least
        if self._peek().kind == ",":
            self._next()
            upper = self._peek()
            if upper.kind == "}":
                most = None
            elif upper.value == "-1":  # xgrammar prints no upper bound as -1
                self._next()
                most = None
            else:
                most = int(str(self._take("number").value))
        self._take("}")
        return repeat(item, least, most)

    def _element(self) -> Expression:
        token = self._next()
        if token.kind == "(":
            return self._group(token)
        if isinstance(token.value, CharClass):
            return token.value
        if token.kind == "string":
            return literal(token.value)
        if token.kind != "name":
            refuse(
                f"expected an element, found {token.value or token.kind}", token.place, "correct the grammar"
            )
        if token.value in _UNSUPPORTED:
            refuse(_UNSUPPORTED[token.value], token.place)
        if token.value in self._macros:
            return self._macros[token.value](token)
        if token.value not in self._names:
            refuse(f"the rule {token.value} is not defined", token.place, "define the rule")
        return Reference(token.value)

    def _group(self, token: _Token) -> Expression:
        self._depth += 1
        if self._depth > MAX_NESTING:
            refuse(f"more than {MAX_NESTING} nested groups", token.place, "nest less")
        inner = EMPTY if self._peek().kind == ")" else self._choice()
        self._take(")")
        self._depth -= 1
        return inner

    # --- macros -----------------------------------------------------------------------------------------------------

    def _regex(self, token: _Token) -> Expression:
        self._take("(")
        pattern = str(self._take("string").value)
        json_string = False
        while self._peek().kind == ",":
            self._next()
            name = self._take("name")
            if name.value != "json_string":
                refuse(f"Regex has the argument {name.value}, which is not supported", name.place)
            self._take("=")
            json_string = self._take("name").value == "true"
        self._take(")")
        flavour = Flavour.JSON_STRING if json_string else Flavour.AUTOMATON
        return parse_regex(pattern, flavour, token.place)

    def _tag_dispatch(self, token: _Token) -> Expression:
        self._take("(")
        triggers: list[tuple[str, Expression]] = []
        excludes: list[str] = []
        loop = True
        while self._peek().kind != ")":
            if self._peek().kind == "(":
                self._next()
                tag = str(self._take("string").value)
                self._take(",")
                triggers.append((tag, self._element()))
                self._take(")")
            elif self._take("name").value == "excludes":
                self._take("=")
                excludes = self._strings()
            else:
                self._take("=")
                loop = self._take("name").value == "true"
            if self._peek().kind == ",":
                self._next()
        self._take(")")
        return add_dispatch(self._rules, TagDispatch(tuple(triggers), tuple(excludes), loop), token.place)

    def _strings(self) -> list[str]:
        self._take("(")
        found = []
        while self._peek().kind != ")":
            found.append(str(self._take("string").value))
            if self._peek().kind == ",":
                self._next()
        self._take(")")
        return found
