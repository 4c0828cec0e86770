"""Frontends that report their requests in flight to each other converge, whatever messages are lost."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_types import Json

from controller.router.endpoints import WorkerRank
from controller.router.load.active_sequences import STALE_S, ActiveSequences, RankWork
from controller.router.load.replicas import AGAIN_S, SILENT_S, WAITING_MAX, Replicas
from events import slot_messages as wire
from events.blocks import sequence_hashes
from events.slot_messages import BLOCKS_MAX, EVENTS_MAX, Added, ResendRequest, SlotBatch

W1, W2 = WorkerRank("w1", "i1"), WorkerRank("w2", "i1", 1)
Net = Callable[["SlotBatch | ResendRequest"], list["SlotBatch | ResendRequest"]]


def whole(said: SlotBatch | ResendRequest) -> list[SlotBatch | ResendRequest]:
    return [said]


class Frontends:
    """Some frontends, and the broker between them. `net` decides the fate of each message."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.net: Net = whole
        self.slots: dict[str, ActiveSequences] = {}
        self.replicas: dict[str, Replicas] = {}
        self.lives = 0
        for name in names:
            self.begin(name)

    def begin(self, name: str) -> None:
        self.lives += 1
        self.slots[name] = ActiveSequences()
        self.replicas[name] = Replicas(name, f"life{self.lives}", self.slots[name])
        self.say(self.replicas[name].request_all())

    def end(self, name: str) -> None:
        del self.slots[name], self.replicas[name]

    def say(self, said: SlotBatch | ResendRequest) -> None:
        for one in self.net(wire.decode(wire.encode(said))):
            for replica in list(self.replicas.values()):
                if (wanted := replica.take(one, self.now)) is not None:
                    self.say(wanted)

    def turn(self, seconds: float = 0.001) -> None:
        """Let every frontend send what is due, after a while."""
        self.now += seconds
        for name in list(self.replicas):
            for batch in list(self.replicas[name].batches(self.now)):
                self.say(batch)

    def quiet(self) -> None:
        """Let no message be lost for some seconds."""
        self.net = whole
        for _ in range(4):
            self.turn(AGAIN_S)
            for replica in self.replicas.values():
                replica.look((), self.now)

    def known(self, name: str) -> dict[WorkerRank, RankWork]:
        """Return the work of all workers as a frontend knows it."""
        slots = self.slots[name]
        works = {holder: slots.work(holder, now=self.now) for holder in slots.holders}
        return {holder: work for holder, work in works.items() if work != RankWork()}


def test_requests_of_one_frontend_are_counted_by_the_others() -> None:
    fleet = Frontends("a", "b")
    fleet.slots["a"].add(1, W1, [7, 8], now=0.0, prefill_tokens=100, own_blocks=1, block_tokens=4)
    fleet.slots["b"].add(1, W1, [7, 9], now=0.0)  # the same number, another request
    assert fleet.known("b") == {W1: RankWork(0, 2, 1)}
    fleet.turn()
    assert fleet.known("a") == fleet.known("b") == {W1: RankWork(100, 4, 2)}  # block 7 is shared
    fleet.slots["a"].prefill_done(1, now=0.0)
    fleet.turn()
    assert fleet.known("b") == {W1: RankWork(0, 4, 2)}
    fleet.slots["a"].free(1, now=0.0)
    fleet.turn()
    assert fleet.known("a") == fleet.known("b") == {W1: RankWork(0, 2, 1)}
    assert fleet.replicas["a"].others == {"b": True}


def test_a_new_frontend_knows_all_requests_within_a_moment() -> None:
    fleet = Frontends("a", "b")
    fleet.turn(AGAIN_S)
    for number in range(600):  # more than a batch
        fleet.slots["a"].add(number, W1, [number], now=fleet.now, prefill_tokens=10)
    fleet.slots["a"].prefill_done(0, now=fleet.now)
    fleet.turn(AGAIN_S)
    fleet.begin("c")
    fleet.turn()
    assert fleet.known("c") == fleet.known("a") == {W1: RankWork(5990, 600, 600)}
    assert fleet.replicas["c"].others == {"a": True, "b": True}


@pytest.mark.parametrize(
    "wrong",
    [
        {"own_blocks": -1},
        {"prefill_tokens": -5},
        {"prefill_tokens": 2**62},
        {"block_tokens": 0},
        {"rank": -1},
        {"expected_s": float("nan")},
        {"expected_s": -1.0},
        {"age_s": float("inf")},
        {"blocks": b"1234567"},
    ],
)
def test_an_invalid_batch_is_rejected_as_a_whole(wrong: Json) -> None:
    fine = Added(1, "w1", "i1", 0, b"", 1, 16, 5)
    said = SlotBatch("f", "life", 0, [fine, msgspec.structs.replace(fine, request=2)])
    assert wire.decode(wire.encode(said)) == said
    fields = {name: getattr(fine, name) for name in Added.__struct_fields__} | wrong
    bad = ["batch", "f", "life", 0, [["added", *dict(fields, request=2).values()]], False]
    with pytest.raises(msgspec.ValidationError):
        wire.decode(msgspec.msgpack.encode(bad))


def test_a_dead_frontend_and_its_former_life_leave_no_requests() -> None:
    fleet = Frontends("a", "b")
    fleet.slots["a"].add(1, W1, [7], now=0.0)
    fleet.turn()
    fleet.end("a")
    assert list(fleet.replicas["b"].look((), fleet.now + SILENT_S)) == []
    assert list(fleet.replicas["b"].look(("a",), fleet.now + SILENT_S + 1)) == []  # others still hear it
    assert list(fleet.replicas["b"].look((), fleet.now + SILENT_S + 1)) == ["a"]
    assert fleet.known("b") == {}
    fleet.begin("a")
    fleet.slots["a"].add(1, W1, [7], now=fleet.now)
    fleet.turn()
    fleet.begin("a")
    fleet.turn()
    assert fleet.known("b") == {}


def test_requests_that_are_never_freed_are_removed_by_the_guard() -> None:
    fleet = Frontends("a", "b")
    fleet.slots["a"].add(1, W1, [7], now=0.0)
    fleet.turn()
    assert fleet.slots["b"].expire(now=STALE_S + 1) == [("a", 1)]
    assert fleet.known("b") == {}


def test_batches_are_bounded_in_events_and_in_blocks() -> None:
    fleet = Frontends("a")
    replica, slots = fleet.replicas["a"], fleet.slots["a"]
    for number in range(EVENTS_MAX + 1):
        slots.add(number, W1, [number], now=0.0)
    assert [len(batch.events) for batch in replica.batches(0.0)] == [EVENTS_MAX, 1]
    long = list(range(1000, 1000 + BLOCKS_MAX // 2 + 1))
    for number in range(3):
        slots.add(f"long{number}", W1, long, now=0.0)
    slots.add("longer", W1, list(range(BLOCKS_MAX + 5)), now=0.0)
    batches = list(replica.batches(0.0))
    assert [len(batch.events) for batch in batches] == [1, 1, 2]
    last = batches[-1].events[-1]
    assert isinstance(last, Added)
    assert (last.blocks, last.own_blocks) == (b"", BLOCKS_MAX + 5)
    assert max(len(wire.encode(batch)) for batch in batches) < 1024 * 1024
    assert [batch.number for batch in batches] == [2, 3, 4]
    assert [(batch.number, batch.events) for batch in replica.batches(0.0)] == [(5, [])]


def test_a_frontend_with_too_many_unsent_events_sends_its_full_state() -> None:
    fleet = Frontends("a", "b")
    fleet.turn(AGAIN_S)
    slots = fleet.slots["a"]
    for number in range(WAITING_MAX // 2 + 10):
        slots.add(number, W1, now=fleet.now)
        if number:
            slots.free(number, now=fleet.now)
    assert fleet.replicas["a"].waiting < 100
    fleet.turn(AGAIN_S)
    assert fleet.known("b") == {W1: RankWork(0, 0, 1)}


def test_unsent_events_are_repaired_also_for_frontends_in_step() -> None:
    fleet = Frontends("a", "b")
    fleet.slots["a"].add(1, W1, [7], now=0.0)
    fleet.slots["a"].add(2, W1, [8], now=0.0)
    fleet.turn(AGAIN_S)
    fleet.slots["a"].free(1, now=fleet.now)
    fleet.replicas["a"].lost()  # the broker was away for a moment
    fleet.slots["a"].add(3, W1, [9], now=fleet.now)
    fleet.turn(AGAIN_S)
    assert fleet.known("b") == fleet.known("a") == {W1: RankWork(0, 2, 2)}


def test_duplicates_count_once_and_revive_no_request() -> None:
    fleet = Frontends("a", "b")
    heard: list[SlotBatch | ResendRequest] = []
    fleet.turn(AGAIN_S)
    fleet.net = lambda said: heard.append(said) or [said]  # type: ignore[func-returns-value]
    fleet.slots["a"].add(1, W1, [7], now=0.0)
    fleet.turn()
    fleet.slots["a"].free(1, now=fleet.now)
    fleet.turn()
    for said in reversed(heard):
        assert fleet.replicas["b"].take(said, fleet.now) is None
    assert fleet.known("b") == {}
    assert fleet.replicas["b"].others == {"a": True}


def test_the_full_state_is_sent_at_most_once_a_second() -> None:
    fleet = Frontends("a", "b")
    fleet.turn(AGAIN_S)
    heard: list[SlotBatch | ResendRequest] = []
    fleet.net = lambda said: heard.append(said) or [said]  # type: ignore[func-returns-value]
    for _ in range(10):
        fleet.say(ResendRequest("b", "a"))
        fleet.turn(AGAIN_S / 10)
    assert sum(isinstance(said, SlotBatch) and said.whole and said.frontend == "a" for said in heard) == 1


def test_blocks_survive_encoding() -> None:
    blocks = [0, 1, 2**64 - 1]
    assert list(wire.unpack(wire.pack(blocks))) == blocks
    assert wire.unpack(b"") == wire.unpack(wire.pack([]))


def test_invalid_messages_are_rejected() -> None:
    with pytest.raises(ValueError):
        wire.unpack(b"1234567")


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_all_frontends_converge(seed: int) -> None:
    dice = Random(seed)
    fleet = Frontends("a", "b", "c")
    late: list[SlotBatch | ResendRequest] = []

    def bad(said: SlotBatch | ResendRequest) -> list[SlotBatch | ResendRequest]:
        fate = dice.random()
        if fate < 0.2:
            return []
        if fate < 0.3:
            return [said, said]
        if fate < 0.4:
            late.append(said)
            return []
        return [said, *(late.pop() for _ in range(len(late)) if dice.random() < 0.5)]

    fleet.net = bad
    inflight: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for number in range(60):
        name = dice.choice("abc")
        slots, mine = fleet.slots[name], inflight[name]
        act = dice.random()
        if act < 0.5:
            blocks = sequence_hashes(dice.choices(range(2), k=dice.randrange(5)))
            holder = dice.choice([W1, W2])
            slots.add(number, holder, blocks, now=fleet.now, prefill_tokens=dice.randrange(50))
            mine.append(number)
        elif act < 0.7 and mine:
            slots.prefill_done(dice.choice(mine), now=fleet.now)
        elif act < 0.95 and mine:
            slots.free(mine.pop(dice.randrange(len(mine))), now=fleet.now)
        elif act >= 0.97:
            fleet.begin(name)
            mine.clear()
        if dice.random() < 0.5:
            fleet.turn(dice.random())
    late.clear()
    fleet.quiet()
    assert fleet.known("a") == fleet.known("b") == fleet.known("c")
    assert sum(work.requests for work in fleet.known("a").values()) == sum(map(len, inflight.values()))
    for name, mine in inflight.items():
        for number in mine:
            fleet.slots[name].free(number, now=fleet.now)
    fleet.turn()
    assert all(fleet.known(name) == {} for name in "abc")
