"""Forecasts, and the choice of the method."""

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planner.forecast import (
    USUAL_MARGIN,
    back_test,
    constant,
    forecast,
    methods,
    moving_average,
    seasonal,
    trend,
)

DAY = 96  # bins of a quarter of an hour


def daily(bins: int, noise: float = 0.2) -> list[float]:
    dice = random.Random(1)
    return [10 - 8 * math.cos(2 * math.pi * n / DAY) + dice.gauss(0, noise) for n in range(bins)]


def test_a_constant_load_is_forecast_to_stay() -> None:
    found = forecast([5.0] * 40, 6, methods(None))
    assert found.values == (5.0,) * 6
    assert (found.error, found.margin, found.peak) == (0.0, 0.0, 5.0)


@pytest.mark.slow
def test_a_growing_load_is_forecast_to_grow() -> None:
    history = [10.0 + n for n in range(60)]
    found = forecast(history, 5, methods(None))
    assert found.method == "trend"
    assert list(found.values) == pytest.approx([70.0, 71.0, 72.0, 73.0, 74.0], rel=0.02)


def test_a_jittering_load_is_forecast_by_its_mean() -> None:
    dice = random.Random(5)
    found = forecast([20 + dice.uniform(-4, 4) for _ in range(60)], 5, methods(None))
    assert all(18 < value < 22 for value in found.values)
    assert 0.05 < found.margin < 0.4, "a moment may be above it"


@pytest.mark.slow
def test_a_day_is_forecast_from_the_days_before() -> None:
    history = daily(3 * DAY + DAY // 4)
    found = forecast(history, DAY // 4, methods(DAY))
    comes = daily(3 * DAY + DAY // 2, noise=0.0)[-DAY // 4 :]
    assert found.method == "seasonal"
    assert list(found.values) == pytest.approx(comes, abs=1.5)
    assert found.error is not None and found.error < 0.1


def test_a_season_needs_two_past_days() -> None:
    assert seasonal(DAY)(daily(2 * DAY - 1), 4) is None
    assert seasonal(DAY)(daily(3 * DAY), 4) is not None


def test_a_short_history_is_forecast_by_its_mean_and_a_margin() -> None:
    found = forecast([6.0, 8.0], 5, methods(DAY))
    assert (found.method, found.error, found.margin) == ("moving_average", None, USUAL_MARGIN)
    assert found.peak == pytest.approx(7.0 * (1 + USUAL_MARGIN))


def test_no_traffic_is_forecast_without_traffic() -> None:
    assert forecast([0.0] * 50, 5, methods(None)).peak == 0.0


def test_underestimates_are_added_as_margin() -> None:
    history = [10.0, 10.0, 20.0, 20.0] * 20
    tested = back_test(history, 4, constant, 12)
    assert tested is not None and tested[1] == pytest.approx(1.0), "10 was expected, and 20 came"


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.integers(1, 12))
def test_every_method_gives_one_value_per_bin_and_none_below_zero(history: list[float], ahead: int) -> None:
    found = forecast(history, ahead, methods(None))
    assert len(found.values) == ahead
    assert all(math.isfinite(value) and value >= 0 for value in found.values)
    assert 0 <= found.margin <= 1


@pytest.mark.slow
@pytest.mark.parametrize("method", [constant, moving_average, trend])
def test_a_back_test_never_sees_later_bins(method: object) -> None:
    asked: list[int] = []

    def watched(history: Sequence[float], ahead: int) -> list[float] | None:
        asked.append(len(history))
        return method(history, ahead)  # type: ignore[operator,no-any-return]

    back_test([float(n % 7) + 1 for n in range(60)], 5, watched, 12)
    assert max(asked) == 55
