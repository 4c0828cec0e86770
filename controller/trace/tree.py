"""The tree of prefixes that a trace's requests share.

The blocks of all prompts form a tree, in which the parent of a block is the block before it in the prompt. Consecutive
blocks that occur in the same requests form one node. Blocks that only one request has are the request's unshared part (a leaf),
of which only the length is kept. The rest of the tree is the *core*: the shared prefixes. Each shared prefix has the numbers of
requests that continued to a longer shared prefix, ended, or continued with an unshared part.

The tree is stored in arrays, with about 170 bytes for each block. A networkx graph would need kilobytes for each node. Every
computation is one pass over the blocks in their order of arrival.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from controller.trace.rows import BadTrace, TraceRow

END, ALONE = -1, -2  # stand for no node: the prompt ends, or continues with an unshared part
ROOT = 0  # the node at which all prompts begin; it has no blocks
QUARTERS = 4

Refuse = Callable[[str], None]


class Node(msgspec.Struct, array_like=True):
    """A shared prefix: its parent's blocks, and then `blocks` blocks of its own."""

    parent: int  # index of the parent in the core; END for the first node
    blocks: int
    visits: int = 0  # number of prompts with this prefix
    alone: int = 0  # number of prompts that continued from this prefix with an unshared part
    first: int = END  # outcome of the first prompt at this prefix: the next node, END or ALONE
    # of the prompts that ended with this prefix: tokens in the last block -> number of prompts
    rests: dict[int, int] = {}
    # whether prompts had this prefix in every quarter of the trace: typical of system prompts, not of conversations
    lasting: bool = False

    @property
    def ends(self) -> int:
        """Number of prompts that ended with this prefix."""
        return sum(self.rests.values())


class Core(msgspec.Struct):
    """The shared prefixes of a trace. The first node is the root, where all prompts begin. Parents come before children."""

    nodes: list[Node]
    # number of blocks of an unshared part -> number of prompts, by `depth_class` of the prefix before the unshared part:
    first_leaves: dict[int, dict[int, int]]  # for the first prompt at each prefix
    later_leaves: dict[int, dict[int, int]]  # for all later prompts, with longer unshared parts
    leaf_rests: dict[int, int]  # of prompts with an unshared part: tokens in the last block -> prompts
    # Number of prompts at a node from one that continued to a child until the next one that continued to the same child ->
    # how often this occurred, by `size_class` of the node's visits and of the child's visits:
    returns: dict[int, dict[int, dict[int, int]]]

    def outcomes(self) -> list[dict[int, int]]:
        """Return, for each node, the number of prompts by outcome.

        An outcome is the index of the child to which a prompt continued, END (the prompt ended), or ALONE (an unshared part
        followed).
        """
        found: list[dict[int, int]] = [{} for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            if place:
                found[node.parent][place] = node.visits
        for node, outcomes in zip(self.nodes, found, strict=True):
            outcomes |= {END: node.ends, ALONE: node.alone}
        return found

    def depths(self) -> list[int]:
        """Return, for each node, the length of its whole prefix in blocks, from the root to the end of the node."""
        depths: list[int] = []
        for node in self.nodes:
            depths.append(node.blocks + (depths[node.parent] if depths else 0))
        return depths


class Tree:
    """The tree of all blocks of a trace, to which requests are added one by one. Blocks are numbered from 1, as they arrive."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._numbers: dict[int, int] = {}  # block numbers by hash id
        self._ids = array("Q", [0])
        self._parents = array("q", [-1])
        self._depths = array("q", [0])
        self._visits = array("q", [0])
        # by block: the number of the block that followed it in its first prompt; 0: that prompt ended, -1: not known yet
        self._first = array("q", [-1])
        self._lasts = array("q")  # by prompt: the number of its last block
        self._rests = array("q")  # by prompt: the number of tokens in its last block

    @property
    def blocks(self) -> int:
        """Number of distinct blocks."""
        return len(self._ids) - 1

    def add(self, row: TraceRow) -> int:
        """Add a request, and return how many of its leading blocks occurred in earlier requests.

        Raise BadTrace if a hash id occurs twice in the request, or follows a different block than in an earlier request.
        """
        path = self._known(row.hash_ids)
        known, fresh = len(path), row.hash_ids[len(path) :]
        self._check_fresh(fresh, path)
        for block in fresh:
            number = len(self._ids)
            self._numbers[block] = number
            self._ids.append(block)
            self._parents.append(path[-1] if path else ROOT)
            self._depths.append(len(path) + 1)
            self._visits.append(0)
            self._first.append(-1)
            path.append(number)
        self._visit(path)
        self._rests.append(row.input_length - max(len(path) - 1, 0) * self._block_tokens)
        return known

    def _known(self, ids: Sequence[int]) -> list[int]:
        """Return the tree's block numbers of a prompt's leading blocks, up to the first block that is not in the tree.

        Raise BadTrace if these blocks do not follow one another in the tree.
        """
        path: list[int] = []
        before = ROOT
        for block in ids:
            number = self._numbers.get(block)
            if number is None:
                break
            if self._parents[number] != before:
                raise BadTrace(self._two_parents(number, self._name(before)))
            path.append(before := number)
        return path

    def _check_fresh(self, fresh: Sequence[int], path: Sequence[int]) -> None:
        before = self._name(path[-1] if path else ROOT)
        for block in fresh:
            if (number := self._numbers.get(block)) is not None:
                raise BadTrace(self._two_parents(number, before))
            before = str(block)
        if len(set(fresh)) < len(fresh):
            twice = next(block for block, times in Counter(fresh).items() if times > 1)
            raise BadTrace(f"hash id {twice} occurs twice in one prompt: an id must stand for one prefix")

    def _two_parents(self, number: int, before: str) -> str:
        known = self._name(self._parents[number])
        return (
            f"the prefixes do not form a tree: hash id {self._ids[number]} comes after {known} in one prompt "
            f"and after {before} in another; an id must stand for one prefix"
        )

    def _name(self, number: int) -> str:
        return str(self._ids[number]) if number else "nothing"

    def _visit(self, path: Sequence[int]) -> None:
        before = ROOT
        for number in path:
            self._visits[before] += 1
            if self._first[before] < 0:
                self._first[before] = number
            before = number
        self._visits[before] += 1
        if self._first[before] < 0:
            self._first[before] = ROOT
        self._lasts.append(before)

    def shared(self) -> tuple[int, list[int]]:
        """Return the number of blocks that occur in several prompts, and each prompt's number of shared blocks."""
        shared = [0] * len(self._ids)
        count = 0
        for number in range(1, len(self._ids)):
            if self._visits[number] > 1:
                shared[number] = self._depths[number]
                count += 1
            else:
                shared[number] = shared[self._parents[number]]
        return count, [shared[last] for last in self._lasts]

    def core(self) -> Core:
        """Return the shared prefixes of the requests added so far."""
        nodes = [Node(END, 0, self._visits[ROOT])]
        # by block: its node or, in an unshared part, the node before that part
        places = [ROOT] * len(self._ids)
        for number in range(1, len(self._ids)):
            parent, visits = places[self._parents[number]], self._visits[number]
            if visits == 1:
                places[number] = parent
            elif parent and nodes[parent].visits == visits:
                nodes[parent].blocks += 1
                places[number] = parent
            else:
                places[number] = len(nodes)
                nodes.append(Node(parent, 1, visits))
        return self._counted(nodes, places)

    def _counted(self, nodes: list[Node], places: Sequence[int]) -> Core:
        """Complete the nodes with the numbers of prompts, and return the core with the lengths of unshared parts.

        `places` has, for each block, the index of its node. For a block of an unshared part, it has the index of the last
        shared node before that part.
        """
        depths = Core(nodes, {}, {}, {}, {}).depths()
        leaves: tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]] = {}, {}
        rests: list[dict[int, int]] = [{} for _ in nodes]
        leaf_rests: dict[int, int] = {}
        for last, rest in zip(self._lasts, self._rests, strict=True):
            place = places[last]
            if last and self._visits[last] == 1:
                own = self._depths[last] - depths[place]
                begins = last - own + 1  # a prompt's new blocks have consecutive numbers
                later = self._first[self._parents[begins]] != begins
                nodes[place].alone += 1
                _count(leaves[later].setdefault(depth_class(depths[place]), {}), own)
                _count(leaf_rests, rest)
            else:
                _count(rests[place], rest)
        for node, counts in zip(nodes, rests, strict=True):
            node.rests = in_order(counts)
        for number, first in enumerate(self._first):
            if number and self._visits[number] == 1:
                continue
            if first <= ROOT:
                nodes[places[number]].first = END
            elif self._visits[first] == 1:
                nodes[places[number]].first = ALONE
            elif places[first] != places[number]:
                nodes[places[number]].first = places[first]
        ordered = [{key: in_order(pool) for key, pool in sorted(pools.items())} for pools in leaves]
        return Core(nodes, ordered[False], ordered[True], in_order(leaf_rests), self._returns(nodes, places))

    def _returns(self, nodes: list[Node], places: Sequence[int]) -> dict[int, dict[int, dict[int, int]]]:
        """Count, for each distance, how often two consecutive visits of a child node are this distance apart.

        A distance is a number of prompts at the child's parent, rounded by `coarse`. The counts are grouped by the `size_class`
        of the parent and of the child.

        Also set `lasting` of each node: whether every quarter of the trace has a prompt with the node's prefix.
        """
        found: dict[int, dict[int, dict[int, int]]] = {}
        visits, before = [0] * len(nodes), [0] * len(nodes)
        quarters = [0] * len(nodes)
        for number, last in enumerate(self._lasts):
            quarter = 1 << (QUARTERS * number // len(self._lasts))
            place = places[last]
            path = [place]
            while place:
                path.append(place := nodes[place].parent)
            for parent, place in zip([END, *reversed(path)], reversed(path), strict=False):
                visits[place] += 1
                quarters[place] |= quarter
                if place == ROOT:
                    continue
                now = visits[parent]
                if before[place]:
                    pools = found.setdefault(size_class(nodes[parent].visits), {})
                    _count(pools.setdefault(size_class(nodes[place].visits), {}), coarse(now - before[place]))
                before[place] = now
        for node, seen in zip(nodes, quarters, strict=True):
            node.lasting = seen == (1 << QUARTERS) - 1
        return {
            key: {below: in_order(counts) for below, counts in sorted(pools.items())}
            for key, pools in sorted(found.items())
        }


def accept(tree: Tree, row: TraceRow, refuse: Refuse | None = None) -> int | None:
    """Add a request to a tree, and return how many of its leading blocks occurred in earlier requests.

    If the request contradicts the tree, call `refuse` with the reason and return None. Without `refuse`, raise BadTrace.
    """
    try:
        return tree.add(row)
    except BadTrace as error:
        if refuse is None:
            raise
        refuse(str(error))
        return None


def depth_class(blocks: int) -> int:
    """Return the class of a shared prefix by its length in blocks. Powers of two separate the classes.

    The lengths of unshared parts are counted separately for each class of the prefix before them.
    """
    return blocks.bit_length()


def size_class(visits: int) -> int:
    """Return the class of a prefix by the number of prompts that have it. Powers of two separate the classes.

    `Core.returns` counts the distances between two visits of the same child separately for each class.
    """
    return visits.bit_length()


def coarse(gap: int) -> int:
    """Return `gap` (a number of prompts) rounded down to four significant binary digits.

    The rounding reduces the number of distinct values to store.
    """
    dropped = max(0, gap.bit_length() - 4)
    return gap >> dropped << dropped


def in_order(counts: dict[int, int]) -> dict[int, int]:
    """Return counts sorted by the counted value, because the original order would reveal single requests."""
    return dict(sorted(counts.items()))


def _count(counts: dict[int, int], value: int) -> None:
    counts[value] = counts.get(value, 0) + 1
