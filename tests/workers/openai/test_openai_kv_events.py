"""An upstream's KV events with losses, restarts and invalid data, without sockets and over real ones."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from vllm_events import Publisher, cleared, packed, removed, stored

from events import blocks
from events.kv import Cleared, KvEvent, Removed, Stored
from workers.engines.openai.kv_events import QUIET_S, UpstreamKvEvents
from workers.engines.openai.kv_rank import Frame, NoReplay, UpstreamRank, no_replay

Eventually = Callable[..., Awaitable[None]]


class Index:
    """A router's view: the blocks of each rank, as announced."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[int]] = {}
        self.heard: list[KvEvent] = []

    def announce(self, rank: int, events: list[KvEvent]) -> None:
        self.heard.extend(events)
        has = set(self.blocks.get(rank, ()))
        for event in events:
            match event:
                case Stored(blocks=names, parent=parent):
                    assert parent is None or parent in has
                    has.update(names)
                case Removed(blocks=names):
                    has.difference_update(names)
                case Cleared():
                    has.clear()
        self.blocks[rank] = has  # replaced at once: the test reads it from another thread


def block(number: int) -> Any:
    """Return the event of a one-block prompt that is unlike all others."""
    return stored([number + 1000], [number, 1, 2, 3], 4)


def name(number: int) -> int:
    return blocks.local_hashes([number, 1, 2, 3], 4)[0]


def names(*numbers: int) -> set[int]:
    return {name(number) for number in numbers}


# --- verdicts by a batch's number and time


class Upstream:
    """The far end without sockets: batches by number, kept for replays."""

    def __init__(self) -> None:
        self.kept: dict[int, bytes] = {}
        self.at = 0.0
        self.asked: list[int] = []

    def batch(self, number: int, *events: Any) -> Frame:
        self.at += 1.0
        self.kept[number] = packed(events, self.at)
        return number, self.kept[number]

    def replay(self, first: int) -> Iterable[Frame]:
        self.asked.append(first)
        return [(number, payload) for number, payload in sorted(self.kept.items()) if number >= first]


@pytest.fixture
def far() -> Upstream:
    return Upstream()


@pytest.fixture
def index() -> Index:
    return Index()


def test_batches_in_order_are_processed_once(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(3, index.announce, far.replay)
    rank.restore()
    frames = [far.batch(n, block(n)) for n in range(3)]
    for frame in (frames[0], frames[0], frames[1], frames[0], frames[2]):
        rank.receive(*frame)
    assert index.blocks == {3: names(0, 1, 2)}
    assert index.heard == [Stored([name(n)]) for n in range(3)]
    assert far.asked == [0]


def test_a_late_subscriber_gets_the_kept_batches(far: Upstream, index: Index) -> None:
    for n in range(5, 9):
        far.batch(n, block(n))
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.restore()
    rank.receive(*far.batch(9, block(9)))
    assert index.blocks[0] == names(5, 6, 7, 8, 9)


def test_a_gap_is_filled_from_a_replay(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.receive(*far.batch(0, block(0)))
    far.batch(1, block(1), removed([1000]))
    rank.receive(*far.batch(2, block(2)))
    assert index.blocks[0] == names(1, 2)
    assert Cleared() not in index.heard
    assert far.asked == [0], "from the last one on, to verify that it is the same"
    assert rank.counters["lost"] == 1


def test_a_gap_without_replay_clears_and_continues(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce)
    rank.restore()
    rank.receive(*far.batch(0, block(0)))
    rank.receive(*far.batch(2, block(2)))
    rank.receive(*far.batch(3, stored([7], [9] * 4, 4, parent=1000)))  # it has block 0 still
    chain = blocks.sequence_hashes(blocks.local_hashes([0, 1, 2, 3, 9, 9, 9, 9], 4))
    assert index.blocks[0] == names(2) | set(chain)
    assert index.heard.count(Cleared()) == 1


def test_a_gap_longer_than_the_replay_clears_and_uses_the_rest(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.receive(*far.batch(0, block(0)))
    for n in (1, 2, 3):
        far.batch(n, block(n))
    del far.kept[0], far.kept[1]
    rank.receive(*far.batch(4, block(4)))
    assert index.blocks[0] == names(2, 3, 4)
    assert index.heard.count(Cleared()) == 1


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_restarted_engine_is_detected_at_any_number(
    far: Upstream, index: Index, number: int, replay: bool
) -> None:
    rank = UpstreamRank(0, index.announce, far.replay if replay else no_replay)
    for n in range(3):
        rank.receive(*far.batch(n, block(n)))
    far.kept.clear()
    for n in range(number):
        far.batch(n, block(n + 10))
    rank.receive(*far.batch(number, block(number + 10)))
    news = range(number + 1) if replay else [number]
    assert index.blocks[0] == names(*(n + 10 for n in news))
    assert rank.counters["restarted"] == 1


def test_an_unnoticed_restart_is_detected_by_its_time(far: Upstream, index: Index) -> None:
    """Its numbers have passed the last known one when it is heard again."""
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.receive(*far.batch(0, block(0)))
    far.kept.clear()
    for n in range(4):
        far.batch(n, block(n + 10))
    rank.receive(*far.batch(4, block(14)))
    assert index.blocks[0] == names(10, 11, 12, 13, 14)


def test_a_reconnection_catches_up_without_a_batch(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.receive(*far.batch(0, block(0)))
    far.batch(1, removed([1000]), block(1))
    rank.restore()
    assert index.blocks[0] == names(1)
    far.kept.clear()  # another life, nothing stored yet
    rank.restore()
    assert index.blocks[0] == set()


def test_a_reconnection_without_replays_clears(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce)
    rank.restore()
    rank.receive(*far.batch(0, block(0)))
    rank.restore()
    assert index.blocks[0] == set()
    rank.receive(*far.batch(7, block(7)))
    assert (index.blocks[0], rank.counters["lost"]) == (names(7), 0)


def test_the_loss_of_the_last_batch_is_found_by_a_check(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.check()
    rank.receive(*far.batch(0, block(0)))
    rank.check()
    far.batch(1, removed([1000]), block(1))
    rank.check()
    assert (index.blocks[0], Cleared() in index.heard) == (names(1), False)
    silent = UpstreamRank(1, index.announce)
    silent.receive(*far.batch(0, block(0)))
    silent.check()
    assert index.blocks[1] == names(0), "no answer changes nothing"
    far.kept = {0: far.kept[0]}
    rank.check()
    assert index.blocks[0] == names(0), "the engine has restarted"


def test_a_replay_with_gaps_is_repeated(far: Upstream, index: Index) -> None:
    for n in range(6):
        far.batch(n, block(n))
    gaps = iter([{2}, {4}, set()])

    def leaky(first: int) -> Sequence[Frame]:
        gap: set[int] = next(gaps)
        return [frame for frame in far.replay(first) if frame[0] not in gap]

    UpstreamRank(0, index.announce, leaky).restore()
    assert index.blocks[0] == names(*range(6))
    assert far.asked == [0, 2, 4]


def test_a_replay_that_always_has_the_same_gap_is_abandoned(far: Upstream, index: Index) -> None:
    for n in (0, 1, 3):
        far.batch(n, block(n))
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.restore()
    rank.receive(*far.batch(4, block(4)))
    assert index.blocks[0] == names(4)
    assert (rank.counters["replay_failed"], far.asked) == (1, [0, 2])


def test_an_unreadable_batch_is_counted_and_clears(far: Upstream, index: Index) -> None:
    rank = UpstreamRank(0, index.announce, far.replay)
    rank.receive(*far.batch(0, block(0)))
    rank.receive(1, b"\xc1")
    assert (index.blocks[0], rank.counters["malformed"]) == (set(), 1)
    rank.receive(*far.batch(2, block(2)))
    rank.receive(0, far.kept[0])
    rank.receive(1, b"\xc1")  # again, from a replay
    assert index.blocks[0] == names(2)
    assert rank.counters["malformed"] == 1


class Far(Upstream):
    """An engine with chains of blocks in its cache, and random faults on its batches.

    If the last batch was missed, the index may still contain earlier blocks. If it was received, the index must contain no
    block that the engine no longer has.
    """

    def __init__(self, index: Index, dice: random.Random, replays: bool) -> None:
        super().__init__()
        self.rank, self.index, self.dice = UpstreamRank(0, index.announce, self._asked), index, dice
        self.replays, self.number, self.has = replays, 0, set[int]()
        self.right = 0  # times at which all blocks were known
        self.rank.restore()

    def _asked(self, first: int) -> Iterable[Frame]:
        if not self.replays or self.dice.random() < 0.1:
            raise NoReplay("not now")
        for frame in self.replay(first):
            if self.dice.random() < 0.05:
                continue
            yield frame
            if self.dice.random() < 0.05:
                raise NoReplay("broken off")

    def step(self, way: str = "") -> None:
        """Store or evict something; its batch is received, doubled, dropped or damaged."""
        events, dice = [], self.dice
        for _ in range(dice.randrange(1, 4)):
            key = dice.randrange(12)  # three chains of four
            if key not in self.has and (key % 4 == 0 or key - 1 in self.has):
                self.has.add(key)
                events.append(stored([key], [key] * 4, 4, parent=key - 1 if key % 4 else None))
            elif key in self.has and key + 1 not in self.has - {4, 8}:
                self.has.remove(key)
                events.append(removed([key]))
        if dice.random() < 0.05:
            self.has.clear()
            events.append(cleared())
        frame, self.number = self.batch(self.number, *events), self.number + 1
        way = way or dice.choice(("heard", "heard", "heard", "doubled", "swallowed", "damaged"))
        if way == "damaged":
            frame = (frame[0], frame[1][:-1] or b"\xc1")
        for _ in range({"swallowed": 0, "doubled": 2}.get(way, 1)):
            self.rank.receive(*frame)
        if way != "swallowed":
            self.check()

    def random_event(self) -> None:
        """Cause another random event."""
        match self.dice.choice(("reconnected", "begins again", "forgets", "asked")):
            case "reconnected":
                self.rank.restore()
            case "begins again":
                self.kept.clear()
                self.has.clear()
                self.number = 0
                for _ in range(self.dice.randrange(20)):
                    self.step("swallowed")
                self.rank.restore()
            case "forgets":
                for number in sorted(self.kept)[: self.dice.randrange(5)]:
                    del self.kept[number]
            case "asked":
                self.rank.check()

    def check(self) -> None:
        believed, true = self.index.blocks.get(0, set()), self.truth()
        assert believed <= true
        self.right += believed == true != set()

    def truth(self) -> set[int]:
        chains = ([4 * chain + place for place in range(4)] for chain in range(3))
        named = {
            key: name
            for chain in chains
            for key, name in zip(
                chain,
                blocks.sequence_hashes(blocks.local_hashes([k for k in chain for _ in range(4)], 4)),
                strict=True,
            )
        }
        return {named[key] for key in self.has}


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_in_any_history_the_index_contains_no_missing_block(seed: int, replays: bool) -> None:
    index, dice = Index(), random.Random(seed)
    far = Far(index, dice, replays)
    for _ in range(100):
        far.step() if dice.random() < 0.9 else far.random_event()
    assert far.right if replays else not far.rank.counters["replayed"]
    assert all(far.rank.counters[count] for count in ("cleared", "malformed"))


# --- over sockets


@pytest.fixture
def publisher() -> Iterable[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.close()


@pytest.fixture
async def listening(publisher: Publisher, index: Index) -> AsyncIterator[UpstreamKvEvents]:
    async for events in listened(index, publisher):
        yield events


async def listened(
    index: Index, *publishers: Publisher, quiet_s: float = QUIET_S
) -> AsyncIterator[UpstreamKvEvents]:
    replays = [p.replay_endpoint for p in publishers if p.replay_endpoint]
    events = UpstreamKvEvents([p.endpoint for p in publishers], replays, index.announce, quiet_s)
    events.start()
    for publisher in publishers:
        await asyncio.to_thread(publisher.wait_for_listener)
    yield events
    await asyncio.to_thread(events.stop)


async def test_events_are_received_and_lost_ones_replayed(
    publisher: Publisher, listening: UpstreamKvEvents, index: Index, eventually: Eventually
) -> None:
    publisher.publish(block(0))
    await eventually(lambda: index.blocks.get(0) == names(0))
    publisher.lose = True
    publisher.publish(block(1), removed([1000]))
    publisher.lose = False
    publisher.publish(block(2))
    await eventually(lambda: index.blocks[0] == names(1, 2))
    assert listening.block_tokens == 4
    assert listening.counters["lost"] == 1


async def test_a_silent_rank_is_asked_for_missed_batches(
    publisher: Publisher, index: Index, eventually: Eventually
) -> None:
    async for events in listened(index, publisher, quiet_s=0.1):
        publisher.publish(block(0))
        await eventually(lambda: index.blocks.get(0) == names(0))
        publisher.lose = True
        publisher.publish(block(1))
        await eventually(lambda: index.blocks[0] == names(0, 1))
        assert events.counters["lost"] == 0


async def test_a_long_history_is_replayed_to_a_late_subscriber(
    publisher: Publisher, index: Index, eventually: Eventually
) -> None:
    """More than a ROUTER socket keeps for one peer (1,000): dropped batches are requested again."""
    publisher.lose = True
    for n in range(3000):
        publisher.publish(block(n))
    publisher.lose = False
    publisher.cut = lambda number: number == 1500 and len(publisher.asked) == 1
    async for events in listened(index, publisher):
        await eventually(lambda: len(index.blocks.get(0, ())) == 3000)
        assert events.counters["replayed"] == 3000
        assert all(a < b for a, b in pairwise(publisher.asked))


async def test_a_restarted_upstream_is_followed(
    publisher: Publisher, listening: UpstreamKvEvents, index: Index, eventually: Eventually
) -> None:
    for n in range(3):
        publisher.publish(block(n))
    await eventually(lambda: index.blocks.get(0) == names(0, 1, 2))
    publisher.restart()
    publisher.drop_listeners()
    await eventually(lambda: index.blocks[0] == set())
    publisher.publish(block(10))
    await eventually(lambda: index.blocks[0] == names(10))


async def test_without_replays_a_gap_clears(index: Index, eventually: Eventually) -> None:
    publisher = Publisher(replay=False)
    async for events in listened(index, publisher):
        publisher.publish(block(0))
        await eventually(lambda: index.blocks.get(0) == names(0))
        publisher.lose = True
        publisher.publish(block(1))
        publisher.lose = False
        publisher.publish(block(2))
        await eventually(lambda: index.blocks[0] == names(2))
        assert events.counters["replay_failed"] == 0
    publisher.close()


async def test_invalid_data_is_counted_and_nothing_breaks(
    publisher: Publisher, listening: UpstreamKvEvents, index: Index, eventually: Eventually
) -> None:
    publisher.publish(block(0))
    publisher.send_frames(b"alone")
    publisher.send_frames(b"", b"short", b"")
    publisher.send_frames(b"", (0).to_bytes(8, "big"), b"", b"one too many")
    publisher.send(b"\xc1 no msgpack")
    publisher.publish(["BlockEaten", [1]], block(2))
    await eventually(lambda: index.blocks.get(0) == names(2))  # perhaps by a replay: the rest arrives later
    await eventually(lambda: listening.counters["bad_frames"] == 3)
    counters = listening.counters
    assert (counters["malformed"], counters["unknown"], counters["mistakes"]) == (1, 1, 0)


async def test_each_rank_has_its_own_events(index: Index, eventually: Eventually) -> None:
    publishers = [Publisher(), Publisher()]
    async for _ in listened(index, *publishers):
        publishers[1].publish(block(1))
        publishers[0].publish(block(0))
        await eventually(lambda: index.blocks == {0: names(0), 1: names(1)})
    for publisher in publishers:
        publisher.close()


async def test_a_bug_leaves_no_wrong_blocks_behind(publisher: Publisher, eventually: Eventually) -> None:
    index, failing = Index(), [True]

    def announce(rank: int, events: list[KvEvent]) -> None:
        if failing and isinstance(events[0], Stored):
            failing.clear()
            raise RuntimeError("told to fail")
        index.announce(rank, events)

    events = UpstreamKvEvents([publisher.endpoint], [], announce)
    events.start()
    await asyncio.to_thread(publisher.wait_for_listener)
    publisher.publish(block(0))
    await eventually(lambda: index.heard == [Cleared()])
    publisher.publish(block(1))
    await eventually(lambda: index.blocks[0] == names(1))
    assert events.counters["mistakes"] == 1
    await asyncio.to_thread(events.stop)


async def test_it_stops_quietly_during_a_long_replay(publisher: Publisher, eventually: Eventually) -> None:
    """Its worker's loop is about to close, and accepts nothing any more."""
    for n in range(2000):
        publisher.publish(block(n))
    told = threading.Event()

    def announce(rank: int, events: list[KvEvent]) -> None:
        if told.is_set():
            raise RuntimeError("Event loop is closed")
        told.set()
        ended.wait(5.0)

    ended = threading.Event()
    events = UpstreamKvEvents([publisher.endpoint], [publisher.replay_endpoint], announce)
    events.start()
    await asyncio.to_thread(told.wait, 10.0)
    stopping = asyncio.ensure_future(asyncio.to_thread(events.stop))
    await eventually(lambda: events.over)
    ended.set()
    await stopping
    assert events.counters["mistakes"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "upstream-kv-events"]


async def test_an_unanswered_replay_times_out(
    publisher: Publisher, index: Index, eventually: Eventually
) -> None:
    publisher.silent = True
    publisher.lose = True
    publisher.publish(block(0))
    publisher.lose = False
    async for events in listened(index, publisher):
        publisher.publish(block(1))
        await eventually(lambda: index.blocks.get(0) == names(1))
        assert events.counters["replay_failed"] == 1


def test_no_replay_raises() -> None:
    with pytest.raises(NoReplay):
        no_replay(0)
