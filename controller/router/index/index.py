"""Which worker holds which KV blocks, and how much of a prompt does each of them have?

A radix tree of *runs*, and one map from block to run.

    block   the hash of a whole prefix (`events.blocks`): it names the block and every block before it
    run     consecutive blocks that the same workers hold; a bit mask for each tier says which
    tree    a run's children begin right after its last block

A look-up walks runs, not blocks: if the last block of a run is the prompt's at that depth, so are all before it. A run is
split where its blocks cease to have the same holders, and joined with its only child where they have them again.

Only what is contiguous from the first block on counts. A hole (a block that was removed before those behind it) ends a
worker's match; what lies behind it counts again when it is filled.

What a look-up has found is kept as groups: among a thousand workers most have the same, the beginning that all prompts share.
Holders are named one by one only where they are asked for by name.

One task owns it: there are no locks, and no call waits.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import msgspec

from controller.router.endpoints import Key, WorkerRank
from events.kv import Tier

_GROUPS_MAX = 4096  # so many sets of holders are kept as names
Masks = tuple[int, int, int]  # the holders of the blocks on each tier: a bit for each
NO_HOLDERS: Masks = (0, 0, 0)


class BlockRun:
    """Consecutive blocks with the same holders. A run that has been joined to another, or removed, has no blocks."""

    __slots__ = ("blocks", "children", "depth", "masks", "parent")

    def __init__(self, blocks: list[int], depth: int, parent: "BlockRun | None", masks: Masks) -> None:
        self.blocks = blocks
        self.depth = depth  # of its first block; 0 where prompts begin
        self.parent = parent
        self.masks = masks
        self.children: dict[int, BlockRun] = {}  # by their first block

    def place(self, block: int) -> int:
        """Return where in the run a block of it lies. Most often it is the last."""
        return len(self.blocks) - 1 if self.blocks[-1] == block else self.blocks.index(block)


def with_bit(masks: Masks, bit: int, tier: Tier) -> Masks:
    """Return the masks with a holder on a tier."""
    device, host, disk = masks
    if tier is Tier.DEVICE:
        return device | bit, host, disk
    return (device, host | bit, disk) if tier is Tier.HOST else (device, host, disk | bit)


def without_bit(masks: Masks, bit: int, tier: Tier) -> Masks:
    """Return the masks without a holder on a tier."""
    device, host, disk = masks
    if tier is Tier.DEVICE:
        return device & ~bit, host, disk
    return (device, host & ~bit, disk) if tier is Tier.HOST else (device, host, disk & ~bit)


def only(masks: Masks, kept: int) -> Masks:
    """Return the masks with no other holders than these."""
    return masks[0] & kept, masks[1] & kept, masks[2] & kept


def common(own: Sequence[int], first: int, others: Sequence[int], start: int) -> int:
    """Return how many blocks are the same from two places on. Where one is, so are all before it."""
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
    """Return the first place in a run, and the number, of the blocks that come together from `position` on."""
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
    """Yield the numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Depths(Mapping[WorkerRank, int]):
    """How many blocks each holder has; a holder without any is missing. A mapping that is made when it is first looked into."""

    __slots__ = ("_made", "groups")

    def __init__(self, groups: Sequence[tuple[tuple[WorkerRank, ...], int]]) -> None:
        self.groups = (
            groups  # how much each has, the deepest last; of a holder that is in several the last one holds
        )
        self._made: dict[WorkerRank, int] | None = None

    def named(self) -> dict[WorkerRank, int]:
        """Return the same as a plain one."""
        made = self._made
        if made is None:
            groups = self.groups
            made = self._made = dict.fromkeys(*groups[0]) if groups else {}
            for group, depth in groups[1:]:
                made.update(dict.fromkeys(group, depth))
        return made

    def deepest(self, keys: Container[Key]) -> int:
        """Return the most that any DP rank of these workers has. No holder is named for it."""
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
    """How many blocks of a prompt each holder has, from the first on, by how far one is willing to fetch them from.

    `device` counts what lies on the device; `host` what lies there or in the host's memory, `disk` everything. A holder that has
    nothing is missing. Without slower tiers all three are the same mapping.
    """

    device: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    host: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)
    disk: Mapping[WorkerRank, int] = msgspec.field(default_factory=dict)

    def scaled(self, factor: float) -> "Matches":
        """Return the same in blocks of another size: each counts `factor` of those."""
        tiers = (self.device, self.host, self.disk)
        return Matches(*({holder: int(count * factor) for holder, count in tier.items()} for tier in tiers))


class Misplaced(ValueError):
    """Blocks that cannot lie where they were said to: after a block that this holder does not have, or at another depth."""


class NoParent(Misplaced):
    """Blocks that were said to lie after a block that this holder does not have."""


class KvIndex:
    """Which blocks each holder has. A holder is whatever the caller takes for one: a rank of an instance of a worker."""

    def __init__(self) -> None:
        self._root = BlockRun([], 0, None, NO_HOLDERS)
        self._runs: dict[int, BlockRun] = {}  # by each of their blocks
        self._all: set[BlockRun] = set()
        self._bits: dict[WorkerRank, int] = {}
        self._holders: dict[int, WorkerRank] = {}  # by the number of their bit
        self._counts: dict[WorkerRank, int] = {}
        self._live = 0  # the bits that are a holder's
        self._gone = 0  # the bits that were a holder's, and still lie in masks
        self._sweeping: list[BlockRun] = []
        self._swept = 0  # the bits that the present sweep wipes out
        self._tiered = False
        self._groups: dict[int, tuple[WorkerRank, ...]] = {}

    def __len__(self) -> int:
        """Return how many different blocks are held."""
        return len(self._runs)

    def count(self, holder: WorkerRank) -> int:
        """Return how many blocks a holder has; one that lies on two tiers counts twice."""
        return self._counts.get(holder, 0)

    @property
    def holders(self) -> Iterable[WorkerRank]:
        """All that have ever stored anything, and were not forgotten."""
        return self._bits.keys()

    # --- what holders say ---------------------------------------------------------------------------------

    def store(
        self, holder: WorkerRank, parent: int | None, blocks: Sequence[int], tier: Tier = Tier.DEVICE
    ) -> None:
        """Take in that a holder has these blocks, the first right after `parent` (None: where prompts begin).

        Blocks that it has already change nothing. Raise NoParent if it does not have the parent, and change nothing;
        Misplaced if blocks lie elsewhere than their names say: those before them have been taken in.
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
        """Take in that a holder has these blocks no more. Return how many of them it did not have.

        Neighbours that come in the order of the prompt, or against it, are taken together.
        """
        bit, missing, position = self._bits.get(holder, 0), 0, 0
        while position < len(blocks):
            run = self._runs.get(blocks[position])
            if run is None or not run.masks[tier] & bit:
                missing, position = missing + 1, position + 1
                continue
            first, size = stretch(run, blocks, position)
            position += size
            self._counts[holder] -= size
            masks = without_bit(run.masks, bit, tier)
            if masks == NO_HOLDERS and first + size == len(run.blocks) and not run.children:
                self._cut(run, first)
                continue
            one = self._isolate(run, first, first + size)
            one.masks = masks
            self._tidy(one)
        return missing

    def forget(self, holder: WorkerRank) -> None:
        """Take in that a holder is gone, or has cleared its cache. It is out of every match at once; `sweep` frees the
        memory."""
        bit = self._bits.pop(holder, 0)
        self._counts.pop(holder, None)
        if bit:
            self._holders.pop(bit.bit_length() - 1)
            self._live &= ~bit
            self._gone |= bit
            self._groups.clear()

    def sweep(self, limit: int = 1000) -> bool:
        """Free what holders had that are gone, `limit` runs at a time. Return whether there is more to do."""
        if not self._sweeping:
            if not self._gone:
                return False
            self._sweeping, self._swept = list(self._all), self._gone
        for run in self._sweeping[-limit:]:
            if run.blocks:
                run.masks = only(run.masks, ~self._swept)
                self._tidy(run)
        del self._sweeping[-limit:]
        if not self._sweeping:
            self._gone &= ~self._swept
            self._swept = 0
        return bool(self._gone)

    # --- what routers ask ---------------------------------------------------------------------------------

    def find(self, blocks: Sequence[int]) -> Matches:
        """Return how many of a prompt's blocks each holder has."""
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
            mask = (
                masks[0]
                if tiers == 1
                else masks[0] | masks[1]
                if tiers == 2
                else masks[0] | masks[1] | masks[2]
            )
            here = alive & mask
            if here != alive:
                if depth:
                    # Where most of them end, all are told of: that set is the same for many prompts, and so is its name
                    # at hand; whoever goes on is told of once more.
                    gone = alive ^ here
                    told = gone if gone.bit_count() * 2 < alive.bit_count() else alive
                    found.append((self._group(told), depth))
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
        """Yield what `store` would have to be told for everything that a holder has, in such an order."""
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
        """Return the holders of these bits."""
        group = self._groups.get(mask)
        if group is None:
            if len(self._groups) >= _GROUPS_MAX:
                self._groups.clear()
            group = self._groups[mask] = tuple(self._holders[place] for place in places(mask))
        return group

    def _after(self, bit: int, parent: int | None) -> tuple[BlockRun, int]:
        """Return the run that a block lies in, and the depth right after it."""
        if parent is None:
            return self._root, 0
        run = self._runs.get(parent)
        if run is None or not (run.masks[0] | run.masks[1] | run.masks[2]) & bit:
            raise NoParent(f"block {parent} is not held there")
        return run, run.depth + run.place(parent) + 1

    def _grow(self, run: BlockRun, depth: int, blocks: list[int], tier: Tier, bit: int) -> None:
        """Add blocks without holders behind the block at `depth` - 1, which lies in `run`."""
        if not self._runs.keys().isdisjoint(blocks) or len(set(blocks)) < len(blocks):
            raise Misplaced(f"some of the {len(blocks)} blocks after {blocks[0]} lie elsewhere, or twice")
        if run is not self._root and depth < run.depth + len(run.blocks):
            run = self._split(run, depth - run.depth)[0]
        new = self._add(BlockRun(blocks, depth, run, with_bit(NO_HOLDERS, bit, tier)))
        self._join(run, new)

    def _mark(self, run: BlockRun, first: int, end: int, tier: Tier, bit: int) -> BlockRun:
        """Let a holder have some blocks of a run too. Return the run in which the last of them lies then."""
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
        if self._sweeping:  # it may be a part of one that is still to be swept
            self._sweeping.append(run)
        return run

    def _isolate(self, run: BlockRun, first: int, end: int) -> BlockRun:
        """Return a run of exactly these blocks of a run."""
        if end < len(run.blocks):
            run = self._split(run, end)[0]
        return self._split(run, first)[1] if first else run

    def _split(self, run: BlockRun, place: int) -> tuple[BlockRun, BlockRun]:
        """Cut a run in two before one of its blocks. The shorter part becomes a new run."""
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
        """See whether a run whose holders have changed is still needed, and whether it can be joined with its neighbours."""
        if run.masks == NO_HOLDERS and not run.children:
            self._cut(run, 0)
            return
        if len(run.children) == 1:
            run = self._join(run, next(iter(run.children.values())))
        if run.parent is not None and len(run.parent.children) == 1:
            self._join(run.parent, run)

    def _cut(self, run: BlockRun, place: int) -> None:
        """Drop a run's blocks from one on: they have no holders, and nothing comes after them."""
        first = run.blocks[0]
        for block in run.blocks[place:]:
            del self._runs[block]
        del run.blocks[place:]
        if not run.blocks:
            self._unlink(run, first)

    def _unlink(self, run: BlockRun, first: int) -> None:
        """Take an empty run, which began with `first`, off the tree."""
        parent = run.parent
        assert parent is not None
        del parent.children[first]
        self._all.discard(run)
        if parent is not self._root:
            self._tidy(parent)

    def _join(self, run: BlockRun, child: BlockRun) -> BlockRun:
        """Make a run and a child one, if the same hold them and it is its only one. Return where the run's blocks lie then."""
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
