"""Numbers the KV events of one rank, tracks its cached KV blocks, and answers frontends' requests.

    events of a step ──▶ numbered, and encoded once ──▶ published, and kept in a ring of recent ones
                   └──▶ the rank's own index ──▶ a dump, in parts

A frontend that has missed events fetches them from the ring. If the ring no longer has them, the frontend fetches a dump. A
dump is a list of events that creates the rank's current blocks in an empty index.

Events that frontends would refuse are refused before they get a number. An event that stores blocks is refused in three cases:

- the parent block is not in the cache;
- the event contains a block twice;
- the index already has one of the blocks, with another parent.

Frontends therefore refuse no numbered event. A frontend that has applied every event has exactly the same blocks as the rank.

The index maps each block to its parent, which is the block before it in a sequence. The index keeps blocks in the order of
their arrival. A dump in this order needs no search, because every block comes after its parent. A block that is removed while
its children are still cached leaves a hole. Because a hole is the parent of other blocks, a dump stores it like a block and
removes it at the end.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from events import kv
from events.kv import Cleared, InvalidRange, KvEvent, KvRefused, KvRequest, Removed, Stored, Tier, TooNew

_HELD = 1 << Tier.DEVICE


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerBounds:
    """Limits on the size of published messages, the ring of recent events, and dumps."""

    event_blocks: int = 4096  # maximum number of blocks in an event; a longer event is split
    part_bytes: int = 64 * 1024  # maximum size of a message; a longer one would delay other workers' messages
    part_blocks: int = 4096  # blocks per part of a dump
    ring_bytes: int = 128 * 1024  # size of the ring of recent events; for older events a dump is cheaper
    dumps: int = 4  # maximum number of dumps that are being fetched
    dump_s: float = 10.0  # seconds for which a dump is kept
    # maximum age in seconds of a dump that is sent to another frontend instead of a new one
    shared_s: float = 1.0
    holes: int = 1024  # number of additional holes after which unneeded holes are searched and removed


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A dump: the blocks that a rank had after all events with an id below `next`."""

    next: int
    at: float  # loop time of its creation, in seconds
    blocks: list[int]  # cached blocks and holes, each after its parent
    parents: list[int | None]  # the parent of each block
    tiers: dict[int, int]  # tiers of a block, one bit per tier; blocks on the device alone are not listed
    holes: list[int]
    part_blocks: int  # maximum number of blocks in a part

    @property
    def parts(self) -> int:
        return max(1, -(-len(self.blocks) // self.part_blocks) + -(-len(self.holes) // self.part_blocks))

    def part(self, number: int) -> bytes:
        """Return the encoded part `number` of the dump."""
        whole = -(-len(self.blocks) // self.part_blocks)
        if number < whole:
            events = list(self._stored(number * self.part_blocks))
        else:
            first = (number - whole) * self.part_blocks
            events = [Removed(self.holes[first : first + self.part_blocks])] if self.holes else []
        return kv.encode(kv.Dump(self.next, number, self.parts, events))

    def _stored(self, first: int) -> Iterator[KvEvent]:
        """Yield events that store up to `part_blocks` blocks, starting at index `first`.

        Consecutive blocks of a sequence that are on the same storage tiers form one event for each of those tiers.
        """
        blocks, parents = self.blocks, self.parents
        end = min(first + self.part_blocks, len(blocks))
        while first < end:
            own, last = self._tiers(first), first + 1
            while last < end and parents[last] == blocks[last - 1] and self._tiers(last) == own:
                last += 1
            for tier in Tier:
                if own >> tier & 1:
                    yield Stored(blocks[first:last], parents[first], tier)
            first = last

    def _tiers(self, index: int) -> int:
        # a hole is on no tier, and is dumped as stored
        return self.tiers.get(self.blocks[index], _HELD) or _HELD


class KvEventLedger:
    """Numbers and keeps the KV events of one rank of a worker instance, and answers frontends' requests for them."""

    def __init__(self, bounds: LedgerBounds | None = None) -> None:
        self._bounds = bounds or LedgerBounds()
        self.next = 0  # the id of the next event
        self.refused = 0  # number of events that were refused because they contradict earlier ones
        self.ring: deque[bytes] = deque()  # the most recent events, encoded
        self._bytes = 0  # size of the ring
        self._parents: dict[int, int | None] = {}  # the parent of each cached block and each hole
        self._tiers: dict[int, int] = {}  # tiers of blocks that are not on the device alone; 0 for a hole
        # number of removed blocks that are still known because they may be parents of cached blocks
        self.holes = 0
        self._holes_max = self._bounds.holes
        # dumps that are kept so that frontends can fetch their further parts, by the id of the next event
        self.snapshots: dict[int, _Snapshot] = {}

    def __len__(self) -> int:
        """Return the number of blocks in the rank's cache. Holes (removed blocks with cached descendants) do not count."""
        return len(self._parents) - self.holes

    @property
    def held(self) -> list[int]:
        """The blocks in the rank's cache, each after its parent."""
        return [block for block in self._parents if self._tiers_of(block)]

    # --- events from the engine

    def record(self, events: Sequence[KvEvent]) -> tuple[int, list[bytes]]:
        """Apply the events of an engine step.

        Return the id of the first event to publish, and the encoded events, numbered consecutively from that id. The list is
        empty if there is nothing to publish.
        """
        first, encoded = self.next, []
        for event in events:
            for one in self._apply(event):
                encoded.append(kv.encode(one))
                self._keep(encoded[-1])
        self.next += len(encoded)
        return first, encoded

    def _apply(self, event: KvEvent) -> Iterator[KvEvent]:
        """Apply one event, and yield the events to publish.

        Yield nothing if `event` is refused. Also yield nothing for a `Stored` event without a block that is new on its tier, and
        for a `Removed` event without a block that is on its tier.
        """

        if isinstance(event, Cleared):
            self._parents, self._tiers = {}, {}
            self.holes, self._holes_max = 0, self._bounds.holes
            yield event
            return
        if not 0 <= event.tier < len(Tier):
            self.refused += 1
            return
        bit, most = 1 << event.tier, self._bounds.event_blocks
        if isinstance(event, Removed):
            blocks = [block for block in dict.fromkeys(event.blocks) if self._tiers_of(block) & bit]
            self._remove(blocks, bit)
            for index in range(0, len(blocks), most):
                yield Removed(blocks[index : index + most], event.tier)
            return
        blocks, parent = event.blocks, event.parent
        if not self._fit(blocks, parent):
            self.refused += 1
            return
        if self._store(blocks, parent, bit):
            for index in range(0, len(blocks), most):
                yield Stored(blocks[index : index + most], parent, event.tier)
                parent = blocks[min(index + most, len(blocks)) - 1]

    def _tiers_of(self, block: int) -> int:
        """Return the storage tiers (device, host, disk) that hold a block, one bit per tier; 0 if none holds it."""
        return self._tiers.get(block, _HELD) if block in self._parents else 0

    def _fit(self, blocks: Sequence[int], parent: int | None) -> bool:
        """Return whether consecutive blocks can be stored after `parent`.

        The parent must be in the cache, or None for the start of a sequence. No block may occur twice, and no block may be in
        the index with another parent.
        """
        if (parent is not None and not self._tiers_of(parent)) or len(set(blocks)) < len(blocks):
            return False
        for block in blocks:
            if self._parents.get(block, parent) != parent:
                return False
            parent = block
        return True

    def _store(self, blocks: Sequence[int], parent: int | None, bit: int) -> bool:
        """Store consecutive blocks after `parent` on one storage tier, which `bit` stands for.

        Return whether any of the blocks was not on that tier before.
        """
        changed = False
        for block in blocks:
            before = self._tiers_of(block)
            if not before & bit:
                changed = True
                self.holes -= block in self._parents and not before
                self._parents[block] = parent
                self._set_tiers(block, before | bit)
            parent = block
        return changed

    def _remove(self, blocks: Sequence[int], bit: int) -> None:
        for block in blocks:
            tiers_left = self._tiers_of(block) & ~bit
            self._set_tiers(block, tiers_left)
            self.holes += not tiers_left
        if self.holes > self._holes_max:
            self._prune()

    def _set_tiers(self, block: int, tiers: int) -> None:
        if tiers == _HELD:
            self._tiers.pop(block, None)
        else:
            self._tiers[block] = tiers

    def _prune(self) -> None:
        """Remove the holes (removed blocks) from which no cached block descends any more."""
        if not self.holes:
            return
        parents, tiers = self._parents, self._tiers
        dead = {block for block, tiers_left in tiers.items() if not tiers_left}
        for block in parents.keys() - dead:
            before = parents[block]
            while before is not None and before in dead:
                dead.discard(before)
                before = parents[before]
        for block in dead:
            del parents[block], tiers[block]
        self.holes -= len(dead)
        self._holes_max = self._bounds.holes + self.holes + len(self) // 2

    # --- requests from frontends

    def _keep(self, event: bytes) -> None:
        self.ring.append(event)
        self._bytes += len(event)
        while self._bytes > self._bounds.ring_bytes:
            self._bytes -= len(self.ring.popleft())

    @property
    def _oldest(self) -> int:
        """The id of the oldest event in the ring; the id of the next event if the ring is empty."""
        return self.next - len(self.ring)

    def answer(self, ask: KvRequest, now: float) -> bytes:
        """Return the encoded answer to a frontend's request for events or for a part of a dump.

        If the requested events are no longer in the ring, the answer is the first part of a dump. `now` is the loop time.
        """
        if ask.dump is not None:
            snapshot = self.snapshots.get(ask.dump)
            if snapshot is None or not 0 <= ask.part < snapshot.parts:
                return kv.encode(KvRefused(f"part {ask.part} of dump {ask.dump} does not exist any more"))
            return snapshot.part(ask.part)
        if ask.first is None:
            return self._dump(now)
        if ask.first < 0 or (ask.last is not None and ask.last < ask.first):
            return kv.encode(InvalidRange(ask.first, -1 if ask.last is None else ask.last))
        if ask.first >= self.next:
            return kv.encode(TooNew(self.next))
        if ask.first < self._oldest:
            return self._dump(now)
        return kv.encode(["events", ask.first, self._range(ask.first, ask.last)])

    def _range(self, first: int, last: int | None) -> list[msgspec.Raw]:
        """Return the encoded events from `first` to `last` in the ring; None for `last` means up to the newest.

        If these events exceed the maximum size of a message, return only the first of them, but at least one.
        """
        found: list[msgspec.Raw] = []
        size, oldest = 0, self._oldest
        end = self.next if last is None else min(last + 1, self.next)
        for event in islice(self.ring, first - oldest, end - oldest):
            size += len(event)
            if found and size > self._bounds.part_bytes:
                break
            found.append(msgspec.Raw(event))
        return found

    def _dump(self, now: float) -> bytes:
        """Return the encoded first part of a recent dump, or of a new one. Frontends request the dump's other parts later."""
        self.tidy(now)
        for snapshot in self.snapshots.values():
            if now - snapshot.at < self._bounds.shared_s and snapshot.next >= self._oldest:
                return snapshot.part(0)
        self._prune()
        tiers = dict(self._tiers)
        holes = [block for block, tiers_left in tiers.items() if not tiers_left]
        blocks, parents = list(self._parents), list(self._parents.values())
        new = _Snapshot(self.next, now, blocks, parents, tiers, holes, self._bounds.part_blocks)
        if new.parts > 1:
            self.snapshots[new.next] = new
            while len(self.snapshots) > self._bounds.dumps:
                del self.snapshots[next(iter(self.snapshots))]
        return new.part(0)

    def tidy(self, now: float) -> None:
        """Drop the dumps that are older than `dump_s` at the loop time `now`."""
        oldest = now - self._bounds.dump_s
        self.snapshots = {number: one for number, one in self.snapshots.items() if one.at >= oldest}
