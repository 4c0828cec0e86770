"""What one rank has said about its blocks, and how it answers those who missed it. `tests/router/test_kv_feed.py` holds it
against frontends and a wire that loses things."""

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


def said(ledger: KvEventLedger, *events: KvEvent) -> list[KvEvent]:
    """Let the engine say something. Return what frontends are told of it."""
    first, bodies = ledger.say(events)
    assert ledger.next == first + len(bodies)
    return kv.batch(kv.encode(["w", "i", 0, first, [Raw(body) for body in bodies]])).events


def answer(ledger: KvEventLedger, ask: KvRequest, now: float = 0.0) -> kv.Answer:
    return kv.answer(ledger.answer(ask, now))


def test_events_are_numbered_from_0_and_kept_for_who_missed_them() -> None:
    ledger = KvEventLedger()
    assert answer(ledger, KvRequest()) == Dump(0, 0, 1, [])
    events: list[KvEvent] = [Stored([1, 2]), Stored([3], 2, Tier.HOST), Removed([1]), Cleared(), Stored([4])]
    assert said(ledger, *events[:2]) + said(ledger, *events[2:]) == events
    assert answer(ledger, KvRequest(0, 0)) == Events(0, events)
    assert answer(ledger, KvRequest(0, 1, 2)) == Events(1, events[1:3])
    assert answer(ledger, KvRequest(0, 3, 99)) == Events(3, events[3:])
    assert answer(ledger, KvRequest(0, 5)) == TooNew(5)
    assert answer(ledger, KvRequest(0, 3, 2)) == InvalidRange(3, 2)
    assert answer(ledger, KvRequest()) == Dump(5, 0, 1, [Stored([4])])


@pytest.mark.parametrize(
    "event",
    [
        Stored([9], parent=8),  # after one that it does not have
        Stored([2]),  # it lies after another
        Stored([5, 5]),
        Stored([3], parent=3),
        Stored([9], None, 7),  # on no tier
        Removed([1], 7),
    ],
)
def test_what_contradicts_is_said_to_nobody(event: KvEvent) -> None:
    ledger = KvEventLedger()
    said(ledger, Stored([1, 2, 3]))
    assert said(ledger, event) == []
    assert ledger.refused == 1 and ledger.next == 1 and len(ledger) == 3


def test_what_changes_nothing_is_not_said() -> None:
    ledger = KvEventLedger()
    said(ledger, Stored([1, 2]))
    assert said(ledger, Stored([1, 2]), Removed([7]), Stored([]), Removed([1], Tier.HOST)) == []
    assert said(ledger, Removed([7, 2, 2])) == [Removed([2])]
    assert (ledger.refused, len(ledger)) == (0, 1)


def test_a_hole_is_in_a_dump_stored_and_then_removed() -> None:
    ledger = KvEventLedger()
    said(ledger, Stored([1, 2, 3]), Stored([4], 2, Tier.DISK), Removed([2]))
    assert answer(ledger, KvRequest()) == Dump(3, 0, 2, [Stored([1, 2, 3]), Stored([4], 2, Tier.DISK)])
    assert answer(ledger, KvRequest(0, dump=3, part=1)) == Dump(3, 1, 2, [Removed([2])])
    assert said(ledger, Stored([5], parent=2)) == []  # nobody can compute what comes after a hole
    said(ledger, Removed([3]), Removed([4], Tier.DISK))
    assert answer(ledger, KvRequest(), 9.0) == Dump(5, 0, 1, [Stored([1])])


def test_a_block_on_two_tiers_is_stored_on_both() -> None:
    ledger = KvEventLedger()
    said(ledger, Stored([1, 2]), Stored([1, 2], None, Tier.HOST), Removed([2]))
    assert answer(ledger, KvRequest()) == Dump(
        3, 0, 1, [Stored([1]), Stored([1], None, Tier.HOST), Stored([2], 1, Tier.HOST)]
    )
    assert len(ledger) == 2


def test_what_is_kept_is_bounded_and_who_missed_more_gets_a_dump() -> None:
    ledger = KvEventLedger(LedgerBounds(ring_bytes=200))
    for block in range(1, 101):
        said(ledger, Stored([block], block - 1 or None))
    assert answer(ledger, KvRequest(0, 50)) == Dump(100, 0, 1, [Stored(list(range(1, 101)))])
    kept = ledger.kept
    assert 10 < kept < 50
    for first in range(100):
        said_of = answer(ledger, KvRequest(0, first), 2.0 * first)
        if first < 100 - kept:
            assert isinstance(said_of, Dump)
        else:
            assert (
                isinstance(said_of, Events) and said_of.first == first and len(said_of.events) == 100 - first
            )


def test_an_answer_is_no_longer_than_a_message_should_be() -> None:
    ledger = KvEventLedger(LedgerBounds(part_bytes=40))
    for block in range(1, 11):
        said(ledger, Stored([block], block - 1 or None))
    first = answer(ledger, KvRequest(0, 0))
    assert isinstance(first, Events) and 0 < len(first.events) < 10


def test_an_answer_has_one_event_at_least() -> None:
    ledger = KvEventLedger(LedgerBounds(part_bytes=1))
    for block in range(1, 11):
        said(ledger, Stored([block], block - 1 or None))
    assert answer(ledger, KvRequest(0, 4)) == Events(4, [Stored([5], 4)])


def test_a_long_event_is_said_in_several() -> None:
    ledger = KvEventLedger(LedgerBounds(event_blocks=2))
    assert said(ledger, Stored([1, 2, 3, 4, 5])) == [Stored([1, 2]), Stored([3, 4], 2), Stored([5], 4)]
    assert said(ledger, Removed([5, 4, 3])) == [Removed([5, 4]), Removed([3])]


def test_the_parts_of_a_dump_belong_together_whatever_happens_meanwhile() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=2))
    said(ledger, Stored([1, 2, 3]))
    assert answer(ledger, KvRequest()) == Dump(1, 0, 2, [Stored([1, 2])])
    said(ledger, Removed([3]), Stored([4], 2))
    assert answer(ledger, KvRequest(0, dump=1, part=1)) == Dump(1, 1, 2, [Stored([3], 2)])
    assert answer(ledger, KvRequest(), 0.5) == Dump(
        1, 0, 2, [Stored([1, 2])]
    )  # the same for another frontend
    assert answer(ledger, KvRequest(), 2.0) == Dump(3, 0, 2, [Stored([1, 2])])
    ledger.tidy(11.0)
    assert isinstance(answer(ledger, KvRequest(0, dump=1, part=1)), KvRefused)
    assert isinstance(answer(ledger, KvRequest(0, dump=3, part=7)), KvRefused)


def test_a_dump_is_shared_only_if_the_events_since_are_kept() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=1, ring_bytes=30))
    said(ledger, Stored([1, 2]))
    assert answer(ledger, KvRequest()) == Dump(1, 0, 2, [Stored([1])])
    for block in range(3, 9):
        said(ledger, Stored([block], block - 1))
    assert answer(ledger, KvRequest(), 0.1) == Dump(7, 0, 8, [Stored([1])])


def test_few_dumps_are_kept_at_once() -> None:
    ledger = KvEventLedger(LedgerBounds(part_blocks=1))
    said(ledger, Stored([1, 2]))
    for number in range(6):
        said(ledger, Stored([10 + number]))
        answer(ledger, KvRequest(), 2.0 * number)
    assert ledger.dumps == LedgerBounds().dumps


def test_holes_that_nobody_needs_do_not_gather() -> None:
    ledger = KvEventLedger(LedgerBounds(holes=10))
    ledger.say([Cleared()])
    for block in range(1, 1000):
        said(ledger, Stored([block]), Removed([block]))
    assert len(ledger) == 0 and ledger.holes <= 11
