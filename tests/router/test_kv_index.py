"""The KV index agrees with a plain record of every holder's prefixes, for any updates in any order."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.router.endpoints import WorkerRank
from controller.router.index.index import NO_HOLDERS, Depths, KvIndex, Misplaced
from events.blocks import sequence_hashes
from events.kv import Tier

Path = tuple[int, ...]

PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
HOLDERS = st.sampled_from([WorkerRank(f"w{number}", "i") for number in range(5)])
A, B, C, D = (WorkerRank(name, "i") for name in "abcd")
GONE, STAYS, NEW = (WorkerRank(name, "i") for name in ("gone", "stays", "new"))
TIERS = st.sampled_from(list(Tier))


def named(path: Path) -> list[int]:
    return sequence_hashes(path)


def prefixes(path: Path) -> list[Path]:
    return [path[: size + 1] for size in range(len(path))]


class AgainstAPlainRecord(RuleBasedStateMachine):
    """A path of small numbers stands for a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.held: dict[WorkerRank, dict[Tier, set[Path]]] = defaultdict(lambda: defaultdict(set))

    def has(self, holder: WorkerRank, path: Path, slowest: Tier = Tier.DISK) -> bool:
        return any(path in self.held[holder][tier] for tier in Tier if tier <= slowest)

    @rule(holder=HOLDERS, path=PATHS, cut=st.integers(0, 8), tier=TIERS)
    def store(self, holder: WorkerRank, path: Path, cut: int, tier: Tier) -> None:
        cut = min(cut, len(path) - 1)
        blocks = named(path)
        parent = blocks[cut - 1] if cut else None
        if cut and not self.has(holder, path[:cut]):
            with pytest.raises(Misplaced):
                self.index.store(holder, parent, blocks[cut:], tier)
            return
        self.index.store(holder, parent, blocks[cut:], tier)
        self.held[holder][tier].update(prefixes(path)[cut:])

    @rule(holder=HOLDERS, path=PATHS, size=st.integers(1, 4), tier=TIERS, order=st.permutations(range(4)))
    def remove(self, holder: WorkerRank, path: Path, size: int, tier: Tier, order: list[int]) -> None:
        last = prefixes(path)[-size:]
        gone = [last[place] for place in order if place < len(last)]
        missing = sum(one not in self.held[holder][tier] for one in gone)
        assert self.index.remove(holder, [named(one)[-1] for one in gone], tier) == missing
        self.held[holder][tier] -= set(gone)

    @rule(holder=HOLDERS)
    def forget(self, holder: WorkerRank) -> None:
        self.index.forget(holder)
        self.held.pop(holder, None)

    @rule(limit=st.integers(1, 3))
    def sweep(self, limit: int) -> None:
        self.index.sweep(limit)

    @rule(path=PATHS)
    def find(self, path: Path) -> None:
        found = self.index.find(named(path))
        for tier, depths in ((Tier.DEVICE, found.device), (Tier.HOST, found.host), (Tier.DISK, found.disk)):
            wanted = {}
            for holder in list(self.held):
                has = [self.has(holder, prefix, tier) for prefix in prefixes(path)]
                wanted[holder] = has.index(False) if False in has else len(has)
            assert depths == {holder: depth for holder, depth in wanted.items() if depth}

    @invariant()
    def every_holder_has_its_blocks(self) -> None:
        for holder, tiers in self.held.items():
            assert self.index.count(holder) == sum(map(len, tiers.values()))

    @invariant()
    def the_tree_is_sound_and_the_smallest(self) -> None:
        index, root = (
            self.index,
            self.index._root,
        )  # not visible in look-ups: the tree is minimal
        below = [root]
        seen, runs = 0, set()
        while below:
            run = below.pop()
            for first, child in run.children.items():
                assert child.parent is run and child.blocks[0] == first
                assert child.depth == run.depth + len(run.blocks)
                assert all(index._runs[block] is child for block in child.blocks)
                assert child.children or child.masks != NO_HOLDERS, "it is not needed"
                assert run is root or len(run.children) > 1 or run.masks != child.masks, "could be one"
                seen += len(child.blocks)
                runs.add(child)
                below.append(child)
        assert seen == len(index)
        assert runs == index._all


AgainstAPlainRecord.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstAPlainRecord = AgainstAPlainRecord.TestCase


def test_a_holder_that_is_gone_is_in_no_match_and_leaves_no_memory() -> None:
    index = KvIndex()
    for holder in (A, B):
        index.store(holder, None, named((1, 2, 3)))
    index.store(A, named((1, 2, 3))[-1], named((1, 2, 3, 4))[3:])
    index.forget(A)
    assert index.find(named((1, 2, 3, 4))).device == {B: 3}
    assert not index.sweep()
    assert len(index) == 3
    index.store(C, None, named((1, 2)))
    assert index.find(named((1, 2, 3))).device == {B: 3, C: 2}


def test_a_hole_ends_a_match_until_it_is_filled() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3, 4))
    index.store(A, None, blocks)
    index.remove(A, blocks[1:2])
    assert index.find(blocks).device == {A: 1}
    index.store(A, blocks[0], blocks[1:2])
    assert index.find(blocks).device == {A: 4}


def test_a_result_does_not_change_later() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3))
    for holder, depth in ((A, 1), (B, 3), (C, 2)):
        index.store(holder, None, blocks[:depth])
    found = index.find(blocks).device
    index.forget(B)
    index.sweep()
    index.store(D, None, blocks)
    assert found and found == {A: 1, B: 3, C: 2}
    assert (len(found), found.get(D), sorted(found), repr(found)) == (
        3,
        None,
        [A, B, C],
        repr(dict(found)),
    )
    assert not index.find(named((9,))).device


def test_blocks_at_another_depth_are_rejected() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3))
    index.store(A, None, blocks)
    for parent, wrong in (
        (None, blocks[1:]),
        (blocks[2], blocks[:1]),
        (blocks[2], [8, 8]),
        (None, [8, blocks[2]]),
    ):
        with pytest.raises(Misplaced):
            index.store(A, parent, wrong)
    assert index.find(blocks).device == {A: 3}
    assert len(index) == 3


@settings(max_examples=40)
@given(st.lists(PATHS, max_size=12))
def test_replaying_held_blocks_gives_the_same_index(paths: list[Path]) -> None:
    index = KvIndex()
    for number, path in enumerate(paths):
        index.store((A, B)[number % 2], None, named(path), Tier(number % 3))
    copy = KvIndex()
    for holder in (A, B):
        for tier, parent, blocks in index.held(holder):
            copy.store(holder, parent, blocks, tier)
    for path in paths:
        assert copy.find(named(path)) == index.find(named(path))


def test_a_new_holder_does_not_inherit_the_blocks_of_one_that_is_gone() -> None:
    index = KvIndex()
    index.store(A, None, [1])
    assert index.find([1]).device == {A: 1}
    index.forget(A)
    while index.sweep():
        pass
    index.store(B, None, [1])
    assert index.find([1]).device == {B: 1}


def test_runs_split_during_a_sweep_are_swept_too() -> None:
    index = KvIndex()
    chains = [[10 * n + 1, 10 * n + 2, 10 * n + 3, 10 * n + 4] for n in range(40)]
    for chain in chains:
        index.store(GONE, None, chain)
        index.store(STAYS, None, chain)
    index.forget(GONE)
    index.sweep(20)
    for chain in chains:
        index.remove(STAYS, chain[3:])
    while index.sweep(20):
        pass
    for chain in chains:
        index.store(NEW, None, chain[:3])
        assert index.find(chain).device == {STAYS: 3, NEW: 3}


def test_joining_two_runs_keeps_their_successors() -> None:
    index = KvIndex()
    index.store(A, None, [1, 2, 3, 10])
    index.store(A, 3, [20])
    index.store(B, None, [1, 2])
    index.remove(B, [1, 2])
    assert index.remove(A, [10]) == 0
    assert index.find([1, 2, 3, 20]).device == {A: 4}
    assert index.find([1, 2, 3, 10]).device == {A: 3}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_the_deepest_match_is_found_without_enumerating_holders(depths: list[int], wanted: set[int]) -> None:
    index, blocks = KvIndex(), named((1, 2, 3, 4, 5, 6))
    for number, depth in enumerate(depths):
        index.store(WorkerRank(f"w{number}", "i", 0), None, blocks[:depth])
    keys = {(f"w{number}", "i") for number in wanted}
    most = max((depth for number, depth in enumerate(depths) if number in wanted), default=0)
    found = index.find(blocks).device
    assert isinstance(found, Depths)
    assert found.deepest(keys) == most
