"""A step function over virtual time, for loads that change at times."""

from bisect import bisect_right
from dataclasses import dataclass
from random import Random

from controller.simulator.world.kernel import MINUTE


@dataclass(frozen=True, slots=True)
class Steps:
    """A step function. Times are microseconds of virtual time."""

    since: tuple[int, ...]
    values: tuple[float, ...]

    def at(self, now: int) -> float:
        """Return the value of the function at time `now`."""
        return self.values[max(0, bisect_right(self.since, now) - 1)]

    def then(self, at: int, value: float) -> "Steps":
        """Return the same function with one constant value from `at` on."""
        kept = bisect_right(self.since, at - 1)
        return Steps((*self.since[:kept], at), (*self.values[:kept], value))


def drawn(chance: Random, until: int, lasts: tuple[int, int], values: tuple[float, ...]) -> Steps:
    """Return a function that is one of `values` at a time, each for a random number of minutes within `lasts`."""
    since, drawn_values, at = list[int](), list[float](), 0
    while at < until:
        since.append(at)
        drawn_values.append(chance.choice(values))
        at += chance.randint(*lasts) * MINUTE
    return Steps(tuple(since), tuple(drawn_values))
