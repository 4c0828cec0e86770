"""Observations of new kinds are held back until they are in force."""

from datetime import UTC, datetime
from pathlib import Path

from events.fact import Observation
from events.journal.counters import JournalCounters
from events.journal.kind_gate import WAITING_MAX, KindGate, KindMemory
from events.observations import DrainRequested, RestartRequested, WorkerAwaited, WorkerLeft
from events.versions import NewWord

NEW = WorkerAwaited(worker="w0", instance="i0", reason="loads")
OLD = WorkerLeft(worker="w0", instance="i0", mode="graceful")
GRACEFUL = NewWord(
    "worker_left", "mode", "graceful", instead="immediate"
)  # as if 0.2.0 did not know this word


class Gate:
    """A gate, and the facts that passed it."""

    def __init__(self, memory: KindMemory | None = None, words: tuple[NewWord, ...] = ()) -> None:
        self.counters = JournalCounters()
        self.gate = KindGate(self.counters, memory, words)
        self.published: list[Observation] = []

    def say(self, *facts: Observation) -> None:
        for fact in facts:
            self.gate.take(fact, self.published.append)


def test_kinds_of_0_2_0_always_pass() -> None:
    one = Gate()
    one.say(OLD, DrainRequested(worker="w0", instance="i0"))
    assert len(one.published) == 2 and not one.gate.waits


def test_a_new_kind_waits_until_it_is_known_what_is_in_force_and_is_published_then() -> None:
    one = Gate()
    one.say(NEW, OLD)
    assert (one.published, one.gate.waits) == ([OLD], True)
    one.gate.learn(frozenset({"worker_awaited"}))
    assert (one.published, one.gate.waits) == ([OLD, NEW], False)
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


def test_waiting_observations_are_bounded_and_the_oldest_is_dropped() -> None:
    one = Gate()
    one.say(*(WorkerAwaited(worker="w0", instance=str(n), reason="loads") for n in range(WAITING_MAX + 5)))
    assert one.counters.withheld == 5
    one.gate.learn(frozenset({"worker_awaited"}))
    assert [fact.instance for fact in one.published][:1] == ["5"]  # type: ignore[attr-defined]


def test_a_command_that_led_to_a_dropped_observation_is_known() -> None:
    """The controller answers such a command itself: the journal of this fleet cannot hold it."""
    one, until = Gate(), datetime.now(UTC)
    one.gate.learn(frozenset())
    one.say(RestartRequested(worker="w0", instance="i0", command="c1", until=until))
    assert one.gate.dropped_command("c1") and not one.gate.dropped_command("c2")
    assert not one.gate.dropped_command("")


def test_a_new_word_of_an_old_kind_is_replaced_until_it_is_in_force() -> None:
    one = Gate(words=(GRACEFUL,))
    one.say(OLD)
    assert [fact.mode for fact in one.published] == ["immediate"], "at once: an old kind never waits"  # type: ignore[attr-defined]
    one.gate.learn(frozenset())
    one.say(OLD)
    one.gate.learn(frozenset({GRACEFUL.name}))
    one.say(OLD)
    assert [fact.mode for fact in one.published[1:]] == ["immediate", "graceful"]  # type: ignore[attr-defined]


def test_a_word_falls_back_over_several_releases() -> None:
    newest = NewWord("worker_left", "mode", "immediate", instead="graceful")
    oldest = NewWord("worker_left", "mode", "graceful", instead="self_initiated")
    left = WorkerLeft(worker="w0", instance="i0", mode="immediate")
    for in_force, expected in (
        (frozenset[str](), "self_initiated"),
        (frozenset({oldest.name}), "graceful"),
        (frozenset({oldest.name, newest.name}), "immediate"),
    ):
        one = Gate(words=(newest, oldest))
        one.gate.learn(in_force)
        one.say(left)
        assert [fact.mode for fact in one.published] == [expected]  # type: ignore[attr-defined]


def test_a_process_that_starts_without_the_broker_publishes_what_was_in_force_before(tmp_path: Path) -> None:
    path = tmp_path / "kinds_in_force.json"
    Gate(KindMemory(path)).gate.learn(frozenset({"worker_awaited"}))
    one = Gate(KindMemory(path))
    one.say(NEW, RestartRequested(worker="w0", instance="i0"))
    assert one.published == [NEW] and one.gate.waits, "what was not in force waits for the news"
    assert not one.gate.informed
    fresh = Gate(KindMemory(path, read=False))  # of another stream, as far as is known
    fresh.say(NEW)
    assert not fresh.published and fresh.gate.waits


def test_a_damaged_memory_is_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "kinds_in_force.json"
    for damage in (b"", b"{", b'{"kinds": 1}', b"[1]", b"\xff\xfe"):
        path.write_bytes(damage)
        assert KindMemory(path).kinds == frozenset()
