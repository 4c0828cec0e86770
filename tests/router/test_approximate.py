"""The approximate cache holds what was recently sent, and never more than its limit."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.router.endpoints import WorkerRank
from controller.router.index.approximate import ApproximateCache, better
from controller.router.index.index import Matches
from events.blocks import sequence_hashes

Path = tuple[int, ...]

PATHS = st.lists(st.integers(0, 1), max_size=5).map(tuple)
RANKS = [WorkerRank(f"w{number}", "i") for number in range(3)]
HOLDERS = st.sampled_from(RANKS)
A, B, C, V, W = (WorkerRank(name, "i") for name in "abcvw")
TTL_S = 10.0


class AgainstAPlainRecord(RuleBasedStateMachine):
    """A path of small numbers stands for a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = ApproximateCache(ttl_s=TTL_S)
        self.now = 0.0
        self.sent: dict[tuple[WorkerRank, Path], float] = {}

    @rule(seconds=st.sampled_from([1, 4, 5, 10]))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(holder=HOLDERS, path=PATHS)
    def send(self, holder: WorkerRank, path: Path) -> None:
        self.cache.sent(holder, sequence_hashes(path), now=self.now)
        for size in range(len(path)):
            self.sent[holder, path[: size + 1]] = self.now

    @rule(holder=HOLDERS)
    def forget(self, holder: WorkerRank) -> None:
        self.cache.forget(holder)
        self.sent = {one: at for one, at in self.sent.items() if one[0] != holder}

    @rule(path=PATHS)
    def find(self, path: Path) -> None:
        self.sent = {one: at for one, at in self.sent.items() if at + TTL_S > self.now}
        found = self.cache.find(sequence_hashes(path), now=self.now)
        wanted = {
            holder: sum((holder, path[: size + 1]) in self.sent for size in range(len(path)))
            for holder in RANKS
        }
        assert found.device == {holder: depth for holder, depth in wanted.items() if depth}
        assert len(self.cache) == len(self.sent)

    @invariant()
    def only_holders_with_blocks_are_kept(self) -> None:
        assert (len(self.cache) > 0) == bool(self.cache.holders)
        assert set(self.cache.holders) <= {holder for holder, _ in self.sent}
        living = {holder for (holder, _), at in self.sent.items() if at + TTL_S > self.now}
        assert set(self.cache.holders) >= living


AgainstAPlainRecord.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAgainstAPlainRecord = AgainstAPlainRecord.TestCase


def test_above_the_limit_the_oldest_blocks_are_dropped_from_the_end_of_the_prompt() -> None:
    cache = ApproximateCache(blocks_max=10)
    first, second, third = (sequence_hashes([n, 0, 0, 0]) for n in (1, 2, 3))
    cache.sent(W, first, now=0.0)
    cache.sent(W, second, now=1.0)
    cache.sent(W, third, now=2.0)
    assert len(cache) == 10
    assert [cache.find(blocks, now=2.0).device.get(W, 0) for blocks in (first, second, third)] == [2, 4, 4]
    cache.sent(W, second, now=3.0)
    cache.sent(V, sequence_hashes([4, 0, 0]), now=4.0)
    assert len(cache) == 10
    kept = [cache.find(blocks, now=4.0).device.get(W, 0) for blocks in (first, second, third)]
    assert kept == [0, 4, 3]


def test_a_mass_expiry_is_processed_in_parts() -> None:
    cache = ApproximateCache(ttl_s=TTL_S)
    for number in range(1000):
        cache.sent(RANKS[number % 3], sequence_hashes([number, 0]), now=0.0)
    cache.expire(now=TTL_S)
    assert 1000 < len(cache) < 2000
    for _ in range(20):
        cache.find([], now=TTL_S)
    assert len(cache) == 0


def test_the_blocks_of_gone_holders_are_freed_without_another_prompt() -> None:
    cache = ApproximateCache()
    for number in range(200):
        cache.sent(W, [number], now=0.0)
    cache.forget(W)
    assert not cache.swept
    for _ in range(4):
        cache.expire(now=0.0)
    assert cache.swept


def test_the_longer_of_two_matches_counts() -> None:
    one, other = {A: 3, B: 1}, {B: 2, C: 1}
    longer = {A: 3, B: 2, C: 1}
    assert better(Matches(one, one, one), Matches(other, other, other)) == Matches(longer, longer, longer)
    nothing = Matches()
    only = Matches(one, one, one)
    assert better(only, nothing) is better(nothing, only) is only
    tiered = better(Matches(one, one, {A: 5}), Matches(other, other, other))
    assert tiered == Matches(longer, longer, {A: 5, B: 2, C: 1})


def test_branching_prompts_expire_separately_and_their_common_prefix_with_the_last() -> None:
    cache = ApproximateCache(ttl_s=TTL_S)
    one, other = sequence_hashes([1, 2, 3]), sequence_hashes([1, 2, 4])
    cache.sent(W, one, now=0.0)
    cache.sent(W, other, now=5.0)
    assert [cache.find(blocks, now=10.0).device for blocks in (one, other)] == [{W: 2}, {W: 3}]
    assert cache.find(other, now=15.0).device == {}
    assert len(cache) == 0
