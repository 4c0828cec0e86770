"""The choice of a worker: the filter's distinct errors, the score, and turns among equals."""

from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest
from filter_rules import Links, rules
from frontend_kit import joined
from scripted_worker import ScriptedWorker

from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import Fleet, evolve
from controller.deciders.policy import FleetPolicy
from controller.router.endpoints import Endpoint, EndpointGroup, EndpointTable
from controller.router.selection.filter import (
    ROOM_LOOKS,
    AllBusy,
    AllTried,
    Headroom,
    NoneReachable,
    NoneRoutable,
    NotServed,
    NoWorker,
    Picker,
    cost,
)
from events.decisions import HealthChanged, HealthStatus
from events.fact import Fact, Recorded
from events.observations import CanaryPassed, DeviceFaulted, EngineFaulted
from events.wire import Load


def endpoint(name: str, weight: float = 1.0, **changes: object) -> Endpoint:
    return Endpoint(joined(ScriptedWorker(name), **changes), weight=weight, status=HealthStatus.HEALTHY)


OPEN = rules()


@pytest.mark.parametrize(
    ("endpoints", "rules", "tried", "error"),
    [
        ([], OPEN, (), NotServed),
        ([endpoint("w1", 0.0)], OPEN, (), NoneRoutable),
        ([endpoint("w1")], rules(Links(lambda w: False)), (), NoneReachable),
        ([endpoint("w1")], OPEN, {("w1", "i1")}, AllTried),
        ([endpoint("w1")], rules(barred={("w1", "i1")}), (), NoneRoutable),
        ([endpoint("w1")], rules(cap=0), (), AllBusy),
    ],
)
def test_every_reason_to_find_no_worker_has_its_own_error(
    endpoints: list[Endpoint], rules: Any, tried: Any, error: type[NoWorker]
) -> None:
    with pytest.raises(error):
        Picker().pick(endpoints, rules, tried=tried)


def loaded(own: int, others: int, *, frontends: int) -> bool:
    """Return whether a worker with a cap of 4 has room for one more request of this frontend."""
    one = endpoint("w1")
    one.begin(requests=own)
    known = rules(Links(external=lambda w: Load(running=others)), frontends=frontends)
    try:
        Picker().pick([one], known)
    except AllBusy:
        return False
    return True


def test_the_cap_applies_to_all_frontends_together_and_each_has_its_share() -> None:
    assert [loaded(own, 9, frontends=1) for own in (0, 3, 4)] == [True, True, False]
    assert [loaded(own, 0, frontends=2) for own in (1, 2, 3, 4)] == [True, True, True, False]
    assert [loaded(own, 2, frontends=2) for own in (0, 1, 2, 3)] == [True, True, False, False]
    assert [loaded(own, 4, frontends=2) for own in (0, 1, 2)] == [True, True, False]
    assert [loaded(own, 99, frontends=9) for own in (0, 1)] == [True, False]


def test_the_cap_does_not_apply_to_a_request_that_must_continue() -> None:
    assert Picker().pick([endpoint("w1")], rules(cap=0), room=Headroom.HELD).worker == "w1"


def test_a_worker_that_was_not_heard_recently_is_asked_last() -> None:
    endpoints = [endpoint("w1"), endpoint("w2", 0.1)]
    known = rules(Links(heard=lambda w: w == "w2"))
    assert Picker().pick(endpoints, known).worker == "w2"
    assert Picker().pick(endpoints, known, tried={("w2", "i1")}).worker == "w1"  # better than no worker


def test_the_worker_with_the_least_load_for_its_weight_is_picked() -> None:
    a, b, c = endpoint("a", 1.0), endpoint("b", 0.25), endpoint("c", 0.5)
    picker, got = Picker(), {"a": 0, "b": 0, "c": 0}
    known = rules(cap=10_000)
    for _ in range(700):
        best = picker.pick([a, b, c], known)
        best.begin()
        got[best.worker] += 1
    assert got["a"] == pytest.approx(400, abs=4)
    assert got["c"] == pytest.approx(200, abs=4)
    assert got["b"] == pytest.approx(100, abs=4)


def test_equal_workers_take_turns() -> None:
    endpoints, picker = [endpoint(n) for n in "abc"], Picker()
    assert [picker.pick(endpoints, OPEN).worker for _ in range(6)] == ["a", "b", "c"] * 2


def test_room_is_found_without_checking_all_workers() -> None:
    endpoints, looks = [endpoint(f"w{n}") for n in range(1000)], list[str]()

    def heard(worker: str) -> bool:
        looks.append(worker)
        return True

    known = rules(Links(heard=heard))
    picker = Picker()
    found = [picker.room(endpoints, known).worker for _ in range(5)]
    assert len(set(found)) == 5
    assert len(looks) == 5


def drawn(dice: Random) -> tuple[list[Endpoint], object]:
    """Return a few endpoints: some out of service, not connected, on trial, full or silent."""
    endpoints = [
        endpoint(f"w{n}", dice.choice([0.0, 0.5, 1.0])) for n in range(dice.randrange(ROOM_LOOKS + 1))
    ]
    for one in endpoints:
        requests, admitted = dice.randrange(4), dice.randrange(2)
        one.begin(dice.randrange(9000), requests=requests)
        if admitted:
            one.admit()
    there, allowed, late, loaded = (
        {f"w{n}" for n in range(9) if dice.random() < p} for p in (0.8, 0.9, 0.4, 0.5)
    )
    links = Links(
        lambda w: w in there, lambda w: w not in late, lambda w: Load(running=2) if w in loaded else None
    )
    return endpoints, rules(
        links, barred={(f"w{n}", "i1") for n in range(9)} - {(w, "i1") for w in allowed}, frontends=2
    )


def outcome(find: Any, endpoints: list[Endpoint], rules: object) -> str:
    try:
        found: Endpoint = find(endpoints, rules)
        return found.worker
    except NoWorker as error:
        return type(error).__name__


def test_the_quick_search_for_room_agrees_with_a_full_one() -> None:
    dice, quick, thorough, found = Random(3), Picker(), Picker(), set()
    for _ in range(300):
        endpoints, known = drawn(dice)
        found.add(room := outcome(quick.room, endpoints, known))
        assert room == outcome(thorough.pick, endpoints, known)
    assert {"NotServed", "NoneRoutable", "NoneReachable", "AllBusy", "w0", "w1"} <= found


def test_room_is_found_anywhere_and_workers_are_busy_only_if_all_are() -> None:
    endpoints, picker = [endpoint(f"w{n}") for n in range(100)], Picker()
    for taken in endpoints[:99]:
        for _ in range(4):
            taken.admit()
    assert picker.room(endpoints, OPEN) is endpoints[99]
    endpoints[99].begin(requests=4)
    with pytest.raises(AllBusy):
        picker.room(endpoints, OPEN)
    with pytest.raises(NotServed):
        picker.room([], OPEN)


def test_requests_of_other_frontends_count_too() -> None:
    one = endpoint("a")
    alone = cost(one, None)
    assert cost(one, Load(running=3, waiting=1)) == alone + 4
    assert cost(one, Load()) == alone
    one.begin(requests=9)
    assert cost(one, Load(running=3)) == alone + 12


def test_the_cap_does_not_bind_mid_stream() -> None:
    full = endpoint("a")
    full.begin(requests=4)
    assert Picker().pick([full], OPEN, room=Headroom.HELD) is full


def test_a_workers_capacity_binds_requests_that_have_begun_too() -> None:
    full = endpoint("a", waiting_max=2)
    assert full.holds == full.max_batch + 2
    full.begin(requests=full.holds)
    for room in (Headroom.FRESH, Headroom.HELD):
        with pytest.raises(AllBusy):
            Picker().pick([full], rules(cap=100), room=room)
    assert Picker().pick([full], OPEN, room=Headroom.NONE) is full


def test_a_static_table_keeps_requests_in_flight() -> None:
    table = EndpointTable()
    table.set_static([joined(ScriptedWorker("w1"))])
    table.endpoints[("w1", "i1")].begin(requests=3)
    table.set_static([joined(ScriptedWorker("w1")), joined(ScriptedWorker("w2"))])
    assert [s.active for s in table.models["m"]] == [3, 0]
    assert all(s.routable for s in table.models["m"])


def fleet_of(*workers: ScriptedWorker) -> Fleet:
    fleet = Fleet()
    for seq, worker in enumerate(workers, 1):
        fleet = evolve(fleet, Recorded(seq, datetime.now(UTC), joined(worker), f"e{seq}"))
    return fleet


def test_objectives_follow_the_policy_and_unknown_names_are_not_stored() -> None:
    table, fleet = EndpointTable(), serving(fleet_of(ScriptedWorker("w1")))
    table.absorb(fleet)
    assert table.slo("m") is table.slo("m") and table.slo("m").slo_ttft_ms == 500
    assert table.slo("made up") is not table.slo("made up")
    policy = FleetPolicy(degradation=DegradationPolicy(slos={"*": Slo(slo_ttft_ms=300)})).adopted
    table.absorb(replace(fleet, policy=policy))
    assert (table.slo("m").slo_ttft_ms, table.slo("made up").slo_ttft_ms) == (300, 300)


def test_a_models_common_values_follow_its_current_workers() -> None:
    table, lineage = EndpointTable(), ("r1", "builtin:sim")
    assert (table.group("m", lineage), table.migration_limit("m")) == (None, None)
    short, long = (
        replace(joined(ScriptedWorker(n)), context_tokens=c) for n, c in (("w1", 100), ("w2", 200))
    )
    table.set_static([short, replace(long, migration_limit=1)])
    endpoints = table.endpoints[("w1", "i1")], table.endpoints[("w2", "i1")]
    assert table.group("m", lineage) == EndpointGroup(
        endpoints, 200, "simulated", text_only=False, block_sizes=(16,), usual_context=200, shown_context=100
    )
    assert table.migration_limit("m") == 1
    table.set_static([replace(long, worker="w3", engine="openai", exact=False)])
    other = (table.endpoints[("w3", "i1")],)
    assert table.group("m", lineage) == EndpointGroup(
        other, 200, "openai", text_only=True, block_sizes=(16,), usual_context=200, shown_context=200
    )
    assert (table.group("m", ("r2", "builtin:sim")), table.migration_limit("m")) == (None, None)


def test_the_table_follows_lives_and_drops_ended_ones() -> None:
    table = EndpointTable()
    one, two = ScriptedWorker("w1"), ScriptedWorker("w2")
    change = table.absorb(fleet_of(one, two))
    assert (change.joined, change.left, bool(change)) == (2, False, True)
    assert set(table.endpoints) == {("w1", "i1"), ("w2", "i1")}
    reborn = ScriptedWorker("w1", instance="i2")
    change = table.absorb(fleet_of(one, two, reborn))
    assert (change.joined, change.left) == (1, True)
    assert set(table.endpoints) == {("w1", "i2"), ("w2", "i1")}
    assert {s.instance for s in table.models["m"] if s.worker == "w1"} == {"i2"}


def test_an_empty_batch_changes_nothing() -> None:
    table, fleet = EndpointTable(), fleet_of(ScriptedWorker("w1"))
    table.absorb(fleet)
    assert not table.absorb(fleet)


def test_irrelevant_changes_do_not_rebuild_the_groups() -> None:
    table, fleet = EndpointTable(), serving(fleet_of(ScriptedWorker("w1")))
    table.absorb(fleet)
    passed = evolve(fleet, Recorded(9, datetime.now(UTC), good_canary("w1"), "e9"))
    change = table.absorb(passed)
    assert [endpoint.worker for endpoint, _ in change.updated] == ["w1"]
    assert not change


@pytest.mark.parametrize(
    ("fact", "routable"),
    [
        (DeviceFaulted(worker="w1", instance="i1", device="GPU-0", fault_class="xid", code="79"), False),
        (EngineFaulted(worker="w1", instance="i1", reason="CUDA error", fatal=True), False),
        (DeviceFaulted(worker="w1", instance="i1", device="GPU-0", fault_class="pcie", fatal=False), True),
        (EngineFaulted(worker="w1", instance="i1", reason="one request", fatal=False), True),
    ],
)
def test_a_convicted_worker_gets_no_request_from_the_evidence_on(fact: Fact, routable: bool) -> None:
    table, fleet = EndpointTable(), serving(fleet_of(ScriptedWorker("w1")))
    table.absorb(fleet)
    assert table.endpoints["w1", "i1"].routable
    table.absorb(evolve(fleet, Recorded(9, datetime.now(UTC), fact, "e9", "s", 9)))
    assert table.endpoints["w1", "i1"].routable is routable, "no decision has been made yet"


def good_canary(worker: str) -> CanaryPassed:
    """A canary that this worker has passed."""
    return CanaryPassed(
        worker=worker, instance="i1", canary_key="k", canary="c1", check_type="scheduled", sent_under=1,
        sent_at=datetime.now(UTC), latency_ms=1.0,
    )  # fmt: skip


def serving(fleet: Fleet) -> Fleet:
    """Bring the fleet's only worker into full service."""
    decided = HealthChanged(
        worker="w1", instance="i1", before=HealthStatus.SUSPICIOUS, after=HealthStatus.HEALTHY, reason="joined",
        weight=1.0, number=fleet.number + 1, decided_at=datetime.now(UTC),
    )  # fmt: skip
    return evolve(fleet, Recorded(8, datetime.now(UTC), decided, "e8"))
