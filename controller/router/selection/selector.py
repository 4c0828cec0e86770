"""Selects the worker for a request among those that may serve it: score and pick, in five modes.

    kv             the lowest cost, which weighs cached blocks against load (`score`); the default
    least-loaded   the fewest requests and tokens in flight per weight; among equals the one picked longest ago
    power-of-two   of two random candidates, the one with fewer requests in flight per weight
    round-robin    one after another, in proportion to the weights
    random         drawn, in proportion to the weights

A candidate is a DP rank of a worker. This module draws no random numbers and reads no clock. The caller supplies random
numbers and times, so that the same history leads to the same choices.

    among = Filter(endpoints, rules, tried, room)
    choice = chooser.choose(among, prompt, mode=…, pricing=…, now=…, draw=…, others=…)              # raises the filter's errors
    slots.add(request, choice.holder, prompt.blocks, prefill_tokens=choice.prefill_tokens, now=…)   # before it is sent

The filter is applied only to the best few candidates, because filtering all takes longer than choosing. If none of
these passes, the choice is repeated among all endpoints that pass.

Values that depend only on the endpoints (holders, rows of their loads) are cached between requests. This saves half
of the 25 µs of a choice among eight workers, and 12 ms among a thousand. The external load that workers report is
cached for REPORTS_S. The costs of a handful of candidates are computed one by one with the same formula, because a
dozen sums over columns take longer. A choice among eight takes 12 µs one by one, and 46 µs by columns (`python -m
benchmarks choice`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import msgspec
import numpy as np

from controller.router.endpoints import ConnectedWorkers, Endpoint, Key, Lineage, WorkerRank
from controller.router.index.index import Depths
from controller.router.load.active_sequences import ActiveSequences, Floats, RankLoad, Rows
from controller.router.selection.filter import TOKENS_PER_REQUEST, WEIGHT_MIN, Filter
from controller.router.selection.score import (
    USUAL,
    CandidateLoad,
    Pricing,
    ScoredPrompt,
    Terms,
    costs,
    per_weight,
    pick_lowest,
    score,
)

REPORTS_S = 0.02  # seconds for which reported external load is cached; workers report every 100 ms
# seconds for which the fleet's weights are cached; the filter checks the chosen worker's current weight
WEIGHTS_S = 0.02
KEPT_MAX = 64  # largest number of cached sets of candidates, and of cached groups
FEW = 16  # largest number of candidates for which costs are computed one by one
# largest group of holders that is not cached; caching larger ones saves 250 of 400 µs among a thousand
SMALL = 16
LOOKS = 8  # number of best candidates that are checked before all are filtered
PAIRS = 2  # pairs drawn before all are filtered, because a random number has digits for no more
DRAWS = 4
_MIXED = 1_000_000_007  # multiplier that derives another random number in 0…1 from a random number


class Mode(StrEnum):
    """The mode in which a worker is chosen."""

    KV = "kv"
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"


_KV = Mode.KV  # looking up an enum attribute takes 0.3 µs of the 12 µs of a choice of eight


@dataclass(slots=True)
class Candidates:
    """The DP ranks of some endpoints as candidates of a choice, in the order of the endpoints, with cached values."""

    endpoints: tuple[Endpoint, ...]  # each endpoint once
    endpoint: Sequence[Endpoint]  # the endpoint of each candidate
    holders: Sequence[WorkerRank]
    loads: Sequence[RankLoad]  # live load of each candidate, from the slot tracker
    rows: Rows  # row of each candidate in the slot tracker
    layout: int  # version of the slot tracker's rows
    at: Mapping[WorkerRank, int]  # index of each holder among the candidates
    ranks: Floats  # number of ranks of each candidate's worker
    caching: Floats  # 1 for a candidate that has a prefix cache and reports its content, otherwise 0
    groups: dict[int, tuple[tuple[WorkerRank, ...], Rows]] = field(default_factory=dict)
    reported_at: float = -inf
    external_requests: Floats = field(default_factory=lambda: np.zeros(0))
    external_tokens: Floats = field(default_factory=lambda: np.zeros(0))
    weighed_at: float = -inf
    weights: Floats = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.holders)

    @classmethod
    def of(cls, endpoints: tuple[Endpoint, ...], slots: ActiveSequences) -> "Candidates":
        """Return the DP ranks of these endpoints as candidates."""
        each = [(endpoint, holder) for endpoint in endpoints for holder in endpoint.holders]
        holders = [holder for _, holder in each]
        loads = slots.rank_loads(holders)
        return cls(
            endpoints,
            [endpoint for endpoint, _ in each],
            holders,
            loads,
            np.array([load.row for load in loads], dtype=np.intp),
            slots.layout,
            {holder: index for index, holder in enumerate(holders)},
            np.array([endpoint.ranks for endpoint, _ in each], dtype=float),
            np.array([endpoint.joined.kv_events for endpoint, _ in each], dtype=float),
        )

    def column(self, found: Mapping[WorkerRank, int]) -> Floats:
        """Return a column with the value of each candidate in `found`, and 0 for each candidate that is missing there."""
        values = np.zeros(len(self))
        if isinstance(found, Depths):
            for group, depth in found.groups:
                values[self._of(group)] = depth
            return values
        for holder, count in found.items():
            if (index := self.at.get(holder)) is not None:
                values[index] = count
        return values

    def _of(self, group: tuple[WorkerRank, ...]) -> Rows | list[int]:
        """Return the indexes of a group's holders among the candidates.

        The result for a large group is cached, because the index returns the same group for many prompts.
        """
        if len(group) <= SMALL:
            return [self.at[holder] for holder in group if holder in self.at]
        kept = self.groups.get(id(group))
        if kept is None or kept[0] is not group:
            if len(self.groups) >= KEPT_MAX:
                self.groups.clear()
            of = np.array([self.at[holder] for holder in group if holder in self.at], dtype=np.intp)
            kept = self.groups[id(group)] = group, of
        return kept[1]


# Each request creates one; a dataclass takes three times as long.
class ScoringRequest(msgspec.Struct, eq=False):
    """One request to score, with its candidates and the state at one moment."""

    candidates: Candidates
    prompt: ScoredPrompt
    pricing: Pricing
    slots: ActiveSequences
    # source of the external load, which is not in the slot tracker; None if no other load exists
    others: ConnectedWorkers | None
    now: float
    draw: float
    among: Filter | None = None  # the filter to apply; None if all candidates may be used
    device: Sequence[float] | None = None  # number of cached blocks of each candidate, set by `costs_of_few`
    columns: tuple[Terms, Floats] | None = None  # terms and costs of all candidates, once computed
    plane: ConnectedWorkers | None = None  # source of the shares of requests that workers report

    def fits(self, index: int) -> bool:
        """Return whether a candidate's endpoint passes the filter, if a filter is set."""
        return self.among is None or self.among.fits(self.candidates.endpoint[index])

    def costs_of_few(self) -> list[float] | None:
        """Return the cost of each candidate, computed one by one, or None if the costs must be computed as columns.

        Columns are required for more than FEW (16) candidates, for blocks on slower tiers, for tokens to prefill that shrink
        with time, and for a credit that decays.
        """
        candidates, prompt, pricing, slots = self.candidates, self.prompt, self.pricing, self.slots
        found = prompt.matches
        if len(candidates) > FEW or found.disk is not found.device or pricing.credit_decay:
            return None
        if prompt.tokens < 1 or slots.paced:
            return None
        external_load = None if self.others is None else self.others.external_load
        now, size = self.now, prompt.block_tokens
        loads: list[CandidateLoad] = []  # `list[...]()` takes as long as the cost of one candidate
        device: list[float] = []
        used = slots.pieces(prompt.blocks) if prompt.blocks else ()
        cached_at = (found.device.named() if type(found.device) is Depths else found.device).get
        ranks = zip(candidates.endpoint, candidates.holders, candidates.loads, strict=True)
        for endpoint, holder, load in ranks:
            has, shared, sharers, row = cached_at(holder, 0), 0, 0, load.row
            for depth, users in used:
                if row in users:
                    shared, sharers = depth, users[row]
            if shared < has:
                sharers = 0
            elif shared > has and endpoint.joined.kv_events:
                has = shared
            others, weight = 0.0, endpoint.weight
            if external_load is not None and (external := external_load(endpoint.worker)) is not None:
                others, weight = external.active_tokens / size, weight * external.weight
            elif external_load is None and self.plane is not None:
                weight *= self.share(endpoint)
            if endpoint.ranks > 1:
                others = self.external_at(len(device))[1] / size
            loads.append((
                load.reading_tokens, load.blocks, len(load.requests), load.recent_tokens_at(now), has, shared, sharers,
                others, weight,
            ))  # fmt: skip
            device.append(has)
        self.device = device
        return costs(pricing, prompt, loads)

    @property
    def terms(self) -> Terms:
        """The cost terms of all candidates."""
        return (self.columns or self._score())[0]

    @property
    def costs(self) -> Floats:
        """The cost of each candidate. Computed once, even if the load changes meanwhile."""
        return (self.columns or self._score())[1]

    def _score(self) -> tuple[Terms, Floats]:
        """Compute the terms and the cost of each candidate as columns.

        If a worker caches prefixes, its blocks in use count as cached, because these blocks will be cached when this prompt
        is prefilled. So requests with the same beginning go to the same worker, even before a KV event reports the blocks.
        """
        candidates, prompt = self.candidates, self.prompt
        found, (shared, sharers) = prompt.matches, self.slots.shared(prompt.blocks, candidates.rows)
        cached = host = disk = candidates.column(found.device)
        if found.disk is not found.device:
            host, disk = candidates.column(found.host), candidates.column(found.disk)
        device = np.maximum(cached, shared * candidates.caching)
        host = np.maximum(host, device)
        loads = self.slots.loads(candidates.rows, now=self.now)
        terms = Terms(
            active_prefill_tokens=loads.prefill_tokens,
            device=device,
            host=host - device,
            disk=np.maximum(disk - host, 0.0),
            sharers=np.where(shared >= cached, sharers, 0.0),
            active=loads.blocks,
            shared=shared,
            others=self.external()[1] / prompt.block_tokens,
            requests=loads.requests,
            lately=loads.recent_tokens,
            weight=self.weights,
        )
        self.columns = terms, score(self.pricing, prompt, terms)
        return self.columns

    @property
    def weights(self) -> Floats:
        """The weight of each candidate's worker. The values are at most WEIGHTS_S seconds old."""
        candidates = self.candidates
        if not 0.0 <= self.now - candidates.weighed_at < WEIGHTS_S:
            weights = [endpoint.weight * self.share(endpoint) for endpoint in candidates.endpoint]
            candidates.weights, candidates.weighed_at = np.fromiter(weights, float, len(weights)), self.now
        return candidates.weights

    def weight(self, index: int) -> float:
        """Return the weight of a candidate's worker now; at least WEIGHT_MIN."""
        endpoint = self.candidates.endpoint[index]
        return max(endpoint.weight * self.share(endpoint), WEIGHT_MIN)

    def share(self, endpoint: Endpoint) -> float:
        """Return the share of requests that a worker wants, compared with other workers: by default 1.

        The fleet's weight is the fleet's trust in a worker, while this share is the operator's setting.
        """
        source = self.others or self.plane
        load = None if source is None else source.external_load(endpoint.worker)
        return 1.0 if load is None else load.weight

    def external(self) -> tuple[Floats, Floats]:
        """Return each candidate's load that is not in the slot tracker, as requests and tokens.

        The values are at most REPORTS_S seconds old.
        """
        candidates = self.candidates
        if self.others is None:
            return np.zeros(len(candidates)), np.zeros(len(candidates))
        if not 0.0 <= self.now - candidates.reported_at < REPORTS_S:
            found = np.array([self.external_at(index) for index in range(len(candidates))])
            candidates.external_requests, candidates.external_tokens = found.T
            candidates.reported_at = self.now
        return candidates.external_requests, candidates.external_tokens

    def external_at(self, index: int) -> tuple[float, float]:
        """Return one candidate's load that is not in the slot tracker, as requests and tokens.

        It is what the worker reports for this rank, or else an equal share of what the worker reports in total.
        """
        if self.others is None:
            return 0.0, 0.0
        endpoint, ranks = self.candidates.endpoint[index], self.candidates.endpoint[index].ranks
        if ranks > 1 and len(loads := self.others.external_load_by_rank(endpoint.worker)) == ranks:
            whole, ranks = loads[self.candidates.holders[index].rank], 1
        elif (load := self.others.external_load(endpoint.worker)) is None:
            return 0.0, 0.0
        else:
            whole = load
        return (whole.running + whole.waiting) / ranks, whole.active_tokens / ranks

    def in_flight(self, index: int) -> float:
        """Return the number of requests in flight at a candidate, external ones included.

        The number includes the candidate's share of the requests that are admitted for its worker but not sent yet.
        """
        endpoint, load = self.candidates.endpoint[index], self.candidates.loads[index]
        return len(load.requests) + endpoint.kept.requests / endpoint.ranks + self.external_at(index)[0]


class Selection(msgspec.Struct, eq=False):
    """The chosen candidate, and the number of the prompt's blocks cached there.

    Do not store this object, because it holds the costs of all candidates.
    """

    endpoint: Endpoint
    holder: WorkerRank
    mode: Mode
    request: ScoringRequest
    overlap_blocks: float  # number of prompt blocks cached there; a block on a slower tier counts in part
    index: int

    @property
    def prefill_tokens(self) -> int:
        """Number of prompt tokens to prefill, for `ActiveSequences.add`. 0 if `Pricing.track_prefill` is off."""
        prompt = self.request.prompt
        left = prompt.tokens - int(self.overlap_blocks * prompt.block_tokens)
        return left if left > 0 and self.request.pricing.track_prefill else 0

    def explain(self) -> list[tuple[WorkerRank, Terms]]:
        """Return each candidate with its cost terms, lowest cost first.

        Call this before the request is added to the slot tracker, because the added request changes the costs. The result
        includes endpoints that a `Filter` would reject. In modes other than kv, the costs are those that kv would use.
        """
        terms, holders = self.request.terms, self.request.candidates.holders
        order = np.argsort(self.request.costs, kind="stable").tolist()
        return [(holders[n], terms.at(n)) for n in order]


class Chooser:
    """Chooses a candidate for each request, for all models of a frontend. Keeps the state of the modes that rotate."""

    def __init__(self, slots: ActiveSequences, plane: ConnectedWorkers | None = None) -> None:
        """Choose by the load in `slots`. `plane` has the shares of requests that workers report; None: they report none."""
        self._slots = slots
        self._plane = plane
        # candidates of recent requests, by model, lineage and number of endpoints
        self._kept: dict[tuple[str, Lineage, int], Candidates] = {}
        self._turn = 0  # number of picks of the mode least-loaded
        # last pick by the tracker's rows; a new holder of a row may inherit the value
        self._last: Floats = np.zeros(0)
        self._due_now = 0.0  # virtual time of round-robin
        self._due: dict[WorkerRank, float] = {}  # virtual time at which each holder is next in round-robin

    def choose(
        self,
        among: Filter | Sequence[Endpoint],
        prompt: ScoredPrompt,
        *,
        now: float,
        draw: float,
        mode: Mode = _KV,
        pricing: Pricing = USUAL,
        others: ConnectedWorkers | None = None,
    ) -> Selection:
        """Choose a candidate for a request: one that passes the filter, or one of the given endpoints.

        Args:
            among: a filter, or at least one endpoint; all given endpoints may be used.
            now: the present time, by the clock of the slot tracker (`ActiveSequences`).
            draw: a random number, at least 0 and below 1.
            others: source of the external load; None if no other frontend sends to these workers, or if the other frontends
                report their requests to this tracker.

        Raise ValueError for an empty prompt, and the errors of the filter if no endpoint passes.
        """
        endpoints: Sequence[Endpoint]
        if isinstance(among, Filter):
            one_by_one = mode is not _KV or (pricing.temperature <= 0.0 and pricing.credit_decay == 0.0)
            if one_by_one and among.all:
                candidates = self.candidates(among.all)
                request = ScoringRequest(candidates, prompt, pricing, self._slots, others, now, draw, among)
                request.plane = self._plane
                if (index := self._pick(request, mode)) is not None:
                    return _chosen(request, mode, index)
                draw = draw * _MIXED % 1.0  # the first digits have drawn candidates that do not fit
            endpoints = among.left()
        else:
            endpoints = among
        request = ScoringRequest(self.candidates(endpoints), prompt, pricing, self._slots, others, now, draw)
        request.plane = self._plane
        index = self._pick(request, mode)
        assert index is not None, "all of them fit"
        return _chosen(request, mode, index)

    def candidates(self, endpoints: Sequence[Endpoint]) -> Candidates:
        """Return the candidates of these endpoints (at least one), from the cache if the endpoints are the same."""
        endpoints = tuple(endpoints)
        name = (endpoints[0].model, endpoints[0].lineage, len(endpoints))
        kept = self._kept.get(name)
        if kept is not None and kept.layout == self._slots.layout and kept.endpoints == endpoints:
            return kept
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        kept = self._kept[name] = Candidates.of(endpoints, self._slots)
        return kept

    def forget(self, keys: Collection[Key]) -> None:
        """Forget the endpoints that no longer exist. `keys` names those that exist."""
        self._due = {holder: due for holder, due in self._due.items() if holder[:2] in keys}
        self._kept.clear()

    # --- the modes: each returns the index of the picked candidate, or None if its first few choices do not fit

    def _pick(self, request: ScoringRequest, mode: Mode) -> int | None:
        if mode is _KV:
            pricing = request.pricing
            if pricing.temperature > 0.0:  # a candidate of higher cost may be picked; all candidates fit
                return pick_lowest(request.costs, pricing.temperature, request.draw)
            few = request.costs_of_few() if request.among is not None else None
            return _lowest(request.costs.copy() if few is None else few, request)
        if mode is Mode.LEAST_LOADED:
            return self._least_loaded(request)
        if mode is Mode.POWER_OF_TWO:
            return _less_loaded_of_two(request)
        return self._next_in_turn(request) if mode is Mode.ROUND_ROBIN else _drawn(request)

    def _least_loaded(self, request: ScoringRequest) -> int | None:
        candidates, (requests, tokens) = request.candidates, request.external()
        rows, loads = candidates.rows, self._slots.loads(candidates.rows, now=request.now)
        ours = [one.kept.requests * TOKENS_PER_REQUEST + one.tokens for one in candidates.endpoint]
        tokens = np.fromiter(ours, float, len(ours)) / candidates.ranks + tokens
        work = 1.0 + loads.requests + requests + tokens / TOKENS_PER_REQUEST
        costs = per_weight(work, request.weights)
        if (size := int(rows.max()) + 1) > len(self._last):
            self._last = np.concatenate([self._last, np.zeros(size - len(self._last))])
        last = self._last[rows]
        for _ in range(min(LOOKS, len(costs))):
            equal = np.flatnonzero(costs == costs.min())
            index = int(equal[last[equal].argmin()])
            if request.fits(index):
                self._turn += 1
                self._last[rows[index]] = self._turn
                return index
            costs[index] = inf
        return None

    def _next_in_turn(self, request: ScoringRequest) -> int | None:
        """Return the index of the first candidate in turn that fits; None if the first 8 candidates (LOOKS) do not fit.

        After a pick, the candidate's next turn comes 1 / weight later in virtual time.
        """
        holders, now, get = request.candidates.holders, self._due_now, self._due.get
        dues = [get(holder, now) for holder in holders]
        # a candidate that was unavailable does not catch up on its missed picks
        turns = np.where(request.weights > 0, np.maximum(dues, now), inf)
        for _ in range(min(LOOKS, len(turns))):
            index = int(turns.argmin())
            if request.fits(index):
                self._due_now = max(dues[index], now)
                self._due[holders[index]] = self._due_now + 1 / request.weight(index)
                return index
            turns[index] = inf
        return None


def _lowest(costs: Floats | list[float], request: ScoringRequest) -> int | None:
    """Return the index of the cheapest candidate that fits; None if the 8 cheapest candidates (LOOKS) do not fit.

    Candidates of equal cost are chosen at random, by `request.draw`.
    """
    draw = request.draw
    for _ in range(min(LOOKS, len(costs))):
        ties: Sequence[int] | Rows = ()
        if isinstance(costs, list):
            lowest = min(costs)
            index = costs.index(lowest)
            if costs.count(lowest) > 1:
                ties = [place for place, cost in enumerate(costs) if cost == lowest]
        else:
            ties = np.flatnonzero(costs == costs.min())
            index = int(ties[0])
        if len(ties) > 1:
            number, draw = divmod(draw * len(ties), 1.0)
            index = int(ties[int(number)])
        if request.fits(index):
            return index
        costs[index] = inf
    return None


def _less_loaded_of_two(request: ScoringRequest) -> int | None:
    """Draw two candidates that both fit, and return the index of the less loaded one; None if 2 draws (PAIRS) fail.

    If the two have the same load, the first one wins.
    """
    size, draw = len(request.candidates), request.draw
    if size == 1:
        return 0 if request.fits(0) else None
    for _ in range(PAIRS):
        number, draw = divmod(draw * size * (size - 1), 1.0)
        one, other = divmod(int(number), size - 1)
        other += other >= one
        if request.fits(one) and request.fits(other):
            return min(one, other, key=lambda index: (request.in_flight(index) + 1) / request.weight(index))
    return None


def _drawn(request: ScoringRequest) -> int | None:
    """Return the index of a candidate that fits, drawn in proportion to the weights; None if a few draws find none."""
    sums, draw = np.cumsum(request.weights), request.draw
    if sums[-1] <= 0.0:  # the cached weights are all 0, because all workers came into service a moment ago
        sums = np.arange(1.0, len(sums) + 1)
    for _ in range(DRAWS):
        at = draw * sums[-1]
        index = min(int(np.searchsorted(sums, at, side="right")), len(sums) - 1)
        if request.fits(index):
            return index
        before = sums[index - 1] if index else 0.0
        draw = (at - before) / max(sums[index] - before, WEIGHT_MIN) % 1.0
    return None


def _chosen(request: ScoringRequest, mode: Mode, index: int) -> Selection:
    candidates, found, pricing = request.candidates, request.prompt.matches, request.pricing
    holder = candidates.holders[index]
    if request.device is not None:
        overlap = float(request.device[index])
    elif mode is _KV:
        tiers = request.terms
        device, host, disk = (float(tier[index]) for tier in (tiers.device, tiers.host, tiers.disk))
        overlap = device + pricing.host_weight * host + pricing.disk_weight * disk
    else:
        device, warm, cold = (tier.get(holder, 0) for tier in (found.device, found.host, found.disk))
        overlap = device + pricing.host_weight * (warm - device) + pricing.disk_weight * (cold - warm)
    return Selection(candidates.endpoint[index], holder, mode, request, overlap, index)
