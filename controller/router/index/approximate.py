"""Approximate prefix cache: assumes that prompts recently sent to a worker are cached there.

    sent ──▶ all blocks of the prompt are assumed cached ── ttl without a prompt that begins with them ──▶ dropped
                                                          └─ too many blocks in total: the oldest first ──▶ dropped

This cache is used for workers that do not publish KV events. A prompt is kept for another ttl when it is sent again, either
alone or as the beginning of a longer prompt. Of blocks that were last sent at the same time, those at the end of a prompt are
dropped first. So the remaining blocks are always a prefix.

A holder is a DP rank. The prompts sent to a holder form one tree, which branches where prompts differ. A node of the tree
is a piece (consecutive blocks). `find` does not use the trees, but a `KvIndex` of the same blocks.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from controller.router.endpoints import WorkerRank
from controller.router.index.index import KvIndex, Matches, common

TTL_S = 120.0
BLOCKS_MAX = 2**20
_DROPPED = 64  # pieces dropped per call; blocks sent in a burst also expire in a burst
_SWEPT = 100  # runs of the index that are freed per call after a holder has gone


@dataclass(slots=True, eq=False, repr=False)
class _SentBlocks:
    """A piece: consecutive blocks of one holder that were last sent together."""

    holder: WorkerRank
    blocks: Sequence[int]
    parent: "_SentBlocks | None"
    at: float
    children: dict[int, "_SentBlocks"] = field(default_factory=dict)  # child pieces by their first block


class ApproximateCache:
    """The blocks that were recently sent to each holder, and may still be cached there.

    If a `KvIndex` is used too, this cache covers the blocks that workers have not reported yet. The function `better` combines
    a result of the `KvIndex` with a result of this cache.
    """

    def __init__(self, *, ttl_s: float = TTL_S, blocks_max: int = BLOCKS_MAX) -> None:
        self._ttl_s = ttl_s
        self._blocks_max = blocks_max
        self._index = KvIndex()
        self._roots: dict[WorkerRank, _SentBlocks] = {}
        # least recently sent first, and children before parents
        self._order: OrderedDict[_SentBlocks, WorkerRank] = OrderedDict()
        self._blocks = 0
        self._due = float("-inf")  # nothing expires before this time
        self._unswept = False  # whether a holder has gone and some of its blocks are not freed yet

    def __len__(self) -> int:
        """Return the number of blocks that are assumed to be cached, over all holders."""
        return self._blocks

    @property
    def holders(self) -> Collection[WorkerRank]:
        """All holders with blocks that are assumed to be cached."""
        return self._roots.keys()

    @property
    def swept(self) -> bool:
        """Whether the blocks of all removed holders have been freed."""
        return not self._unswept

    def sent(self, holder: WorkerRank, blocks: Sequence[int], *, now: float) -> None:
        """Record that a prompt with these blocks is sent to a holder."""
        if not blocks:
            return
        if (root := self._roots.get(holder)) is None:
            root = self._roots[holder] = _SentBlocks(holder, (), None, now)
        before, path = self._blocks, self._path(root, blocks, now)
        for piece in reversed(path):
            piece.at = now
            self._order[piece] = holder
            self._order.move_to_end(piece)
        if self._blocks == before:
            return  # all blocks were known, and only their expiry has moved
        self._index.store(holder, None, blocks)
        self.expire(now=now)
        while self._blocks > self._blocks_max:
            oldest = next(iter(self._order))
            self._drop(oldest, min(len(oldest.blocks), self._blocks - self._blocks_max))

    def find(self, blocks: Sequence[int], *, now: float) -> Matches:
        """Return how many leading blocks of a prompt each holder is assumed to have cached."""
        self.expire(now=now)
        return self._index.find(blocks)

    def forget(self, holder: WorkerRank) -> None:
        """Drop a holder that no longer exists, with all its blocks."""
        root = self._roots.pop(holder, None)
        below = [root] if root is not None else []
        while below:
            piece = below.pop()
            below.extend(piece.children.values())
            if self._order.pop(piece, None) is not None:
                self._blocks -= len(piece.blocks)
        self._forget(holder)

    def _forget(self, holder: WorkerRank) -> None:
        self._index.forget(holder)
        self._unswept = True

    def expire(self, *, now: float) -> None:
        """Drop blocks that were last sent more than the ttl ago, and free the blocks of holders that have gone.

        Each call does a limited part of this work. Later calls do the rest.
        """
        if now < self._due and not self._unswept:
            return  # the usual case
        self._unswept = self._index.sweep(_SWEPT)
        for _ in range(_DROPPED):
            oldest = next(iter(self._order), None)
            self._due = (now if oldest is None else oldest.at) + self._ttl_s  # later sends expire later
            if oldest is None or self._due > now:
                return
            self._drop(oldest, len(oldest.blocks))

    def _path(self, root: _SentBlocks, blocks: Sequence[int], now: float) -> list[_SentBlocks]:
        """Return the pieces that make up a prompt, in order. Missing pieces are created."""
        piece, depth = root, 0
        path: list[_SentBlocks] = []
        while depth < len(blocks):
            child = piece.children.get(blocks[depth])
            if child is None:
                child = _SentBlocks(root.holder, list(blocks[depth:]), piece, now)
                piece.children[blocks[depth]] = child
                self._blocks += len(child.blocks)
                return [*path, child]
            size = common(child.blocks, 0, blocks, depth)
            if size < len(child.blocks):
                child = self._split(child, size)
            path.append(child)
            piece, depth = child, depth + size
        return path

    @staticmethod
    def _split(tail: _SentBlocks, place: int) -> _SentBlocks:
        """Split a piece. Return a new piece with the blocks before `place`; the old piece keeps the rest.

        The new piece counts as sent at the same time as the old one.
        """
        assert tail.parent is not None
        head = _SentBlocks(tail.holder, tail.blocks[:place], tail.parent, tail.at)
        tail.parent.children[head.blocks[0]] = head
        tail.blocks, tail.parent = tail.blocks[place:], head
        head.children = {tail.blocks[0]: tail}
        return head

    def _drop(self, piece: _SentBlocks, size: int) -> None:
        """Drop the last `size` blocks of a piece without children."""
        assert not piece.children and piece.parent is not None
        first, kept, holder = piece.blocks[0], len(piece.blocks) - size, self._order[piece]
        self._index.remove(holder, piece.blocks[: kept - 1 if kept else None : -1])
        self._blocks -= size
        if kept:
            piece.blocks = piece.blocks[:kept]
            return
        del self._order[piece]
        del piece.parent.children[first]
        if piece.parent.parent is None and not piece.parent.children:
            del self._roots[holder]
            self._forget(holder)  # the holder may never return


def better(one: Matches, other: Matches) -> Matches:
    """Combine two look-ups: for each holder, return the longer of the two matches on each cache tier."""
    if not other.disk:  # `disk` counts all tiers
        return one
    if not one.disk:
        return other
    device = _longer(one.device, other.device)
    if one.disk is one.device and other.disk is other.device:
        return Matches(device, device, device)
    return Matches(device, _longer(one.host, other.host), _longer(one.disk, other.disk))


def _longer(one: Mapping[WorkerRank, int], other: Mapping[WorkerRank, int]) -> Mapping[WorkerRank, int]:
    found = dict(one)
    for holder, depth in other.items():
        if depth > found.get(holder, 0):
            found[holder] = depth
    return found
