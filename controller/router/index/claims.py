"""Verification of workers' KV claims against their registration and what requests found cached.

A worker loses its claims if it claims more blocks than it has, or if requests do not find what it claims. It is then treated
as if it had nothing cached, until its instance ends. A claim is wrong if less than half of it was found. One wrong claim is
normal, because blocks are evicted. 12 wrong ones among the last 16 claims are not.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from controller.router.endpoints import Key, WorkerRank
from controller.router.index.index import KvIndex
from events.kv import Tier

SLACK = 1.05  # times the registered blocks: events of one step may arrive out of order
SLACK_BLOCKS = 256
TIERED_MAX = 256  # times the registered blocks, over all tiers: slower tiers are not registered
LOOK_AGAIN = 1.25  # growth of a rank's blocks until they are counted again
CLAIMED_MIN = 64  # tokens; a smaller claim attracts no request
JUDGED = 16  # last claims of an instance that are judged
WRONG = 12  # wrong ones among these that lose the claims


@dataclass(slots=True)
class KvClaims:
    """The record of claims of each worker instance."""

    lost: Callable[[Key, str], None] = lambda key, why: None  # called when an instance loses its claims
    disbelieved: set[Key] = field(default_factory=set)
    _blocks: dict[Key, int] = field(default_factory=dict)  # registered
    _looked: dict[WorkerRank, float] = field(
        default_factory=dict
    )  # how many blocks a rank may claim until they are counted again
    _wrong: dict[Key, deque[bool]] = field(default_factory=dict)

    def know(self, blocks: Mapping[Key, int]) -> None:
        """Set the live workers and the number of blocks that each has registered."""
        self._blocks = dict(blocks)
        self.disbelieved &= blocks.keys()
        for gone in self._wrong.keys() - blocks.keys():
            del self._wrong[gone]
        for holder in [holder for holder in self._looked if holder[:2] not in blocks]:
            del self._looked[holder]

    def check(self, holder: WorkerRank, index: KvIndex) -> bool:
        """Return whether a rank claims no more blocks than it can hold. Cheap until it claims many more than last time."""
        held, key = index.count(holder), (holder.worker, holder.instance)
        most = self._blocks.get(key, 0) * SLACK + SLACK_BLOCKS
        if held <= self._looked.get(holder, most):
            return True
        on_device = sum(len(blocks) for tier, _, blocks in index.held(holder) if tier == Tier.DEVICE)
        self._looked[holder] = held * LOOK_AGAIN
        if on_device <= most and held <= most * TIERED_MAX:
            return True
        self._lose(key, f"claim {on_device} KV blocks, and it has registered {self._blocks.get(key, 0)}")
        return False

    def compare(self, key: Key, claimed: int, cached: int) -> None:
        """Compare the prompt tokens that a worker claimed with those that a request found cached."""
        if claimed < CLAIMED_MIN or key in self.disbelieved or key not in self._blocks:
            return
        record = self._wrong.setdefault(key, deque(maxlen=JUDGED))
        record.append(cached * 2 < claimed)
        if sum(record) >= WRONG:
            self._lose(key, f"claim cached prompts that {sum(record)} of {len(record)} requests did not find")

    def _lose(self, key: Key, why: str) -> None:
        self.disbelieved.add(key)
        self.lost(key, why)
