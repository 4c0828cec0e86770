"""The simulated servers keep the guarantees for which the real ones are tested."""

from collections.abc import Callable
from datetime import timedelta
from random import Random

import pytest

from controller.simulator.world.broker import (
    DUPLICATES_REMEMBERED,
    LEASE_TTL,
    Broker,
    BrokerMessage,
    Network,
    SimulatedOutbox,
)
from controller.simulator.world.kernel import SECOND, Kernel, micros, since_start
from controller.simulator.world.seams import Seams
from controller.simulator.world.surroundings import Replica
from events.decisions import Absorbed
from events.observations import DrainRequested


class Bench:
    """A broker with its own kernel."""

    def __init__(self) -> None:
        self.kernel = Kernel(1)
        self.broker = Broker(self.kernel, Seams(), Network(Random("bench")))

    def outbox(self, source: str = "a.1") -> SimulatedOutbox:
        return SimulatedOutbox(self.broker, source)

    def run(self, seconds: float) -> None:
        self.kernel.run(self.kernel.now + int(seconds * SECOND))

    @property
    def numbers(self) -> list[int]:
        return [event.source_number for event in self.broker.events]

    def absorbed(self, number: int) -> tuple[Absorbed, ...]:
        return (Absorbed(number=number, decided_at=self.kernel.instant()),)


def fact() -> DrainRequested:
    return DrainRequested(worker="w1", instance="w1.1")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_events_run_in_the_order_in_which_they_were_scheduled() -> None:
    kernel, seen = Kernel(1), list[str]()
    for name, delay in (("late", 2), ("first", 1), ("second", 1)):
        kernel.after(delay, seen.append, name)
    kernel.run(1)
    assert seen == ["first", "second"]
    kernel.run(5)
    assert (seen[-1], kernel.now) == ("late", 5)
    assert since_start(kernel.instant()) == 5
    assert micros(timedelta(seconds=1.5)) == 1_500_000


def test_each_name_has_its_own_random_stream() -> None:
    one, again, other = (Kernel(7).chance(name).random() for name in ("a", "a", "b"))
    assert one == again != other


def test_facts_arrive_once_and_in_order_through_loss_and_delay(bench: Bench) -> None:
    network = bench.broker.network
    network.loss, network.slow = 0.4, 0.3
    box = bench.outbox()
    for _ in range(40):
        box.observe(fact())
    bench.run(600)
    assert bench.numbers == list(range(1, 41))
    assert bench.broker.acknowledged == {"a.1": 40}


def test_a_fact_with_a_lost_acknowledgement_is_stored_again_after_the_duplicate_window(bench: Bench) -> None:
    bench.broker.mute = True
    bench.outbox().observe(fact())
    bench.run(5)
    assert bench.numbers == [1]  # repeated within the window, and recognised
    bench.broker.up = False
    bench.run(DUPLICATES_REMEMBERED / SECOND)
    bench.broker.come_up()
    bench.run(5)
    assert bench.numbers == [1, 1]
    assert bench.broker.repeated == 1


@pytest.mark.parametrize(("spooled", "left"), [(True, [1, 2]), (False, [])])
def test_a_crash_loses_what_was_not_spooled_and_a_successor_sends_the_rest(
    bench: Bench, spooled: bool, left: list[int]
) -> None:
    bench.broker.up = False
    box = bench.outbox()
    box.observe(fact())
    box.observe(fact())
    bench.run(3 if spooled else 0.1)
    spool = box.crash()
    bench.broker.come_up()
    successor = bench.outbox("a.2")
    successor.inherit(spool)
    successor.observe(fact())
    bench.run(5)
    assert bench.numbers == [*left, 1]


def test_an_append_is_rejected_whole_if_its_source_has_not_read_the_last_decision(bench: Bench) -> None:
    broker = bench.broker
    assert broker.append(bench.absorbed(1), source="c1", through=0, after=0)
    assert not broker.append(bench.absorbed(1), source="c2", through=0, after=0)
    assert broker.append(bench.absorbed(2), source="c2", through=1, after=1)
    assert (broker.last_seq, broker.fenced) == (2, 1)


def test_a_lease_is_free_again_when_its_holder_does_not_renew_it(bench: Bench) -> None:
    broker = bench.broker
    assert broker.lease("c1") == "c1"
    assert broker.lease("c2") == "c1"
    bench.run(LEASE_TTL / SECOND)
    assert broker.lease("c2") == "c2"


def test_a_replica_from_a_snapshot_ends_where_one_from_the_beginning_does(bench: Bench) -> None:
    def replica(stored: Callable[[], object] | None = None) -> Replica:
        found = stored() if stored is not None else None
        return Replica("r", bench.broker, lambda r, b: None, found)  # type: ignore[arg-type]

    whole = replica()
    for number in (1, 2, 3):
        bench.broker.store(BrokerMessage(fact(), f"a/{number}", "a", number))
        seq = bench.broker.last_seq
        bench.broker.append(bench.absorbed(number), source="c", through=seq, after=bench.broker.decided)
        bench.run(1)
    late = replica(whole.store)
    bench.broker.store(BrokerMessage(fact(), "a/4", "a", 4))
    bench.run(1)
    assert (late.fleet, late.seq) == (whole.fleet, whole.seq)
