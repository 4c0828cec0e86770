"""Decks deal every observed value as often as it was observed."""

from collections import Counter
from itertools import pairwise
from random import Random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.trace.synthesis import Deck, ReturningDeck

seen = st.dictionaries(st.integers(-5, 50), st.integers(0, 5), min_size=1).filter(lambda c: sum(c.values()))


@given(seen, st.integers())
def test_every_round_deals_every_observation(counts: dict[int, int], seed: int) -> None:
    deck = Deck(counts, Random(seed))
    for _ in range(2):
        assert deck.begins
        assert Counter(deck.deal() for _ in range(sum(counts.values()))) == +Counter(counts)


@given(seen, st.integers(), st.data())
def test_a_round_begins_with_the_first_and_deals_all_with_any_gaps(
    counts: dict[int, int], seed: int, data: st.DataObject
) -> None:
    chance, values = Random(seed), [value for value, count in counts.items() if count]
    first = data.draw(st.sampled_from(values))
    some = data.draw(st.sets(st.sampled_from(values)))
    gap = data.draw(st.integers(1, 100))
    deck = ReturningDeck(counts, chance, first, {value: Deck({gap: 1}, chance) for value in some})
    for _ in range(2):
        assert deck.begins
        dealt = [deck.deal() for _ in range(sum(counts.values()))]
        assert Counter(dealt) == +Counter(counts) and dealt[0] == first


def test_outcomes_recur_after_the_observed_gaps() -> None:
    chance = Random(1)
    counts = {0: 1} | dict.fromkeys(range(1, 400), 3)
    deck = ReturningDeck(counts, chance, 0, {value: Deck({10: 1}, chance) for value in range(1, 400)})
    dealt = [deck.deal() for _ in range(1 + 3 * 399)]
    places: dict[int, list[int]] = {}
    for place, value in enumerate(dealt):
        places.setdefault(value, []).append(place)
    gaps = [after - before for found in places.values() for before, after in pairwise(found)]
    assert median(gaps) == pytest.approx(10, rel=0.2) and max(gaps) < 30


def test_gaps_that_do_not_fit_into_a_round_are_shortened() -> None:
    chance = Random(1)
    deck = ReturningDeck({1: 5, 2: 95}, chance, 2, {1: Deck({1000: 1}, chance)})
    assert Counter(deck.deal() for _ in range(100)) == {1: 5, 2: 95}
