"""One planned move: every event in every state."""

from collections.abc import Sequence

import pytest

from controller.migration.planned_move import (
    Act,
    Event,
    GivenUp,
    Lost,
    MigrationDeclined,
    SourceLeft,
    SourceProgressed,
    State,
    TargetCommitted,
    TargetReserved,
    Transfer,
    step,
)

SENT = (7, 8, 9)  # the source's tokens when it stopped
EVENTS: dict[str, Event] = {
    "reserved": TargetReserved(),
    "target declined": MigrationDeclined("target", "no room"),
    "source declined": MigrationDeclined("source", "it is over"),
    "committed": TargetCommitted(SENT),
    "said": SourceProgressed(),
    "target lost": Lost("gone"),
    "given up": GivenUp("too late"),
    "left": SourceLeft(over=False),
    "over": SourceLeft(over=True),
}
BEFORE: dict[State, Transfer] = {
    "asked": Transfer(),
    "shipping": Transfer("shipping"),
    "committed": Transfer("committed", SENT),
    "switched": Transfer("switched", SENT),
    "stayed": Transfer("stayed"),
    "replayed": Transfer("replayed"),
}
# events not listed change nothing
MOVES: dict[tuple[State, str], tuple[State, tuple[Act, ...]]] = {
    ("asked", "reserved"): ("shipping", ("ship",)),
    ("asked", "target declined"): ("stayed", ()),
    ("asked", "source declined"): ("stayed", ("cancel",)),
    ("asked", "committed"): ("stayed", ("cancel", "stay")),
    ("asked", "target lost"): ("stayed", ()),
    ("asked", "given up"): ("stayed", ("cancel",)),
    ("asked", "left"): ("replayed", ("cancel",)),
    ("asked", "over"): ("stayed", ("cancel",)),
    ("shipping", "target declined"): ("stayed", ("stay",)),
    ("shipping", "source declined"): ("stayed", ("cancel",)),
    ("shipping", "committed"): ("committed", ()),
    ("shipping", "target lost"): ("stayed", ("stay",)),
    ("shipping", "given up"): ("stayed", ("cancel", "stay")),
    ("shipping", "left"): ("replayed", ("cancel",)),
    ("shipping", "over"): ("stayed", ("cancel",)),
    ("committed", "target declined"): ("stayed", ("stay",)),
    ("committed", "source declined"): ("stayed", ("cancel",)),
    ("committed", "committed"): ("stayed", ("cancel", "stay")),
    ("committed", "target lost"): ("stayed", ("stay",)),
    ("committed", "given up"): ("stayed", ("cancel", "stay")),
    ("committed", "left"): ("replayed", ("cancel",)),
    ("committed", "over"): ("stayed", ("cancel",)),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", BEFORE)
def test_every_event_in_every_state(state: State, event: str) -> None:
    before = BEFORE[state]
    after, acts = step(before, EVENTS[event], SENT[:1])  # the source's last tokens are still in flight
    assert (after.state, acts) == MOVES.get((state, event), (state, ()))
    assert bool(after.why) == (after.state == "stayed" and not before.over and event != "over")


@pytest.mark.parametrize(
    ("said", "state", "acts", "why"),
    [
        ((), "committed", (), ""),
        (SENT[:2], "committed", (), ""),
        (SENT, "switched", ("switch",), ""),
        ((*SENT, 10), "stayed", ("cancel", "stay"), "the source has continued meanwhile"),
        ((7, 0), "stayed", ("cancel", "stay"), "source and target report different tokens"),
        ((7, 8, 0), "stayed", ("cancel", "stay"), "source and target report different tokens"),
        ((7, 8, 0, 10), "stayed", ("cancel", "stay"), "source and target report different tokens"),
    ],
)
@pytest.mark.parametrize("event", [TargetCommitted(SENT), SourceProgressed()])
def test_a_move_switches_when_the_sources_own_tokens_equal_the_committed_ones(
    event: Event, said: Sequence[int], state: State, acts: tuple[Act, ...], why: str
) -> None:
    before = BEFORE["shipping"] if isinstance(event, TargetCommitted) else BEFORE["committed"]
    after, found = step(before, event, list(said))
    assert (after.state, found, after.why) == (state, acts, why)


def test_a_source_without_further_tokens_switches_at_once() -> None:
    after, acts = step(Transfer("shipping"), TargetCommitted(()), ())
    assert (after.state, acts) == ("switched", ("switch",))
