"""An independent recogniser of small grammars, and random grammars for property tests.

It computes which spans of a text each rule derives, as a fixed point, without any of the product's automata.
"""

from functools import cache
from itertools import product

from hypothesis import strategies as st

from events.grammar.model import (
    Alternation,
    CharClass,
    Expression,
    Grammar,
    Literal,
    Reference,
    Repeat,
    Sequence,
    characters,
    choice,
    literal,
    productive_rules,
    sequence,
)

ALPHABET = "ab"
NAMES = ("root", "x", "y")


@cache
def texts(longest: int) -> tuple[str, ...]:
    """Return all texts over the alphabet, up to a length."""
    return tuple("".join(chars) for size in range(longest + 1) for chars in product(ALPHABET, repeat=size))


def derives(grammar: Grammar, text: str) -> bool:
    """Return whether the grammar derives the text."""
    ends: dict[tuple[str, int], frozenset[int]] = {}

    def after(one: Expression, start: int) -> frozenset[int]:
        if isinstance(one, Literal):
            return frozenset({start + len(one.text)} if text.startswith(one.text, start) else ())
        if isinstance(one, CharClass):
            inside = start < len(text) and any(low <= ord(text[start]) <= high for low, high in one.ranges)
            return frozenset({start + 1} if inside else ())
        if isinstance(one, Reference):
            return ends.get((one.name, start), frozenset())
        if isinstance(one, Alternation):
            return frozenset().union(*(after(option, start) for option in one.options))
        if isinstance(one, Sequence):
            reached = frozenset({start})
            for item in one.items:
                reached = frozenset().union(*(after(item, at) for at in reached))
            return reached
        return repeated(one, start)

    def repeated(one: Repeat, start: int) -> frozenset[int]:
        found: set[int] = set()
        reached = frozenset({start})
        for count in range(min(one.most if one.most is not None else 99, one.least + len(text) + 1) + 1):
            if count >= one.least:
                found |= reached
            reached = frozenset().union(*(after(one.item, at) for at in reached))
        return frozenset(found)

    changed = True
    while changed:
        changed = False
        for name, body in grammar.rules.items():
            for start in range(len(text) + 1):
                found = after(body, start)
                if found != ends.get((name, start), frozenset()):
                    ends[name, start] = found
                    changed = True
    return len(text) in ends.get((grammar.root, 0), ())


def language(grammar: Grammar, longest: int) -> set[str]:
    """Return the texts of a grammar up to a length."""
    return {text for text in texts(longest) if derives(grammar, text)}


leaves = st.one_of(
    st.text(ALPHABET, min_size=1, max_size=3).map(literal),
    st.sampled_from([characters([(97, 97)]), characters([(97, 98)]), characters([(97, 97)], negated=True)]),
    st.sampled_from(NAMES).map(Reference),
    st.just(literal("")),
)


def _larger(parts: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    bounds = st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 2, None]))
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(lambda items: sequence(*items)),
        st.lists(parts, min_size=1, max_size=3).map(lambda items: choice(*items)),
        st.tuples(parts, bounds).map(
            lambda drawn: Repeat(
                drawn[0], drawn[1][0], None if drawn[1][1] is None else drawn[1][0] + drawn[1][1]
            )
        ),
    )


expressions: st.SearchStrategy[Expression] = st.recursive(leaves, _larger, max_leaves=6)
grammars = (
    st.fixed_dictionaries(dict.fromkeys(NAMES, expressions))
    .map(Grammar)
    .filter(lambda grammar: grammar.root in productive_rules(grammar))
)
