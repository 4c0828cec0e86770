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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from controller.router.few import score_few
from controller.router.pick import Filter
from controller.router.places import ByRank, KeptPlaces, Others, Question
from controller.router.score import USUAL, Pricing, Prompt, Terms
from controller.router.slots import SlotTracker
from controller.router.strategies import (
    Drawn,
    KvAware,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    Strategy,
    lowest_of_few,
)
from controller.router.table import Holder, Key, Seat
from events.wire import Load

_MIXED = 1_000_000_007  # times a random number, less its whole part: another one


class Mode(StrEnum):
    """How a worker is chosen."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"

    __hash__ = str.__hash__  # an enum's own is a function in Python, and looked up for each request


_KV = Mode.KV


def _anybody(seat: Seat) -> bool:
    return True


def _unsaid(worker: str) -> Sequence[Load]:
    return ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One place that might have been chosen, and what the request costs there."""

    holder: Holder
    terms: Terms
    chosen: bool


class Choice(msgspec.Struct, eq=False):
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
        prompt = self.question.prompt
        left = prompt.tokens - int(self.overlap_blocks * prompt.block_tokens)
        return left if left > 0 else 0

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
        kv = mode is _KV
        one_by_one = not kv or (pricing.temperature <= 0.0 and pricing.credit_decay == 0.0)
        if one_by_one and isinstance(among, Filter) and among.all:
            places = self._places.of(among.all)
            question = Question(places, prompt, pricing, self._slots, others, by_rank, now, draw)
            if kv and (few := score_few(question)) is not None:
                costs, device = few
                if (place := lowest_of_few(costs, question, among.fits)) is not None:
                    seat, holder, _ = places.few[place]
                    return Choice(seat, holder, mode, question, float(device[place]), place)
            elif (place := self._strategies[mode].pick(question, among.fits)) is not None:
                return _chosen(question, mode, place)
            draw = draw * _MIXED % 1.0  # those that were drawn with the first digits of it do not fit
        seats = among.left() if isinstance(among, Filter) else among
        places = self._places.of(seats)
        question = Question(places, prompt, pricing, self._slots, others, by_rank, now, draw)
        place = self._strategies[mode].pick(question, _anybody)
        assert place is not None, "everybody fits"
        return _chosen(question, mode, place)

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of seats that are gone; keep `keys`."""
        self._turns.forget(keys)
        self._places.clear()


def _chosen(question: Question, mode: Mode, place: int) -> Choice:
    places, found, pricing = question.places, question.prompt.matches, question.pricing
    holder = places.holders[place]
    if mode is _KV:
        overlaps = question.scores.overlaps
        device, host, disk = (float(tier[place]) for tier in (overlaps.device, overlaps.host, overlaps.disk))
    else:
        device, warm, cold = (tier.get(holder, 0) for tier in (found.device, found.host, found.disk))
        host, disk = warm - device, cold - warm
    overlap = device + pricing.host_weight * host + pricing.disk_weight * disk
    return Choice(places.seat[place], holder, mode, question, overlap, place)
