"""Where may a request go, and what does it cost there? A candidate is a DP rank of a worker.

What is asked of the same endpoints again and again (who their holders are, in which rows their loads lie) is kept from one
request to the next, which saves half of the 25 µs that a choice of eight takes otherwise, and 12 ms among a thousand; what
others have there, as workers report it, is kept for a moment. (`python -m benchmarks choice`)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from controller.router.endpoints import Endpoint, Lineage, WorkerRank
from controller.router.index.matches import Depths
from controller.router.load.active_sequences import ActiveSequences, Floats, Loads, RankLoad, Rows
from controller.router.selection.filter import WEIGHT_MIN
from controller.router.selection.score import Overlaps, Pricing, ScoredPrompt, Scores, score
from events.wire import Load

ExternalLoad = Callable[[str], Load | None]
"""What requests that the tracker knows nothing of load a worker with; None: nothing is known."""

ByRank = Callable[[str], Sequence[Load]]
"""The same of each DP rank of a worker; nothing where it does not say so: then all have an equal part of it."""

REPORTS_S = 0.02  # what workers report of others is as good as new for so long: they do it every 100 ms
WEIGHTS_S = 0.02  # and the fleet's weights: whether the chosen worker may be used, its filter asks then
KEPT_MAX = 64
FEW = 16  # candidates whose costs are reckoned one by one
SMALL = 16  # holders of a group that is looked up each time; to keep larger ones saves 250 of 400 µs among a thousand


@dataclass(slots=True)
class Reported:
    """What others have at each candidate, and what it weighs, as it was gathered last."""

    at: float = float("-inf")
    requests: Floats = field(default_factory=lambda: np.zeros(0))
    tokens: Floats = field(default_factory=lambda: np.zeros(0))
    weighed_at: float = float("-inf")
    weights: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every rank of some endpoints, in their order."""

    endpoints: tuple[Endpoint, ...]  # each once
    endpoint: Sequence[Endpoint]  # of each candidate
    holders: Sequence[WorkerRank]
    rows: Rows  # of the slot tracker
    rank_loads: Sequence[RankLoad]  # what there is to do in each, as the slot tracker keeps it
    ranks: Floats  # of each candidate's worker
    caching: Floats  # 1: it has a prefix cache, and says what is in it
    at: Mapping[WorkerRank, int]
    layout: int
    reported: "Reported"
    few: Sequence[
        tuple[Endpoint, WorkerRank, RankLoad]
    ]  # the same of each candidate, where there are only a few
    groups: dict[int, tuple[tuple[WorkerRank, ...], Rows]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.holders)

    def column(self, found: Mapping[WorkerRank, int]) -> Floats:
        """Return how much each candidate has, 0 where nothing is said of it."""
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
        """Return the candidates of a group. Those of a large one are kept: the index gives the same for many prompts."""
        if len(group) <= SMALL:
            return [self.at[holder] for holder in group if holder in self.at]
        kept = self.groups.get(id(group))
        if kept is None or kept[0] is not group:
            if len(self.groups) >= KEPT_MAX:
                self.groups.clear()
            of = np.array([self.at[holder] for holder in group if holder in self.at], dtype=np.intp)
            kept = self.groups[id(group)] = group, of
        return kept[1]


class ScoringRequest(
    msgspec.Struct, eq=False
):  # each request makes one: a dataclass takes three times as long
    """One request, and those who may serve it, at one moment."""

    candidates: Candidates
    prompt: ScoredPrompt
    pricing: Pricing
    slots: ActiveSequences
    external_load: ExternalLoad | None
    by_rank: ByRank
    now: float
    draw: float
    reckoned: Scores | None = None  # `scores`, from the first time on that they were asked for

    @property
    def scores(self) -> Scores:
        """What the request costs at each candidate: reckoned once, however much changes meanwhile."""
        if (scores := self.reckoned) is None:
            scores = self.reckoned = self._score()
        return scores

    def _score(self) -> Scores:
        """Return what the request costs at each candidate.

        What is in use where prefixes are cached counts as cached there already: it will be by the time this prompt is read,
        and requests that begin alike stay together before any event says so.
        """
        candidates, prompt = self.candidates, self.prompt
        found, (shared, sharers) = prompt.matches, self.slots.shared(prompt.blocks, candidates.rows)
        cached = host = disk = candidates.column(found.device)
        if found.disk is not found.device:
            host, disk = candidates.column(found.host), candidates.column(found.disk)
        device = np.maximum(cached, shared * candidates.caching)
        host = np.maximum(host, device)
        return score(
            self.pricing,
            tokens=prompt.tokens,
            blocks=len(prompt.blocks),
            block_tokens=prompt.block_tokens,
            loads=self.loads,
            overlaps=Overlaps(
                device,
                host - device,
                np.maximum(disk - host, 0.0),
                shared,
                np.where(shared >= cached, sharers, 0.0),
            ),
            external_blocks=self.reported.tokens / prompt.block_tokens,
            weights=self.weights,
        )

    @property
    def loads(self) -> Loads:
        """What our tracker knows that there is to do at each candidate."""
        return self.slots.loads(self.candidates.rows, now=self.now)

    @property
    def weights(self) -> Floats:
        """What the fleet thought of each candidate's worker a moment ago."""
        reported = self.candidates.reported
        if not 0.0 <= self.now - reported.weighed_at < WEIGHTS_S:
            endpoints = self.candidates.endpoint
            reported.weights = np.fromiter([endpoint.weight for endpoint in endpoints], float, len(endpoints))
            reported.weighed_at = self.now
        return reported.weights

    def weight(self, index: int) -> float:
        """Return what the fleet thinks of a candidate's worker now: above 0, or the filter would not leave it."""
        return max(self.candidates.endpoint[index].weight, WEIGHT_MIN)

    @property
    def reported(self) -> Reported:
        """What others had at each candidate a moment ago."""
        reported = self.candidates.reported
        if self.external_load is None:
            return Reported(requests=np.zeros(len(self.candidates)), tokens=np.zeros(len(self.candidates)))
        if not 0.0 <= self.now - reported.at < REPORTS_S:
            found = np.array([self.external_at(index) for index in range(len(self.candidates))])
            reported.requests, reported.tokens = found.T
            reported.at = self.now
        return reported

    def in_flight(self, index: int) -> float:
        """Return how many requests are in flight at a candidate. Those that were only let in for its worker so far are shared
        among its ranks."""
        endpoint, holder = self.candidates.endpoint[index], self.candidates.holders[index]
        ours = self.slots.work(holder, now=self.now).requests
        return ours + endpoint.kept.requests / endpoint.ranks + self.external_at(index)[0]

    def external_at(self, index: int) -> tuple[float, float]:
        """Return how many requests and tokens others have at a candidate: as its worker says of it, or an equal part."""
        if self.external_load is None:
            return 0.0, 0.0
        endpoint = self.candidates.endpoint[index]
        if endpoint.ranks > 1 and len(loads := self.by_rank(endpoint.worker)) == endpoint.ranks:
            load = loads[self.candidates.holders[index].rank]
            return load.running + load.waiting, load.active_tokens
        whole = self.external_load(endpoint.worker)
        if whole is None:
            return 0.0, 0.0
        return (whole.running + whole.waiting) / endpoint.ranks, whole.active_tokens / endpoint.ranks


class KeptCandidates:
    """The candidates of endpoints that were asked for recently: of each model and lineage, and of each number of them."""

    def __init__(self, slots: ActiveSequences) -> None:
        self._slots = slots
        self._kept: dict[tuple[str, Lineage, int], Candidates] = {}

    def of(self, endpoints: Sequence[Endpoint]) -> Candidates:
        """Return the candidates of these endpoints, of which there is at least one."""
        endpoints = tuple(endpoints)
        name = (endpoints[0].model, endpoints[0].lineage, len(endpoints))
        kept = self._kept.get(name)
        if kept is not None and kept.layout == self._slots.layout and kept.endpoints == endpoints:
            return kept
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        each = [(endpoint, rank) for endpoint in endpoints for rank in range(endpoint.ranks)]
        holders = [WorkerRank(endpoint.worker, endpoint.instance, rank) for endpoint, rank in each]
        rows, rank_loads = self._slots.rows(holders), self._slots.rank_loads(holders)
        ranks = np.array([endpoint.ranks for endpoint, _ in each], dtype=float)
        caching = np.array([endpoint.joined.kv_events for endpoint, _ in each], dtype=float)
        at = {holder: index for index, holder in enumerate(holders)}
        of = [endpoint for endpoint, _ in each]
        few = list(zip(of, holders, rank_loads, strict=True)) if len(of) <= FEW else []
        candidates = self._kept[name] = Candidates(
            endpoints, of, holders, rows, rank_loads, ranks, caching, at, self._slots.layout, Reported(), few
        )
        return candidates

    def clear(self) -> None:
        """Keep nothing: endpoints are gone."""
        self._kept.clear()
