"""Data model of a context-free grammar over Unicode characters.

All values are immutable and hashable. Every parser builds a `Grammar`. The recogniser, the residual and the printers
read a `Grammar`. A character is a code point, surrogates included, because xgrammar's classes contain them.

Make expressions with the functions `sequence`, `choice`, `repeat`, `literal` and `characters`, not with the classes. The
functions merge nested sequences and choices, and remove redundant parts. So equivalent expressions are more often equal values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from events.grammar.refusals import MAX_EXPRESSIONS, MAX_REPEATS, MAX_RULES, refuse

LAST = 0x10FFFF  # the last code point
Range = tuple[int, int]  # first and last code point, both included


@dataclass(frozen=True, slots=True)
class Literal:
    """A text of at least one character."""

    text: str


@dataclass(frozen=True, slots=True)
class CharClass:
    """One character of a set.

    The ranges are sorted, disjoint and not adjacent. A class without ranges matches nothing.
    """

    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """The use of a rule by its name. It matches the texts that the rule matches."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Several expressions, one after another. Without items, it matches the empty text."""

    items: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several expressions. Without options it matches nothing."""

    options: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """An expression that occurs at least `least` and at most `most` times (None: no upper bound)."""

    item: "Expression"
    least: int
    most: int | None


Expression: TypeAlias = Literal | CharClass | Reference | Sequence | Alternation | Repeat

EMPTY = Sequence(())
NOTHING = Alternation(())


@dataclass(frozen=True, slots=True)
class Grammar:
    """Rules by name, and the name of the start rule."""

    rules: Mapping[str, Expression]
    root: str = "root"


def literal(text: str) -> Expression:
    """Return an expression for exactly this text."""
    return Literal(text) if text else EMPTY


def characters(ranges: Iterable[Range], negated: bool = False) -> CharClass:
    """Return the class of the code points in `ranges` or, if `negated`, of all other code points."""
    merged: list[Range] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return CharClass(complement(merged) if negated else tuple(merged))


def one_of(text: str) -> CharClass:
    """Return the class of the characters of a text."""
    return characters((ord(char), ord(char)) for char in text)


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the ranges of the code points outside `ranges`, which are sorted and disjoint."""
    gaps, start = [], 0
    for first, last in ranges:
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= LAST:
        gaps.append((start, LAST))
    return tuple(gaps)


ANY_CHARACTER = CharClass(((0, LAST),))


def sequence(*parts: Expression) -> Expression:
    """Return the concatenation of the parts. Nested sequences and adjacent literals are merged."""
    items: list[Expression] = []
    for part in parts:
        for item in part.items if isinstance(part, Sequence) else (part,):
            if isinstance(item, Literal) and items and isinstance(last := items[-1], Literal):
                items[-1] = Literal(last.text + item.text)
            else:
                items.append(item)
    return items[0] if len(items) == 1 else Sequence(tuple(items))


def choice(*parts: Expression) -> Expression:
    """Return the choice between the parts. Nested choices are merged, and repeated options are removed."""
    options: dict[Expression, None] = {}
    for part in parts:
        options.update(dict.fromkeys(part.options if isinstance(part, Alternation) else (part,)))
    return next(iter(options)) if len(options) == 1 else Alternation(tuple(options))


def repeat(item: Expression, least: int, most: int | None) -> Expression:
    """Return an expression for `item` repeated `least` to `most` times (None: no upper bound).

    Raise GrammarRefused if a bound is above 1,000,000, or if the bounds contradict each other.
    """
    if least > MAX_REPEATS or (most or 0) > MAX_REPEATS:
        refuse(f"a repetition has a bound above {MAX_REPEATS}", "the repetition", "reduce the bound")
    if least < 0 or (most is not None and most < least):
        refuse(f"a repetition has the bounds {least} and {most}", "the repetition", "correct the bounds")
    if most == 0 or item == EMPTY:
        return EMPTY
    return item if (least, most) == (1, 1) else Repeat(item, least, most)


def children(expression: Expression) -> tuple[Expression, ...]:
    """Return the direct parts of an expression."""
    if isinstance(expression, Sequence):
        return expression.items
    if isinstance(expression, Alternation):
        return expression.options
    return (expression.item,) if isinstance(expression, Repeat) else ()


def walk(expression: Expression) -> Iterator[Expression]:
    """Yield an expression and all its parts, without recursion."""
    left = [expression]
    while left:
        one = left.pop()
        yield one
        left.extend(children(one))


def references(expression: Expression) -> set[str]:
    """Return the names of the rules that an expression uses."""
    return {part.name for part in walk(expression) if isinstance(part, Reference)}


def reachable(grammar: Grammar) -> Grammar:
    """Return the grammar without the rules that the start rule does not need.

    Raise GrammarRefused if a needed rule is missing.
    """
    found: dict[str, Expression] = {}
    left = [grammar.root]
    while left:
        name = left.pop()
        if name in found:
            continue
        if name not in grammar.rules:
            refuse("a rule is used but not defined", f"rule {name}", "define the rule")
        found[name] = grammar.rules[name]
        left.extend(sorted(references(found[name])))
    return Grammar({name: found[name] for name in grammar.rules if name in found}, grammar.root)


def _known(grammar: Grammar, holds: Callable[[Expression], bool]) -> frozenset[str]:
    """Return the names of the rules that match a text made only of leaves for which `holds` is true.

    The leaves are literals and character classes. The search takes linear time (Horn satisfiability).
    """
    parents: list[int | str] = []  # of each expression: the expression around it, or its rule
    missing: list[int] = []  # of each expression: the number of parts that must still hold
    users: dict[str, list[int]] = {}
    true: list[int] = []
    left: list[tuple[Expression, int | str]] = [(body, name) for name, body in grammar.rules.items()]
    while left:
        one, parent = left.pop()
        number = len(parents)
        parents.append(parent)
        if isinstance(one, Sequence):
            missing.append(len(one.items))
        elif isinstance(one, Literal | CharClass):
            missing.append(0 if holds(one) else 1)
        else:
            missing.append(0 if isinstance(one, Repeat) and one.least == 0 else 1)
        if isinstance(one, Reference):
            users.setdefault(one.name, []).append(number)
        if missing[number] == 0:
            true.append(number)
        left.extend((child, number) for child in children(one))
    rules: set[str] = set()
    while true:
        above = parents[true.pop()]
        if isinstance(above, str):
            rules.add(above)
        for user in users.pop(above, ()) if isinstance(above, str) else (above,):
            missing[user] -= 1
            if missing[user] == 0:
                true.append(user)
    return frozenset(rules)


def nullable_rules(grammar: Grammar) -> frozenset[str]:
    """Return the names of the rules that match the empty text."""
    return _known(grammar, lambda leaf: False)


def productive_rules(grammar: Grammar) -> frozenset[str]:
    """Return the names of the rules that match at least one text."""
    return _known(grammar, lambda leaf: leaf != CharClass(()))


def is_nullable(expression: Expression, nullable: Set[str]) -> bool:
    """Return whether an expression matches the empty text.

    `nullable` are the names of the rules that match the empty text.
    """
    if isinstance(expression, Reference):
        return expression.name in nullable
    if isinstance(expression, Sequence):
        return all(is_nullable(item, nullable) for item in expression.items)
    if isinstance(expression, Alternation):
        return any(is_nullable(option, nullable) for option in expression.options)
    return isinstance(expression, Repeat) and (
        expression.least == 0 or is_nullable(expression.item, nullable)
    )


def embed(rules: MutableMapping[str, Expression], grammar: Grammar, prefix: str) -> Reference:
    """Add the rules of `grammar` to `rules`, with names that begin with `prefix`.

    Return a reference to the start rule of `grammar`.
    """
    for name, body in grammar.rules.items():
        rules[f"{prefix}.{name}"] = _renamed(body, prefix)
    return Reference(f"{prefix}.{grammar.root}")


def _renamed(expression: Expression, prefix: str) -> Expression:
    if isinstance(expression, Reference):
        return Reference(f"{prefix}.{expression.name}")
    if isinstance(expression, Sequence):
        return Sequence(tuple(_renamed(item, prefix) for item in expression.items))
    if isinstance(expression, Alternation):
        return Alternation(tuple(_renamed(option, prefix) for option in expression.options))
    if isinstance(expression, Repeat):
        return Repeat(_renamed(expression.item, prefix), expression.least, expression.most)
    return expression


def check(grammar: Grammar) -> Grammar:
    """Return the grammar without the rules that it does not need.

    Raise GrammarRefused if the grammar is too large, or if no text matches it.
    """
    used = reachable(grammar)
    if len(used.rules) > MAX_RULES:
        refuse(f"the grammar has more than {MAX_RULES} rules", "the grammar", "make the grammar smaller")
    size = sum(1 for body in used.rules.values() for _ in walk(body))
    if size > MAX_EXPRESSIONS:
        refuse(
            f"the grammar has more than {MAX_EXPRESSIONS} parts", "the grammar", "make the grammar smaller"
        )
    if used.root not in productive_rules(used):
        refuse("no text is in the grammar", f"rule {used.root}", "give each recursion an end")
    return used
