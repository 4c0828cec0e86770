"""Which place is next, by each of the ways to choose, and does it do?

Which seats the filter leaves is asked of the best few only: to ask about all of them takes longer than to choose. Where none
of the first few does, the caller asks again with those that are left.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Protocol

import numpy as np

from controller.router.pick import TOKENS_PER_REQUEST, WEIGHT_MIN
from controller.router.places import Question
from controller.router.score import per_weight, pick_lowest
from controller.router.slots import Floats, Rows
from controller.router.table import Holder, Key, Seat

_LOOKS = 8  # at the best ones, before all are filtered
_PAIRS = 2  # that are drawn before; a random number has digits for no more
_DRAWS = 4

Fits = Callable[[Seat], bool]
"""Whether the filter leaves a seat."""


class Strategy(Protocol):
    """One way to choose."""

    def pick(self, question: Question, fits: Fits) -> int | None:
        """Return the place that is chosen; None: the first few that it would be do not fit."""
        ...


class KvAware:
    """The lowest cost; at a temperature dearer ones too, of places that all fit."""

    def pick(self, question: Question, fits: Fits) -> int | None:
        costs, pricing = question.scores.costs, question.pricing
        if pricing.temperature > 0.0:
            return pick_lowest(costs, pricing.temperature, question.draw)
        return _lowest_that_fits(costs.copy(), question, fits)


class LeastLoaded:
    """The fewest requests and tokens in flight for the weight; among equals the one that was picked longest ago."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: Floats = np.zeros(
            0
        )  # turn, by the tracker's rows; who gets another's row may inherit his

    def pick(self, question: Question, fits: Fits) -> int | None:
        places, others = question.places, question.reported
        ours = np.fromiter(
            [seat.promised * TOKENS_PER_REQUEST + seat.tokens for seat in places.seat], float, len(places)
        )
        tokens = ours / places.ranks + others.tokens
        work = 1.0 + question.loads.requests + others.requests + tokens / TOKENS_PER_REQUEST
        costs = per_weight(work, question.weights)
        last = self._turns(places.rows)
        for _ in range(min(_LOOKS, len(costs))):
            equal = np.flatnonzero(costs == costs.min())
            place = int(equal[last[equal].argmin()])
            if fits(places.seat[place]):
                self._turn += 1
                self._last[places.rows[place]] = self._turn
                return place
            costs[place] = inf
        return None

    def _turns(self, rows: Rows) -> Floats:
        """Return when each of these rows was picked last."""
        if (size := int(rows.max()) + 1) > len(self._last):
            self._last = np.concatenate([self._last, np.zeros(size - len(self._last))])
        return self._last[rows]


class PowerOfTwo:
    """Of two different ones that are drawn, the one with fewer requests in flight; the first, if they have the same."""

    def pick(self, question: Question, fits: Fits) -> int | None:
        seats, size, draw = question.places.seat, len(question.places), question.draw
        if size == 1:
            return 0 if fits(seats[0]) else None
        for _ in range(_PAIRS):
            number, draw = divmod(draw * size * (size - 1), 1.0)
            one, other = divmod(int(number), size - 1)
            other += other >= one
            if fits(seats[one]) and fits(seats[other]):
                return min(
                    one, other, key=lambda place: (question.in_flight(place) + 1) / question.weight(place)
                )
        return None


class RoundRobin:
    """One after another. Each pick puts a place off by the inverse of its weight; the one that is due first is next."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[Holder, float] = {}

    def pick(self, question: Question, fits: Fits) -> int | None:
        holders, now = question.places.holders, self._now
        get = self._due.get
        dues = [get(holder, now) for holder in holders]
        turns = np.where(
            question.weights > 0, np.maximum(dues, now), inf
        )  # who was away has missed its turns
        for _ in range(min(_LOOKS, len(turns))):
            place = int(turns.argmin())
            if fits(question.places.seat[place]):
                self._now = max(dues[place], now)
                self._due[holders[place]] = self._now + 1 / question.weight(place)
                return place
            turns[place] = inf
        return None

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._due = {holder: due for holder, due in self._due.items() if holder[:2] in keys}


class Drawn:
    """Anybody, by lot."""

    def pick(self, question: Question, fits: Fits) -> int | None:
        sums, draw = np.cumsum(question.weights), question.draw
        if sums[-1] <= 0.0:  # all came into service in this moment
            sums = np.arange(1.0, len(sums) + 1)
        for _ in range(_DRAWS):
            at = draw * sums[-1]
            place = min(int(np.searchsorted(sums, at, side="right")), len(sums) - 1)
            if fits(question.places.seat[place]):
                return place
            before = sums[place - 1] if place else 0.0
            draw = (at - before) / max(sums[place] - before, WEIGHT_MIN) % 1.0
        return None


def lowest_of_few(costs: list[float], question: Question, fits: Fits) -> int | None:
    """Return the place with the lowest cost that fits, of a few places; None: it is none of the first few."""
    draw = question.draw
    for _ in range(min(_LOOKS, len(costs))):
        lowest = min(costs)
        if costs.count(lowest) == 1:
            place = costs.index(lowest)
        else:
            ties = [place for place, cost in enumerate(costs) if cost == lowest]
            number, draw = divmod(draw * len(ties), 1.0)
            place = ties[int(number)]
        if fits(question.places.seat[place]):
            return place
        costs[place] = inf
    return None


def _lowest_that_fits(costs: Floats, question: Question, fits: Fits) -> int | None:
    """Return what `lowest_of_few` does, of many. A draw among equals goes on with the digits that are left of it."""
    draw = question.draw
    for _ in range(_LOOKS):
        ties = np.flatnonzero(costs == costs.min())
        number, draw = divmod(draw * len(ties), 1.0)
        place = int(ties[int(number)])
        if fits(question.places.seat[place]):
            return place
        costs[place] = np.inf
    return None
