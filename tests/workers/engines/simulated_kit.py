"""Helpers for tests of the simulated engine: requests, stepping to the end, and a KV event listener."""

from collections.abc import Iterable

from events.kv import Cleared, KvEvent, Removed, Stored, Tier
from events.wire import Generate, Sampling
from workers.engines.simulated.kv_cache import KvManager
from workers.engines.simulated.scheduler import Scheduler


class Listener:
    """Tracks a rank's blocks from its events, and checks that never more blocks are stored than fit."""

    def __init__(self, kv: KvManager | None = None) -> None:
        self.held: dict[int, set[int]] = {tier: set() for tier in Tier}
        self.total = kv.total if kv is not None else 1 << 31

    def announce(self, rank: int, events: list[KvEvent]) -> None:
        self.hear(events)

    def hear(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            match event:
                case Stored(blocks, parent, tier):
                    assert blocks and self.held[tier].isdisjoint(blocks)
                    assert parent is None or any(parent in held for held in self.held.values())
                    self.held[tier].update(blocks)
                    assert len(self.held[Tier.DEVICE]) <= self.total
                case Removed(blocks, tier):
                    assert blocks and self.held[tier].issuperset(blocks)
                    self.held[tier].difference_update(blocks)
                case Cleared():
                    for held in self.held.values():
                        held.clear()


def run(scheduler: Scheduler, steps: int = 10_000) -> dict[int, list[int]]:
    """Step until no work is left; return the tokens of every request."""
    said: dict[int, list[int]] = {}
    for _ in range(steps):
        if scheduler.plan().idle:
            return said
        for key, chunk in scheduler.step():
            said.setdefault(key, []).extend(chunk.tokens)
    raise AssertionError("the scheduler does not come to an end")


def generate(tokens: list[int], most: int = 64, **rest: object) -> Generate:
    sampling = Sampling(max_tokens=most, ignore_eos=True)
    return Generate(1, "r", tokens, len(tokens), sampling, **rest)  # type: ignore[arg-type]
