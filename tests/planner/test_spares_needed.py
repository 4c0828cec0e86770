"""The number of spares needed, and the shortage that remains."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.spares import Outage, missing
from controller.planner.spares import SparePolicy, spares_for, spares_needed

STEPFUN = {"rate": 0.004195, "mttr": 5.54}  # per node-day; days


@pytest.mark.parametrize(
    ("nodes", "target", "spares"),
    [(128, 0.99, 8), (128, 0.999, 10), (1250, 0.999, 47), (1, 0.9, 0), (0, 0.99, 0)],
)
def test_n20_spares_are_the_quantile_of_the_nodes_away(nodes: int, target: float, spares: int) -> None:
    assert spares_needed(nodes, target=target, **STEPFUN) == spares


def test_n20_at_the_median_repair_four_are_enough_for_128() -> None:
    assert spares_needed(128, 0.004195, 20.4 / 24, 0.999) == 4


def test_pooling_matters() -> None:
    small = spares_needed(128, target=0.999, **STEPFUN) / 128
    assert spares_needed(1250, target=0.999, **STEPFUN) / 1250 < small / 2 + 0.001


@pytest.mark.parametrize("wrong", [{"target": 1.0}, {"target": -0.1}, {"rate": -1.0}, {"n_nodes": -1}])
def test_invalid_arguments_are_rejected(wrong: dict[str, float]) -> None:
    asked = {"n_nodes": 10, "rate": 0.1, "mttr": 1.0, "target": 0.9} | wrong
    with pytest.raises(ValueError, match="must be"):
        spares_needed(**asked)  # type: ignore[arg-type]


def test_by_default_spares_are_between_a_twentieth_and_a_tenth() -> None:
    policy = SparePolicy()
    assert spares_for(policy, 15) == 0, "a small fleet has none by default"
    assert spares_for(policy, 16) == 1
    assert spares_for(policy, 128) == 8
    assert spares_for(policy, 1250) == 63, "a twentieth is more than failures need"
    assert spares_for(SparePolicy(per_day=0.1), 128) == 12, "a tenth is the maximum"
    assert spares_for(SparePolicy(spares=3), 2) == 3, "a fixed number applies"


def test_a_spare_fills_a_place_and_the_one_after_the_last_is_missing() -> None:
    outages = [Outage(10, 20), Outage(12, 15)]
    assert missing(outages, 0, 0.5, 100).unit_time == 13
    one = missing(outages, 1, 0.5, 100)
    assert (one.unit_time, one.worst, one.lacking, one.replaced) == (3.5, 1, 0.03, 1)
    both = missing(outages, 2, 0.5, 100)
    assert (both.unit_time, both.worst, both.lacking, both.replaced) == (1.0, 0, 0.0, 2)


def test_an_outage_beyond_the_end_counts_to_the_end() -> None:
    assert missing([Outage(90, 500), Outage(200, 300)], 0, 0.0, 100).unit_time == 10


Spans = st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 50)), max_size=25)


@given(Spans, st.integers(0, 6))
def test_another_spare_never_increases_the_shortage_and_without_any_every_outage_counts(
    spans: list[tuple[float, float]], spares: int
) -> None:
    outages = [Outage(begin, begin + length) for begin, length in spans]
    here = missing(outages, spares, 0.0, 120.0)
    assert missing(outages, spares + 1, 0.0, 120.0).unit_time <= here.unit_time + 1e-6
    alone = missing(outages, 0, 0.0, 120.0).unit_time
    assert alone == pytest.approx(sum(min(o.end, 120.0) - o.begin for o in outages))
    assert missing(outages, len(outages), 0.0, 120.0).unit_time == 0
