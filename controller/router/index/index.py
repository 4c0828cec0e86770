"""The KV index: which worker holds which KV blocks, and how many blocks of a prompt each worker has.

The index is a radix tree of *runs*, and one map from block to run.

    block   the hash of a whole prefix (`events.blocks`), so it identifies the block and every block before it
    run     consecutive blocks that the same workers hold; one bit mask per cache tier records these workers
    tree    the children of a run begin right after its last block

A look-up walks runs, not blocks. It compares only the last block of a run with the prompt: if this block matches,
all blocks before it match too. A run is split where the holders of its blocks start to differ. It is joined with its
only child when both have the same holders again.

Only blocks that are contiguous from the first one count. A hole (a block that was removed before the blocks behind
it) ends a worker's match. The blocks behind the hole count again when the hole is filled.

Look-up results are kept as groups of holders, because most of a thousand workers have the same match: the beginning
that all prompts share. Individual holders are enumerated only when a caller reads the result by holder.

One task owns the index, so there are no locks, and no call blocks.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import msgspec

from controller.router.endpoints import Key, WorkerRank
from events.kv import Tier

_GROUPS_MAX = 4096  # maximum number of cached holder sets
Masks = tuple[int, int, int]  # the holders on each cache tier, as a bit mask with one bit per holder
NO_HOLDERS: Masks = (0, 0, 0)


@dataclass(slots=True, eq=False, repr=False)
class BlockRun:
    """Consecutive blocks with the same holders. A run that was removed, or joined to another run, has no blocks."""

    blocks: list[int]
    depth: int  # depth of its first block; 0 where prompts begin
    parent: "BlockRun | None"
    masks: Masks
    children: dict[int, "BlockRun"] = field(default_factory=dict)  # child runs by their first block

    def place(self, block: int) -> int:
        """Return the position of a block in the run. Fast for the last block, which is the usual case."""
        return len(self.blocks) - 1 if self.blocks[-1] == block else self.blocks.index(block)


def with_bit(masks: Masks, bit: int, tier: Tier) -> Masks:
    """Return the masks with this holder's bit added on a cache tier."""
    device, host, disk = masks
    if tier is Tier.DEVICE:
        return device | bit, host, disk
    return (device, host | bit, disk) if tier is Tier.HOST else (device, host, disk | bit)


def without(masks: Masks, gone: Masks) -> Masks:
    """Return the masks with the holders in `gone` removed, tier by tier."""
    return masks[0] & ~gone[0], masks[1] & ~gone[1], masks[2] & ~gone[2]


def common(own: Sequence[int], first: int, others: Sequence[int], start: int) -> int:
    """Return the number of equal blocks at the start of `own[first:]` and `others[start:]`.

    A binary search is possible, because two equal blocks imply that all blocks before them are equal.
    """
    low, high = 0, min(len(own) - first, len(others) - start)
    if high and own[first + high - 1] == others[start + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if own[first + middle - 1] == others[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def stretch(run: BlockRun, blocks: Sequence[int], position: int) -> tuple[int, int]:
    """Return the part of a run that matches `blocks` from `position` on, as its start in the run and its length.

    The part ends where `blocks` and the run differ. `blocks` may list the run's blocks in prompt order or in reverse.
    """
    own, last = run.blocks, len(blocks) - position
    place, size = run.place(blocks[position]), 1
    while size < last and size <= place and blocks[position + size] == own[place - size]:
        size += 1
    if size > 1:
        return place - size + 1, size
    while size < last and place + size < len(own) and blocks[position + size] == own[place + size]:
        size += 1
    return place, size


def places(mask: int) -> Iterator[int]:
    """Yield the positions of the bits that are set in `mask`, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Depths(Mapping[WorkerRank, int]):
    """A mapping from each holder to its number of matching blocks. The mapping is built on first access."""

    __slots__ = ("_made", "groups")

    def __init__(self, groups: Sequence[tuple[tuple[WorkerRank, ...], int]]) -> None:
        # groups of holders with their depth, the deepest last; a later group overrides an earlier one
        self.groups = groups
        self._made: dict[WorkerRank, int] | None = None

    def named(self) -> dict[WorkerRank, int]:
        """Return the number of matching blocks of each holder as a plain dict."""
        made = self._made
        if made is None:
            groups = self.groups
            made = self._made = dict.fromkeys(*groups[0]) if groups else {}
            for group, depth in groups[1:]:
                made.update(dict.fromkeys(group, depth))
        return made

    def deepest(self, keys: Container[Key]) -> int:
        """Return the largest number of matching blocks of any DP rank of these workers.

        The mapping is not built for this.
        """
        for group, depth in reversed(self.groups):
            if any(holder[:2] in keys for holder in group):
                return depth
        return 0

    def __getitem__(self, holder: WorkerRank) -> int:
        return self.named()[holder]

    def __iter__(self) -> Iterator[WorkerRank]:
        return iter(self.named())

    def __len__(self) -> int:
        return len(self.named())

    def __bool__(self) -> bool:
        return bool(self.groups)

    def __repr__(self) -> str:
        return repr(self.named())


class Matches(msgspec.Struct):
    """How many leading blocks of a prompt each holder has, counted on three sets of cache tiers.

    `device` counts blocks on the device, `host` those on the device or in host memory, and `disk` those on any tier.
    A holder without blocks is missing. If no slower tier is in use, all three are the same mapping.
    """

    device: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    host: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    disk: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)

    def scaled(self, factor: float) -> "Matches":
        """Return the matches in blocks of another size: each block counts as `factor` blocks of that size."""
        tiers = (self.device, self.host, self.disk)
        return Matches(*({holder: int(count * factor) for holder, count in tier.items()} for tier in tiers))


class Misplaced(ValueError):
    """Blocks that contradict the index.

    Either the holder of the blocks does not hold their parent, or the index knows them at another depth of the prompt.
    """


class ParentNotHeld(Misplaced):
    """Blocks stored after a parent that this holder does not have."""


class KvIndex:
    """The blocks of each holder (a DP rank of a worker instance), for look-ups by prompt."""

    def __init__(self) -> None:
        self._root = BlockRun([], 0, None, NO_HOLDERS)
        self._runs: dict[int, BlockRun] = {}  # run by each of its blocks
        self._all: set[BlockRun] = set()
        self._bits: dict[WorkerRank, int] = {}
        self._holders: dict[int, WorkerRank] = {}  # holder by bit position
        self._counts: dict[WorkerRank, int] = {}
        self._live = 0  # bits of the holders that were not forgotten
        self._gone = 0  # bits of forgotten holders that are still set in masks
        self._sweeping: list[BlockRun] = []
        self._swept = 0  # bits that the current sweep clears
        self._tiered = False
        self._groups: dict[int, tuple[WorkerRank, ...]] = {}

    def __len__(self) -> int:
        """Return the number of distinct blocks that any holder has."""
        return len(self._runs)

    def count(self, holder: WorkerRank) -> int:
        """Return the number of blocks of a holder. A block on two cache tiers counts twice."""
        return self._counts.get(holder, 0)

    @property
    def holders(self) -> Iterable[WorkerRank]:
        """All holders that have stored a block and were not forgotten."""
        return self._bits.keys()

    # --- updates from holders ---------------------------------------------------------------------------------

    def store(
        self, holder: WorkerRank, parent: int | None, blocks: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> None:
        """Record that a holder has these blocks.

        The first block comes right after the block `parent`, or at the start of prompts if `parent` is None. Blocks that the
        holder already has change nothing. Raise ParentNotHeld, without a change, if the holder does not have the parent. Raise
        Misplaced if the index knows a block at another depth; the blocks before that one have then been stored.
        """
        bit = self._bit(holder)
        run, depth = self._after(bit, parent)
        self._tiered = self._tiered or tier != Tier.DEVICE
        position = 0
        while position < len(blocks):
            found = self._runs.get(blocks[position])
            if found is None:
                self._grow(run, depth, list(blocks[position:]), tier, bit)
                self._counts[holder] += len(blocks) - position
                return
            first = depth - found.depth
            if not 0 <= first < len(found.blocks) or found.blocks[first] != blocks[position]:
                raise Misplaced(f"block {blocks[position]} lies at another depth than {depth}")
            size = common(found.blocks, first, blocks, position)
            if not found.masks[tier] & bit:
                found = self._mark(found, first, first + size, tier, bit)
                self._counts[holder] += size
            run, position, depth = found, position + size, depth + size

    def remove(self, holder: WorkerRank, blocks: Sequence[int], tier: Tier = Tier.DEVICE) -> int:
        """Record that a holder no longer has these blocks. Return how many of the blocks the holder did not have.

        Adjacent blocks are removed together if they are in prompt order, or in reverse.
        """
        bit, missing, position = self._bits.get(holder, 0), 0, 0
        gone = with_bit(NO_HOLDERS, bit, tier)
        while position < len(blocks):
            run = self._runs.get(blocks[position])
            if run is None or not run.masks[tier] & bit:
                missing, position = missing + 1, position + 1
                continue
            first, size = stretch(run, blocks, position)
            position += size
            self._counts[holder] -= size
            masks = without(run.masks, gone)
            if masks == NO_HOLDERS and first + size == len(run.blocks) and not run.children:
                self._cut(run, first)
                continue
            one = self._isolate(run, first, first + size)
            one.masks = masks
            self._tidy(one)
        return missing

    def forget(self, holder: WorkerRank) -> None:
        """Remove a holder that no longer exists or has cleared its cache.

        The holder disappears from every match at once. `sweep` frees the memory later.
        """
        bit = self._bits.pop(holder, 0)
        self._counts.pop(holder, None)
        if bit:
            self._holders.pop(bit.bit_length() - 1)
            self._live &= ~bit
            self._gone |= bit
            self._groups.clear()

    def sweep(self, limit: int = 1000) -> bool:
        """Free blocks of forgotten holders, at most `limit` runs per call. Return whether blocks remain to be freed."""
        if not self._sweeping:
            if not self._gone:
                return False
            self._sweeping, self._swept = list(self._all), self._gone
        for run in self._sweeping[-limit:]:
            if run.blocks:
                run.masks = without(run.masks, (self._swept,) * 3)
                self._tidy(run)
        del self._sweeping[-limit:]
        if not self._sweeping:
            self._gone &= ~self._swept
            self._swept = 0
        return bool(self._gone)

    # --- look-ups ---------------------------------------------------------------------------------

    def find(self, blocks: Sequence[int]) -> Matches:
        """Return how many leading blocks of a prompt each holder has."""
        device = self._depths(blocks, 1)
        if not self._tiered:
            return Matches(device, device, device)
        return Matches(device, self._depths(blocks, 2), self._depths(blocks, 3))

    def _depths(self, blocks: Sequence[int], tiers: int) -> Depths:
        found: list[tuple[tuple[WorkerRank, ...], int]] = []
        alive, depth, length = self._live, 0, len(blocks)
        children = self._root.children
        while depth < length and (run := children.get(blocks[depth])) is not None:
            masks = run.masks
            here = alive & (masks[0] if tiers == 1 else reduce(or_, masks[:tiers]))
            if here != alive:
                if depth:
                    # If most holders end here, emit all of them: that set is the same for many prompts, so its group is
                    # cached. Holders that continue are emitted again with a greater depth.
                    gone = alive ^ here
                    listed = gone if gone.bit_count() * 2 < alive.bit_count() else alive
                    found.append((self._group(listed), depth))
                alive = here
                if not alive:
                    return Depths(found)
            own = run.blocks
            end = depth + len(own)
            if end > length or blocks[end - 1] != own[-1]:
                depth += common(own, 0, blocks, depth)
                break
            depth = end
            children = run.children
        if depth:
            found.append((self._group(alive), depth))
        return Depths(found)

    def held(self, holder: WorkerRank) -> Iterator[tuple[Tier, int | None, list[int]]]:
        """Yield a holder's blocks as arguments of `store`, parents before their children.

        Calls of `store` with these arguments would reproduce the holder's blocks.
        """
        bit = self._bits.get(holder, 0)
        below = [self._root]
        while below:
            run = below.pop()
            before = run.parent.blocks[-1] if run.parent is not None and run.parent.blocks else None
            for tier in Tier:
                if run.masks[tier] & bit:
                    yield tier, before, list(run.blocks)
            below.extend(run.children.values())

    # --- the tree -----------------------------------------------------------------------------------------

    def _bit(self, holder: WorkerRank) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            free = ~(self._live | self._gone)
            bit = free & -free
            self._bits[holder] = bit
            self._holders[bit.bit_length() - 1] = holder
            self._counts[holder] = 0
            self._live |= bit
        return bit

    def _group(self, mask: int) -> tuple[WorkerRank, ...]:
        """Return the holders of the bits that are set in `mask`. The results are cached."""
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            group = self._groups[mask] = tuple(self._holders[place] for place in places(mask))
        return group

    def _after(self, bit: int, parent: int | None) -> tuple[BlockRun, int]:
        """Return the run that contains the block `parent`, and the depth right after that block.

        Raise ParentNotHeld if the holder does not have the block.
        """
        if parent is None:
            return self._root, 0
        run = self._runs.get(parent)
        if run is None or not (run.masks[0] | run.masks[1] | run.masks[2]) & bit:
            raise ParentNotHeld(f"block {parent} is not held there")
        return run, run.depth + run.place(parent) + 1

    def _grow(self, run: BlockRun, depth: int, blocks: list[int], tier: Tier, bit: int) -> None:
        """Add new blocks after the block at `depth` - 1, which is in `run`.

        Raise Misplaced if one of the new blocks is already in the index, or occurs twice.
        """
        if not self._runs.keys().isdisjoint(blocks) or len(set(blocks)) < len(blocks):
            raise Misplaced(f"some of the {len(blocks)} blocks after {blocks[0]} lie elsewhere, or twice")
        if run is not self._root and depth < run.depth + len(run.blocks):
            run = self._split(run, depth - run.depth)[0]
        new = self._add(BlockRun(blocks, depth, run, with_bit(NO_HOLDERS, bit, tier)))
        self._join(run, new)

    def _mark(self, run: BlockRun, first: int, end: int, tier: Tier, bit: int) -> BlockRun:
        """Add a holder to the blocks from `first` to `end` of a run.

        Return the run that contains the last of these blocks.
        """
        last = run.blocks[end - 1]
        one = self._isolate(run, first, end)
        one.masks = with_bit(one.masks, bit, tier)
        self._tidy(one)
        return self._runs[last]

    def _add(self, run: BlockRun) -> BlockRun:
        assert run.parent is not None
        run.parent.children[run.blocks[0]] = run
        self._runs.update(dict.fromkeys(run.blocks, run))
        self._all.add(run)
        if self._sweeping:  # the new run may be a part of a run that is still to be swept
            self._sweeping.append(run)
        return run

    def _isolate(self, run: BlockRun, first: int, end: int) -> BlockRun:
        """Return a run of exactly the blocks from `first` to `end`, and split the given run if necessary."""
        if end < len(run.blocks):
            run = self._split(run, end)[0]
        return self._split(run, first)[1] if first else run

    def _split(self, run: BlockRun, place: int) -> tuple[BlockRun, BlockRun]:
        """Split a run before the block at `place`. Return both parts. The shorter part becomes a new run."""
        parent, masks = run.parent, run.masks
        assert parent is not None
        if place * 2 < len(run.blocks):
            head = BlockRun(run.blocks[:place], run.depth, parent, masks)
            del run.blocks[:place]
            run.depth += place
            run.parent, head.children[run.blocks[0]] = head, run
            return self._add(head), run
        tail = BlockRun(run.blocks[place:], run.depth + place, run, masks)
        del run.blocks[place:]
        tail.children, run.children = run.children, {}
        for child in tail.children.values():
            child.parent = tail
        return run, self._add(tail)

    def _tidy(self, run: BlockRun) -> None:
        """Remove a run without holders and children. Join any other run with its parent and its only child, if possible."""
        if run.masks == NO_HOLDERS and not run.children:
            self._cut(run, 0)
            return
        if len(run.children) == 1:
            run = self._join(run, next(iter(run.children.values())))
        if run.parent is not None and len(run.parent.children) == 1:
            self._join(run.parent, run)

    def _cut(self, run: BlockRun, place: int) -> None:
        """Drop the blocks of a run from `place` on. These blocks must have no holders and no successors."""
        first = run.blocks[0]
        for block in run.blocks[place:]:
            del self._runs[block]
        del run.blocks[place:]
        if not run.blocks:
            self._unlink(run, first)

    def _unlink(self, run: BlockRun, first: int) -> None:
        """Remove an empty run from the tree. `first` was its first block."""
        parent = run.parent
        assert parent is not None
        del parent.children[first]
        self._all.discard(run)
        if parent is not self._root:
            self._tidy(parent)

    def _join(self, run: BlockRun, child: BlockRun) -> BlockRun:
        """Join a run with its only child if both have the same holders.

        Return the run that then contains the blocks of `run`.
        """
        if run is self._root or run.masks != child.masks or len(run.children) != 1:
            return run
        if len(child.blocks) <= len(run.blocks):
            kept, dead = run, child
            self._runs.update(dict.fromkeys(child.blocks, run))
            run.blocks += child.blocks
            run.children = child.children
            for grandchild in run.children.values():
                grandchild.parent = run
        else:
            kept, dead = child, run
            assert run.parent is not None
            self._runs.update(dict.fromkeys(run.blocks, child))
            child.blocks[:0] = run.blocks
            child.depth, child.parent = run.depth, run.parent
            run.parent.children[child.blocks[0]] = child
        dead.blocks = []
        dead.children = {}
        self._all.discard(dead)
        return kept
