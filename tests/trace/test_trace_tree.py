"""The tree of shared prefixes: what is shared, how often, and what is not a tree."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.trace.rows import BadTrace, TraceRow
from controller.trace.tree import ALONE, END, ROOT, Core, Node, Tree, coarse

BLOCK = 4
Prompts = list[list[int]]


def grown(prompts: Prompts) -> Tree:
    tree = Tree(BLOCK)
    for ids in prompts:
        tree.add(TraceRow(0, len(ids) * BLOCK, 1, ids))
    return tree


def core_of(prompts: Prompts) -> Core:
    return grown(prompts).core()


def test_the_known_graph_merges_chains_and_strips_leaves() -> None:
    """The example of Dynamo's own tests, in which nodes are named by the last block of each chain."""
    core = core_of([[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [7, 8], [7, 8, 9, 10], [11, 12]])
    full = {BLOCK: 1}
    assert core.nodes == [
        Node(END, 0, visits=6, alone=1, first=1, lasting=True),
        Node(ROOT, 2, visits=3, first=END, rests=full),  # 1
        Node(1, 3, visits=2, alone=1, first=END, rests=full),  # 4
        Node(ROOT, 2, visits=2, alone=1, first=END, rests=full),  # 8
    ]
    assert core.outcomes()[ROOT] == {1: 3, 3: 2, END: 0, ALONE: 1}
    assert core.outcomes()[1] == {2: 2, END: 1, ALONE: 0}
    assert core.later_leaves == {0: {2: 1}, 3: {2: 1}, 2: {2: 1}} and core.first_leaves == {}
    assert core.leaf_rests == {BLOCK: 3}


def test_return_gaps_are_counted_and_lasting_prefixes_marked() -> None:
    """Prefix 0 occurs throughout the trace, mostly with two others in between; 5 and 6 recur at once, and never again."""
    core = core_of([[0, 1], [5, 2], [5, 3], [0, 4], [0, 9], [6, 7], [6, 8], [0, 10]])
    assert [(node.visits, node.lasting) for node in core.nodes] == [
        (8, True),
        (4, True),
        (2, False),
        (2, False),
    ]
    assert core.returns == {4: {3: {1: 1, 3: 2}, 2: {1: 2}}}


@pytest.mark.parametrize(("gap", "kept"), [(1, 1), (15, 15), (16, 16), (17, 16), (1000, 960), (1023, 960)])
def test_long_gaps_are_rounded(gap: int, kept: int) -> None:
    assert coarse(gap) == kept


def test_the_own_part_of_the_first_prompt_is_counted_separately() -> None:
    core = core_of([[0, 1, 2], [0, 3], [0, 4]])
    assert core.first_leaves == {1: {2: 1}} and core.later_leaves == {1: {1: 2}}
    assert core.nodes[1] == Node(ROOT, 1, visits=3, alone=3, first=ALONE)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([[0, 2], [1, 2]], "hash id 2 comes after 0 in one prompt and after 1 in another"),
        ([[0, 2], [2]], "hash id 2 comes after 0 in one prompt and after nothing in another"),
        ([[5], [6, 5]], "hash id 5 comes after nothing in one prompt and after 6 in another"),
        ([[0, 1, 0]], "hash id 0 occurs twice"),
    ],
)
def test_a_violation_of_the_tree_is_named(prompts: Prompts, says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        grown(prompts)


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    tree = grown([[0, 1]])
    before = tree.core()
    for bad in ([0, 2, 1], [3, 3], [1]):
        with pytest.raises(BadTrace):
            tree.add(TraceRow(0, 9, 1, bad))
    assert tree.core() == before and tree.blocks == 2


any_prompts = st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=6)


@settings(max_examples=150)
@given(any_prompts)
def test_prompts_are_a_tree_exactly_if_each_block_has_one_parent(prompts: Prompts) -> None:
    parents: dict[int, set[int]] = {}
    for ids in prompts:
        for before, block in zip([-1, *ids], ids, strict=False):
            parents.setdefault(block, set()).add(before)
    is_tree = all(len(found) == 1 for found in parents.values()) and all(
        len(set(ids)) == len(ids) for ids in prompts
    )
    try:
        grown(prompts)
        assert is_tree
    except BadTrace:
        assert not is_tree


# Words over a small alphabet share prefixes; a prefix is a block, named by its letters.
words = st.lists(st.text("ab", max_size=7), min_size=1, max_size=12)


def named(texts: list[str]) -> Prompts:
    return [
        [1 + int("1" + text[:n].translate({97: "0", 98: "1"}), 2) for n in range(1, len(text) + 1)]
        for text in texts
    ]


@settings(max_examples=150)
@given(words)
def test_the_core_matches_a_plain_count_of_prefixes(texts: list[str]) -> None:
    tree = grown(named(texts))
    visits = Counter(text[:n] for text in texts for n in range(len(text) + 1))
    count, shared = tree.shared()
    assert count == sum(1 for prefix, times in visits.items() if prefix and times > 1)
    assert shared == [max(n for n in range(len(t) + 1) if not n or visits[t[:n]] > 1) for t in texts]
    core = tree.core()
    assert sum(node.blocks for node in core.nodes) == count
    assert core.nodes[ROOT].visits == len(texts)
    assert sum(node.alone + node.ends for node in core.nodes) == len(texts)
    for node, outcomes in zip(core.nodes, core.outcomes(), strict=True):
        assert sum(outcomes.values()) == node.visits  # in = out: every CDF ends at 1
        assert outcomes[node.first] > 0
        assert node.parent < 0 or node.visits <= core.nodes[node.parent].visits
    own = Counter(len(text) - n for text, n in zip(texts, shared, strict=True) if len(text) > n)
    pools = [*core.first_leaves.values(), *core.later_leaves.values()]
    assert sum((Counter(pool) for pool in pools), Counter()) == own


@given(words)
def test_known_blocks_are_those_of_an_earlier_prompt(texts: list[str]) -> None:
    tree, seen = Tree(BLOCK), {""}
    for text, ids in zip(texts, named(texts), strict=True):
        assert tree.add(TraceRow(0, len(ids) * BLOCK, 1, ids)) == max(
            n for n in range(len(text) + 1) if text[:n] in seen
        )
        seen |= {text[:n] for n in range(len(text) + 1)}
