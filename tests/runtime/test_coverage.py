"""Canaries that cover more of a model: slices of the vocabulary before the questions."""

import pytest

from controller.runtime.canary.goldens import FIRST_ID, SLICES, Canary, covering, dealt

POOL = tuple(Canary(f"q{n}", (7, 8, 9), 32, text="why") for n in range(12))


def test_the_first_of_each_slice_together_read_every_row_of_a_small_vocabulary() -> None:
    wide = {canary.id: canary for canary in covering(POOL, 2048)}
    chosen = dealt(tuple(reversed([canary.id for canary in POOL])), POOL)[:SLICES]
    assert {token for id in chosen for token in wide[id].prompt} == set(range(FIRST_ID, 2048))


def test_the_question_stays_at_the_end_and_the_text_is_unchanged() -> None:
    for canary in covering(POOL, 2048):
        assert canary.prompt[-3:] == (7, 8, 9)
        assert (canary.text, canary.max_tokens) == ("why", 32)
        assert len(canary.prompt) in (514, 515)


@pytest.mark.parametrize("vocabulary", [259, 2048, 128_256])
def test_the_same_vocabulary_gives_the_same_questions(vocabulary: int) -> None:
    assert covering(POOL, vocabulary) == covering(POOL, vocabulary)
    assert max(token for canary in covering(POOL, vocabulary) for token in canary.prompt) < vocabulary
    assert max(len(canary.prompt) for canary in covering(POOL, vocabulary)) <= 515


def test_within_a_slice_the_better_one_comes_first() -> None:
    order = ("q4", "q0", "q1", "q8", "q2", "q5", "q3")
    assert dealt(order, POOL) == ("q4", "q1", "q2", "q3", "q0", "q5", "q8")
