"""The ledger of reservations, against a reference model in random orders, and each refusal by example."""

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_kit import BLOCKS, KV, TOKENS

from workers.kv_transfer.ledger import KvReservation, ReservationPolicy, TransferReservations
from workers.kv_transfer.messages import Ending, KvChunk, Open, TransferFailed, digest, packed

T = TypeVar("T")
POLICY = ReservationPolicy(live_max=3, bytes_max=10 * KV.block_bytes, lasts=timedelta(seconds=10))


def ledger(policy: ReservationPolicy = POLICY) -> TransferReservations:
    names = itertools.count()
    return TransferReservations((KV,), policy, lambda: f"t{next(names)}")


def outcome(call: Callable[..., T], *args: object, **more: object) -> T | TransferFailed:
    """Return the result of a call, or the refusal that it raises."""
    try:
        return call(*args, **more)
    except TransferFailed as error:
        return error


def ending(ticket: str, chunks: int, computed: int = 50, tokens: list[int] = TOKENS) -> Ending:
    ids = packed(tokens)
    return Ending(ticket, chunks, computed, len(tokens), ids, digest(ids))


def whole(book: TransferReservations, blocks: int = BLOCKS) -> str:
    """Reserve, open and mark everything, one chunk per block."""
    made = book.reserve(KV, blocks, TOKENS[:10], 0.0)
    book.open(Open(made.ticket, KV, True), 0.0)
    for n in range(blocks):
        chunk = KvChunk(made.ticket, n, n * KV.block_bytes, KV.block_bytes, n)
        book.mark(made.ticket, chunk, n, 0.0)
    return made.ticket


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x"}, {"revision": "x"}, {"dtype": "float16"}, {"layers": 3}, {"heads": 4}, {"head_size": 9},
        {"block_size": 32}, {"block_bytes": 4097}, {"tp_size": 2}, {"rank": 1},
    ],
)  # fmt: skip
def test_another_models_blocks_are_refused_before_a_byte_moves(change: dict[str, object]) -> None:
    book = ledger()
    other = msgspec.structs.replace(KV, **change)
    refused = outcome(book.reserve, other, 1, [], 0.0)
    assert isinstance(refused, TransferFailed) and next(iter(change)) in str(refused)
    made = book.reserve(KV, 1, [], 0.0)
    assert isinstance(outcome(book.open, Open(made.ticket, other, True), 0.0), TransferFailed)
    assert not made.opened


def test_a_reservation_beyond_room_or_limits_is_refused() -> None:
    book = ledger()
    assert "no room" in str(outcome(book.reserve, KV, 11, [], 0.0))
    assert "cannot reserve" in str(outcome(book.reserve, KV, 0, [], 0.0))
    for _ in range(3):
        assert book.reserve(KV, 1, [], 0.0)
    assert "too many" in str(outcome(book.reserve, KV, 1, [], 0.0))
    assert "token ids" in str(outcome(ledger().reserve, KV, 1, [-1], 0.0))


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda t: ending("other", 4), "another ticket"),
        (lambda t: ending(t, 5), "chunks"),
        (lambda t: ending(t, 4, computed=48), "bytes"),
        (lambda t: ending(t, 4, computed=0), "tokens"),
        (lambda t: ending(t, 4, computed=51), "tokens"),
        (lambda t: ending(t, 4, tokens=[1, *TOKENS[1:]]), "continue"),
        (lambda t: ending(t, 4, computed=5, tokens=TOKENS[:5]), "continue"),
        (lambda t: msgspec.structs.replace(ending(t, 4), count=49), "count"),
        (lambda t: msgspec.structs.replace(ending(t, 4), digest=b"x" * 16), "digest"),
        (lambda t: msgspec.structs.replace(ending(t, 4), state=bytes(2 << 20)), "state"),
    ],
)  # fmt: skip
def test_an_inconsistent_ending_is_refused_and_changes_nothing(end, why: str) -> None:  # type: ignore[no-untyped-def]
    book = ledger()
    ticket = whole(book)
    refused = outcome(book.commit, ticket, end(ticket), 0.0)
    assert isinstance(refused, TransferFailed) and why in str(refused)
    assert book.commit(ticket, ending(ticket, 4), 0.0)
    assert "committed already" in str(outcome(book.commit, ticket, ending(ticket, 4), 0.0))


def test_a_reservation_has_one_source_of_one_version_and_a_deadline() -> None:
    book = ledger()
    made = book.reserve(KV, 1, [], 0.0)
    assert "version" in str(outcome(book.open, Open(made.ticket, KV, True, version=2), 0.0))
    assert book.open(Open(made.ticket, KV, True), 0.0)
    assert "source already" in str(outcome(book.open, Open(made.ticket, KV, True), 0.0))
    assert "deadline has passed" in str(
        outcome(book.check, made.ticket, KvChunk(made.ticket, 0, 0, 1, 0), 10.0)
    )
    assert book.expire(9.9) == [] and book.expire(10.0) == [made]
    assert (len(book), book.bytes) == (0, 0)


def test_blocks_that_the_target_already_has_are_not_required() -> None:
    book = ledger()
    made = book.reserve(KV, 2, TOKENS[:48], 0.0, first_block=2)
    assert made.size == 2 * KV.block_bytes
    book.open(Open(made.ticket, KV, True), 0.0)
    for n in range(2):
        book.mark(made.ticket, KvChunk(made.ticket, n, n * KV.block_bytes, KV.block_bytes, n), n, 0.0)
    assert book.commit(made.ticket, ending(made.ticket, 2, computed=50), 0.0) is made
    assert "cannot reserve" in str(outcome(book.reserve, KV, 1, [], 0.0, first_block=-1))
    made = book.reserve(KV, 1, TOKENS[:48], 0.0, first_block=3)
    book.open(Open(made.ticket, KV, True), 0.0)
    assert book.commit(made.ticket, ending(made.ticket, 0, computed=48), 0.0) is made


def test_each_shard_has_its_own_description_and_its_own_count() -> None:
    shards = [msgspec.structs.replace(KV, tp_size=2, rank=rank) for rank in range(2)]
    book = TransferReservations(shards, POLICY)
    made = [book.reserve(shard, 1, [], 0.0) for _ in range(3) for shard in shards]
    assert "too many" in str(outcome(book.reserve, shards[1], 1, [], 0.0))
    assert "rank is 1" in str(outcome(book.open, Open(made[0].ticket, shards[1], True), 0.0))
    assert "rank is 2" in str(outcome(book.reserve, msgspec.structs.replace(shards[0], rank=2), 1, [], 0.0))


class AgainstAReference(RuleBasedStateMachine):
    """The reference model keeps a set of bytes for each reservation, and nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.book = ledger()
        self.now = 0.0
        self.blocks: dict[str, int] = {}
        self.until: dict[str, float] = {}
        self.got: dict[str, dict[int, tuple[int, int]]] = {}  # ticket → number → offset, bytes
        self.done: set[str] = set()

    def some(self, pick: int) -> str:
        return sorted(self.blocks)[pick % len(self.blocks)] if self.blocks else "none"

    def live(self, ticket: str) -> bool:
        return ticket in self.blocks and self.now < self.until[ticket] and ticket not in self.done

    @rule(blocks=st.integers(-1, 11))
    def reserve(self, blocks: int) -> None:
        made = outcome(self.book.reserve, KV, blocks, TOKENS[:3], self.now)
        fits = 0 < blocks <= 10 - sum(self.blocks.values()) and len(self.blocks) < 3
        assert isinstance(made, KvReservation) == fits
        if isinstance(made, KvReservation):
            assert made.ticket not in self.blocks
            self.blocks[made.ticket], self.got[made.ticket] = blocks, {}
            self.until[made.ticket] = self.now + 10

    @rule(
        pick=st.integers(0, 2), number=st.integers(-1, 4), half=st.integers(-1, 8), halves=st.integers(0, 3),
        damage=st.sampled_from([0, 0, 0, 1]), wrong=st.sampled_from([False, False, True]),
    )  # fmt: skip
    def write(self, pick: int, number: int, half: int, halves: int, damage: int, wrong: bool) -> None:
        ticket, unit = self.some(pick), KV.block_bytes // 2
        chunk = KvChunk("another" if wrong else ticket, number, half * unit, halves * unit, 7)
        refused = outcome(self.book.mark, ticket, chunk, 7 + damage, self.now)
        got = self.got.get(ticket, {})
        place = set(range(half, half + halves))
        taken = {at // unit + n for at, size in got.values() for n in range(size // unit)}
        fits = place and min(place) >= 0 and max(place) < 2 * self.blocks.get(ticket, 0) and number >= 0
        repeated = got.get(number) == (half * unit, halves * unit)
        fresh = number not in got and fits and not place & taken and not damage
        assert (refused is None) == bool(self.live(ticket) and not wrong and (repeated or fresh))
        if refused is None:
            got[number] = (half * unit, halves * unit)

    @rule(pick=st.integers(0, 2), computed=st.sampled_from([1, 16, 17, 32, 50]))
    def commit(self, pick: int, computed: int) -> None:
        ticket = self.some(pick)
        got = self.got.get(ticket, {})
        done = outcome(self.book.commit, ticket, ending(ticket, len(got), computed), self.now)
        need = set(range(0, -(-computed // 16) * KV.block_bytes, KV.block_bytes // 2))
        places = {
            at for begin, size in got.values() for at in range(begin, begin + size, KV.block_bytes // 2)
        }
        assert isinstance(done, KvReservation) == (self.live(ticket) and need == places)
        if isinstance(done, KvReservation):
            self.done.add(ticket)

    def forget(self, ticket: str) -> None:
        for kept in (self.blocks, self.until, self.got):
            kept.pop(ticket, None)
        self.done.discard(ticket)

    @rule(pick=st.integers(0, 2))
    def abort_or_disconnect_or_release(self, pick: int) -> None:
        ticket = self.some(pick)
        assert (self.book.abort(ticket) is not None) == (ticket in self.blocks)
        assert self.book.abort(ticket) is None
        self.forget(ticket)

    @rule(seconds=st.sampled_from([1.0, 4.0, 10.0]), look=st.booleans())
    def time_passes(self, seconds: float, look: bool) -> None:
        self.now += seconds
        if look:
            over = {ticket for ticket, until in self.until.items() if until <= self.now}
            assert {one.ticket for one in self.book.expire(self.now)} == over
            for ticket in over:
                self.forget(ticket)

    @invariant()
    def nothing_leaks(self) -> None:
        assert len(self.book) == len(self.blocks)
        assert self.book.bytes == sum(self.blocks.values()) * KV.block_bytes
        for ticket, got in self.got.items():
            found = self.book.get(ticket)
            assert found is not None and found.coverage.bytes == sum(size for _, size in got.values())

    def teardown(self) -> None:
        self.book.expire(self.now + 100)
        assert (len(self.book), self.book.bytes) == (0, 0)


AgainstAReference.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
test_random_orders_agree_with_a_plain_reference_and_leak_nothing = AgainstAReference.TestCase
