"""Observations of new kinds are held back until they are in force."""

from datetime import UTC, datetime

from events.fact import Observation
from events.journal.counters import JournalCounters
from events.journal.kind_gate import WAITING_MAX, KindGate
from events.observations import DrainRequested, RestartRequested, WorkerAwaited, WorkerLeft

NEW = WorkerAwaited(worker="w0", instance="i0", reason="loads")
OLD = WorkerLeft(worker="w0", instance="i0", mode="graceful")


class Gate:
    """A gate, and what it let through."""

    def __init__(self) -> None:
        self.counters = JournalCounters()
        self.gate = KindGate(self.counters)
        self.published: list[Observation] = []

    def say(self, *facts: Observation) -> None:
        for fact in facts:
            self.gate.take(fact, lambda fact=fact: self.published.append(fact))  # type: ignore[misc]


def test_kinds_of_0_2_0_always_pass() -> None:
    one = Gate()
    one.say(OLD, DrainRequested(worker="w0", instance="i0"))
    assert len(one.published) == 2 and not one.gate.waits


def test_a_new_kind_waits_until_it_is_known_what_is_in_force_and_is_published_then() -> None:
    one = Gate()
    one.say(NEW, OLD)
    assert one.published == [OLD] and one.gate.waits
    one.gate.learn(frozenset({"worker_awaited"}))
    assert one.published == [OLD, NEW] and not one.gate.waits
    one.say(NEW)
    assert one.published[2:] == [NEW] and not one.counters.withheld


def test_a_new_kind_that_is_not_in_force_is_dropped_counted_and_logged_once(caplog: object) -> None:
    one = Gate()
    one.say(NEW)
    one.gate.learn(frozenset())
    one.say(NEW, NEW)
    assert not one.published and one.counters.withheld == 3
    one.gate.learn(frozenset({"worker_awaited"}))
    one.say(NEW)
    assert one.published == [NEW], "it is published from then on"


def test_what_waits_is_bounded_and_the_oldest_goes() -> None:
    one = Gate()
    one.say(*(WorkerAwaited(worker="w0", instance=str(n), reason="loads") for n in range(WAITING_MAX + 5)))
    assert one.counters.withheld == 5
    one.gate.learn(frozenset({"worker_awaited"}))
    assert [fact.instance for fact in one.published][:1] == ["5"]  # type: ignore[attr-defined]


def test_a_command_whose_observation_was_dropped_is_known() -> None:
    """The controller answers such a command itself: the journal of this fleet cannot hold it."""
    one, until = Gate(), datetime.now(UTC)
    one.gate.learn(frozenset())
    one.say(RestartRequested(worker="w0", instance="i0", command="c1", until=until))
    assert one.gate.dropped_command("c1") and not one.gate.dropped_command("c2")
    assert not one.gate.dropped_command("")
