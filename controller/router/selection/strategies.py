"""Which candidate is next, by each of the ways to choose, and does it do?

Which endpoints the filter leaves is asked of the best few only: to ask about all of them takes longer than to choose. Where none
of the first few does, the caller asks again with those that are left.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Protocol

import numpy as np

from controller.router.endpoints import Endpoint, Key, WorkerRank
from controller.router.load.active_sequences import Floats, Rows
from controller.router.selection.candidates import ScoringRequest
from controller.router.selection.filter import TOKENS_PER_REQUEST, WEIGHT_MIN
from controller.router.selection.score import per_weight, pick_lowest

_LOOKS = 8  # at the best ones, before all are filtered
_PAIRS = 2  # that are drawn before; a random number has digits for no more
_DRAWS = 4

Fits = Callable[[Endpoint], bool]
"""Whether the filter leaves an endpoint."""


class Strategy(Protocol):
    """One way to choose."""

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of the candidate that is chosen; None: the first few that it would be do not fit."""
        ...


class KvAware:
    """The lowest cost; at a temperature dearer ones too, of candidates that all fit."""

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of the lowest cost that fits; above temperature 0 of one that is drawn."""
        costs, pricing = request.scores.costs, request.pricing
        if pricing.temperature > 0.0:
            return pick_lowest(costs, pricing.temperature, request.draw)
        return _lowest_that_fits(costs.copy(), request, fits)


class LeastLoaded:
    """The fewest requests and tokens in flight for the weight; among equals the one that was picked longest ago."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: Floats = np.zeros(
            0
        )  # turn, by the tracker's rows; who gets another's row may inherit his

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of the least laden that fits."""
        candidates, reported = request.candidates, request.reported
        ours = np.fromiter(
            [
                endpoint.kept.requests * TOKENS_PER_REQUEST + endpoint.tokens
                for endpoint in candidates.endpoint
            ],
            float,
            len(candidates),
        )
        tokens = ours / candidates.ranks + reported.tokens
        work = 1.0 + request.loads.requests + reported.requests + tokens / TOKENS_PER_REQUEST
        costs = per_weight(work, request.weights)
        last = self._turns(candidates.rows)
        for _ in range(min(_LOOKS, len(costs))):
            equal = np.flatnonzero(costs == costs.min())
            index = int(equal[last[equal].argmin()])
            if fits(candidates.endpoint[index]):
                self._turn += 1
                self._last[candidates.rows[index]] = self._turn
                return index
            costs[index] = inf
        return None

    def _turns(self, rows: Rows) -> Floats:
        """Return when each of these rows was picked last."""
        if (size := int(rows.max()) + 1) > len(self._last):
            self._last = np.concatenate([self._last, np.zeros(size - len(self._last))])
        return self._last[rows]


class PowerOfTwo:
    """Of two different ones that are drawn, the one with fewer requests in flight; the first, if they have the same."""

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of the better one of two that are drawn, both of which fit."""
        endpoints, size, draw = request.candidates.endpoint, len(request.candidates), request.draw
        if size == 1:
            return 0 if fits(endpoints[0]) else None
        for _ in range(_PAIRS):
            number, draw = divmod(draw * size * (size - 1), 1.0)
            one, other = divmod(int(number), size - 1)
            other += other >= one
            if fits(endpoints[one]) and fits(endpoints[other]):
                return min(
                    one, other, key=lambda index: (request.in_flight(index) + 1) / request.weight(index)
                )
        return None


class RoundRobin:
    """One after another. Each pick puts a candidate off by the inverse of its weight; the one that is due first is next."""

    def __init__(self) -> None:
        self._now = 0.0
        self._due: dict[WorkerRank, float] = {}

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of the one that is due first and fits."""
        holders, now = request.candidates.holders, self._now
        get = self._due.get
        dues = [get(holder, now) for holder in holders]
        turns = np.where(request.weights > 0, np.maximum(dues, now), inf)  # who was away has missed its turns
        for _ in range(min(_LOOKS, len(turns))):
            index = int(turns.argmin())
            if fits(request.candidates.endpoint[index]):
                self._now = max(dues[index], now)
                self._due[holders[index]] = self._now + 1 / request.weight(index)
                return index
            turns[index] = inf
        return None

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._due = {holder: due for holder, due in self._due.items() if holder[:2] in keys}


class Drawn:
    """Anybody, by lot."""

    def pick(self, request: ScoringRequest, fits: Fits) -> int | None:
        """Return the index of one that is drawn in proportion to the weights, and fits."""
        sums, draw = np.cumsum(request.weights), request.draw
        if sums[-1] <= 0.0:  # all came into service in this moment
            sums = np.arange(1.0, len(sums) + 1)
        for _ in range(_DRAWS):
            at = draw * sums[-1]
            index = min(int(np.searchsorted(sums, at, side="right")), len(sums) - 1)
            if fits(request.candidates.endpoint[index]):
                return index
            before = sums[index - 1] if index else 0.0
            draw = (at - before) / max(sums[index] - before, WEIGHT_MIN) % 1.0
        return None


def lowest_of_few(costs: list[float], request: ScoringRequest, fits: Fits) -> int | None:
    """Return the index of the lowest cost whose endpoint fits, of a few; None: it is none of the first few."""
    draw = request.draw
    for _ in range(min(_LOOKS, len(costs))):
        lowest = min(costs)
        if costs.count(lowest) == 1:
            index = costs.index(lowest)
        else:
            ties = [index for index, cost in enumerate(costs) if cost == lowest]
            number, draw = divmod(draw * len(ties), 1.0)
            index = ties[int(number)]
        if fits(request.candidates.endpoint[index]):
            return index
        costs[index] = inf
    return None


def _lowest_that_fits(costs: Floats, request: ScoringRequest, fits: Fits) -> int | None:
    """Return what `lowest_of_few` does, of many. A draw among equals goes on with the digits that are left of it."""
    draw = request.draw
    for _ in range(_LOOKS):
        ties = np.flatnonzero(costs == costs.min())
        number, draw = divmod(draw * len(ties), 1.0)
        index = int(ties[int(number)])
        if fits(request.candidates.endpoint[index]):
            return index
        costs[index] = np.inf
    return None
