"""The index of KV blocks finds what a plain record of everybody's prefixes finds, whatever was said to it in whatever order."""

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
HOLDERS = st.integers(0, 4)
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
        self.held: dict[int, dict[Tier, set[Path]]] = defaultdict(lambda: defaultdict(set))

    def has(self, holder: int, path: Path, slowest: Tier = Tier.DISK) -> bool:
        return any(path in self.held[holder][tier] for tier in Tier if tier <= slowest)

    @rule(holder=HOLDERS, path=PATHS, cut=st.integers(0, 8), tier=TIERS)
    def store(self, holder: int, path: Path, cut: int, tier: Tier) -> None:
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
    def remove(self, holder: int, path: Path, size: int, tier: Tier, order: list[int]) -> None:
        last = prefixes(path)[-size:]
        gone = [last[place] for place in order if place < len(last)]
        missing = sum(one not in self.held[holder][tier] for one in gone)
        assert self.index.remove(holder, [named(one)[-1] for one in gone], tier) == missing
        self.held[holder][tier] -= set(gone)

    @rule(holder=HOLDERS)
    def forget(self, holder: int) -> None:
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
    def everybody_has_what_they_said(self) -> None:
        for holder, tiers in self.held.items():
            assert self.index.count(holder) == sum(map(len, tiers.values()))

    @invariant()
    def the_tree_is_sound_and_the_smallest(self) -> None:
        index, root = (
            self.index,
            self.index._root,
        )  # what look-ups cannot show: the tree is no larger than it must be
        below = [root]
        seen, runs = 0, set()
        while below:
            run = below.pop()
            for first, child in run.children.items():
                assert child.parent is run and child.blocks[0] == first
                assert child.depth == run.depth + len(run.blocks)
                assert all(index._runs[block] is child for block in child.blocks)
                assert child.children or child.masks != NO_HOLDERS, "nobody needs it"
                assert run is root or len(run.children) > 1 or run.masks != child.masks, "could be one"
                seen += len(child.blocks)
                runs.add(child)
                below.append(child)
        assert seen == len(index)
        assert runs == index._all


AgainstAPlainRecord.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstAPlainRecord = AgainstAPlainRecord.TestCase


def test_a_holder_that_is_gone_is_in_no_match_and_leaves_nothing() -> None:
    index = KvIndex()
    for holder in ("a", "b"):
        index.store(holder, None, named((1, 2, 3)))
    index.store("a", named((1, 2, 3))[-1], named((1, 2, 3, 4))[3:])
    index.forget("a")
    assert index.find(named((1, 2, 3, 4))).device == {"b": 3}
    assert not index.sweep()
    assert len(index) == 3
    index.store("c", None, named((1, 2)))
    assert index.find(named((1, 2, 3))).device == {"b": 3, "c": 2}


def test_a_hole_ends_a_match_until_it_is_filled() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3, 4))
    index.store("a", None, blocks)
    index.remove("a", blocks[1:2])
    assert index.find(blocks).device == {"a": 1}
    index.store("a", blocks[0], blocks[1:2])
    assert index.find(blocks).device == {"a": 4}


def test_what_was_found_stays_what_it_was() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3))
    for holder, depth in (("a", 1), ("b", 3), ("c", 2)):
        index.store(holder, None, blocks[:depth])
    found = index.find(blocks).device
    index.forget("b")
    index.sweep()
    index.store("d", None, blocks)
    assert found and found == {"a": 1, "b": 3, "c": 2}
    assert (len(found), found.get("d"), sorted(found), repr(found)) == (
        3,
        None,
        ["a", "b", "c"],
        repr(dict(found)),
    )
    assert not index.find(named((9,))).device


def test_blocks_that_lie_elsewhere_are_refused() -> None:
    index = KvIndex()
    blocks = named((1, 2, 3))
    index.store("a", None, blocks)
    for parent, wrong in (
        (None, blocks[1:]),
        (blocks[2], blocks[:1]),
        (blocks[2], [8, 8]),
        (None, [8, blocks[2]]),
    ):
        with pytest.raises(Misplaced):
            index.store("a", parent, wrong)
    assert index.find(blocks).device == {"a": 3}
    assert len(index) == 3


@settings(max_examples=40)
@given(st.lists(PATHS, max_size=12))
def test_what_is_told_on_gives_the_same_index(paths: list[Path]) -> None:
    index = KvIndex()
    for number, path in enumerate(paths):
        index.store("ab"[number % 2], None, named(path), Tier(number % 3))
    copy = KvIndex()
    for holder in "ab":
        for tier, parent, blocks in index.held(holder):
            copy.store(holder, parent, blocks, tier)
    for path in paths:
        assert copy.find(named(path)) == index.find(named(path))


def test_who_comes_after_somebody_gone_is_not_taken_for_him() -> None:
    index = KvIndex()
    index.store("a", None, [1])
    assert index.find([1]).device == {"a": 1}
    index.forget("a")
    while index.sweep():
        pass
    index.store("b", None, [1])
    assert index.find([1]).device == {"b": 1}


def test_runs_that_are_split_while_somebody_gone_is_swept_out_are_swept_too() -> None:
    index = KvIndex()
    chains = [[10 * n + 1, 10 * n + 2, 10 * n + 3, 10 * n + 4] for n in range(40)]
    for chain in chains:
        index.store("gone", None, chain)
        index.store("stays", None, chain)
    index.forget("gone")
    index.sweep(20)
    for chain in chains:
        index.remove("stays", chain[3:])
    while index.sweep(20):
        pass
    for chain in chains:
        index.store("new", None, chain[:3])
        assert index.find(chain).device == {"stays": 3, "new": 3}


def test_what_comes_after_two_runs_that_are_joined_stays_where_it_is() -> None:
    index = KvIndex()
    index.store("a", None, [1, 2, 3, 10])
    index.store("a", 3, [20])
    index.store("b", None, [1, 2])
    index.remove("b", [1, 2])
    assert index.remove("a", [10]) == 0
    assert index.find([1, 2, 3, 20]).device == {"a": 4}
    assert index.find([1, 2, 3, 10]).device == {"a": 3}


@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_the_most_that_some_workers_have_is_known_without_naming_them(
    depths: list[int], wanted: set[int]
) -> None:
    index, blocks = KvIndex(), named((1, 2, 3, 4, 5, 6))
    for number, depth in enumerate(depths):
        index.store(WorkerRank(f"w{number}", "i", 0), None, blocks[:depth])
    keys = {(f"w{number}", "i") for number in wanted}
    most = max((depth for number, depth in enumerate(depths) if number in wanted), default=0)
    found = index.find(blocks).device
    assert isinstance(found, Depths)
    assert found.deepest(keys) == most
