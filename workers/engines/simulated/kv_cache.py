"""The KV cache of one simulated rank: blocks, eviction order, and the slower tiers below the device.

The states of a block on the device, and the moves between the tiers:

    absent ── use ──▶ active (counted) ── deref to 0 ──▶ inactive ── evicted ──▶ absent, or a slower tier
                        │    ▲                              │
                        │    └───────────── use ────────────┘
                        └── destroy ──▶ absent

    device ── evicted ──▶ host ── its oldest, when it is full ──▶ disk ── its oldest, when it is full ──▶ absent
       ▲                   │                                        │
       └──── fetched ──────┴────────────────────────────────────────┘   the copy below stays, as the newest

An active block is held by at least one request, and counts the requests that hold it. An inactive block is held by no request,
but a request with the same prefix can use it. A block is identified by a number. A full block's number is its name, the sequence
hash (`events.blocks`). A partial block belongs to one request. Its number is negative, unlike any hash. When the block is full,
it is promoted, which means that it gets its name. Active and inactive blocks together never exceed the capacity.

Full blocks cause KV events, as in a real engine. `stored` is reported once for each run of consecutive new blocks, and `removed`
when blocks are evicted or destroyed. Reuse and release of a block cause no events.

A block is on at most one of the two slower tiers. When the device evicts a block, the block moves to a slower tier, if there is
one. If the preceding block of the sequence is on no tier, the evicted block is dropped instead. No prompt could use the evicted
block without the preceding one. An evictor selects the inactive block to evict:

    lru        the block that has been idle longest
    multi-lru  the block idle longest in the lowest class; four classes group the blocks by their number of uses
    lineage    the block idle longest among those without an idle child, so that children are evicted before their parent

The first two evictors take constant time per block. `lineage` takes logarithmic time, because a block that becomes a leaf again
must be sorted in by its idle time.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from events.kv import Cleared, KvEvent, Removed, Stored, Tier

EvictorKind = Literal["lru", "multi-lru", "lineage"]
CLASSES = (2, 4, 8)  # numbers of uses at which a block belongs to the next higher class of `multi-lru`
_ABSENT = object()


class Evictor(Protocol):
    """Keeps the idle blocks, and selects the next one to evict.

    A block's `parent` is the block before it in its sequence, or None for the first block.
    """

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def insert(self, block: int, parent: int | None = None) -> None:
        """Add a block that has become idle now. If the block was idle already, its idle time starts again at 0."""

    def remove(self, block: int) -> bool:
        """Remove a block because a request uses it again. Return False if the block was not idle."""

    def evict(self) -> int | None:
        """Remove and return the next block to evict. Return None if no block is idle."""


class Lru:
    """Evicts the block that has been idle longest."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: object) -> bool:
        return block in self._idle

    def insert(self, block: int, parent: int | None = None) -> None:
        idle = self._idle
        if block in idle:
            idle.move_to_end(block)
        else:
            idle[block] = None

    def remove(self, block: int) -> bool:
        return self._idle.pop(block, _ABSENT) is None

    def evict(self) -> int | None:
        return self._idle.popitem(last=False)[0] if self._idle else None


class MultiLru:
    """Evicts blocks of the class with the fewest uses first, and within a class the block that has been idle longest.

    The count of a block's uses starts with 1 when the block first becomes idle, and is dropped when the block is evicted.
    """

    def __init__(self) -> None:
        self._classes = tuple(Lru() for _ in range(len(CLASSES) + 1))
        self._class_of: dict[int, int] = {}
        self.uses: dict[int, int] = {}  # number of uses by block, also for blocks that are in use now

    def __len__(self) -> int:
        return len(self._class_of)

    def __contains__(self, block: object) -> bool:
        return block in self._class_of

    def insert(self, block: int, parent: int | None = None) -> None:
        before = self._class_of.get(block)
        if before is not None:
            self._classes[before].remove(block)
        uses = self.uses.setdefault(block, 1)
        place = self._class_of[block] = sum(uses >= least for least in CLASSES)
        self._classes[place].insert(block)

    def remove(self, block: int) -> bool:
        held = self._class_of.pop(block, None)
        if held is None:
            return False
        self.uses[block] += 1
        return self._classes[held].remove(block)

    def evict(self) -> int | None:
        for one in self._classes:
            if (block := one.evict()) is not None:
                del self._class_of[block], self.uses[block]
                return block
        return None


class Lineage:
    """Evicts the block that has been idle longest among the leaves, which are the idle blocks without an idle child."""

    def __init__(self) -> None:
        self._idle: dict[int, tuple[int, int | None]] = {}  # block -> (idle since, its parent)
        self.below: dict[int, int] = {}  # block, idle or not -> number of its idle children
        self.leaves: list[tuple[int, int]] = []  # a heap of (idle since, block); entries may be stale
        self._now = 0  # a clock that counts insertions

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: object) -> bool:
        return block in self._idle

    def insert(self, block: int, parent: int | None = None) -> None:
        self.remove(block)
        self._now += 1
        self._idle[block] = self._now, parent
        if parent is not None:
            self.below[parent] = self.below.get(parent, 0) + 1
        if block not in self.below:
            self._add_leaf(block)

    def remove(self, block: int) -> bool:
        held = self._idle.pop(block, None)
        if held is None:
            return False
        parent = held[1]
        if parent is not None:
            self.below[parent] -= 1
            if not self.below[parent]:
                del self.below[parent]
                if parent in self._idle:
                    self._add_leaf(parent)
        return True

    def evict(self) -> int | None:
        while self.leaves:
            since, block = heappop(self.leaves)
            if self._is_leaf(since, block):
                self.remove(block)
                return block
        return None

    def _is_leaf(self, since: int, block: int) -> bool:
        held = self._idle.get(block)
        return held is not None and held[0] == since and block not in self.below

    def _add_leaf(self, block: int) -> None:
        heappush(self.leaves, (self._idle[block][0], block))
        if len(self.leaves) > 4 * len(self._idle) + 64:
            self.leaves = [leaf for leaf in set(self.leaves) if self._is_leaf(*leaf)]
            heapify(self.leaves)


EVICTORS: Mapping[EvictorKind, Callable[[], Evictor]] = {
    "lru": Lru,
    "multi-lru": MultiLru,
    "lineage": Lineage,
}


class TierTraffic(NamedTuple):
    """Numbers of blocks that were copied from and to the slower tiers, host memory and disk."""

    from_host: int = 0
    from_disk: int = 0
    to_host: int = 0
    to_disk: int = 0


class SlowTiers:
    """The host memory and disk tiers below the device of one rank."""

    def __init__(
        self, host: int, disk: int, emit: Callable[[KvEvent], None], on_device: Callable[[int], bool]
    ) -> None:
        """Create empty tiers.

        Args:
            host: size of the host memory tier in blocks; 0: there is no such tier.
            disk: size of the disk tier in blocks; 0: there is no such tier.
            emit: called with each KV event of the tiers.
            on_device: returns whether a block is on the device.
        """
        self._rooms = {Tier.HOST: host, Tier.DISK: disk}
        # for each tier, its blocks with their parents, the oldest first
        self.held: dict[Tier, OrderedDict[int, int | None]] = {tier: OrderedDict() for tier in self._rooms}
        self._moved = dict.fromkeys(("from_host", "from_disk", "to_host", "to_disk"), 0)
        self._emit = emit
        self._on_device = on_device

    def __contains__(self, block: int) -> bool:
        return any(block in held for held in self.held.values())

    def offload(self, block: int, parent: int | None) -> None:
        """Copy a block to the fastest of the slower tiers, because the device is evicting the block.

        If a slower tier already has the block, nothing is copied, and the block becomes the newest one of that tier. `parent` is
        the block before this one in the sequence, or None. If `parent` is on no tier, the block is dropped instead.
        """
        for held in self.held.values():
            if block in held:
                held.move_to_end(block)
                return
        tier = next(tier for tier, room in self._rooms.items() if room)
        self._put(tier, block, parent)

    def fetch(self, names: Sequence[int]) -> None:
        """Record that these blocks are copied to the device. The slower tiers keep the blocks, as their newest ones.

        `names` are in the order of the prompt. All of the blocks must be on a slower tier.
        """
        for name in reversed(names):  # so that earlier blocks of the prompt are newer, and dropped later
            tier = next(tier for tier, held in self.held.items() if name in held)
            self.held[tier].move_to_end(name)
            self._moved["from_host" if tier is Tier.HOST else "from_disk"] += 1

    def take_traffic(self) -> TierTraffic:
        """Return the numbers of blocks copied from and to the tiers since the last call."""
        moved = TierTraffic(**self._moved)
        if any(moved):
            self._moved = dict.fromkeys(self._moved, 0)
        return moved

    def clear(self) -> None:
        """Drop all blocks without reporting KV events."""
        for held in self.held.values():
            held.clear()

    def _put(self, tier: Tier, block: int, parent: int | None) -> None:
        held = self.held[tier]
        while len(held) >= self._rooms[tier]:
            oldest, before = held.popitem(last=False)
            if tier is Tier.HOST and self._rooms[Tier.DISK]:
                self._put(Tier.DISK, oldest, before)
            self._emit(Removed([oldest], tier))
        if not (parent is None or self._on_device(parent) or parent in self):
            return
        held[block] = parent
        self._moved["to_host" if tier is Tier.HOST else "to_disk"] += 1
        self._emit(Stored([block], parent, tier))


_NO_TRAFFIC = TierTraffic()


class KvManager:
    """Manages the KV blocks of one rank: allocation, reuse, naming, eviction and KV events."""

    def __init__(
        self, total: int, kind: EvictorKind = "lru", *, host_blocks: int = 0, disk_blocks: int = 0
    ) -> None:
        if total < 1:
            raise ValueError(f"a pool holds at least one block, not {total}")
        self.total = total
        self.heard = False  # whether KV events are recorded, because a consumer reads them
        self.active: dict[int, int] = {}  # active block -> number of requests that hold it
        self.inactive = EVICTORS[kind]()
        self._kind: EvictorKind = kind
        # full block on the device, active or inactive -> its parent
        self.parents: dict[int, int | None] = {}
        self._events: list[KvEvent] = []
        self._made = 0  # number of partial blocks created so far
        self.slow: SlowTiers | None = None  # None: there are no slower tiers
        if host_blocks or disk_blocks:
            self.slow = SlowTiers(host_blocks, disk_blocks, self._emit, self.parents.__contains__)

    @property
    def used(self) -> int:
        """Number of blocks that requests hold. Inactive blocks do not count, because they can be evicted."""
        return len(self.active)

    def partials(self, count: int) -> list[int]:
        """Return unused numbers for `count` partial blocks. The caller must allocate the blocks by `use`."""
        first = self._made = self._made + count
        return list(range(-first, count - first))

    def cached(self, names: Sequence[int]) -> int:
        """Return how many consecutive blocks, counted from the first one in `names`, are on the device."""
        return sum(1 for _ in takewhile(self.parents.__contains__, names))

    def fetchable(self, names: Sequence[int]) -> int:
        """Return how many consecutive blocks, counted from the first one in `names`, are on the device or on a slower tier.

        Return 0 if there are no slower tiers.
        """
        slow, here = self.slow, self.parents
        return (
            0 if slow is None else sum(1 for _ in takewhile(lambda name: name in here or name in slow, names))
        )

    def fetch(self, names: Sequence[int]) -> None:
        """Copy each block in `names` that is only on a slower tier to the device.

        The caller must then allocate all blocks in `names` by `use`.
        """
        if self.slow is not None and names:
            self.slow.fetch([name for name in names if name not in self.parents])

    def count_activated(self, names: Sequence[int]) -> int:
        """Return how many blocks in `names` are inactive, so that `use` would activate them.

        All blocks in `names` must be on the device.
        """
        return sum(name not in self.active for name in names)

    def use(self, blocks: Sequence[int], parent: int | None = None) -> bool:
        """Allocate blocks for a request, in the order of its sequence. Return False if the device has no room for all.

        `parent` is the block before the first of `blocks`, or None. If a block is active already, one more request holds it. An
        inactive block becomes active. If the device is full, inactive blocks are evicted to make room for absent ones. If the
        result is False, nothing was allocated.
        """
        active, inactive = self.active, self.inactive
        room = self.total - len(active)
        if len(blocks) > room and sum(block not in active for block in {*blocks}) > room:
            return False
        # Remove reused blocks from the evictor first, so that an eviction for one of `blocks` cannot evict another one.
        absent = [False] * len(blocks)
        for place, block in enumerate(blocks):
            held = active.get(block)
            if held is not None:
                active[block] = held + 1
            else:
                absent[place] = not inactive.remove(block)
                active[block] = 1
        if (over := len(active) + len(inactive) - self.total) > 0:
            self._evict(over)
        self._store(blocks, absent, parent)
        return True

    def take(self) -> int:
        """Allocate one partial block and return its number. Return 0 if all blocks are active. This is a fast path of `use`."""
        active = self.active
        if len(active) >= self.total:
            return 0
        self._made += 1
        active[-self._made] = 1
        if len(active) + len(self.inactive) > self.total:
            self._evict(1)
        return -self._made

    def deref(self, blocks: Sequence[int]) -> None:
        """Release these blocks of a request, in the given order. Raise KeyError for a block that is not active.

        A block that no other request holds becomes inactive if it is full, and free if it is partial. A block that
        comes earlier in the list counts as idle for longer, so an LRU evictor evicts it sooner.
        """
        active, parents, insert = self.active, self.parents, self.inactive.insert
        for block in blocks:
            left = active[block] - 1
            if left:
                active[block] = left
            else:
                del active[block]
                if block >= 0:
                    insert(block, parents[block])

    def destroy(self, blocks: Sequence[int]) -> None:
        """Drop active blocks, whatever the number of requests that hold them. Raise KeyError for a block that is not active."""
        gone = []
        for block in blocks:
            del self.active[block]
            if block >= 0:
                del self.parents[block]
                gone.append(block)
        if gone:
            self._emit(Removed(gone))

    def promote(self, partial: int, name: int, parent: int | None) -> None:
        """Name a partial block that has become full. `parent` is the block before it, or None.

        If the device already has a block of this name, the request uses the existing block, and the partial block is freed. Raise
        KeyError if the partial block is not active.
        """
        active = self.active
        del active[partial]
        held = active.get(name)
        if held is not None:
            active[name] = held + 1
            return
        active[name] = 1
        if not self.inactive.remove(name):
            self.parents[name] = parent
            if self.heard:
                self._events.append(Stored([name], parent))

    def promote_all(self, partials: Sequence[int], names: Sequence[int], parent: int | None) -> None:
        """Give consecutive partial blocks their names, as `promote` does for one block.

        `parent` is the block before the first of them, or None. One KV event is recorded for each run of consecutive new blocks.
        """
        active, absent = self.active, []
        for partial, name in zip(partials, names, strict=True):
            del active[partial]
            held = active.get(name)
            active[name] = 1 if held is None else held + 1
            absent.append(held is None and not self.inactive.remove(name))
        self._store(names, absent, parent)

    def release(self, blocks: Sequence[int]) -> None:
        """Release all blocks of a request, the last one first, so that later blocks are evicted before earlier ones."""
        self.deref(blocks[::-1])

    def forget(self) -> dict[int, int]:
        """Remove the names of all blocks, so that later requests cannot reuse any block that is cached now.

        Active full blocks become partial blocks with new numbers, and stay with the requests that hold them. Inactive blocks and
        all blocks on slower tiers are dropped. Return the map from old to new numbers.
        """
        full = [block for block in self.active if block >= 0]
        renamed = dict(zip(full, self.partials(len(full)), strict=True))
        self.active = {renamed.get(block, block): held for block, held in self.active.items()}
        self.inactive = EVICTORS[self._kind]()
        self.parents.clear()  # the slower tiers share this map
        if self.slow is not None:
            self.slow.clear()
        self._events = [Cleared()] if self.heard else []
        return renamed

    def take_events(self) -> list[KvEvent]:
        """Return the KV events that were recorded since the last call, in order."""
        events, self._events = self._events, []
        return events

    def take_traffic(self) -> TierTraffic:
        """Return the numbers of blocks copied from and to the slower tiers since the last call."""
        return self.slow.take_traffic() if self.slow is not None else _NO_TRAFFIC

    def _store(self, blocks: Sequence[int], absent: Sequence[bool], parent: int | None) -> None:
        """Record the parent of each new block, and one KV event for each run of consecutive new blocks.

        `absent` tells for each block whether it is new.
        """
        new: list[int] = []
        after = parent  # the block before the first of `new`
        for block, is_new in zip(blocks, absent, strict=True):
            if block < 0:
                continue
            if is_new:
                self.parents[block] = parent
                new.append(block)
            else:
                if new:
                    self._emit(Stored(new, after))
                    new = []
                after = block
            parent = block
        if new:
            self._emit(Stored(new, after))

    def _evict(self, count: int) -> None:
        gone, parents, evict = [], self.parents, self.inactive.evict
        for _ in range(count):
            block = evict()
            assert block is not None, "the room was counted before"
            parent = parents.pop(block)
            if self.slow is not None:
                self.slow.offload(block, parent)
            gone.append(block)
        self._emit(Removed(gone))

    def _emit(self, event: KvEvent) -> None:
        if self.heard:
            self._events.append(event)
