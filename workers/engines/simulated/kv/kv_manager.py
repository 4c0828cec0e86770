"""The KV blocks of one rank: which are in use, by how many requests, and which are only kept for what may come.

    absent ── use ──▶ active (counted) ── deref to 0 ──▶ inactive ── evicted ──▶ absent, or a slower tier
                        │    ▲                              │
                        │    └───────────── use ────────────┘
                        └── destroy ──▶ absent

A block is full, and named by its sequence hash (`events.blocks`), or partial: it fills, belongs to one request, and is
promoted when it is full. Partial blocks are numbers below 0, which no hash is. Active and inactive blocks together never
exceed the capacity. What becomes of full blocks is an event, as a real engine's: stored once for each stretch of new ones,
removed when blocks are evicted or destroyed; nothing is said when blocks come into use again or fall idle.
"""

from collections.abc import Sequence, Set

from events.kv import Cleared, KvEvent, Removed, Stored
from workers.engines.simulated.kv.evictors import EvictorKind, evictor
from workers.engines.simulated.kv.tiers import SlowTiers, TierTraffic

_NO_TRAFFIC = TierTraffic()


class KvManager:
    """The blocks of one rank."""

    def __init__(
        self, total: int, kind: EvictorKind = "lru", *, host_blocks: int = 0, disk_blocks: int = 0
    ) -> None:
        if total < 1:
            raise ValueError(f"a pool holds at least one block, not {total}")
        self.total = total
        self.heard = False  # whether anybody takes the events
        self.active: dict[int, int] = {}  # how many requests hold each
        self.inactive = evictor(kind)
        self._kind: EvictorKind = kind
        self._parents: dict[int, int | None] = {}  # of the full blocks that are active or inactive
        self._events: list[KvEvent] = []
        self._made = 0  # partial blocks so far
        self.slow: SlowTiers | None = None
        if host_blocks or disk_blocks:
            self.slow = SlowTiers(host_blocks, disk_blocks, self._say, self._parents.__contains__)

    @property
    def used(self) -> int:
        """Blocks that requests hold; what is only kept can be evicted and does not count."""
        return len(self.active)

    @property
    def named(self) -> Set[int]:
        """The full blocks on the device, in use or kept."""
        return self._parents.keys()

    def partials(self, count: int) -> list[int]:
        """Return names of so many blocks that nobody else can use. They are nowhere yet."""
        first = self._made = self._made + count
        return list(range(-first, count - first))

    def cached(self, names: Sequence[int]) -> int:
        """Return how many of the first of these blocks are on the device."""
        found, active, inactive = 0, self.active, self.inactive
        for name in names:
            if name not in active and name not in inactive:
                break
            found += 1
        return found

    def fetchable(self, names: Sequence[int]) -> int:
        """Return how many of the first of these blocks are on any tier."""
        if self.slow is None:
            return 0
        found = 0
        for name in names:
            if name not in self.slow and name not in self.active and name not in self.inactive:
                break
            found += 1
        return found

    def fetch(self, names: Sequence[int]) -> None:
        """Copy those of these blocks to the device that are on slower tiers only. They have to be taken with `use`."""
        if self.slow is not None and names:
            self.slow.fetch([name for name in names if name not in self.active and name not in self.inactive])

    def wanted(self, names: Sequence[int]) -> int:
        """Return how many blocks become active if these, which are on the device, are used."""
        return sum(name not in self.active for name in names)

    def use(self, blocks: Sequence[int], parent: int | None = None) -> bool:
        """Take blocks for a request, in the order of its sequence; the first comes right after `parent`. False, and
        nothing is taken, if there is no room for all of them.

        One that is active is held once more, an inactive one becomes active, an absent one takes the place of the
        inactive one that goes first.
        """
        active, inactive = self.active, self.inactive
        room = self.total - len(active)
        if len(blocks) > room and sum(block not in active for block in {*blocks}) > room:
            return False
        # All that is here is taken out of the evictor's reach first: making room for one block must not evict another.
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
        """Take one partial block; return its name, or 0 if there is no room for it. `use` of one, in a hurry."""
        active = self.active
        if len(active) >= self.total:
            return 0
        self._made += 1
        active[-self._made] = 1
        if len(active) + len(self.inactive) > self.total:
            self._evict(1)
        return -self._made

    def deref(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, in this order: of those that nobody holds then the full ones are idle, the first of them longest,
        and the partial ones are gone. Raise KeyError for one not in use."""
        active, parents, insert = self.active, self._parents, self.inactive.insert
        for block in blocks:
            left = active[block] - 1
            if left:
                active[block] = left
            else:
                del active[block]
                if block >= 0:
                    insert(block, parents[block])

    def destroy(self, blocks: Sequence[int]) -> None:
        """Drop blocks that are in use, whoever holds them. Raise KeyError for one that is not."""
        gone = []
        for block in blocks:
            del self.active[block]
            if block >= 0:
                del self._parents[block]
                gone.append(block)
        if gone:
            self._say(Removed(gone))

    def promote(self, partial: int, name: int, parent: int | None) -> None:
        """Name a block that has become full, right after `parent`.

        If the same block is here already, that one is used, and ours is free again. Raise KeyError if it is not in use."""
        active = self.active
        del active[partial]
        held = active.get(name)
        if held is not None:
            active[name] = held + 1
            return
        active[name] = 1
        if not self.inactive.remove(name):
            self._parents[name] = parent
            if self.heard:
                self._events.append(Stored([name], parent))

    def promote_all(self, partials: Sequence[int], names: Sequence[int], parent: int | None) -> None:
        """Name consecutive blocks that have become full together: one event for each stretch of new ones."""
        active, absent = self.active, []
        for partial, name in zip(partials, names, strict=True):
            del active[partial]
            held = active.get(name)
            active[name] = 1 if held is None else held + 1
            absent.append(held is None and not self.inactive.remove(name))
        self._store(names, absent, parent)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of all blocks of a request, its last one first: a prefix outlives what builds on it."""
        self.deref(blocks[::-1])

    def forget(self) -> dict[int, int]:
        """Let no block be found any more. Return what those in use are called now: partial ones, as many hold them as
        before."""
        full = [block for block in self.active if block >= 0]
        renamed = dict(zip(full, self.partials(len(full)), strict=True))
        self.active = {renamed.get(block, block): held for block, held in self.active.items()}
        self.inactive = evictor(self._kind)
        self._parents.clear()  # the slower tiers look here, too
        if self.slow is not None:
            self.slow.clear()
        self._events = [Cleared()] if self.heard else []
        return renamed

    def take_events(self) -> list[KvEvent]:
        """Return what has become of full blocks since the last call, in order."""
        if not self._events:
            return []
        said, self._events = self._events, []
        return said

    def take_traffic(self) -> TierTraffic:
        """Return what went between the tiers since the last call."""
        return self.slow.take_traffic() if self.slow is not None else _NO_TRAFFIC

    def _store(self, blocks: Sequence[int], absent: Sequence[bool], parent: int | None) -> None:
        """Remember whom the new ones of these blocks follow, and say each stretch of them."""
        new: list[int] = []
        after = parent  # what comes before the first of `new`
        for block, is_new in zip(blocks, absent, strict=True):
            if block < 0:
                continue
            if is_new:
                self._parents[block] = parent
                new.append(block)
            else:
                if new:
                    self._say(Stored(new, after))
                    new = []
                after = block
            parent = block
        if new:
            self._say(Stored(new, after))

    def _evict(self, count: int) -> None:
        gone, parents, evict = [], self._parents, self.inactive.evict
        for _ in range(count):
            block = evict()
            assert block is not None, "the room was counted before"
            parent = parents.pop(block)
            if self.slow is not None:
                self.slow.offload(block, parent)
            gone.append(block)
        self._say(Removed(gone))

    def _say(self, event: KvEvent) -> None:
        if self.heard:
            self._events.append(event)
