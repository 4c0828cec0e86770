"""The slot tracker agrees with a plain list of requests in flight, for any events in any order."""

from itertools import pairwise
from math import e
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import LOOK_S, RECENT_S, STALE_S, ActiveSequences, RankWork
from events.blocks import sequence_hashes

Path = tuple[int, ...]

PATHS = st.lists(st.integers(0, 2), max_size=6).map(tuple)
RANKS = [WorkerRank(f"w{number}", "i") for number in range(4)]
HOLDERS = st.sampled_from(RANKS)
NAMES = st.integers(0, 7)
W = WorkerRank("w", "i")
BLOCK = 4


def prefixes(path: Path) -> set[Path]:
    return {path[: size + 1] for size in range(len(path))}


class AgainstAPlainList(RuleBasedStateMachine):
    """A path of small numbers stands for a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = ActiveSequences()
        self.there: dict[int, tuple[WorkerRank, Path, int, int, str]] = {}
        self.ever: set[Path] = set()

    @rule(
        name=NAMES,
        holder=HOLDERS,
        path=PATHS,
        tokens=st.integers(0, 50),
        own=st.integers(0, 2),
        owner=st.sampled_from(["", "f2"]),
    )
    def add(self, name: int, holder: WorkerRank, path: Path, tokens: int, own: int, owner: str) -> None:
        fresh = self.slots.add(
            name,
            holder,
            sequence_hashes(path),
            now=0.0,
            prefill_tokens=tokens,
            own_blocks=own,
            owner=owner,
        )
        assert fresh == (name not in self.there)
        self.ever.add(path)
        if fresh:
            self.there[name] = (holder, path, tokens, own, owner)

    @rule(name=NAMES)
    def read(self, name: int) -> None:
        known = name in self.there and self.there[name][2] > 0
        assert self.slots.prefill_done(name, now=0.0) == known
        if known:
            holder, path, _, own, owner = self.there[name]
            self.there[name] = (holder, path, 0, own, owner)

    @rule(name=NAMES)
    def free(self, name: int) -> None:
        assert self.slots.free(name, now=0.0) == (self.there.pop(name, None) is not None)

    @rule(holder=HOLDERS)
    def forget(self, holder: WorkerRank) -> None:
        self.slots.forget(holder, now=0.0)
        self.there = {name: one for name, one in self.there.items() if one[0] != holder}

    @rule()
    def a_frontend_leaves(self) -> None:
        gone = [name for name, one in self.there.items() if one[4] == "f2"]
        assert self.slots.leave("f2", now=0.0) == len(gone)
        for name in gone:
            del self.there[name]

    @rule(path=PATHS)
    def shared(self, path: Path) -> None:
        depths, sharers = self.slots.shared(sequence_hashes(path), self.slots.rows(RANKS))
        for holder, depth, sharing in zip(RANKS, depths.tolist(), sharers.tolist(), strict=True):
            held = [set(prefixes(one[1])) for one in self.there.values() if one[0] == holder]
            common = sorted((p for p in prefixes(path) if any(p in one for one in held)), key=len)
            assert depth == len(common)
            assert sharing == (sum(common[-1] in one for one in held) if common else 0)

    @invariant()
    def every_holder_has_the_listed_work(self) -> None:
        assert len(self.slots) == len(self.there)
        for holder in RANKS:
            mine = [one for one in self.there.values() if one[0] == holder]
            blocks = len(set().union(*(prefixes(one[1]) for one in mine))) + sum(one[3] for one in mine)
            work = RankWork(sum(one[2] for one in mine), blocks, len(mine))
            assert self.slots.work(holder, now=0.0) == work

    @invariant()
    def the_tree_is_the_smallest(self) -> None:
        for path in self.ever:
            pieces = self.slots.pieces(sequence_hashes(path))
            assert all(users for _, users in pieces), "it has no users"
            assert all(one[1] != following[1] for one, following in pairwise(pieces)), "could be one"


AgainstAPlainList.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAgainstAPlainList = AgainstAPlainList.TestCase


def reading(*prompts: tuple[int, float | None]) -> ActiveSequences:
    """Return a tracker with a worker that reads prompts of (tokens, expected seconds)."""
    slots = ActiveSequences()
    for name, (tokens, expected_s) in enumerate(prompts):
        slots.add(name, W, now=0.0, prefill_tokens=tokens, expected_s=expected_s)
    return slots


@pytest.mark.parametrize(
    ("prompts", "now", "left"),
    [
        ([(100, 10.0)], 0.0, 100),
        ([(100, 10.0)], 2.5, 75),
        ([(100, 10.0)], 2.55, 75),  # a token that is half read is still to be read
        ([(100, 10.0)], 99.0, 0),
        ([(100, 10.0), (60, 5.0)], 5.0, 110),
        ([(100, 10.0), (60, 5.0)], 13.0, 30),  # continues into the next, at the same pace
        ([(100, 10.0), (60, 5.0)], 99.0, 0),
        ([(100, 10.0), (60, None)], 5.0, 110),
        ([(100, 10.0), (60, None)], 13.0, 60),  # the other has no prediction
        ([(100, None), (60, 5.0)], 13.0, 160),  # nor has this one, which is the oldest
        ([(100, 0.0), (60, 5.0)], 0.0, 60),  # as good as read
        ([(100, 0.0), (60, 5.0)], 9.0, 60),
    ],
)
def test_a_prompt_being_read_counts_less_with_time(
    prompts: list[tuple[int, float | None]], now: float, left: float
) -> None:
    assert reading(*prompts).work(W, now=now).prefill_tokens == left


def test_the_next_prompt_is_the_oldest_from_the_moment_the_one_before_it_is_read() -> None:
    slots = reading((100, 10.0), (60, 6.0))
    slots.prefill_done(0, now=12.0)
    assert slots.work(W, now=12.0).prefill_tokens == 60
    assert slots.work(W, now=15.0).prefill_tokens == 30
    slots.free(1, now=15.0)
    assert slots.work(W, now=15.0) == RankWork(0.0, 0.0, 1)


def test_a_prompt_that_ends_before_the_oldest_leaves_the_oldest_alone() -> None:
    slots = reading((100, 10.0), (60, 6.0))
    slots.free(1, now=4.0)
    assert slots.work(W, now=5.0).prefill_tokens == 50


def test_requests_without_an_event_for_an_hour_are_forgotten() -> None:
    slots = ActiveSequences()
    slots.add("a", W, [1], now=0.0, prefill_tokens=5)
    slots.add("b", W, [1, 2], now=10.0)
    assert slots.expire(now=STALE_S - LOOK_S) == []
    assert slots.expire(now=STALE_S - 1) == (), "it scans twice a minute"
    slots.add("c", W, now=STALE_S)
    assert slots.expire(now=STALE_S) == ["a"]
    assert slots.work(W, now=STALE_S) == RankWork(0.0, 2.0, 2)
    assert slots.free("a", now=STALE_S) is False


def test_an_answer_counts_each_block_that_it_fills() -> None:
    slots = ActiveSequences(track_output=True)
    slots.add("a", W, [1, 2], now=0.0, block_tokens=BLOCK)
    blocks = []
    for tokens in (3, 1, 4, 1):
        slots.output("a", tokens)
        blocks.append(slots.work(W, now=0.0).blocks)
    assert blocks == [2, 3, 4, 4]
    slots.output("unknown", 9)
    slots.free("a", now=0.0)
    assert slots.work(W, now=0.0).blocks == 0


def test_answers_are_not_counted_by_default() -> None:
    slots = ActiveSequences()
    slots.add("a", W, [1], now=0.0, block_tokens=BLOCK)
    slots.output("a", 100)
    assert slots.work(W, now=0.0).blocks == 1


def test_a_row_is_reused_only_after_its_holder_is_forgotten() -> None:
    slots, ranks = ActiveSequences(), [WorkerRank(f"w{number}", "i") for number in range(101)]
    rows = slots.rows(ranks[:100])  # more than the initial rows
    assert len(set(rows.tolist())) == 100
    slots.add("a", ranks[7], [1], now=0.0, prefill_tokens=3)
    layout = slots.layout
    slots.forget(ranks[7], now=0.0)
    assert slots.layout != layout
    assert slots.rows(ranks[100:])[0] == rows[7]
    assert slots.work(ranks[100], now=0.0) == RankWork()
    assert set(slots.holders) == {*ranks} - {ranks[7]}


def test_recently_sent_tokens_count_for_some_seconds() -> None:
    slots = ActiveSequences()
    slots.add(1, W, now=0.0, prefill_tokens=1000)
    slots.free(1, now=1.0)
    assert slots.work(W, now=0.0).recent_tokens == 1000
    slots.add(2, W, now=RECENT_S, prefill_tokens=1000)
    assert slots.work(W, now=RECENT_S).recent_tokens == pytest.approx(1000 / e + 1000)
    assert slots.work(W, now=2 * RECENT_S).recent_tokens == pytest.approx(1000 / e**2 + 1000 / e)
    assert slots.work(W, now=0.0).recent_tokens == pytest.approx(1000 / e + 1000), (
        "an earlier time adds nothing"
    )
    slots.add("told later", W, now=0.0, prefill_tokens=1000, owner="f2")
    assert slots.work(W, now=RECENT_S).recent_tokens == pytest.approx(2000 / e + 1000), (
        "no other frontend's is lost"
    )
    slots.free("told later", now=0.0)
    (load,) = slots.rank_loads([W])
    assert load.recent_tokens_at(15.0) == pytest.approx(slots.work(W, now=15.0).recent_tokens)


def test_the_columns_are_current_however_rarely_they_are_read() -> None:
    slots, dice = ActiveSequences(), Random(7)
    holders = [WorkerRank(f"w{number}", "i") for number in range(100)]  # more than the initial rows
    alive: list[int] = []
    for request in range(2000):
        slots.add(request, dice.choice(holders), [1, 2, request], now=0.0, prefill_tokens=dice.randrange(9))
        alive.append(request)
        slots.prefill_done(dice.choice(alive), now=0.0)
        if dice.random() < 0.6:
            slots.free(alive.pop(dice.randrange(len(alive))), now=0.0)
        if dice.random() < 0.02:
            slots.forget(dice.choice(holders), now=0.0)
        if dice.random() < 0.1:
            columns, rank_loads = slots.loads(slots.rows(holders), now=0.0), slots.rank_loads(holders)
            assert columns.prefill_tokens.tolist() == [one.reading_tokens for one in rank_loads]
            assert columns.blocks.tolist() == [one.blocks for one in rank_loads]
            assert columns.requests.tolist() == [len(one.requests) for one in rank_loads]
            assert columns.recent_tokens.tolist() == [one.recent_tokens for one in rank_loads]


def test_a_holder_does_not_inherit_the_sent_tokens_of_its_predecessor() -> None:
    slots = ActiveSequences()
    old, new = WorkerRank("w", "old"), WorkerRank("w", "new")
    slots.add(1, old, now=0.0, prefill_tokens=1000)
    slots.forget(old, now=0.0)
    row = slots.rows([new])
    assert slots.loads(row, now=0.0).recent_tokens.tolist() == [0.0]
