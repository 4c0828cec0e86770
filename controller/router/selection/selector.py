"""Who of those that may serve a request gets it? Five ways to choose.

    kv             the lowest cost: what is cached there against what there is to do (`score`); the default
    least-loaded   the fewest requests and tokens in flight for its weight; among equals whose turn it is
    power-of-two   of two that are drawn, the one with fewer requests in flight for its weight
    round-robin    one after another, in proportion to the weights
    random         drawn, in proportion to the weights

Every DP rank of a worker is a candidate of its own. Nothing in here draws lots or reads a clock: the caller gives a random
number and the time, so that the same history makes the same choices.

    filter = Filter(endpoints, rules, tried, capped)                                         # of pick, with its errors
    choice = chooser.choose(filter, prompt, mode=…, pricing=…, now=…, draw=…, external_load=…)
    slots.add(request, choice.holder, prompt.blocks, prefill_tokens=choice.prefill_tokens, now=…)   # before it leaves
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from controller.router.endpoints import Endpoint, Key, WorkerRank
from controller.router.load.active_sequences import ActiveSequences
from controller.router.selection.candidates import ByRank, ExternalLoad, KeptCandidates, ScoringRequest
from controller.router.selection.filter import Filter
from controller.router.selection.score import USUAL, Pricing, ScoredPrompt, Terms
from controller.router.selection.score_small import score_few
from controller.router.selection.strategies import (
    Drawn,
    KvAware,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    Strategy,
    lowest_of_few,
)
from events.wire import Load

_MIXED = 1_000_000_007  # times a random number, less its whole part: another one


class Mode(StrEnum):
    """How a worker is chosen."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"


_KV = Mode.KV  # an attribute of an enum takes 0.3 µs to look up, of the 12 that a choice of eight takes


def _anybody(endpoint: Endpoint) -> bool:
    return True


def _unsaid(worker: str) -> Sequence[Load]:
    return ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rank that might have been chosen, and what the request costs there."""

    holder: WorkerRank
    terms: Terms
    chosen: bool


class Selection(msgspec.Struct, eq=False):
    """Where a request goes, and what is known of it there. Keep none: it holds the costs of all candidates."""

    endpoint: Endpoint
    holder: WorkerRank
    mode: Mode
    request: ScoringRequest
    overlap_blocks: float  # of its prompt, cached there; those on slower tiers count in part
    index: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that need not be computed."""
        prompt = self.request.prompt
        return min(int(self.overlap_blocks * prompt.block_tokens), prompt.tokens)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that must be read: for `ActiveSequences.add`. 0 where prompts are not tracked."""
        if not self.request.pricing.track_prefill:
            return 0
        prompt = self.request.prompt
        left = prompt.tokens - int(self.overlap_blocks * prompt.block_tokens)
        return left if left > 0 else 0

    def explain(self) -> list[Candidate]:
        """Return what the request costs at each candidate, the lowest first. To be asked before anything is added to the
        tracker, of a choice among endpoints: those that a `Filter` would not leave are in it too. In modes other than kv the
        costs are what kv would have gone by."""
        scores, holders = self.request.scores, self.request.candidates.holders
        order = np.argsort(scores.costs, kind="stable").tolist()
        return [Candidate(holders[n], scores.terms(n), n == self.index) for n in order]


class Chooser:
    """Chooses among candidates, for all models of a frontend."""

    def __init__(self, slots: ActiveSequences) -> None:
        self._slots = slots
        self._candidates = KeptCandidates(slots)
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
        among: Filter | Sequence[Endpoint],
        prompt: ScoredPrompt,
        *,
        now: float,
        draw: float,
        mode: Mode = Mode.KV,
        pricing: Pricing = USUAL,
        external_load: ExternalLoad | None = None,
        by_rank: ByRank = _unsaid,
    ) -> Selection:
        """Return where a request goes: to one of the endpoints that a filter leaves, or of these, at least one.

        `now` is the slot tracker's time, `draw` a random number from 0 to below 1. `external_load`, and what is known of it
        `by_rank`, are left out where nobody else sends to these workers, or the other frontends tell our tracker. Raise
        ValueError for an empty prompt, and what the filter raises.
        """
        kv = mode is _KV
        one_by_one = not kv or (pricing.temperature <= 0.0 and pricing.credit_decay == 0.0)
        if one_by_one and isinstance(among, Filter) and among.all:
            candidates = self._candidates.of(among.all)
            request = ScoringRequest(
                candidates, prompt, pricing, self._slots, external_load, by_rank, now, draw
            )
            if kv and (few := score_few(request)) is not None:
                costs, device = few
                if (index := lowest_of_few(costs, request, among.fits)) is not None:
                    endpoint, holder, _ = candidates.few[index]
                    return Selection(endpoint, holder, mode, request, float(device[index]), index)
            elif (index := self._strategies[mode].pick(request, among.fits)) is not None:
                return _chosen(request, mode, index)
            draw = draw * _MIXED % 1.0  # those that were drawn with the first digits of it do not fit
        endpoints = among.left() if isinstance(among, Filter) else among
        candidates = self._candidates.of(endpoints)
        request = ScoringRequest(candidates, prompt, pricing, self._slots, external_load, by_rank, now, draw)
        index = self._strategies[mode].pick(request, _anybody)
        assert index is not None, "everybody fits"
        return _chosen(request, mode, index)

    def forget(self, keys: Collection[Key]) -> None:
        """Drop the memory of endpoints that are gone; keep `keys`."""
        self._turns.forget(keys)
        self._candidates.clear()


def _chosen(request: ScoringRequest, mode: Mode, index: int) -> Selection:
    candidates, found, pricing = request.candidates, request.prompt.matches, request.pricing
    holder = candidates.holders[index]
    if mode is _KV:
        overlaps = request.scores.overlaps
        device, host, disk = (float(tier[index]) for tier in (overlaps.device, overlaps.host, overlaps.disk))
    else:
        device, warm, cold = (tier.get(holder, 0) for tier in (found.device, found.host, found.disk))
        host, disk = warm - device, cold - warm
    overlap = device + pricing.host_weight * host + pricing.disk_weight * disk
    return Selection(candidates.endpoint[index], holder, mode, request, overlap, index)
