"""The benchmark of near ties, shortened: no correct worker is convicted at any rate of flips."""

import pytest

from benchmarks.corruption import near_ties


@pytest.mark.slow
def test_no_correct_worker_is_convicted_by_near_ties_at_any_rate_of_flips() -> None:
    result = near_ties.measured((0.001, 0.01, 0.05, 0.2), 0.05, 7, answers=2_000, number=10)
    assert near_ties.convictions(result) == 0
    assert result["tokens"]["20.0%"]["flips"] > 1_000
    assert result["sampled"]["valid"]
    assert result["sampled"]["false_convictions_per_worker_year"] < 1e-4


def test_the_benchmark_finds_convictions_without_the_rule_for_near_ties() -> None:
    """Without the rule, flips convict: the benchmark can fail."""
    assert near_ties.by_tokens(0.2, 0.01, 7, 10, 2, tie_margin=0.0)["false_convictions"] > 0
