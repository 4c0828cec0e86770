"""The announcements of processes, and the kinds that a `PolicyAdopted` puts in force."""

from pathlib import Path

import pytest

from events.versions import (
    BASE_KINDS,
    KINDS,
    NAMES_MAX,
    WITHOUT_STATEMENT,
    InForce,
    Known,
    names,
    new_kinds,
    stated_kinds,
)

KINDS_OF_5 = Path(__file__).parents[1] / "fixtures" / "0.3.0-deciders5" / "kinds.txt"


def test_the_kinds_of_both_older_releases_are_listed_and_none_has_gone() -> None:
    """The recorded journal of deciders version 5 holds every kind of its time; 44 of them are those of 0.2.0."""
    assert len(BASE_KINDS) == 44
    assert BASE_KINDS | WITHOUT_STATEMENT[5] == set(KINDS_OF_5.read_text().split())
    assert BASE_KINDS | WITHOUT_STATEMENT[5] <= KINDS.keys()
    assert new_kinds() == KINDS.keys() - BASE_KINDS


def test_a_decision_without_kinds_means_what_its_release_wrote() -> None:
    assert stated_kinds(None, 4) == frozenset()
    assert stated_kinds(None, 5) == WITHOUT_STATEMENT[5]
    assert stated_kinds((), 5) == frozenset(), "a leader of this release in a fleet of 0.2.0"
    assert InForce.of({"b", "a"}, 5).stated == ("a", "b")
    assert InForce(None, 5).kinds == WITHOUT_STATEMENT[5]


def test_an_announcement_survives_the_wire_and_invalid_ones_are_refused() -> None:
    ours = Known.ours(7)
    assert Known.of_body(ours.as_body()) == ours
    for wrong in ("abc", [1], ["x" * 101], ["x"] * (NAMES_MAX + 1), None):
        with pytest.raises(ValueError, match=r"expected|is a text"):
            names(wrong)
