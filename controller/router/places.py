"""Where may a request go, and what does it cost in each place? A place is a DP rank of a worker.

What is asked of the same seats again and again (who their holders are, in which rows their loads lie) is kept from one
request to the next; what others have there, as workers report it, for a moment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from controller.router.kv_matches import Depths
from controller.router.pick import WEIGHT_MIN
from controller.router.score import Overlaps, Pricing, Prompt, Scores, score
from controller.router.slots import Floats, Loads, Rows, SlotTracker, Standing
from controller.router.table import Holder, Lineage, Seat
from events.wire import Load

Others = Callable[[str], Load | None]
"""What requests that the tracker knows nothing of load a worker with; None: nothing is known."""

ByRank = Callable[[str], Sequence[Load]]
"""The same of each DP rank of a worker; nothing where it does not say so: then all have an equal part of it."""

REPORTS_S = 0.02  # what workers report of others is as good as new for so long: they do it every 100 ms
WEIGHTS_S = 0.02  # and the fleet's weights: whether the chosen worker may be used, its filter asks then
KEPT_MAX = 64
FEW = 16  # places whose costs are reckoned one by one
SMALL = 16  # holders of a group whose places are looked up each time


@dataclass(slots=True)
class Reported:
    """What others have in each place, tokens, and the weight of each, as it was gathered last."""

    at: float = float("-inf")
    requests: Floats = field(default_factory=lambda: np.zeros(0))
    tokens: Floats = field(default_factory=lambda: np.zeros(0))
    weighed_at: float = float("-inf")
    weights: Floats = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True, slots=True)
class Places:
    """Every rank of some seats, in their order."""

    seats: tuple[Seat, ...]  # each once
    seat: Sequence[Seat]  # of each place
    holders: Sequence[Holder]
    rows: Rows  # of the slot tracker
    standing: Sequence[Standing]  # what there is to do in each, as the slot tracker keeps it
    ranks: Floats  # of each place's worker
    caching: Floats  # 1: it has a prefix cache, and says what is in it
    at: Mapping[Holder, int]
    layout: int
    reported: "Reported"
    few: Sequence[tuple[Seat, Holder, Standing]]  # the same of each place, where there are only a few
    groups: dict[int, tuple[tuple[Holder, ...], Rows]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.holders)

    def column(self, found: Mapping[Holder, int]) -> Floats:
        """Return how much each place has, 0 where nothing is said of it."""
        values = np.zeros(len(self))
        if isinstance(found, Depths):
            for group, depth in found.groups:
                values[self._of(group)] = depth
            return values
        for holder, count in found.items():
            if (place := self.at.get(holder)) is not None:
                values[place] = count
        return values

    def _of(self, group: tuple[Holder, ...]) -> Rows | list[int]:
        """Return the places of a group. Those of a large one are kept: the index gives the same for many prompts."""
        if len(group) <= SMALL:
            return [self.at[holder] for holder in group if holder in self.at]
        kept = self.groups.get(id(group))
        if kept is None or kept[0] is not group:
            if len(self.groups) >= KEPT_MAX:
                self.groups.clear()
            of = np.array([self.at[holder] for holder in group if holder in self.at], dtype=np.intp)
            kept = self.groups[id(group)] = group, of
        return kept[1]


class Question(
    msgspec.Struct, eq=False, dict=True
):  # each request makes one: a dataclass takes three times as long
    """One request, and those who may serve it, at one moment."""

    places: Places
    prompt: Prompt[Holder]
    pricing: Pricing
    slots: SlotTracker[Holder]
    others: Others | None
    by_rank: ByRank
    now: float
    draw: float

    @cached_property
    def scores(self) -> Scores:
        """What the request costs in each place.

        What is in use where prefixes are cached counts as cached there already: it will be by the time this prompt is read,
        and requests that begin alike stay together before any event says so.
        """
        places, prompt = self.places, self.prompt
        found, (shared, sharers) = prompt.matches, self.slots.shared(prompt.blocks, places.rows)
        cached = host = disk = places.column(found.device)
        if found.disk is not found.device:
            host, disk = places.column(found.host), places.column(found.disk)
        device = np.maximum(cached, shared * places.caching)
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
            others=self.reported.tokens / prompt.block_tokens,
            weights=self.weights,
        )

    @cached_property
    def loads(self) -> Loads:
        """What our tracker knows that there is to do in each place."""
        return self.slots.loads(self.places.rows, now=self.now)

    @cached_property
    def weights(self) -> Floats:
        """What the fleet thought of each place's worker a moment ago."""
        reported = self.places.reported
        if not 0.0 <= self.now - reported.weighed_at < WEIGHTS_S:
            seats = self.places.seat
            reported.weights = np.fromiter([seat.weight for seat in seats], float, len(seats))
            reported.weighed_at = self.now
        return reported.weights

    def weight(self, place: int) -> float:
        """Return what the fleet thinks of a place's worker now: above 0, or the filter would not leave it."""
        return max(self.places.seat[place].weight, WEIGHT_MIN)

    @property
    def reported(self) -> Reported:
        """What others had in each place a moment ago."""
        reported = self.places.reported
        if self.others is None:
            return Reported(requests=np.zeros(len(self.places)), tokens=np.zeros(len(self.places)))
        if not 0.0 <= self.now - reported.at < REPORTS_S:
            found = np.array([self.others_at(place) for place in range(len(self.places))])
            reported.requests, reported.tokens = found.T
            reported.at = self.now
        return reported

    def in_flight(self, place: int) -> float:
        """Return how many requests are in flight in a place. Those that were only let in for its worker so far are shared
        among its ranks."""
        seat, holder = self.places.seat[place], self.places.holders[place]
        ours = self.slots.work(holder, now=self.now).requests
        return ours + seat.promised / seat.ranks + self.others_at(place)[0]

    def others_at(self, place: int) -> tuple[float, float]:
        """Return how many requests and tokens others have in a place: as its worker says of it, or an equal part."""
        if self.others is None:
            return 0.0, 0.0
        seat = self.places.seat[place]
        if seat.ranks > 1 and len(said := self.by_rank(seat.worker)) == seat.ranks:
            load = said[self.places.holders[place].rank]
            return load.running + load.waiting, load.active_tokens
        whole = self.others(seat.worker)
        if whole is None:
            return 0.0, 0.0
        return (whole.running + whole.waiting) / seat.ranks, whole.active_tokens / seat.ranks


class KeptPlaces:
    """The places of seats that were asked for lately: of each model and lineage, and of each number of them."""

    def __init__(self, slots: SlotTracker[Holder]) -> None:
        self._slots = slots
        self._kept: dict[tuple[str, Lineage, int], Places] = {}
        self._last: tuple[Sequence[Seat], Places] | None = None  # of a tuple: nobody can have changed it

    def of(self, seats: Sequence[Seat]) -> Places:
        """Return the places of these seats, of which there is at least one."""
        last = self._last
        if last is not None and last[0] is seats and last[1].layout == self._slots.layout:
            return last[1]
        places = self._of(tuple(seats))
        if isinstance(seats, tuple):
            self._last = seats, places
        return places

    def _of(self, seats: tuple[Seat, ...]) -> Places:
        name = (seats[0].joined.model, seats[0].lineage, len(seats))
        kept = self._kept.get(name)
        if kept is not None and kept.layout == self._slots.layout and kept.seats == seats:
            return kept
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        each = [(seat, rank) for seat in seats for rank in range(seat.ranks)]
        holders = [Holder(seat.worker, seat.instance, rank) for seat, rank in each]
        rows, standing = self._slots.rows(holders), self._slots.standing(holders)
        ranks = np.array([seat.ranks for seat, _ in each], dtype=float)
        caching = np.array([seat.joined.kv_events for seat, _ in each], dtype=float)
        at = {holder: place for place, holder in enumerate(holders)}
        of = [seat for seat, _ in each]
        few = list(zip(of, holders, standing, strict=True)) if len(of) <= FEW else []
        places = self._kept[name] = Places(
            seats, of, holders, rows, standing, ranks, caching, at, self._slots.layout, Reported(), few
        )
        return places

    def clear(self) -> None:
        """Keep nothing: seats are gone."""
        self._kept.clear()
        self._last = None
