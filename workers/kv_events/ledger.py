"""What has one rank said about its KV blocks, and what does it hold? From that, every question of a frontend is answered.

    events of a step ──▶ numbered, and encoded once ──▶ published, and kept in a ring of recent ones
                   └──▶ the rank's own index ──▶ a dump, in parts

What frontends would refuse is refused here, before it has a number: blocks after one that the rank does not have, or at two
places. So an index that has taken in every event holds exactly what this one does.

The index is a map from block to the one before it, in the order in which they came, so that a dump needs no search: every
block comes after the one before it. A block that was removed while blocks behind it are still held leaves a hole. Its name
is needed for their sake; a dump therefore stores it, and removes it at the end.
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
    """How much is said at once, and how much is kept."""

    event_blocks: int = 4096  # a longer event is said in several
    part_bytes: int = 64 * 1024  # of a message; a longer one would hold up those of all others
    part_blocks: int = 4096  # of a dump
    ring_bytes: int = 128 * 1024  # what is missing for longer than that costs less as a dump
    dumps: int = 4  # that are being asked for, part by part
    dump_s: float = 10.0  # so long is each of them kept
    shared_s: float = 1.0  # a frontend gets one that was made for another so lately
    holes: int = 1024  # beyond as many as blocks, before those that nobody needs are looked for


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a rank held after all events before `next`."""

    next: int
    at: float
    blocks: list[int]
    parents: list[int | None]
    tiers: dict[int, int]  # of those that do not lie on the device alone: a bit for each
    holes: list[int]
    part_blocks: int

    @property
    def parts(self) -> int:
        return max(1, -(-len(self.blocks) // self.part_blocks) + -(-len(self.holes) // self.part_blocks))

    def part(self, number: int) -> bytes:
        """Return one part of the dump, encoded."""
        whole = -(-len(self.blocks) // self.part_blocks)
        if number < whole:
            events = list(self._stored(number * self.part_blocks))
        else:
            first = (number - whole) * self.part_blocks
            events = [Removed(self.holes[first : first + self.part_blocks])] if self.holes else []
        return kv.encode(kv.Dump(self.next, number, self.parts, events))

    def _stored(self, first: int) -> Iterator[KvEvent]:
        """Yield stretches of blocks that follow each other on the same tiers."""
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

    def _tiers(self, place: int) -> int:
        return self.tiers.get(self.blocks[place], _HELD) or _HELD  # a hole is filled first


class KvEventLedger:
    """One rank of one life of a worker."""

    __slots__ = (
        "_bounds",
        "_bytes",
        "_holes",
        "_holes_max",
        "_parents",
        "_part_blocks",
        "_ring",
        "_snapshots",
        "_tiers",
        "next",
        "refused",
    )

    def __init__(self, bounds: LedgerBounds | None = None) -> None:
        self._bounds = bounds or LedgerBounds()
        self.next = 0  # the id of the next event
        self.refused = 0  # events that contradict what was said before
        self._ring: deque[bytes] = deque()  # the last events, encoded
        self._bytes = 0  # in it
        self._parents: dict[int, int | None] = {}  # the block before each that is held, or a hole
        self._tiers: dict[int, int] = {}  # of those that do not lie on the device alone; holes lie nowhere
        self._holes = 0
        self._holes_max = self._bounds.holes
        self._snapshots: dict[int, _Snapshot] = {}

    def __len__(self) -> int:
        """Return how many blocks the rank holds."""
        return len(self._parents) - self._holes

    @property
    def held(self) -> list[int]:
        """The blocks that the rank holds, each after the one before it."""
        return [block for block in self._parents if self._lies(block)]

    @property
    def kept(self) -> int:
        """How many of the last events are kept for who has missed them."""
        return len(self._ring)

    @property
    def holes(self) -> int:
        """How many blocks are known that are not held, because others lie behind them."""
        return self._holes

    @property
    def dumps(self) -> int:
        """How many dumps are kept whose parts are still to be asked for."""
        return len(self._snapshots)

    # --- what the engine says

    def say(self, events: Sequence[KvEvent]) -> tuple[int, list[bytes]]:
        """Take in what a step has changed. Return the id of the first event, and all of them encoded."""
        first, said = self.next, []
        for event in events:
            for one in self._taken(event):
                said.append(kv.encode(one))
                self._keep(said[-1])
        self.next += len(said)
        return first, said

    def _taken(self, event: KvEvent) -> Iterator[KvEvent]:
        """Take one event in. Yield what there is to say of it: nothing if nothing has changed."""
        if isinstance(event, Cleared):
            self._parents, self._tiers = {}, {}
            self._holes, self._holes_max = 0, self._bounds.holes
            yield event
            return
        if not 0 <= event.tier < len(Tier):
            self.refused += 1
            return
        bit, most = 1 << event.tier, self._bounds.event_blocks
        if isinstance(event, Removed):
            blocks = [block for block in dict.fromkeys(event.blocks) if self._lies(block) & bit]
            self._remove(blocks, bit)
            for place in range(0, len(blocks), most):
                yield Removed(blocks[place : place + most], event.tier)
            return
        blocks, parent = event.blocks, event.parent
        if not self._fit(blocks, parent):
            self.refused += 1
            return
        if self._store(blocks, parent, bit):
            for place in range(0, len(blocks), most):
                yield Stored(blocks[place : place + most], parent, event.tier)
                parent = blocks[min(place + most, len(blocks)) - 1]

    def _lies(self, block: int) -> int:
        """Return on which tiers a block lies: a bit for each."""
        return self._tiers.get(block, _HELD) if block in self._parents else 0

    def _fit(self, blocks: Sequence[int], parent: int | None) -> bool:
        """Return whether blocks can lie there: after a block that is held, and where they lie already."""
        if (parent is not None and not self._lies(parent)) or len(set(blocks)) < len(blocks):
            return False
        for block in blocks:
            if self._parents.get(block, parent) != parent:
                return False
            parent = block
        return True

    def _store(self, blocks: Sequence[int], parent: int | None, bit: int) -> bool:
        """Add blocks. Return whether any of them was not there."""
        changed = False
        for block in blocks:
            lay = self._lies(block)
            if not lay & bit:
                changed = True
                self._holes -= block in self._parents and not lay
                self._parents[block] = parent
                self._lay(block, lay | bit)
            parent = block
        return changed

    def _remove(self, blocks: Sequence[int], bit: int) -> None:
        for block in blocks:
            lies = self._lies(block) & ~bit
            self._lay(block, lies)
            self._holes += not lies
        if self._holes > self._holes_max:
            self._prune()

    def _lay(self, block: int, tiers: int) -> None:
        if tiers == _HELD:
            self._tiers.pop(block, None)
        else:
            self._tiers[block] = tiers

    def _prune(self) -> None:
        """Drop the holes that no held block lies behind."""
        if not self._holes:
            return
        parents, tiers = self._parents, self._tiers
        dead = {block for block, lies in tiers.items() if not lies}
        for block in parents.keys() - dead:
            before = parents[block]
            while before is not None and before in dead:
                dead.discard(before)
                before = parents[before]
        for block in dead:
            del parents[block], tiers[block]
        self._holes -= len(dead)
        self._holes_max = self._bounds.holes + self._holes + len(self) // 2

    # --- what frontends ask

    def _keep(self, event: bytes) -> None:
        self._ring.append(event)
        self._bytes += len(event)
        while self._bytes > self._bounds.ring_bytes:
            self._bytes -= len(self._ring.popleft())

    @property
    def _oldest(self) -> int:
        """The id of the oldest event that is kept, or of the next if none is."""
        return self.next - len(self._ring)

    def answer(self, ask: KvRequest, now: float) -> bytes:
        """Return the answer to a frontend's question, encoded."""
        if ask.dump is not None:
            snapshot = self._snapshots.get(ask.dump)
            if snapshot is None or not 0 <= ask.part < snapshot.parts:
                return kv.encode(KvRefused(f"there is no part {ask.part} of a dump {ask.dump} any more"))
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
        """Return kept events from one on: as many as fit, at least one."""
        found: list[msgspec.Raw] = []
        size, oldest = 0, self._oldest
        end = self.next if last is None else min(last + 1, self.next)
        for event in islice(self._ring, first - oldest, end - oldest):
            size += len(event)
            if found and size > self._bounds.part_bytes:
                break
            found.append(msgspec.Raw(event))
        return found

    def _dump(self, now: float) -> bytes:
        """Return the first part of a dump; the others are asked for."""
        self.tidy(now)
        for snapshot in self._snapshots.values():
            if now - snapshot.at < self._bounds.shared_s and snapshot.next >= self._oldest:
                return snapshot.part(0)
        self._prune()
        tiers = dict(self._tiers)
        holes = [block for block, lies in tiers.items() if not lies]
        fresh = _Snapshot(
            self.next,
            now,
            list(self._parents),
            list(self._parents.values()),
            tiers,
            holes,
            self._bounds.part_blocks,
        )
        if fresh.parts > 1:
            self._snapshots[fresh.next] = fresh
            while len(self._snapshots) > self._bounds.dumps:
                del self._snapshots[next(iter(self._snapshots))]
        return fresh.part(0)

    def tidy(self, now: float) -> None:
        """Drop dumps that nobody asks for any more."""
        for number in [
            n for n, snapshot in self._snapshots.items() if now - snapshot.at > self._bounds.dump_s
        ]:
            del self._snapshots[number]
