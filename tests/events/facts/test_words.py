"""Every new word of a kind of 0.2.0 has an older word that replaces it until it is in force."""

import dataclasses
import enum
import json
import typing
from pathlib import Path
from typing import Any

from events.fact import Observation
from events.versions import BASE_KINDS, KINDS, NEW_WORDS

THEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "words-0.2.0.json").read_text())


def words(hint: Any, path: str, found: dict[str, set[str]]) -> None:
    """Collect the allowed words of each field, by `kind.field`."""
    if typing.get_origin(hint) is typing.Literal:
        found[path] = set(map(str, typing.get_args(hint)))
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        found[path] = {str(member.value) for member in hint}
    elif dataclasses.is_dataclass(hint):
        for name, inner in typing.get_type_hints(hint).items():
            if not name.startswith("_") and typing.get_origin(inner) is not typing.ClassVar:
                words(inner, f"{path}.{name}", found)
    else:
        for inner in typing.get_args(hint):
            words(inner, path, found)


def of(kinds: frozenset[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in kinds:
        words(KINDS[name], name, found)
    return found


def test_a_new_word_of_an_old_kind_has_an_older_replacement() -> None:
    now = of(BASE_KINDS)
    assert now.keys() >= THEN.keys(), "the words of a field became free text, or its name changed"
    listed = {(f"{new.kind}.{new.field}", new.word) for new in NEW_WORDS}
    for path, then in THEN.items():
        gained = now[path] - set(then)
        assert not set(then) - now[path], f"{path}: a word was removed, but old journals contain it"
        missing = {word for word in gained if (path, word) not in listed}
        assert not missing, f"{path} has gained {missing}: list them in `events.versions.NEW_WORDS`"


def test_replacements_are_known_words_and_no_decision_is_listed() -> None:
    for place, new in enumerate(NEW_WORDS):
        older = {later.word for later in NEW_WORDS[place + 1 :] if later.field == new.field}
        assert new.instead in older | set(THEN[f"{new.kind}.{new.field}"])
        assert issubclass(KINDS[new.kind], Observation), "a decision's words need a new version"
