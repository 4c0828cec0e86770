"""Settled and pending: the order in which every reader folds."""

import random
from datetime import UTC, datetime, timedelta

import pytest

from events.decisions import Absorbed
from events.fact import Fact, Recorded, Skipped
from events.observations import ObserverBlind
from events.order import CLOCK_SLACK, REMEMBERED, Order, OutOfOrder, OutOfTurn, Position

AT = datetime(2026, 1, 1, tzinfo=UTC)
Log = tuple[str, ...]


def fold(state: Log, event: Recorded) -> Log:
    """Record the ids in the order in which they were folded."""
    return (*state, event.id)


def seen(seq: int, *, source: str = "", number: int = 0, at: datetime = AT) -> Recorded:
    fact: Fact = ObserverBlind(observer="o", silent=1, known=1)
    return Recorded(seq=seq, at=at, fact=fact, id=f"o{seq}", source=source, source_number=number)


def decided(seq: int, number: int, through: int, at: datetime = AT) -> Recorded:
    fact = Absorbed(number=number, decided_at=AT)
    return Recorded(seq=seq, at=at, fact=fact, id=f"d{seq}", through=through)


def order(*events: Recorded) -> Order[Log]:
    made: Order[Log] = Order(fold, ())
    for event in events:
        made.absorb(event)
    return made


def test_a_decision_is_folded_after_what_its_controller_had_read_and_before_the_rest() -> None:
    made = order(seen(1), seen(2), seen(3), decided(4, 1, through=2))
    assert made.settled == ("o1", "o2", "d4")
    assert made.shown == ("o1", "o2", "d4", "o3")
    assert [event.seq for event in made.pending] == [3]
    assert made.position == Position(through=2, decided=4, number=1)


def test_a_batch_is_folded_as_one() -> None:
    made = order(seen(1), seen(2), decided(3, 1, through=1), decided(4, 2, through=1), seen(5))
    assert made.shown == ("o1", "d3", "d4", "o2", "o5")
    assert made.settled == ("o1", "d3", "d4")


def test_a_decision_that_read_everything_leaves_nothing_pending() -> None:
    made = order(seen(1), seen(2), decided(3, 1, through=2))
    assert made.shown == made.settled == ("o1", "o2", "d3")
    assert not made.pending


def test_repetitions_of_a_source_are_dropped() -> None:
    made = order(
        seen(1, source="w", number=1),
        seen(2, source="w", number=1),
        seen(3, source="v", number=1),
        seen(4, source="w", number=2),
        seen(5, source="w", number=1),
    )
    assert made.shown == ("o1", "o3", "o4")


def test_repetitions_are_dropped_after_a_snapshot_too() -> None:
    first = order(seen(1, source="w", number=1), seen(2, source="w", number=2), decided(3, 1, through=1))
    again: Order[Log] = Order(fold, first.settled, first.position, dict(first.sources))
    for event in (
        seen(2, source="w", number=2),
        decided(3, 1, through=1),
        seen(4, source="w", number=1),
        seen(5, source="w", number=3),
    ):
        again.absorb(event)
    assert again.shown == ("o1", "d3", "o2", "o5")


@pytest.mark.parametrize(
    ("silent", "dropped"), [(REMEMBERED, True), (REMEMBERED + timedelta(seconds=1), False)]
)
def test_a_source_is_forgotten_after_its_time(silent: timedelta, dropped: bool) -> None:
    events = [
        seen(1, source="w", number=7),
        decided(2, 1, through=1),
        seen(3, source="w", number=7, at=AT + silent),
    ]
    assert order(*events).shown == (("o1", "d2") if dropped else ("o1", "d2", "o3"))


def test_sources_that_are_gone_are_forgotten() -> None:
    made, day, days = order(), timedelta(days=1), 100
    for n in range(days):
        made.absorb(seen(2 * n + 1, source=f"life-{n}", number=1, at=AT + n * day))
        made.absorb(decided(2 * n + 2, n + 1, through=2 * n + 1, at=AT + n * day))
    kept = (REMEMBERED + CLOCK_SLACK) // day
    assert list(made.sources) == list(made._seen) == [f"life-{n}" for n in range(days - kept - 1, days)]


@pytest.mark.parametrize(
    "events",
    [
        (seen(1), seen(3)),
        (seen(1), seen(1)),
        (seen(2), seen(1)),
        (decided(1, 2, through=0),),
        (decided(1, 1, through=0), decided(2, 3, through=0)),
        (decided(1, 1, through=0), decided(2, 1, through=0)),
    ],
)
def test_gaps_and_repeated_numbers_are_refused(events: tuple[Recorded, ...]) -> None:
    with pytest.raises(OutOfOrder, match="truncated"):
        order(*events)


def test_a_decision_out_of_turn_changes_nothing_and_names_the_way_past_it() -> None:
    made = order(seen(1), decided(2, 1, through=1), seen(3))
    before = (made.shown, made.position, made.last_seq)
    sentence = r"decision 9, at 4, is out of turn, 2 is next.*journal inspect.*journal quarantine 4 --why"
    for _ in range(2):
        with pytest.raises(OutOfTurn, match=sentence):
            made.take(decided(4, 9, through=3))
        assert (made.shown, made.position, made.last_seq) == before
    forged = Skipped(why="quarantined", subject="fleet.decided.absorbed", bytes=2, decided=True)
    made.take(Recorded(4, AT, forged, "skipped:x"))
    assert (made.position.decided, made.position.number) == (4, 1), "the fence counts it, the numbers do not"
    made.take(decided(5, 2, through=4))
    assert made.shown == ("o1", "d2", "o3", "d5")


@pytest.mark.parametrize("seed", range(30))
def test_readers_that_start_from_different_snapshots_show_the_same_state(seed: int) -> None:
    r = random.Random(seed)
    events: list[Recorded] = []
    number = read = 0
    now = AT
    for seq in range(1, 200):
        now += r.choice((1, 30, 300)) * timedelta(hours=1)  # long enough for a source to be forgotten
        at = now - r.random() * CLOCK_SLACK  # the broker's clock is set back occasionally
        if r.random() < 0.3:
            number += 1
            read = r.randint(read, seq - 1)
            events.append(decided(seq, number, read, at))
        else:
            events.append(seen(seq, source=f"s{r.randrange(9)}", number=r.randrange(1, 60), at=at))
    whole = order(*events)
    for cut in r.sample(range(1, 199), 10):
        part = order(*events[:cut])
        rest: Order[Log] = Order(fold, part.settled, part.position, dict(part.sources))
        for event in events[part.position.through :]:
            rest.absorb(event)
        assert (rest.shown, rest.settled, rest.position) == (whole.shown, whole.settled, whole.position)
        assert rest.sources == whole.sources
    assert len(whole.sources) < 9
