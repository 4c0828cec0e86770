"""Token masks of xgrammar: under our grammar, after random cuts, and against our matcher."""

import random

import pytest

pytest.importorskip("xgrammar", reason="xgrammar is not installed: make test-engines")
pytestmark = pytest.mark.engines

from xgrammar_server import (  # noqa: E402
    Constraint,
    XgrammarServer,
    constraints,
    cut_answers,
    masks,
    report,
)

CONSTRAINTS = constraints()


@pytest.fixture(scope="module")
def servers() -> dict[bool, XgrammarServer]:
    return {free: XgrammarServer(whole_characters=free) for free in (False, True)}


@pytest.mark.parametrize("one", CONSTRAINTS, ids=lambda one: one.name)
def test_our_grammar_and_our_matcher_allow_what_the_constraint_allows(
    servers: dict[bool, XgrammarServer], one: Constraint
) -> None:
    server = servers[one.free_text]
    for seed in range(3):
        for text, theirs, printed, ours in masks(server, one, random.Random(seed)):
            assert printed == ours, text
            assert theirs == ours or (theirs & ~ours == 0 and one.recursive_root), text


def test_random_cuts_alter_no_answer_and_none_becomes_invalid() -> None:
    found = cut_answers(2 * len(CONSTRAINTS), seed=3)
    assert found.problems == [], report(found)
    assert len(found.kinds) == len(CONSTRAINTS) >= 100
