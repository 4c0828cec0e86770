"""Choices between texts (vLLM `structured_outputs.choice`), with common prefixes written once.

Written in full, thousands of texts with the same first character would need thousands of positions in one state of the
automaton. With common prefixes written once, a state needs one position for each possible next character.
"""

from collections.abc import Iterable, Sequence

from events.grammar.model import Expression, Grammar, Literal, check, choice, literal, sequence
from events.grammar.refusals import MAX_SOURCE, refuse

MANY = 16  # literal options from which they are factored
MAX_DEPTH = 30  # nested prefixes; below, options stay as they are


def grammar_of_choice(texts: Sequence[str]) -> Grammar:
    """Return the grammar of exactly these texts.

    Raise GrammarRefused if there is no text, or if the texts together are too long.
    """
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        refuse("a choice must be a list of at least one text", "choice", "give texts")
    if sum(map(len, texts)) > MAX_SOURCE:
        refuse(f"a choice has more than {MAX_SOURCE} characters", "choice", "make it smaller")
    return check(Grammar({"root": choice_of_texts(texts)}))


def factored_choice(options: Sequence[Expression]) -> Expression:
    """Return a choice between these options.

    If 16 or more of them are literals, the common prefixes of the literals are written once.
    """
    texts = [one.text for one in options if isinstance(one, Literal)]
    if len(texts) < MANY:
        return choice(*options)
    others = [one for one in options if not isinstance(one, Literal)]
    return choice(choice_of_texts(texts), *others)


def choice_of_texts(texts: Iterable[str]) -> Expression:
    """Return an expression that matches exactly these texts."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < MANY:
        return choice(*map(literal, distinct))
    return _tree(sorted(distinct), 0)


def _tree(texts: list[str], depth: int) -> Expression:
    """Return an expression that matches exactly these texts, which are sorted and distinct.

    Common prefixes are written once. `depth` is the number of prefixes that are already removed from the texts.
    """
    if len(texts) == 1 or depth == MAX_DEPTH:
        return choice(*map(literal, texts))
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    options = []
    for group in groups.values():
        prefix = _common_prefix(group[0], group[-1])
        rests = [text[len(prefix) :] for text in group]
        options.append(sequence(literal(prefix), _tree(rests, depth + 1) if rests != [""] else literal("")))
    return choice(*options)


def _common_prefix(one: str, other: str) -> str:
    length = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[:length] if length is not None else min(one, other, key=len)
