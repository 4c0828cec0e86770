"""Where do blocks go that the device has no room for, and which of a prompt can be fetched back?

    device ── evicted ──▶ host ── its oldest, when it is full ──▶ disk ── its oldest, when it is full ──▶ absent
       ▲                   │                                        │
       └──── fetched ──────┴────────────────────────────────────────┘   the copy below stays, as the newest

A block lies on at most one of the two slower tiers. One whose prefix is nowhere any more is not kept: no prompt could be
served with it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from events.kv import KvEvent, Removed, Stored, Tier


class TierTraffic(NamedTuple):
    """Blocks that went between the tiers."""

    from_host: int = 0
    from_disk: int = 0
    to_host: int = 0
    to_disk: int = 0


class SlowTiers:
    """The host's memory and the disk, behind one rank's device."""

    def __init__(
        self,
        host_blocks: int,
        disk_blocks: int,
        say: Callable[[KvEvent], None],
        on_device: Callable[[int], bool],
    ) -> None:
        self._rooms = {Tier.HOST: host_blocks, Tier.DISK: disk_blocks}
        # The oldest first; each with its parent.
        self._held: dict[Tier, OrderedDict[int, int | None]] = {tier: OrderedDict() for tier in self._rooms}
        self._moved = dict.fromkeys(("from_host", "from_disk", "to_host", "to_disk"), 0)
        self._say = say
        self._on_device = on_device

    def __contains__(self, block: int) -> bool:
        return any(block in held for held in self._held.values())

    def count(self, tier: Tier) -> int:
        """Return how many blocks lie on a tier."""
        return len(self._held[tier])

    def blocks(self, tier: Tier) -> Sequence[int]:
        """Return the blocks of a tier, the oldest first."""
        return tuple(self._held[tier])

    def offload(self, block: int, parent: int | None) -> None:
        """Keep a block that the device gives up."""
        for held in self._held.values():
            if block in held:
                held.move_to_end(block)
                return
        tier = next(tier for tier, room in self._rooms.items() if room)
        self._put(tier, block, parent)

    def fetch(self, names: Sequence[int]) -> None:
        """Copy blocks to the device, in the order of their prompt. All of them lie here."""
        for name in reversed(names):  # a prefix outlives what builds on it
            tier = next(tier for tier, held in self._held.items() if name in held)
            self._held[tier].move_to_end(name)
            self._moved["from_host" if tier is Tier.HOST else "from_disk"] += 1

    def take_traffic(self) -> TierTraffic:
        """Return what went between the tiers since the last call."""
        moved = TierTraffic(**self._moved)
        if any(moved):
            self._moved = dict.fromkeys(self._moved, 0)
        return moved

    def clear(self) -> None:
        """Forget everything, and say nothing."""
        for held in self._held.values():
            held.clear()

    def _put(self, tier: Tier, block: int, parent: int | None) -> None:
        held = self._held[tier]
        while len(held) >= self._rooms[tier]:
            oldest, before = held.popitem(last=False)
            if tier is Tier.HOST and self._rooms[Tier.DISK]:
                self._put(Tier.DISK, oldest, before)
            self._say(Removed([oldest], tier))
        if not (parent is None or self._on_device(parent) or parent in self):
            return
        held[block] = parent
        self._moved["to_host" if tier is Tier.HOST else "to_disk"] += 1
        self._say(Stored([block], parent, tier))
