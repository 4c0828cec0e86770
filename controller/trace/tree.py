"""The tree of prefixes that a trace's requests share.

The blocks of all prompts form a tree, in which the parent of a block is the block before it in the prompt. A chain of blocks that
the same requests visit is one node. Blocks that only one request has are the request's own part (a leaf), of which only the
length is kept. The rest of the tree is the *core*: the shared prefixes, and how many requests continued from each of them, ended
there, or continued with an own part.

The tree is stored in arrays, with about 170 bytes for each block. A networkx graph would need kilobytes for each node. Every
computation is one pass over the blocks in their order of arrival.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from controller.trace.rows import BadTrace, TraceRow

END, ALONE = -1, -2  # stand for no node: the prompt ends, or continues with an own part
ROOT = 0  # the node at which all prompts begin; it has no blocks
QUARTERS = 4

Refuse = Callable[[str], None]


class Node(msgspec.Struct, array_like=True):
    """A shared prefix: its parent's blocks, and then `blocks` blocks of its own."""

    parent: int  # index of the parent in the core; END for the first node
    blocks: int
    visits: int = 0  # number of prompts with this prefix
    alone: int = 0  # number of prompts that continued from this prefix with an own part
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
    # number of blocks of an own part -> number of prompts, by `depth_class` of the prefix before the own part:
    first_leaves: dict[int, dict[int, int]]  # for the first prompt at each prefix
    later_leaves: dict[int, dict[int, int]]  # for all later prompts, with longer own parts
    leaf_rests: dict[int, int]  # of prompts with an own part: tokens in the last block -> number of prompts
    # Number of prompts at a node from one that continued to a child until the next one that continued to the same child ->
    # how often this occurred, by `size_class` of the node's visits and of the child's visits:
    returns: dict[int, dict[int, dict[int, int]]]

    def outcomes(self) -> list[dict[int, int]]:
        """Return, for each node, the number of prompts by outcome: the index of a child, END or ALONE."""
        found: list[dict[int, int]] = [{} for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            if place:
                found[node.parent][place] = node.visits
        for node, outcomes in zip(self.nodes, found, strict=True):
            outcomes |= {END: node.ends, ALONE: node.alone}
        return found

    def depths(self) -> list[int]:
        """Return, for each node, the length of its prefix in blocks, its parents' blocks included."""
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
        """Add a request, and return how many of its leading blocks earlier requests had.

        Raise BadTrace if a hash id of the request had another block before it in an earlier request.
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
        """Return the numbers of a prompt's leading blocks that the tree has. Raise BadTrace if they are not a path in it."""
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
        """Return the number of blocks that several prompts have, and for each prompt the number of its shared blocks."""
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
        places = [ROOT] * len(self._ids)  # by block: its node or, in an own part, the node before that part
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
        """Return the core with these nodes, with counts of where prompts ended and how long their own parts are.

        `places` has the index of the node of each block.
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
        """Count after how many prompts at a node the same child was visited again, and set `lasting` of each node.

        Return the counts in the form of `Core.returns`.
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
    """Add a request to a tree, and return how many of its leading blocks earlier requests had.

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
    """Return the class of a shared prefix by its length in blocks, in powers of two. Own parts are counted by this class."""
    return blocks.bit_length()


def size_class(visits: int) -> int:
    """Return the class of a prefix by its number of visits, in powers of two. Return gaps are counted by this class."""
    return visits.bit_length()


def coarse(gap: int) -> int:
    """Return a number of prompts with all but its four leading binary digits set to 0, so that fewer values are counted."""
    dropped = max(0, gap.bit_length() - 4)
    return gap >> dropped << dropped


def in_order(counts: dict[int, int]) -> dict[int, int]:
    """Return counts sorted by the counted value, because the original order would reveal single requests."""
    return dict(sorted(counts.items()))


def _count(counts: dict[int, int], value: int) -> None:
    counts[value] = counts.get(value, 0) + 1
