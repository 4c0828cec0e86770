"""Who of those that may serve a request gets it? Five ways to choose.

    kv             the lowest cost: what is cached there against what there is to do (`score`); the default
    least-loaded   the fewest requests and tokens in flight for its weight; among equals whose turn it is
    power-of-two   of two that are drawn, the one with fewer requests in flight for its weight
    round-robin    one after another, in proportion to the weights
    random         drawn, in proportion to the weights

Every DP rank of a worker is a place of its own. Nothing in here draws lots or reads a clock: the caller gives a random
number and the time, so that the same history makes the same choices.

    filter = Filter(seats, rules, tried, capped)                                         # of pick, with its errors
    choice = chooser.choose(filter, prompt, mode=…, pricing=…, now=…, draw=…, others=…)
    slots.add(request, choice.holder, prompt.blocks, prefill_tokens=choice.prefill_tokens, now=…)   # before it leaves
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Protocol

import numpy as np

from controller.router.few import score_few
from controller.router.pick import TOKENS_PER_REQUEST, Filter
from controller.router.places import WEIGHT_MIN, ByRank, KeptPlaces, Others, Question
from controller.router.score import USUAL, Pricing, Prompt, Terms, per_weight, pick_lowest
from controller.router.slots import Floats, Rows, SlotTracker
from controller.router.table import Holder, Key, Seat
from events.wire import Load

_LOOKS = 8  # at the best ones, before all are filtered
_PAIRS = 2  # that are drawn before; a random number has digits for no more
_DRAWS = 4
_MIXED = 1_000_000_007  # times a random number, less its whole part: another one


class Mode(StrEnum):
    """How a worker is chosen."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"


def _anybody(seat: Seat) -> bool:
    return True


def _unsaid(worker: str) -> Sequence[Load]:
    return ()


Fits = Callable[[Seat], bool]
"""Whether the filter leaves a seat. Only the best few are asked about: to ask about all takes longer than to choose."""


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place that might have been chosen, and what the request costs there."""

    holder: Holder
    terms: Terms
    chosen: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request goes, and what is known of it there. Keep none: it holds the costs of all candidates."""

    seat: Seat
    holder: Holder
    mode: Mode
    question: Question
    overlap_blocks: float  # of its prompt, cached there; those on slower tiers count in part
    place: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        prompt = self.question.prompt
        return min(int(self.overlap_blocks * prompt.block_tokens), prompt.tokens)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that must be read: for `SlotTracker.add`. 0 where prompts are not tracked."""
        if not self.question.pricing.track_prefill:
            return 0
        return self.question.prompt.tokens - self.cached_tokens

    def explain(self) -> list[Candidate]:
        """Return what the request costs in each place, the lowest first. To be asked before anything is added to the
        tracker, of a choice among seats: those that a `Filter` would not leave are in it too. In modes other than kv the
        costs are what kv would have gone by."""
        scores, holders = self.question.scores, self.question.places.holders
        order = np.argsort(scores.costs, kind="stable").tolist()
        return [Candidate(holders[n], scores.terms(n), n == self.place) for n in order]


class Chooser:
    """Chooses among candidates, for all models of a frontend."""

    def __init__(self, slots: SlotTracker[Holder]) -> None:
        self._slots = slots
        self._places = KeptPlaces(slots)
        self._turns = RoundRobin()
        self._strategies: Mapping[Mode, Strategy] = {
            Mode.KV: KvAware(),
            Mode.LEAST_LOADED: LeastLoaded(),
            Mode.POWER_OF_TWO: PowerOfTwo(),
            Mode.ROUND_ROBIN: self._turns,
            Mode.RANDOM: Drawn(),
        }

    def choose(
        self,
        among: Filter | Sequence[Seat],
        prompt: Prompt[Holder],
        *,
        now: float,
        draw: float,
        mode: Mode = Mode.KV,
        pricing: Pricing = USUAL,
        others: Others | None = None,
        by_rank: ByRank = _unsaid,
    ) -> Choice:
        """Return where a request goes: to one of the seats that a filter leaves, or of these, at least one.

        `now` is the slot tracker's time, `draw` a random number from 0 to below 1. `others`, and what is said of them
        `by_rank`, are left out where nobody else sends to these workers, or the other frontends tell our tracker. Raise
        ValueError for an empty prompt, and what the filter raises.
        """
        strategy = self._strategies[mode]
        one_by_one = mode is not Mode.KV or (pricing.temperature <= 0.0 and pricing.credit_decay == 0.0)
        if one_by_one and isinstance(among, Filter) and among.all:
            question = self._question(among.all, prompt, pricing, others, by_rank, now, draw)
            if mode is Mode.KV and (few := score_few(question)) is not None:
                if (place := _first_that_fits(few.costs, question, among.fits)) is not None:
                    places = question.places
                    return Choice(
                        places.seat[place], places.holders[place], mode, question, few.device[place], place
                    )
            elif (place := strategy.pick(question, among.fits)) is not None:
                return _chosen(question, mode, place)
            draw = draw * _MIXED % 1.0  # those that were drawn with the first digits of it do not fit
        seats = among.left() if isinstance(among, Filter) else among
        question = self._question(seats, prompt, pricing, others, by_rank, now, draw)
        place = strategy.pick(question, _anybody)
        assert place is not None, "everybody fits"
        return _chosen(question, mode, place)

    def _question(
        self,
        seats: Sequence[Seat],
        prompt: Prompt[Holder],
        pricing: Pricing,
        others: Others | None,
        by_rank: ByRank,
        now: float,
        draw: float,
    ) -> Question:
        return Question(self._places.of(seats), prompt, pricing, self._slots, others, by_rank, now, draw)

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._turns.forget(keys)
        self._places.clear()


def _first_that_fits(costs: list[float], question: Question, fits: Fits) -> int | None:
    """Return what `_lowest_that_fits` does, of a few places."""
    draw = question.draw
    for _ in range(min(_LOOKS, len(costs))):
        lowest = min(costs)
        ties = [place for place, cost in enumerate(costs) if cost == lowest]
        number, draw = divmod(draw * len(ties), 1.0)
        place = ties[int(number)]
        if fits(question.places.seat[place]):
            return place
        costs[place] = inf
    return None


def _lowest_that_fits(costs: Floats, question: Question, fits: Fits) -> int | None:
    """Return the place with the lowest cost that fits; None: it is none of the first few. A draw among equals goes on with
    the digits that are left of it."""
    draw = question.draw
    for _ in range(_LOOKS):
        ties = np.flatnonzero(costs == costs.min())
        number, draw = divmod(draw * len(ties), 1.0)
        place = int(ties[int(number)])
        if fits(question.places.seat[place]):
            return place
        costs[place] = np.inf
    return None


def _chosen(question: Question, mode: Mode, place: int) -> Choice:
    places, found, pricing = question.places, question.prompt.matches, question.pricing
    holder = places.holders[place]
    if mode is Mode.KV:
        overlaps = question.scores.overlaps
        device, host, disk = (float(tier[place]) for tier in (overlaps.device, overlaps.host, overlaps.disk))
    else:
        device, warm, cold = (tier.get(holder, 0) for tier in (found.device, found.host, found.disk))
        host, disk = warm - device, cold - warm
    overlap = device + pricing.host_weight * host + pricing.disk_weight * disk
    return Choice(places.seat[place], holder, mode, question, overlap, place)
