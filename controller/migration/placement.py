"""Which group takes which request of a group that failed or leaves?

    in order      priority (the lowest number first), then age
    transfer      the one group that takes all of them and is predicted to do so soonest; where none can take all, each
                  request goes where its own transfer is cheapest
    re-prefill    where the request would be computed first, behind what this plan has already put there: that
                  spreads them evenly
    failed        no group has room

Each request takes the cheaper of the two. Its blocks, and the place of its next token, are reserved before the next one is
looked at, so that no group is promised more than it has free.

What a reader would get wrong: nothing moves here. `place` says what to try; a transfer that fails is re-prefilled by who
carries the plan out, and a request that failed to be placed may be tried again when there is room.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from typing import Literal

from controller.migration.cost import KvShape, MigrationCost, MigrationTarget, MovingPolicy, Prices
from controller.migration.links import at_least_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A request that has to go on elsewhere. `cached` says how many of its first tokens each group has in its cache,
    `barred` where it must not go."""

    request_id: str
    priority: int  # the lower, the sooner
    arrived: datetime
    tokens: int  # computed so far
    cached: Mapping[str, int] = field(default_factory=dict)
    barred: Collection[str] = ()

    def __post_init__(self) -> None:
        at_least_zero(tokens=self.tokens, **{f"cached on {name}": n for name, n in self.cached.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one request goes on, and how. `target` is empty and `cost` is None where it failed."""

    request_id: str
    method: Literal["transfer", "reprefill", "failed"]
    target: str = ""
    blocks: int = 0  # reserved there
    cost: MigrationCost | None = None


@dataclass(slots=True)
class _GroupRoom:
    """One group and what the plan has left of it."""

    target: MigrationTarget
    prices: Prices
    free_blocks: int
    free_places: int
    queued_tokens: int
    blocks_taken: int = 0

    def blocks(self, request: Leaving) -> int:
        """Return what it needs: a place for its next token too, and its cached prefix, which it pins."""
        return request.tokens // self.prices.block_tokens + 1

    def missing(self, request: Leaving) -> int:
        """Return how many tokens of a request this group does not have."""
        if not request.cached:
            return request.tokens
        return self.prices.missing(request.tokens, request.cached.get(self.target.name, 0))

    def takes(self, request: Leaving) -> bool:
        """Say whether it has room for this request, which may go there."""
        return self.blocks(request) <= self.free_blocks and self.target.name not in request.barred


def place(
    policy: MovingPolicy, kv: KvShape | None, requests: Iterable[Leaving], targets: Sequence[MigrationTarget]
) -> tuple[Placement, ...]:
    """Return a placement for each of `requests`, in the order in which they are to move.

    `kv` is None where the source is dead or convicted: then everything is re-prefilled. Raise ValueError where two
    targets have one name, or lanes that are not one per shard.

    A thousand requests take about 0.02 s over 15 targets, 0.1 s over 128, 0.6 s over 1,000: a loop that serves streams
    gives it few targets, or has it done elsewhere.
    """
    if len({target.name for target in targets}) < len(targets):
        raise ValueError("two targets have the same name")
    rooms = [
        _GroupRoom(t, Prices.of(policy, kv, t), t.free_blocks, t.free_places, t.queued_tokens)
        for t in targets
    ]
    order = sorted(requests, key=lambda r: (r.priority, r.arrived, r.request_id))
    shippers = [room for room in rooms if room.prices.fixed_s < inf]
    single = _takes_all(order, shippers)
    if single is not None:
        shippers = [single, *(room for room in shippers if room is not single)]
    placements, transfers = [], 0
    for request in order:
        at_once = min(transfers, policy.transfers_at_once - 1) + 1
        placement = _place_one(request, rooms, shippers, single, at_once)
        transfers += placement.method == "transfer"
        placements.append(placement)
    return tuple(placements)


def _takes_all(order: Sequence[Leaving], shippers: Sequence[_GroupRoom]) -> _GroupRoom | None:
    """Return the group with room for every request that is worth sending somewhere, and soonest done with them."""
    sent = [request for request in order if any(_worth_sending(room, request) for room in shippers)]
    found, soonest = None, inf
    for room in shippers if sent else ():
        seconds = sum(room.prices.transfer_s(room.missing(request), 1) for request in sent)
        roomy = sum(room.blocks(request) for request in sent) <= room.free_blocks
        roomy = roomy and len(sent) <= room.free_places
        if roomy and seconds < soonest and all(_worth_sending(room, request) for request in sent):
            found, soonest = room, seconds
    return found


def _worth_sending(room: _GroupRoom, request: Leaving) -> bool:
    if room.target.name in request.barred:
        return False
    at_once = 1 + room.target.transfers
    return room.prices.recommended(room.missing(request), at_once, room.queued_tokens) == "transfer"


def _place_one(
    request: Leaving,
    rooms: Sequence[_GroupRoom],
    shippers: Sequence[_GroupRoom],
    single: _GroupRoom | None,
    at_once: int,
) -> Placement:
    """Place one request and reserve its blocks."""
    reprefill, reprefill_s = _soonest_computed(request, rooms)
    if reprefill is None:
        return Placement(request_id=request.request_id, method="failed")
    for candidates in ((single,) if single else (), shippers):
        sent, sent_s = _cheapest_to_send(request, candidates, at_once)
        if sent is not None and sent_s < reprefill_s:
            return _reserve(request, sent, "transfer", at_once)
    placement = _reserve(request, reprefill, "reprefill", at_once)
    reprefill.queued_tokens += reprefill.missing(request)
    return placement


def _soonest_computed(request: Leaving, rooms: Iterable[_GroupRoom]) -> tuple[_GroupRoom | None, float]:
    found, soonest = None, inf
    for room in rooms:
        if room.takes(request):
            seconds = room.prices.reprefill_s(room.missing(request), room.queued_tokens)
            if seconds < soonest:
                found, soonest = room, seconds
    return found, soonest


def _cheapest_to_send(
    request: Leaving, rooms: Iterable[_GroupRoom], at_once: int
) -> tuple[_GroupRoom | None, float]:
    """Return where a transfer is cheapest and how long it takes; among equals, where least has been sent. Who has a place
    in its batch comes first; but it is the target that says whether it has one: this knows what was reported last."""
    found, cheapest = None, (True, inf, 0)
    for room in rooms:
        if room.takes(request):
            moving_s = room.prices.moving_s(room.missing(request), at_once + room.target.transfers)
            price = (room.free_places <= 0, room.prices.wait_s + moving_s, room.blocks_taken)
            if price < cheapest and moving_s <= room.prices.transfer_s_max:
                found, cheapest = room, price
    return found, cheapest[1]


def _reserve(
    request: Leaving, room: _GroupRoom, method: Literal["transfer", "reprefill"], at_once: int
) -> Placement:
    blocks = room.blocks(request)
    cached = request.cached.get(room.target.name, 0)
    cost = room.prices.cost(request.tokens, cached, at_once + room.target.transfers, room.queued_tokens)
    room.free_blocks -= blocks
    room.free_places -= 1
    room.blocks_taken += blocks
    return Placement(
        request_id=request.request_id, method=method, target=room.target.name, blocks=blocks, cost=cost
    )
