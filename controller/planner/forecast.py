"""How much will come within the next minutes? By the way of looking ahead that would have been best lately.

    constant         as much as in the last minute
    moving_average   as much as in the last ten on average
    trend            on as it has been going, more and more slowly (Holt's damped trend, of statsmodels)
    seasonal         as at the same time of the last days, above or below it by as much as now (Holt and Winters, of statsmodels)

Each is tried on what is known already (back-test): from several moments of the past it looks ahead as far as is asked now. That
with the least error is taken, and nine tenths of what it had underestimated is added, as a share.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, isfinite
from typing import Any

from events.errors import HoldfastError

MOMENTS = 12  # of the past from which a back-test looks ahead
DAYS, A_DAY = 7, 96  # that a season looks back, and into how many parts it divides each
WINDOW = 10  # bins of a moving average
TREND_LEAST, TREND_MOST = 10, 120  # bins that a trend needs, and looks at
USUAL_MARGIN = 0.2  # where too little is known for a back-test
COVERED = 0.9  # of the moments in which the back-test had underestimated
SLOW_MOMENTS = 4  # as many where fitting takes long

Method = Callable[[Sequence[float], int], "list[float] | None"]


class ForecastsMissing(HoldfastError):
    """Trends and seasons need statsmodels, which is not installed: pip install -e '.[planner]'."""


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """What is to be expected."""

    method: str
    values: tuple[float, ...]  # for each of the next bins
    error: float | None  # of this method lately: what it was off by, over what came; None: not known
    margin: float  # what has to be added, as a share

    @property
    def peak(self) -> float:
        """The most that is to be planned for."""
        return max(self.values, default=0.0) * (1 + self.margin)


def constant(history: Sequence[float], ahead: int) -> list[float] | None:
    """Return the last value again and again."""
    return [history[-1]] * ahead


def moving_average(history: Sequence[float], ahead: int) -> list[float] | None:
    """Return the mean of the last ones."""
    last = history[-WINDOW:]
    return [sum(last) / len(last)] * ahead


def trend(history: Sequence[float], ahead: int) -> list[float] | None:
    """Return how it goes on, ever more slowly; None: too little is known."""
    last = list(history[-TREND_MOST:])
    return _fitted(last, ahead, trend="add", damped_trend=True) if len(last) >= TREND_LEAST else None


def seasonal(period: int) -> Method:
    """Return the method that looks back by days of so many bins, in quarters of an hour or so."""
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
        warnings.simplefilter("ignore")  # that it has not converged shows in its error
        try:
            found = smoothing(history, initialization_method="heuristic", **model).fit()
            values = [float(value) for value in found.forecast(ahead)]
        except (ValueError, ArithmeticError):
            return None
    return [max(0.0, value) for value in values] if all(map(isfinite, values)) else None


@cache
def _smoothing() -> Any:
    """Return statsmodels' exponential smoothing, which takes a second to load; None: it is not installed."""
    try:
        from statsmodels.tsa.holtwinters import ExponentialSmoothing
    except ImportError:
        return None
    return ExponentialSmoothing


def check_installed() -> None:
    """Raise ForecastsMissing where trends and seasons cannot be foreseen."""
    if _smoothing() is None:
        raise ForecastsMissing(str(ForecastsMissing.__doc__))


def methods(period: int | None) -> dict[str, Method]:
    """Return all of them; without a period, those that know of no days."""
    found: dict[str, Method] = {"constant": constant, "moving_average": moving_average, "trend": trend}
    if period is not None:
        found["seasonal"] = seasonal(period)
    return found


def forecast(history: Sequence[float], ahead: int, among: dict[str, Method]) -> LoadForecast:
    """Return what the best method says of the next bins. `history`: the latest last, one bin at least."""
    usual = moving_average(history, ahead) or [history[-1]] * ahead
    best = LoadForecast("moving_average", tuple(usual), None, USUAL_MARGIN)  # until anything can be tried
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
    """Return by how much a method was off, over what came, and the margin that it would have needed; None: too little known."""
    last = len(history) - ahead
    first = max(2, last - moments * max(1, ahead // 2) + 1)
    off = came = 0.0
    short = []
    for now in range(last, first - 1, -max(1, ahead // 2)):
        values = method(history[:now], ahead)
        if values is None:
            break
        actual = history[now : now + ahead]
        off += sum(abs(a - v) for a, v in zip(actual, values, strict=True))
        came += sum(actual)
        expected = max(values)
        short.append(max(actual) / expected - 1 if expected > 0 else (1.0 if max(actual) > 0 else 0.0))
    if len(short) < 3 or came <= 0:
        return None
    ranked = sorted(max(0.0, one) for one in short)
    return off / came, min(1.0, ranked[ceil(COVERED * len(ranked)) - 1])
