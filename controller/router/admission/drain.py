"""How fast is a line served? The work that was taken out of it, for each second and worker in which somebody waited.

    rate = capacity x efficiency          capacity: the weights of the workers in service
                                          efficiency: work taken / (capacity x time in which somebody waited), lately

While nobody waits nothing is learned: workers had less to do than they could. What is known fades slowly towards the first guess,
so that no bad moment keeps everybody from waiting for ever. A worker that falls takes its part of the rate with it at once, since
only the efficiency is remembered.
"""

from math import exp

WINDOW_S = 10.0  # what was taken so long ago counts e times less
PRIOR_S = 1.0  # of waiting, that the first guess is worth
FADES_S = 30.0  # without anybody waiting: what is known counts e times less against that guess
LEAST, MOST = 0.02, 8.0  # an efficiency beyond these is no news of the workers


class DrainRate:
    """One line's."""

    def __init__(self, now: float, efficiency: float = 1.0) -> None:
        """`efficiency`: the first guess."""
        self._at = now
        self._guess = efficiency
        self._taken = efficiency * PRIOR_S
        self._could = PRIOR_S
        self.efficiency = efficiency

    def pass_time(self, now: float, capacity: float, *, waited: bool) -> None:
        """Take in that time has passed, with so much capacity, and whether somebody `waited` in all of it."""
        passed = max(0.0, now - self._at)
        self._at = now
        if passed <= 0.0:
            return
        if waited:
            fades = exp(-passed / WINDOW_S)
            self._taken *= fades
            self._could = self._could * fades + passed * capacity
        else:
            fades = exp(-passed / FADES_S)
            self._taken = self._taken * fades + self._guess * PRIOR_S * (1.0 - fades)
            self._could = self._could * fades + PRIOR_S * (1.0 - fades)
        self._reckon()

    def take(self, work: float) -> None:
        """So much work was taken out of the line."""
        self._taken += work

    def rate(self, capacity: float) -> float:
        """Return how much work is taken in a second, while somebody waits."""
        return capacity * self.efficiency

    def _reckon(self) -> None:
        if self._could > 0.0:
            self.efficiency = min(MOST, max(LEAST, self._taken / self._could))


class Inflow:
    """How much work comes in a second? A mean of the last seconds."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, work: float, now: float) -> None:
        """Work has come."""
        self._sum = self._faded(now) + work
        self._at = max(now, self._at)

    def rate(self, now: float) -> float:
        """Return how much comes in a second."""
        return self._faded(now) / self._window_s

    def _faded(self, now: float) -> float:
        return self._sum * exp(-max(0.0, now - self._at) / self._window_s)
