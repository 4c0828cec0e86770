"""New enum values in fields of older kinds, and the older values that replace them for now.

A reader of an older release stops at a value ("word") that it does not know, as at an unknown kind. So a new word is announced
and put in force like a kind, under its `name`. Until then an observation carries the older word. A new word in a decision needs
a new version of the deciders instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from events.fact import Observation
from events.frozen import replace


@dataclass(frozen=True, slots=True)
class NewWord:
    """One word beyond those of release 0.2.0."""

    kind: str
    field: str
    word: str
    instead: (
        str  # a word that older releases know; or a new word of an earlier release, listed after this one
    )

    @property
    def name(self) -> str:
        """The word's name among the kinds in force."""
        return f"{self.kind}.{self.field}={self.word}"


NEW_WORDS: tuple[NewWord, ...] = ()
"""The newest first. Empty: no kind of 0.2.0 has gained a word yet; `tests/events/facts/test_words.py` detects the first one."""


def older(
    fact: Observation, in_force: frozenset[str], new_words: Iterable[NewWord] = NEW_WORDS
) -> Observation:
    """Return the fact with each word that is not in force replaced by an older one."""
    for new in new_words:
        if new.kind == fact.kind() and getattr(fact, new.field) == new.word and new.name not in in_force:
            fact = replace(fact, **{new.field: new.instead})
    return fact
