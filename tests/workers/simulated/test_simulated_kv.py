"""The simulated engine's KV blocks: pools, evictors, tiers and events, compared with plain models."""

import random
from itertools import chain, takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_kit import Listener

from events.kv import Cleared, Removed, Stored, Tier
from workers.engines.simulated.kv_cache import (
    CLASSES,
    EVICTORS,
    EvictorKind,
    KvManager,
    Lineage,
    Lru,
    MultiLru,
    SlowTiers,
    TierTraffic,
)

KINDS: tuple[EvictorKind, ...] = ("lru", "multi-lru", "lineage")


def drain(kv: KvManager) -> list[int]:
    """Evict everything; return the blocks in the order of their eviction."""
    gone = []
    while (block := kv.inactive.evict()) is not None:
        gone.append(block)
    return gone


# --- evictors


def test_the_block_idle_longest_is_evicted_first() -> None:
    lru = Lru()
    for block in (4, 3, 2, 1, 5, 1, 4, 2):
        lru.insert(block)
    assert [lru.evict() for _ in range(6)] == [3, 5, 1, 4, 2, None]


def test_blocks_used_more_often_are_evicted_later() -> None:
    multi = EVICTORS["multi-lru"]()
    for block in (1, 2, 3):
        multi.insert(block)
        for _ in range(CLASSES[0] - block):  # only the first reaches the next class
            multi.remove(block)
            multi.insert(block)
    assert [multi.evict() for _ in range(3)] == [2, 3, 1]
    multi.insert(1)  # counting starts again
    multi.insert(2)
    assert multi.evict() == 1


def test_no_block_is_evicted_before_its_children() -> None:
    lineage = EVICTORS["lineage"]()
    lineage.insert(1)
    lineage.insert(2, 1)
    lineage.insert(9)
    lineage.insert(3, 2)
    assert [lineage.evict() for _ in range(4)] == [9, 3, 2, 1]


class PlainEvictor:
    """A slow reference implementation of the evictors."""

    def __init__(self, kind: EvictorKind) -> None:
        self.kind = kind
        self.idle: dict[int, int | None] = {}  # in the order of their idleness, with their parents
        self.uses: dict[int, int] = {}

    def insert(self, block: int, parent: int | None) -> None:
        self.idle.pop(block, None)
        self.idle[block] = parent
        self.uses.setdefault(block, 1)

    def remove(self, block: int) -> bool:
        if block not in self.idle:
            return False
        del self.idle[block]
        self.uses[block] += 1
        return True

    def evict(self) -> int | None:
        order = list(self.idle)
        if self.kind == "multi-lru":
            order.sort(key=lambda block: sum(self.uses[block] >= least for least in CLASSES))
        if self.kind == "lineage":
            order = [block for block in order if block not in self.idle.values()]
        if not order:
            return None
        del self.idle[order[0]], self.uses[order[0]]
        return order[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_evictor_keeps_its_order_and_bounded_memory(kind: EvictorKind) -> None:
    dice, real, plain = random.Random(kind), EVICTORS[kind](), PlainEvictor(kind)
    for turn in range(4_000):
        # Few are removed at first, and their stale entries must be dropped along the way.
        act, block = dice.choice("iiiiirrre" if turn > 1_000 else "iiiiirrr"), dice.randrange(10)
        if act == "i":
            parent = (block - 1) // 2 if block else None
            real.insert(block, parent)
            plain.insert(block, parent)
        elif act == "r":
            assert real.remove(block) == plain.remove(block)
        else:
            assert real.evict() == plain.evict()
        assert len(real) == len(plain.idle)
        assert all((block in real) == (block in plain.idle) for block in range(10))
        if isinstance(real, Lineage):
            assert len(real.leaves) + len(real.below) <= 4 * 10 + 65 + len(real)
        if isinstance(real, MultiLru):
            assert real.uses == plain.uses
    assert [real.evict() for _ in range(11)] == [plain.evict() for _ in range(11)]


def test_no_leaf_is_lost_when_stale_entries_are_dropped() -> None:
    lineage = EVICTORS["lineage"]()
    for block in [*range(10)] + 200 * [10]:
        lineage.insert(block)
    assert [lineage.evict() for _ in range(12)] == [*range(11), None]


# --- pools


def test_blocks_have_the_life_cycle_of_vllms() -> None:
    kv = KvManager(10)
    assert kv.use([0, 1, 2, 3, 4]) and kv.use([0, 1, 5, 6])
    kv.destroy([4])
    assert kv.cached([0, 4, 1]) == 1  # nothing is found after a missing block
    kv.deref([0, 1, 2, 3])
    assert set(kv.active) == {0, 1, 5, 6} and len(kv.inactive) == 2
    kv.destroy([6])
    kv.deref([0, 1, 5])
    assert not kv.active and len(kv.inactive) == 5
    assert kv.use([0, 1, 2, 7, 8, 9])
    assert [block in kv.inactive for block in (3, 5)] == [True, True] and len(kv.inactive) == 2
    assert kv.cached([0, 1, 2, 3, 4]) == 4
    assert kv.use([10, 11, 12])
    assert drain(kv) == [5]


def test_new_blocks_are_announced_once_and_by_stretches() -> None:
    kv = KvManager(10)
    kv.heard = True
    assert kv.use([1, 2, 3, *kv.partials(1)])
    assert kv.take_events() == [Stored([1, 2, 3], None)]
    assert kv.use([1, 2, 7, 8])
    assert kv.take_events() == [Stored([7, 8], 2)]
    kv.release([1, 2, 7, 8])
    assert kv.use([1, 2, 7, 8]) and kv.take_events() == []
    kv.destroy([7])
    assert kv.use([7, 8, 9], parent=2)
    assert kv.take_events() == [Removed([7]), Stored([7], 2), Stored([9], 8)]


def test_a_use_without_room_allocates_nothing() -> None:
    kv = KvManager(3)
    assert kv.use([1, 2])
    assert not kv.use([1, 3, 4])
    assert kv.active == {1: 1, 2: 1}
    assert kv.use([1, 1, 3])  # the same block twice takes one place
    assert kv.active == {1: 3, 2: 1, 3: 1}


def test_making_room_evicts_none_of_the_used_blocks() -> None:
    kv = KvManager(3)
    assert kv.use([1, 2, 3])
    kv.release([1, 2, 3])
    assert kv.use([8, 2, 1])
    assert kv.cached([8, 2, 1]) == 3 and drain(kv) == []


def test_a_block_that_becomes_a_duplicate_is_merged() -> None:
    kv = KvManager(8)
    kv.heard = True
    assert kv.use([1, -1]) and kv.use([1, -2])
    kv.promote(-1, 5, 1)
    kv.promote(-2, 5, 1)
    assert kv.active == {1: 2, 5: 2}
    kv.release([1, 5])
    kv.release([1, 5])
    assert kv.use([1, -3])
    kv.promote(-3, 5, 1)
    assert kv.active == {1: 1, 5: 1}
    assert kv.take_events() == [Stored([1], None), Stored([5], 1)]


@pytest.mark.parametrize("act", ["deref", "destroy", "release"])
def test_releasing_a_block_that_is_not_in_use_is_an_error(act: str) -> None:
    kv = KvManager(4)
    with pytest.raises(KeyError):
        getattr(kv, act)([1])
    with pytest.raises(KeyError):
        kv.promote(-1, 1, None)


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="at least one block, not 0"):
        KvManager(0)


# --- tiers


def test_evicted_blocks_stay_on_slower_tiers_until_needed() -> None:
    kv = KvManager(2, host_blocks=2, disk_blocks=1)
    kv.heard = True
    listener = Listener()

    def serve(names: list[int]) -> TierTraffic:
        here = kv.cached(names)
        found = here + kv.fetchable(names[here:])
        kv.fetch(names[here:found])
        assert kv.use(names)
        kv.release(names)
        listener.hear(kv.take_events())
        return kv.take_traffic()

    assert serve([1, 2]) == TierTraffic()
    assert serve([3, 4]) == TierTraffic(to_host=2)
    assert serve([5, 6]) == TierTraffic(to_host=2, to_disk=2)  # the disk kept only the prefix
    assert {tier: set(held) for tier, held in listener.held.items()} == {0: {5, 6}, 1: {3, 4}, 2: {1}}
    assert kv.fetchable([3, 5, 4, 7, 1]) == 3  # on whichever tier they are
    assert serve([3, 4]) == TierTraffic(from_host=2, to_host=2, to_disk=2)
    assert listener.held[Tier.DEVICE] == {3, 4}


def test_reused_blocks_stay_longer_on_slower_tiers() -> None:
    def tiers() -> SlowTiers:
        made = SlowTiers(2, 0, lambda event: None, lambda block: True)
        made.offload(1, None)
        made.offload(2, None)
        return made

    fetched, offered = tiers(), tiers()
    fetched.fetch([1])
    offered.offload(1, None)
    for one in (fetched, offered):
        one.offload(3, None)
        assert [*one.held[Tier.HOST]] == [1, 3]


def test_traffic_from_disk_and_host_is_counted_separately() -> None:
    tiers = SlowTiers(1, 1, lambda event: None, lambda block: True)
    tiers.offload(1, None)
    tiers.offload(2, None)
    assert tiers.take_traffic() == TierTraffic(to_host=2, to_disk=1)
    tiers.fetch([1, 2])
    assert tiers.take_traffic() == TierTraffic(from_host=1, from_disk=1)


def test_a_block_without_its_prefix_is_not_kept() -> None:
    kv = KvManager(2, host_blocks=4)
    assert kv.use([1, 2])
    kv.destroy([1])
    kv.release([2])
    assert kv.use([5, 6])
    assert kv.slow is not None and not kv.slow.held[Tier.HOST]


# --- everything at once


class Pools(RuleBasedStateMachine):
    """Requests arrive, grow and leave, and the pools match a plain model of them."""

    @initialize(
        total=st.integers(1, 12), kind=st.sampled_from(KINDS), host=st.integers(0, 4), disk=st.integers(0, 4)
    )
    def begin(self, total: int, kind: EvictorKind, host: int, disk: int) -> None:
        self.kv = KvManager(total, kind, host_blocks=host, disk_blocks=disk)
        self.kv.heard = True
        self.requests: list[list[int]] = []
        self.listener = Listener(self.kv)

    def holders(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for blocks in self.requests:
            for block in blocks:
                counts[block] = counts.get(block, 0) + 1
        return counts

    @rule(prompt=st.integers(0, 3), length=st.integers(0, 5), tail=st.booleans())
    def come(self, prompt: int, length: int, tail: bool) -> None:
        names = [prompt * 10 + place for place in range(length)]
        blocks = names + self.kv.partials(tail)
        here = self.kv.cached(names)
        held = self.listener.held
        assert here == len([*takewhile(held[Tier.DEVICE].__contains__, names)])
        there = self.kv.fetchable(names[here:])
        if self.kv.slow is not None:
            assert here + there == len([*takewhile({*chain(*held.values())}.__contains__, names)])
        self.kv.fetch(names[here : here + there])
        fits = len(self.holders().keys() | {*blocks}) <= self.kv.total
        assert self.kv.use(blocks) == fits
        if fits:
            self.requests.append(blocks)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.kv.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.requests))
        named = [block for block in blocks if block >= 0]
        if len(named) + 1 == len(blocks) and self.holders()[blocks[-1]] == 1:
            parent = blocks[-2] if len(blocks) > 1 else None
            name = data.draw(st.integers(0, 3)) * 10 if parent is None else parent + 1
            self.kv.promote(blocks[-1], name, parent)
            blocks[-1] = name
        full = len(self.holders()) == self.kv.total
        partial = self.kv.take()
        assert bool(partial) != full
        if partial:
            blocks.append(partial)

    @rule()
    def forget(self) -> None:
        renamed = self.kv.forget()
        assert set(renamed) == {block for block in self.holders() if block >= 0}
        self.requests = [[renamed.get(block, block) for block in blocks] for blocks in self.requests]
        assert self.kv.take_events() == [Cleared()] and not len(self.kv.inactive)
        self.listener.hear([Cleared()])

    @invariant()
    def holds(self) -> None:
        kv = self.kv
        assert kv.active == self.holders()
        assert kv.used + len(kv.inactive) <= kv.total
        assert not any(block in kv.inactive for block in kv.active)
        events = kv.take_events()
        self.listener.hear(events)
        if any(isinstance(event, Removed) and event.tier == Tier.DEVICE for event in events):
            assert kv.used + len(kv.inactive) == kv.total  # nothing is evicted while there is room
        full = {block for block in kv.active if block >= 0}
        idle = {block for block in range(50) if block in kv.inactive}
        assert self.listener.held[Tier.DEVICE] == full | idle
        for tier in (Tier.HOST, Tier.DISK):
            assert self.listener.held[tier] == {*(kv.slow.held[tier] if kv.slow is not None else ())}

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for blocks in self.requests:
                self.kv.release(blocks)
            assert not self.kv.active


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
