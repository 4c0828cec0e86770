"""Random draws that keep the observed frequencies.

Independent draws from an empirical distribution do not keep the frequencies: in four cases of ten, a prefix shared by two
prompts would be visited by one prompt or by none. A deck deals every observed value as often as it was observed before any
value is repeated.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from random import Random
from typing import Generic, TypeVar

V = TypeVar("V", bound=float)


class Cdf(Generic[V]):
    """The observed values in order, with cumulative counts. Each slot from 0 to `total` - 1 is one observation."""

    def __init__(self, counts: Mapping[V, int]) -> None:
        seen = sorted((value, count) for value, count in counts.items() if count)
        self.values: list[V] = [value for value, _ in seen]
        self.cumulative: list[int] = list(accumulate(count for _, count in seen))

    @property
    def total(self) -> int:
        """Number of observations."""
        return self.cumulative[-1] if self.cumulative else 0

    def counts(self) -> Iterator[tuple[V, int]]:
        """Yield each value and how often it was observed."""
        for value, low, high in zip(self.values, [0, *self.cumulative], self.cumulative, strict=False):
            yield value, high - low

    def __getitem__(self, slot: int) -> V:
        return self.values[bisect_right(self.cumulative, slot)]


class Deck(Generic[V]):
    """Deals values in rounds: every slot of the distribution once, in random order, then the next round."""

    def __init__(self, counts: Mapping[V, int], chance: Random) -> None:
        self.cdf = Cdf(counts)
        self.chance = chance
        self._left: list[V] = []

    @property
    def begins(self) -> bool:
        """Return whether the next deal begins a round."""
        return not self._left

    def deal(self) -> V:
        """Return the next value. The deck must not be empty."""
        if not self._left:
            self._left = self.order()
            self._left.reverse()
        return self._left.pop()

    def order(self) -> list[V]:
        """Return the values of a round in the order in which they are dealt."""
        slots = list(range(self.cdf.total))
        self.chance.shuffle(slots)
        return [self.cdf[slot] for slot in slots]


class ReturningDeck(Deck[int]):
    """Deals outcomes that recur as soon as they did in the trace.

    `gaps` has, for some outcomes, the observed numbers of deals between two occurrences. Every round begins with `first`.
    Outcomes without gaps are dealt at random.
    """

    def __init__(
        self, counts: Mapping[int, int], chance: Random, first: int, gaps: Mapping[int, Deck[int]]
    ) -> None:
        super().__init__(counts, chance)
        self._first = first
        self._gaps = gaps

    def order(self) -> list[int]:
        """Return a round's outcomes: each outcome first at a random time, then again after drawn gaps."""
        due: list[tuple[float, int]] = []
        total = self.cdf.total
        for outcome, count in self.cdf.counts():
            gaps = self._gaps.get(outcome)
            if gaps is None or count == 1:
                times = [self.chance.random() * total for _ in range(count)]
                if outcome == self._first:
                    times[0] = -1.0
            else:
                times = list(accumulate((gaps.deal() for _ in range(count - 1)), initial=0))
                scale = min(1.0, total / (times[-1] + 1))
                begin = -1.0 if outcome == self._first else self.chance.random() * (total - times[-1] * scale)
                times = [begin + time * scale for time in times]
            due += [(time, outcome) for time in times]
        due.sort()
        return [outcome for _, outcome in due]
