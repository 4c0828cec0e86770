"""Every frontend's index converges to the engines' caches, despite losses, duplicates and restarts."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from controller.router.endpoints import WorkerRank
from controller.router.index import view as kv_feed
from controller.router.index.index import KvIndex
from controller.router.index.view import Counts, Feed, KvView
from events import kv
from events.blocks import sequence_hashes
from events.kv import (
    Cleared,
    Dump,
    Events,
    InvalidRange,
    KvBatch,
    KvEvent,
    KvRefused,
    KvRequest,
    Removed,
    Stored,
    Tier,
    TooNew,
)
from events.observations import Profile, WorkerJoined
from workers.kv_events.ledger import KvEventLedger, LedgerBounds

Content = set[tuple[int, Tier]]
Key = tuple[str, str]

PROFILE = Profile(kv_blocks=9, block_tokens=1, max_batch=1, prefill_tokens_per_s=1.0, tpot_ms=((1, 1.0),))
DP = {"w0": 1, "w1": 2}
RANKS = st.sampled_from([("w0", 0), ("w1", 0), ("w1", 1)])
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
TIERS = st.sampled_from(list(Tier))
SMALL = LedgerBounds(ring_bytes=70, part_bytes=60, part_blocks=3, event_blocks=3, holes=2)


def joined(worker: str, instance: str, dp: int = 1, *, kv_events: bool = True) -> WorkerJoined:
    return WorkerJoined(
        worker=worker, instance=instance, url="", model="m", revision="r", tokenizer="t", engine="e", engine_version="1",
        dtype="d", tp=1, device="d", profile=PROFILE, canary_key="c", pid=1, dp=dp, kv_events=kv_events,
    )  # fmt: skip


def held(index: KvIndex, holder: WorkerRank) -> Content:
    """Return what an index records for a holder."""
    return {(block, tier) for tier, _, blocks in index.held(holder) for block in blocks}


@pytest.fixture(autouse=True, scope="module")
def cramped() -> Iterator[None]:
    """Make all bounds so small that every path is taken: partial dumps, full buffers, dropped events."""
    ahead = kv_feed.AHEAD_MAX
    kv_feed.AHEAD_MAX = 12
    yield
    kv_feed.AHEAD_MAX = ahead


class Engine:
    """One rank: what it really holds, and the ledger of its events."""

    def __init__(self, holder: WorkerRank, bounds: LedgerBounds) -> None:
        self.holder = holder
        self.ledger = KvEventLedger(bounds)
        self.holds: Content = set()

    def say(self, *events: KvEvent) -> bytes:
        first, said = self.ledger.record(events)
        return kv.encode([*self.holder, first, [msgspec.Raw(event) for event in said]])


class Frontend:
    """One life of a frontend, and the messages in flight to it."""

    def __init__(self) -> None:
        self.view = KvView(dice=lambda: 0.5)
        self.batches: list[bytes] = []
        self.asked: list[tuple[WorkerRank, KvRequest, bytes]] = []  # with the answer to come


class Fleet(RuleBasedStateMachine):
    """Two workers, one of them with two ranks, two frontends, and an unreliable wire."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.lives = 0
        self.bounds = SMALL
        self.engines: dict[str, list[Engine]] = {}
        self.frontends = [Frontend(), Frontend()]
        self.paths: set[tuple[int, ...]] = set()

    def begin(self, worker: str) -> None:
        self.lives += 1
        self.engines[worker] = [
            Engine(WorkerRank(worker, f"i{self.lives}", rank), self.bounds) for rank in range(DP[worker])
        ]

    def absorb(self, frontend: Frontend) -> None:
        living = [
            joined(name, engines[0].holder.instance, dp=DP[name]) for name, engines in self.engines.items()
        ]
        frontend.view.absorb(living, self.now)

    def publish(self, engine: Engine, *events: KvEvent) -> None:
        batch = engine.say(*events)
        for frontend in self.frontends:
            frontend.batches.append(batch)

    @initialize(ring=st.sampled_from([70, 200]))
    def keep_few_events(self, ring: int) -> None:
        self.bounds = replace(SMALL, ring_bytes=ring)
        for worker in DP:
            self.begin(worker)
        for frontend in self.frontends:
            self.absorb(frontend)

    # --- engines

    @rule(of=RANKS, path=PATHS, size=st.integers(1, 9), tier=TIERS)
    def store(self, of: tuple[str, int], path: tuple[int, ...], size: int, tier: Tier) -> None:
        engine = self.engines[of[0]][of[1]]
        self.paths.add(path)
        names = sequence_hashes(path)
        there = {block for block, _ in engine.holds}
        first = next((place for place, name in enumerate(names) if name not in there), len(names))
        first = max(0, first - 1)  # including one that is there already
        new = names[first : first + size]
        engine.holds |= {(name, tier) for name in new}
        self.publish(engine, Stored(new, names[first - 1] if first else None, tier))

    @rule(of=RANKS, paths=st.lists(PATHS, min_size=1, max_size=4), size=st.integers(1, 9), tier=TIERS)
    def remove(self, of: tuple[str, int], paths: list[tuple[int, ...]], size: int, tier: Tier) -> None:
        engine = self.engines[of[0]][of[1]]
        removed = [sequence_hashes(path)[-size:][::-1] for path in paths]
        engine.holds -= {(block, tier) for blocks in removed for block in blocks}
        self.publish(engine, *[Removed(blocks, tier) for blocks in removed])

    @rule(of=RANKS, path=PATHS)
    def turn_over(self, of: tuple[str, int], path: tuple[int, ...]) -> None:
        """Store one block after another, and remove the old ones: more events than are kept."""
        engine = self.engines[of[0]][of[1]]
        self.paths.add(path)
        names = sequence_hashes(path)
        old = sorted(engine.holds)
        engine.holds = {(name, Tier.DEVICE) for name in names}
        new = [Stored([name], before) for before, name in zip([None, *names], names, strict=False)]
        gone = [Removed([block], tier) for block, tier in old if (block, tier) not in engine.holds]
        for event in new:
            self.publish(engine, event)
        for removed in gone:
            self.publish(engine, removed)

    @rule(of=RANKS)
    def clear(self, of: tuple[str, int]) -> None:
        engine = self.engines[of[0]][of[1]]
        engine.holds = set()
        self.publish(engine, Cleared())

    @rule(of=RANKS)
    def say_next(self, of: tuple[str, int]) -> None:
        self.publish(self.engines[of[0]][of[1]])

    @rule(worker=st.sampled_from(sorted(DP)))
    def restart_worker(self, worker: str) -> None:
        self.begin(worker)

    # --- the wire

    @rule(number=st.integers(0, 1), which=st.integers(0, 99), again=st.booleans())
    def deliver(self, number: int, which: int, again: bool) -> None:
        frontend = self.frontends[number]
        if frontend.batches:
            place = which % len(frontend.batches)
            body = frontend.batches[place] if again else frontend.batches.pop(place)
            frontend.view.take(kv.batch(body), self.now)

    @rule(number=st.integers(0, 1))
    def deliver_all(self, number: int) -> None:
        frontend = self.frontends[number]
        batches, frontend.batches = frontend.batches, []
        for body in batches:
            frontend.view.take(kv.batch(body), self.now)

    @rule(number=st.integers(0, 1), which=st.integers(0, 99))
    def lose(self, number: int, which: int) -> None:
        batches = self.frontends[number].batches
        if batches:
            del batches[which % len(batches)]

    @rule(number=st.integers(0, 1))
    def lose_all(self, number: int) -> None:
        self.frontends[number].batches.clear()

    # --- frontends

    @rule(number=st.integers(0, 1))
    def ask(self, number: int) -> None:
        self.asks(self.frontends[number])

    def asks(self, frontend: Frontend) -> bool:
        if (due := frontend.view.due(self.now)) is None:
            return False
        holder, ask = due
        ledgers = {engine.holder: engine.ledger for engines in self.engines.values() for engine in engines}
        ledger = ledgers.get(holder)
        answer = ledger.answer(kv.ask(kv.encode(ask)), self.now) if ledger is not None else b""
        frontend.asked.append((holder, ask, answer))
        return True

    @rule(number=st.integers(0, 1), which=st.integers(0, 99), lost=st.booleans())
    def answer(self, number: int, which: int, lost: bool) -> None:
        frontend = self.frontends[number]
        if frontend.asked:
            holder, ask, answer = frontend.asked.pop(which % len(frontend.asked))
            came = None if lost or not answer else kv.answer(answer)
            frontend.view.answer(holder, ask, came, self.now)

    @rule(seconds=st.sampled_from([0.001, 0.3, 15.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=st.integers(0, 1))
    def see_live_workers(self, number: int) -> None:
        self.absorb(self.frontends[number])

    @rule(number=st.integers(0, 1))
    def restart_frontend(self, number: int) -> None:
        batches = self.frontends[number].batches
        self.frontends[number] = Frontend()
        self.frontends[number].batches = batches
        self.absorb(self.frontends[number])

    @rule(number=st.integers(0, 1))
    def doubt(self, number: int) -> None:
        self.frontends[number].view.doubt(self.now)

    # --- convergence

    def teardown(self) -> None:
        for frontend in self.frontends:
            self.absorb(frontend)
            frontend.batches.clear()
        for engine in self.living():
            self.publish(engine)
        for frontend in self.frontends:
            self.settle(frontend)
            for engine in self.living():
                assert frontend.view.complete(engine.holder)
                assert held(frontend.view.index, engine.holder) == engine.holds
                assert len(engine.ledger) == len({block for block, _ in engine.holds})
            holders = {engine.holder for engine in self.living() if engine.holds}
            index = frontend.view.index
            assert {holder for holder in index.holders if held(index, holder)} == holders
            for path in self.paths:
                names = sequence_hashes(path)
                found = index.find(names)
                assert found.device == self.matched(names, [Tier.DEVICE])
                assert found.disk == self.matched(names, list(Tier))

    def matched(self, names: list[int], tiers: list[Tier]) -> dict[WorkerRank, int]:
        """Return how many leading blocks of a prompt each engine has on these tiers."""
        depths = {}
        for engine in self.living():
            there = {block for block, tier in engine.holds if tier in tiers}
            depths[engine.holder] = next(
                (place for place, name in enumerate(names) if name not in there), len(names)
            )
        return {holder: depth for holder, depth in depths.items() if depth}

    def living(self) -> list[Engine]:
        return [engine for engines in self.engines.values() for engine in engines]

    def settle(self, frontend: Frontend) -> None:
        for body in frontend.batches:
            frontend.view.take(kv.batch(body), self.now)
        for holder, ask, _ in frontend.asked:
            frontend.view.answer(holder, ask, None, self.now)
        frontend.asked.clear()
        for _ in range(100):
            self.now += 15.0
            while self.asks(frontend):
                self.answer(self.frontends.index(frontend), 0, lost=False)
            if frontend.view.due_at == inf:
                return
        raise AssertionError("it asks for ever")


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=60, stateful_step_count=40)


# --- one rank


def stored(*blocks: int, parent: int | None = None) -> Stored:
    return Stored(list(blocks), parent)


def batch(first: int, *events: KvEvent) -> KvBatch:
    return KvBatch("w0", "i1", 0, first, list(events))


def due(feed: Feed) -> float | None:
    return feed.due


def complete(feed: Feed) -> bool:
    return feed.complete


def followed(first: int = 10, counts: Counts | None = None) -> Feed:
    """Return a feed that has all events before `first`."""
    feed = Feed(0, counts or Counts(), due=0.0)
    feed.answer(feed.ask(), Dump(first, 0, 1, []), 0.0)
    assert complete(feed) and due(feed) is None
    return feed


def test_a_rank_is_restored_by_a_dump_in_parts_and_the_events_meanwhile() -> None:
    feed = Feed(0, Counts(), due=1.0)
    assert due(feed) == 1.0 and not complete(feed)
    assert feed.take(batch(8, stored(8), stored(9, parent=8)), 1.0) == []
    assert feed.ask() == KvRequest(0) and due(feed) is None
    assert list(feed.answer(KvRequest(0), Dump(9, 0, 1, []), 1.0)) == []  # the answer to another request
    first = Feed(0, Counts(), due=1.0)
    first.take(batch(8, stored(8), stored(9, parent=8)), 1.0)
    assert list(first.answer(first.ask(), Dump(9, 0, 2, [stored(1)]), 1.0)) == [Cleared(), stored(1)]
    assert not complete(first) and due(first) == 1.0
    assert first.take(batch(10, stored(10)), 1.1) == []
    ask = first.ask()
    assert ask == KvRequest(0, dump=9, part=1)
    last: list[KvEvent] = [stored(2, parent=1), stored(9, parent=8), stored(10)]
    assert list(first.answer(ask, Dump(9, 1, 2, last[:1]), 1.2)) == last
    assert complete(first) and due(first) is None and first.next == 11


def test_the_first_event_of_all_needs_no_dump() -> None:
    feed = Feed(0, Counts(), due=1.0)
    assert list(feed.take(batch(0, stored(1)), 0.0)) == [Cleared(), stored(1)]
    assert complete(feed) and due(feed) is None


def test_duplicates_are_dropped_and_missing_events_are_requested_once() -> None:
    counts = Counts()
    feed = followed(10, counts)
    assert feed.take(batch(9, stored(1)), 0.0) == []
    assert feed.take(batch(9, stored(1), stored(2)), 0.0) == [stored(2)]
    assert feed.take(batch(12, stored(4)), 0.5) == [] and due(feed) == 0.5
    ask = feed.ask()
    assert ask == KvRequest(0, first=11) and due(feed) is None
    assert feed.take(batch(13, stored(5)), 0.6) == [] and due(feed) is None
    assert feed.answer(ask, Events(11, [stored(3), stored(4)]), 0.7) == [stored(3), stored(4), stored(5)]
    assert complete(feed) and due(feed) is None
    assert counts.gaps == counts.recovered == 1


def test_late_events_that_close_the_gap_end_the_request() -> None:
    feed = followed(10)
    feed.take(batch(11, stored(2)), 0.0)
    ask = feed.ask()
    assert feed.take(batch(10, stored(1)), 0.1) == [stored(1), stored(2)]
    assert feed.answer(ask, Events(10, [stored(1), stored(2)]), 0.2) == ()
    assert complete(feed) and due(feed) is None


def test_a_lost_last_event_is_detected_at_the_next_sign_of_life() -> None:
    feed = followed(10)
    feed.take(batch(10), 0.0)
    assert due(feed) is None
    feed.take(batch(11), 1.0)
    assert due(feed) == 1.0 and not complete(feed)


def test_clearing_makes_everything_before_it_irrelevant() -> None:
    feed = followed(10)
    feed.take(batch(15, stored(5)), 0.0)
    ask = feed.ask()
    assert list(feed.take(batch(20, stored(6), Cleared(), stored(7)), 0.0)) == [Cleared(), stored(7)]
    assert complete(feed) and due(feed) is None
    assert feed.answer(ask, Events(10, [stored(1)]), 0.1) == ()
    assert feed.take(batch(21, Cleared()), 0.2) == []  # a duplicate
    assert feed.next == 23


def test_an_answer_from_before_a_clear_is_ignored() -> None:
    feed = Feed(0, Counts(), due=0.0)
    ask = feed.ask()
    feed.take(batch(25, stored(9)), 0.1)  # beyond a gap
    assert feed.take(batch(20, Cleared(), stored(7)), 0.2) == [Cleared(), stored(7)]
    assert due(feed) == 0.2 and not complete(feed)
    assert feed.answer(ask, Dump(19, 0, 1, [stored(1)]), 0.3) == ()
    assert feed.next == 22 and feed.ask() == KvRequest(0, first=22)


def test_a_rank_that_does_not_answer_is_retried_for_ever_with_backoff() -> None:
    feed = Feed(0, Counts(), due=0.0)
    waits = []
    for _ in range(9):
        feed.answer(feed.ask(), None, 100.0)
        waits.append(round((due(feed) or 0.0) - 100.0, 3))
    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 12.8, 12.8]
    feed.answer(feed.ask(), Dump(4, 0, 1, []), 100.0)
    feed.take(batch(5, stored(1)), 100.0)
    feed.answer(feed.ask(), KvRefused("not now"), 100.0)
    assert due(feed) == 100.2  # a success resets the backoff


@pytest.mark.parametrize("answer", [TooNew(3), InvalidRange(10, 9), Events(12, [stored(3)])])
def test_a_worker_that_does_not_know_these_events_is_restored(answer: kv.Answer) -> None:
    feed = followed(10)
    feed.take(batch(12, stored(2)), 0.0)
    assert feed.answer(feed.ask(), answer, 0.0) == ()
    assert not complete(feed) and due(feed) == 0.2
    assert feed.ask() == KvRequest(0)


def test_a_nonexistent_event_is_no_longer_awaited() -> None:
    feed = followed(10)
    feed.take(batch(99), 0.0)
    assert feed.answer(feed.ask(), TooNew(10), 0.0) == []
    assert complete(feed) and due(feed) is None


def test_events_that_do_not_fit_into_the_buffer_are_requested_later() -> None:
    feed = followed(10)
    feed.take(batch(11, stored(*range(9))), 0.0)
    feed.take(batch(12, stored(*range(9))), 0.0)  # too much
    assert len(feed.answer(feed.ask(), Events(10, [stored(1)]), 0.0)) == 2
    assert feed.next == 12 and due(feed) == 0.0
    assert feed.ask() == KvRequest(0, first=12)


def test_a_dump_with_a_lost_part_is_restarted() -> None:
    feed = Feed(0, Counts(), due=0.0)
    feed.answer(feed.ask(), Dump(9, 0, 3, [stored(1)]), 0.0)
    feed.answer(feed.ask(), KvRefused("gone"), 0.0)
    assert feed.ask() == KvRequest(0)


# --- all ranks


def test_only_live_ranks_that_publish_kv_events_are_followed() -> None:
    view = KvView(dice=lambda: 1.0)
    view.absorb([joined("w0", "i1"), joined("w1", "i2", kv_events=False)], 10.0)
    one = WorkerRank("w0", "i1")
    assert view.due(10.0) is None and view.due_at == pytest.approx(10.003)
    due = view.due(10.1)
    assert due == (one, KvRequest(0))
    view.answer(*due, Dump(1, 0, 1, [stored(1, 2)]), 10.1)
    view.take(batch(1, stored(3, parent=2)), 10.2)
    view.take(KvBatch("w1", "i2", 0, 0, [stored(4)]), 10.2)
    view.take(KvBatch("w0", "i1", 7, 0, [stored(5)]), 10.2)
    view.take(KvBatch("w0", "i0", 0, 0, [stored(6)]), 10.2)
    assert held(view.index, one) == {(1, Tier.DEVICE), (2, Tier.DEVICE), (3, Tier.DEVICE)}
    assert str(view.health) == "3 blocks of 1 of 1 ranks"
    view.absorb([], 11.0)
    assert view.index.find([1]).device == {}
    while view.index.sweep():
        pass
    assert str(view.health) == "0 blocks of 0 of 0 ranks"


def test_after_a_doubt_every_rank_without_new_events_is_queried() -> None:
    view = KvView(dice=lambda: 1.0)
    view.absorb([joined("w0", "i1"), joined("w1", "i2")], 0.0)
    for worker, instance in (("w0", "i1"), ("w1", "i2")):
        view.take(KvBatch(worker, instance, 0, 0, [stored(1)]), 0.0)
    view.doubt(1.0)
    view.take(batch(1, stored(2)), 1.1)
    assert view.due(1.4) is None
    due = view.due(1.5)
    assert due == (WorkerRank("w1", "i2"), KvRequest(0, first=1))
    view.answer(*due, TooNew(1), 1.5)
    assert view.due(99.0) is None and view.due_at == inf
    assert view.counts.gaps == view.counts.failed == 0


def test_events_are_counted_by_result() -> None:
    view = KvView()
    view.absorb([joined("w0", "i1")], 0.0)
    events: list[KvEvent] = [
        stored(1),
        stored(3, parent=2),
        stored(1, parent=1),
        Removed([1]),
        Removed([1]),
        Stored([1], None, 9),
        Cleared(),
    ]
    for place, event in enumerate(events):
        view.take(batch(place, event), 0.0)
    assert view.counts.applied == {
        ("stored", "ok"): 1,
        ("stored", "parent_block_not_found"): 1,
        ("stored", "invalid_block"): 2,
        ("removed", "ok"): 1,
        ("removed", "block_not_found"): 1,
        ("cleared", "ok"): 1,  # without the reset of a new rank
    }
