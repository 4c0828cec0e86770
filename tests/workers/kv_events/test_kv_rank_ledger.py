"""The KV event ledger of one rank, and its answers to frontends that missed events.

`tests/router/test_kv_feed.py` checks it against frontends and a lossy connection.
"""

import pytest
from msgspec import Raw

from events import kv
from events.kv import (
    Cleared,
    Dump,
    Events,
    InvalidRange,
    KvEvent,
    KvRefused,
    KvRequest,
    Removed,
    Stored,
    Tier,
    TooNew,
)
from workers.kv_events.ledger import KvEventLedger, LedgerBounds


def published(ledger: KvEventLedger, *events: KvEvent) -> list[KvEvent]:
    """Apply engine events. Return the events that frontends receive."""
    first, bodies = ledger.record(events)
    assert ledger.next == first + len(bodies)
    return kv.batch(kv.encode(["w", "i", 0, first, [Raw(body) for body in bodies]])).events


def answer(ledger: KvEventLedger, ask: KvRequest, now: float = 0.0) -> kv.Answer:
    return kv.answer(ledger.answer(ask, now))


def test_events_are_numbered_from_0_and_kept_for_catching_up() -> None:
    ledger = KvEventLedger()
    assert answer(ledger, KvRequest()) == Dump(0, 0, 1, [])
    events: list[KvEvent] = [Stored([1, 2]), Stored([3], 2, Tier.HOST), Removed([1]), Cleared(), Stored([4])]
    assert published(ledger, *events[:2]) + published(ledger, *events[2:]) == events
    assert answer(ledger, KvRequest(0, 0)) == Events(0, events)
    assert answer(ledger, KvRequest(0, 1, 2)) == Events(1, events[1:3])
    assert answer(ledger, KvRequest(0, 3, 99)) == Events(3, events[3:])
    assert answer(ledger, KvRequest(0, 5)) == TooNew(5)
    assert answer(ledger, KvRequest(0, 3, 2)) == InvalidRange(3, 2)
    assert answer(ledger, KvRequest()) == Dump(5, 0, 1, [Stored([4])])


@pytest.mark.parametrize(
    "event",
    [
        Stored([9], parent=8),  # after a block that the rank does not hold
        Stored([2]),  # it is already held after another block
        Stored([5, 5]),
        Stored([3], parent=3),
        Stored([9], None, 7),  # on no tier
        Removed([1], 7),
    ],
)
def test_contradicting_events_are_not_published(event: KvEvent) -> None:
    ledger = KvEventLedger()
    published(ledger, Stored([1, 2, 3]))
    assert published(ledger, event) == []
    assert ledger.refused == 1 and ledger.next == 1 and len(ledger) == 3


def test_events_that_change_nothing_are_not_published() -> None:
    ledger = KvEventLedger()
    published(ledger, Stored([1, 2]))
    assert published(ledger, Stored([1, 2]), Removed([7]), Stored([]), Removed([1], Tier.HOST)) == []
    assert published(ledger, Removed([7, 2, 2])) == [Removed([2])]
    assert (ledger.refused, len(ledger)) == (0, 1)


def test_a_dump_stores_a_hole_and_then_removes_it() -> None:
    ledger = KvEventLedger()
    published(ledger, Stored([1, 2, 3]), Stored([4], 2, Tier.DISK), Removed([2]))
    assert answer(ledger, KvRequest()) == Dump(3, 0, 2, [Stored([1, 2, 3]), Stored([4], 2, Tier.DISK)])
    assert answer(ledger, KvRequest(0, dump=3, part=1)) == Dump(3, 1, 2, [Removed([2])])
    assert published(ledger, Stored([5], parent=2)) == []  # blocks after a hole cannot be computed
    published(ledger, Removed([3]), Removed([4], Tier.DISK))
    assert answer(ledger, KvRequest(), 9.0) == Dump(5, 0, 1, [Stored([1])])


def test_a_block_on_two_tiers_is_stored_on_both() -> None:
    ledger = KvEventLedger()
    published(ledger, Stored([1, 2]), Stored([1, 2], None, Tier.HOST), Removed([2]))
    assert answer(ledger, KvRequest()) == Dump(
        3, 0, 1, [Stored([1]), Stored([1], None, Tier.HOST), Stored([2], 1, Tier.HOST)]
    )
    assert len(ledger) == 2


def test_the_ring_is_bounded_and_older_events_are_answered_with_a_dump() -> None:
    ledger = KvEventLedger(LedgerBounds(ring_bytes=200))
    for block in range(1, 101):
        published(ledger, Stored([block], block - 1 or None))
    assert answer(ledger, KvRequest(0, 50)) == Dump(100, 0, 1, [Stored(list(range(1, 101)))])
    kept = len(ledger.ring)
    assert 10 < kept < 50
    for first in range(100):
        said_of = answer(ledger, KvRequest(0, first), 2.0 * first)
        if first < 100 - kept:
            assert isinstance(said_of, Dump)
        else:
            assert (
                isinstance(said_of, Events) and said_of.first == first and len(said_of.events) == 100 - first
            )


def test_an_answer_is_not_longer_than_a_message_may_be() -> None:
    ledger = KvEventLedger(LedgerBounds(part_bytes=40))
    for block in range(1, 11):
        published(ledger, Stored([block], block - 1 or None))
    first = answer(ledger, KvRequest(0, 0))
    assert isinstance(first, Events) and 0 < len(first.events) < 10


def test_an_answer_has_at_least_one_event() -> None:
    ledger = KvEventLedger(LedgerBounds(part_bytes=1))
    for block in range(1, 11):
        published(ledger, Stored([block], block - 1 or None))
    assert answer(ledger, KvRequest(0, 4)) == Events(4, [Stored([5], 4)])


def test_a_long_event_is_split() -> None:
    ledger = KvEventLedger(LedgerBounds(event_blocks=2))
    assert published(ledger, Stored([1, 2, 3, 4, 5])) == [Stored([1, 2]), Stored([3, 4], 2), Stored([5], 4)]
    assert published(ledger, Removed([5, 4, 3])) == [Removed([5, 4]), Removed([3])]


def test_the_parts_of_a_dump_are_consistent_despite_later_events() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=2))
    published(ledger, Stored([1, 2, 3]))
    assert answer(ledger, KvRequest()) == Dump(1, 0, 2, [Stored([1, 2])])
    published(ledger, Removed([3]), Stored([4], 2))
    assert answer(ledger, KvRequest(0, dump=1, part=1)) == Dump(1, 1, 2, [Stored([3], 2)])
    assert answer(ledger, KvRequest(), 0.5) == Dump(
        1, 0, 2, [Stored([1, 2])]
    )  # the same dump for another frontend
    assert answer(ledger, KvRequest(), 2.0) == Dump(3, 0, 2, [Stored([1, 2])])
    ledger.tidy(11.0)
    assert isinstance(answer(ledger, KvRequest(0, dump=1, part=1)), KvRefused)
    assert isinstance(answer(ledger, KvRequest(0, dump=3, part=7)), KvRefused)


def test_a_dump_is_shared_only_if_the_events_since_are_kept() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=1, ring_bytes=30))
    published(ledger, Stored([1, 2]))
    assert answer(ledger, KvRequest()) == Dump(1, 0, 2, [Stored([1])])
    for block in range(3, 9):
        published(ledger, Stored([block], block - 1))
    assert answer(ledger, KvRequest(), 0.1) == Dump(7, 0, 8, [Stored([1])])


def test_the_number_of_kept_dumps_is_limited() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=1))
    published(ledger, Stored([1, 2]))
    for number in range(6):
        published(ledger, Stored([10 + number]))
        answer(ledger, KvRequest(), 2.0 * number)
    assert len(ledger.snapshots) == LedgerBounds().dumps


def test_unneeded_holes_do_not_accumulate() -> None:
    ledger = KvEventLedger(LedgerBounds(holes=10))
    ledger.record([Cleared()])
    for block in range(1, 1000):
        published(ledger, Stored([block]), Removed([block]))
    assert len(ledger) == 0 and ledger.holes <= 11
