"""Which of the blocks that nobody uses goes first when room is needed?

    lru        the one that has been idle longest
    multi-lru  the one idle longest among those used least often: four classes, by how often a block came into use
    lineage    the one idle longest among those that nothing idle builds on: no block goes before what comes after it

The first two take the same time however many blocks there are; lineage takes the logarithm, because a block that
becomes a leaf again takes the place that its own idle time gives it.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Literal, Protocol

EvictorKind = Literal["lru", "multi-lru", "lineage"]
CLASSES = (2, 4, 8)  # a block that came into use so often is in the next class


class Evictor(Protocol):
    """The blocks that nobody uses, in the order in which they go. `parent` is the block before one, if there is any."""

    def __len__(self) -> int: ...

    def __contains__(self, block: object) -> bool: ...

    def insert(self, block: int, parent: int | None = None) -> None:
        """Take a block in that has just become idle. If it is here already, it is as if it came now."""
        ...

    def remove(self, block: int) -> bool:
        """Take a block out because it is used again. False: it is not here."""
        ...

    def evict(self) -> int | None:
        """Take out the block that goes first; None if there is none."""
        ...


class Lru:
    """The one that has been idle longest."""

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
    """Classes by how often a block came into use; within each, the one that has been idle longest.

    Uses are counted from a block's first idleness to its eviction; what comes back after that begins anew.
    """

    def __init__(self) -> None:
        self._classes = tuple(Lru() for _ in range(len(CLASSES) + 1))
        self._class_of: dict[int, int] = {}
        self.uses: dict[int, int] = {}  # also of blocks that are in use now

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
    """Leaves first: of the blocks that no idle block builds on, the one that has been idle longest."""

    def __init__(self) -> None:
        self._idle: dict[int, tuple[int, int | None]] = {}  # block -> (idle since, its parent)
        self._below: dict[int, int] = {}  # how many of those that are here build on it, itself here or not
        self._leaves: list[tuple[int, int]] = []  # a heap of (idle since, block), some no leaves any more
        self._now = 0

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, block: object) -> bool:
        return block in self._idle

    @property
    def remembered(self) -> int:
        """How many entries it keeps for its blocks, stale ones included."""
        return len(self._leaves) + len(self._below)

    def insert(self, block: int, parent: int | None = None) -> None:
        self.remove(block)
        self._now += 1
        self._idle[block] = self._now, parent
        if parent is not None:
            self._below[parent] = self._below.get(parent, 0) + 1
        if block not in self._below:
            self._add_leaf(block)

    def remove(self, block: int) -> bool:
        held = self._idle.pop(block, None)
        if held is None:
            return False
        parent = held[1]
        if parent is not None:
            self._below[parent] -= 1
            if not self._below[parent]:
                del self._below[parent]
                if parent in self._idle:
                    self._add_leaf(parent)
        return True

    def evict(self) -> int | None:
        while self._leaves:
            since, block = heappop(self._leaves)
            if self._is_leaf(since, block):
                self.remove(block)
                return block
        return None

    def _is_leaf(self, since: int, block: int) -> bool:
        held = self._idle.get(block)
        return held is not None and held[0] == since and block not in self._below

    def _add_leaf(self, block: int) -> None:
        heappush(self._leaves, (self._idle[block][0], block))
        if len(self._leaves) > 4 * len(self._idle) + 64:
            self._leaves = [leaf for leaf in set(self._leaves) if self._is_leaf(*leaf)]
            heapify(self._leaves)


_ABSENT = object()
_KINDS: Mapping[EvictorKind, Callable[[], Evictor]] = {"lru": Lru, "multi-lru": MultiLru, "lineage": Lineage}


def evictor(kind: EvictorKind) -> Evictor:
    """Return an empty evictor of this kind."""
    return _KINDS[kind]()
