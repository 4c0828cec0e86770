"""Forecasts the load of the next minutes by the method with the least error in a back-test.

    constant         the last minute's load
    moving_average   the mean of the last ten minutes
    trend            continues the trend with damping (Holt's damped trend, statsmodels)
    seasonal         the load at the same time on the last days, shifted to the present level (Holt-Winters, statsmodels)

The history is a list of loads, one per minute (a bin). A back-test repeats a method's forecast at several past bins, as far
ahead as is needed now, and compares the forecasts with the recorded loads. A method's margin is the fraction by which its
forecasts are raised, at most 1. With the margin, nine tenths of the back-test's forecasts would have reached the recorded
peak.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, isfinite
from typing import Any

from events.errors import HoldfastError

MOMENTS = 12  # past moments from which a back-test forecasts
DAYS, A_DAY = 7, 96  # days of history of a season, and parts per day
WINDOW = 10  # bins of a moving average
TREND_LEAST, TREND_MOST = 10, 120  # minimum and maximum history of a trend, in bins
USUAL_MARGIN = 0.2  # margin without enough history for a back-test
COVERED = 0.9  # share of a back-test's underestimates that the margin covers
SLOW_MOMENTS = 4  # the same for methods that are slow to fit

Method = Callable[[Sequence[float], int], "list[float] | None"]


class ForecastsMissing(HoldfastError):
    """Trends and seasons need statsmodels, which is not installed. Run: pip install -e '.[planner]'."""


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """The forecast load per bin, with the method that computed it."""

    method: str
    values: tuple[float, ...]  # one per bin
    error: float | None  # recent relative error of this method; None: unknown
    margin: float  # share to add

    @property
    def peak(self) -> float:
        """The highest forecast load with the margin added."""
        return max(self.values, default=0.0) * (1 + self.margin)


def constant(history: Sequence[float], ahead: int) -> list[float] | None:
    """Forecast, for each of the next `ahead` bins, the load of the last bin."""
    return [history[-1]] * ahead


def moving_average(history: Sequence[float], ahead: int) -> list[float] | None:
    """Forecast, for each of the next `ahead` bins, the mean load of the last WINDOW bins."""
    last = history[-WINDOW:]
    return [sum(last) / len(last)] * ahead


def trend(history: Sequence[float], ahead: int) -> list[float] | None:
    """Forecast the next `ahead` bins by a damped trend.

    Return None if the history is shorter than TREND_LEAST bins or the fit fails.
    """
    last = list(history[-TREND_MOST:])
    return _fitted(last, ahead, trend="add", damped_trend=True) if len(last) >= TREND_LEAST else None


def seasonal(period: int) -> Method:
    """Return a method that forecasts by the time of day, where a day has `period` bins.

    The bins are averaged over 15 minutes before the fit. The method returns None if the fit fails, or if the history is
    shorter than two days and 15 minutes.
    """
    coarse = max(1, period // A_DAY)

    def method(history: Sequence[float], ahead: int) -> list[float] | None:
        if len(history) < 2 * period + coarse:
            return None
        last = history[-DAYS * period :]
        blocks = [last[n : n + coarse] for n in range(len(last) % coarse, len(last), coarse)]
        means = [sum(block) / coarse for block in blocks]
        found = _fitted(means, -(-ahead // coarse), seasonal="add", seasonal_periods=period // coarse)
        return [found[n // coarse] for n in range(ahead)] if found is not None else None

    return method


def _fitted(history: list[float], ahead: int, **model: object) -> list[float] | None:
    if max(history) == min(history):
        return [history[-1]] * ahead
    if (smoothing := _smoothing()) is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a lack of convergence shows in its error
        try:
            found = smoothing(history, initialization_method="heuristic", **model).fit()
            values = [float(value) for value in found.forecast(ahead)]
        except (ValueError, ArithmeticError):
            return None
    return [max(0.0, value) for value in values] if all(map(isfinite, values)) else None


@cache
def _smoothing() -> Any:
    """Return the smoothing class of statsmodels; None if statsmodels is not installed. The import takes about a second."""
    try:
        from statsmodels.tsa.holtwinters import ExponentialSmoothing
    except ImportError:
        return None
    return ExponentialSmoothing


def check_installed() -> None:
    """Raise ForecastsMissing if statsmodels, which trends and seasons need, is not installed."""
    if _smoothing() is None:
        raise ForecastsMissing(str(ForecastsMissing.__doc__))


def methods(period: int | None) -> dict[str, Method]:
    """Return all methods by name. The seasonal method is omitted if `period` (the bins of a day) is None."""
    found: dict[str, Method] = {"constant": constant, "moving_average": moving_average, "trend": trend}
    if period is not None:
        found["seasonal"] = seasonal(period)
    return found


def forecast(history: Sequence[float], ahead: int, among: dict[str, Method]) -> LoadForecast:
    """Return the forecast for the next `ahead` bins by the method with the least error in a back-test.

    `history` holds the load of at least one bin, the latest last, and `among` the methods by name. If no method can be
    back-tested, the moving average is used.
    """
    default = moving_average(history, ahead) or [history[-1]] * ahead
    best = LoadForecast("moving_average", tuple(default), None, USUAL_MARGIN)  # until a back-test succeeds
    for name, method in among.items():
        moments = SLOW_MOMENTS if method not in (constant, moving_average) else MOMENTS
        tried = back_test(history, ahead, method, moments)
        if tried is None or (best.error is not None and tried[0] >= best.error):
            continue
        values = method(history, ahead)
        if values is not None:
            best = LoadForecast(name, tuple(values), *tried)
    return best


def back_test(
    history: Sequence[float], ahead: int, method: Method, moments: int
) -> tuple[float, float] | None:
    """Return a method's relative error in a back-test, and the margin to add to the method's forecasts.

    The back-test repeats the forecast at up to `moments` past times. The error is the sum of absolute errors over the sum of
    loads. The margin is the fraction by which forecasts are raised, at most 1. With it, nine tenths of the forecasts would
    have reached the recorded peak. Return None if the history is too short or without load.
    """
    last = len(history) - ahead
    first = max(2, last - moments * max(1, ahead // 2) + 1)
    error = total = 0.0
    short = []
    for now in range(last, first - 1, -max(1, ahead // 2)):
        values = method(history[:now], ahead)
        if values is None:
            break
        actual = history[now : now + ahead]
        error += sum(abs(a - v) for a, v in zip(actual, values, strict=True))
        total += sum(actual)
        expected = max(values)
        short.append(max(actual) / expected - 1 if expected > 0 else (1.0 if max(actual) > 0 else 0.0))
    if len(short) < 3 or total <= 0:
        return None
    ranked = sorted(max(0.0, one) for one in short)
    return error / total, min(1.0, ranked[ceil(COVERED * len(ranked)) - 1])
