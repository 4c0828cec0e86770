"""The fleet as a whole: policy in force, bounds, properties of workers, and a robust fold."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from any_fact import facts
from fleet_story import (
    START,
    Story,
    device_limited,
    device_recovered,
    drain_requested,
    failed,
    joined,
    kinds,
    passed,
    proposed,
    request_failed,
    resume,
    silent,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from controller.deciders.breaker import BreakerPolicy
from controller.deciders.budget import BudgetPolicy
from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import (
    DECIDERS_VERSION,
    Fleet,
    FleetPolicy,
    absorbed,
    absorption_due,
    evolve,
    load,
    settle,
)
from controller.deciders.golden import GoldenPolicy
from controller.deciders.health_state import HealthPolicy
from controller.deciders.worker_removal import ForgettingPolicy
from events.decisions import PolicyAdopted
from events.fact import Decision, Fact, Recorded


def test_a_new_leader_first_adopts_its_policy() -> None:
    first = settle(FleetPolicy(), Fleet(), START)
    assert kinds(first) == ["PolicyAdopted"]
    story = Story()
    assert (story.fleet.policy, story.fleet.deciders_version) == (FleetPolicy().adopted, DECIDERS_VERSION)
    story.policy = FleetPolicy(health=HealthPolicy(trials_max=9))
    assert kinds(story.settle()) == ["PolicyAdopted"]


def test_another_version_of_the_deciders_is_adopted_too() -> None:
    fleet = replace(Story().fleet, deciders_version=DECIDERS_VERSION - 1)
    assert kinds(settle(FleetPolicy(), fleet, START)) == ["PolicyAdopted"]


def test_a_policy_survives_the_journal() -> None:
    policy = FleetPolicy(
        health=HealthPolicy(ramp=(0.1, 1.0), dead_after=timedelta(seconds=1.5)),
        breaker=BreakerPolicy(backoff=1.0),
        degradation=DegradationPolicy(slos={"llama": Slo(slo_throughput_rps=3.5, max_batch_size=8)}),
    )
    written = json.loads(json.dumps(policy.adopted))
    assert load(written) == policy
    assert written == policy.adopted
    fact = PolicyAdopted(policy=dict(policy.adopted), deciders_version=1, decided_at=START)
    assert msgspec.json.decode(msgspec.json.encode(fact), type=PolicyAdopted) == fact


def test_an_older_or_newer_policy_loads_with_defaults() -> None:
    before = replace(
        FleetPolicy(),
        forgetting=ForgettingPolicy(forget_after=None),
        degradation=DegradationPolicy(exit_at_provisioned=False, tolerance=0.0),
        breaker=BreakerPolicy(silence_ends_wait=False, soft_timeouts=False),
        health=HealthPolicy(eject_intruders=False, soft_timeouts=False, silence_returns_whole=False),
        golden=GoldenPolicy(outvote=False, tie_margin=0.0, hold_new_lineage=False),
        budget=BudgetPolicy(keep_last=False),
    )
    assert load({}) == before
    assert load({"health": {"trials_max": 2, "unheard_of": 1}, "tomorrow": {}}).health.trials_max == 2
    assert load(FleetPolicy().adopted) == FleetPolicy()


SETTINGS = TypeAdapter(FleetPolicy)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"breaker": {"bakoff": 1}}, "bakoff"),
        ({"brakes": {}}, "brakes"),
        ({"breaker": {"failures_max": 0}}, "failures_max is 0: it must be at least 1"),
        ({"breaker": {"backoff": 0.5}}, "backoff is 0.5: it must be at least 1"),
        ({"breaker": {"wait_min": -5}}, "wait_min"),
        ({"budget": {"max_ejection_share": 7}}, "max_ejection_share is 7.0: it must be between 0 and 1"),
        ({"budget": {"kept_weight": 0}}, "kept_weight"),
        ({"health": {"ramp": []}}, "ramp"),
        ({"health": {"ramp": [0.5, 0.25]}}, "ramp"),
        ({"health": {"trials_max": 0}}, "trials_max"),
        ({"degradation": {"entries": [1.0, 0.5, 0.75, 0.25]}}, "entries"),
        ({"degradation": {"slos": {"m": {"slo_ttft_ms": -1}}}}, "slo_ttft_ms"),
        ({"degradation": {"slos": {"m": {"slo_ttft": 1}}}}, "slo_ttft"),
        ({"golden": {"voters_min": 1}}, "voters_min"),
        ({"drain": {"wait": -1}}, "wait"),
    ],
)
def test_invalid_settings_are_rejected_with_one_sentence(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SETTINGS.validate_python(wrong)


def test_settings_accept_the_usual_notations() -> None:
    policy = SETTINGS.validate_python(
        {
            "breaker": {"backoff": 1, "wait_min": "PT5S"},
            "degradation": {"slos": {"llama": {"slo_throughput_rps": 3}}},
        }
    )
    assert policy.breaker == BreakerPolicy(backoff=1.0, wait_min=timedelta(seconds=5))
    assert policy.degradation.slos["llama"].slo_throughput_rps == 3.0
    assert load(policy.adopted) == policy


def test_decisions_are_numbered_without_a_gap_and_name_their_cause() -> None:
    story = Story().up("w0", "w1", "w2")
    story.tell(silent("w0"), failed("w1"))
    story.wait(30)
    told = [e.fact for e in story.events if isinstance(e.fact, Decision)]
    assert [d.number for d in told] == list(range(1, len(told) + 1))
    ids = {e.id for e in story.events} | {f"decision:{d.number}" for d in told}
    assert all(d.cause in ids for d in told if not isinstance(d, PolicyAdopted))


def test_a_calm_fleet_absorbs_after_a_thousand_facts_or_ten_seconds() -> None:
    assert not absorption_due(0, timedelta(days=1))
    assert not absorption_due(1000, timedelta(seconds=9.9))
    assert absorption_due(1001, timedelta(0))
    assert absorption_due(1, timedelta(seconds=10))
    story = Story()
    assert absorbed(story.fleet, story.now).number == story.fleet.number + 1


def test_a_workers_weight_is_the_minimum_of_its_reasons() -> None:
    story = Story().up("w0", "w1")
    assert (story.worker().weight, story.worker().reasons) == (1.0, ())
    story.tell(failed("w0"))
    assert (story.worker().weight, story.worker().reasons) == (0.5, ("health SUSPICIOUS: exception",))
    story.tell(request_failed("w0", 3))
    assert story.worker().weight == 0.0
    assert not story.worker().routable and story.worker().in_doubt
    assert story.worker().reasons[1] == "breaker open: requests: disconnected"
    story.tell(drain_requested("w0"))
    assert story.worker().reasons[-1] == "draining: operator"


def test_a_device_that_limits_a_healthy_worker_is_shown_as_the_reason() -> None:
    story = Story().up("w0", "w1")
    story.tell(device_limited("w0", 0.5, device="gpu1"), device_limited("w0", 0.0, device="gpu2"))
    assert (story.worker().weight, story.worker().reasons) == (0.0, ("device gpu2 throttle: leaves 0",))
    story.tell(device_recovered("w0", device="gpu2", fault_class="throttle"))
    assert story.worker().reasons == ("device gpu1 throttle: leaves 0.5",)


def test_the_last_pass_of_each_canary_is_remembered_for_exposure() -> None:
    story = Story().up("w0")
    story.now += timedelta(seconds=7)
    story.tell(passed("w0", canary="c2"))
    assert story.worker().passes == {"c1": START, "c2": START + timedelta(seconds=7)}
    for n in range(100):
        story.tell(passed("w0", canary=f"x{n}"))
    assert len(story.worker().passes) == 64
    story.tell(failed("w0", canary="c2"))
    last = story.worker().last_canary
    assert last is not None
    assert (last.canary, last.outcome, last.reason) == ("c2", "failed", "exception")


def test_every_conviction_is_remembered_with_the_exposed_time() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0"), proposed("w0", canary="c2"), passed("w0", canary="c2"))
    story.now += timedelta(seconds=7)
    assert story.worker().cache_epoch == 0
    wrong: dict[str, Any] = {"reason": "token_mismatch", "confirmed": True, "golden": "agreed"}
    later = passed("w0", canary="c2")  # does not acquit
    story.tell(failed("w0", canary="c2", **wrong), later)
    (one,) = story.worker().convictions
    epoch = story.worker().cache_epoch
    assert (one.instance, one.canary, one.since, one.at) == ("i1", "c2", START, story.now)
    story.tell(failed("w0", canary="c1", **wrong))  # it is convicted already, and serves no requests
    assert story.worker().convictions == (one,)
    began = story.now = story.now + timedelta(seconds=1)
    story.tell(joined("w0", "i2"), resume("w0", "i2"))
    assert story.worker().cache_epoch == epoch > 0  # an engine that outlived the first life has its cache
    story.now += timedelta(seconds=1)
    story.tell(
        failed("w0", "i2", canary="c2", **wrong)
    )  # passes of its first life do not count for the second
    assert story.worker().convictions == (
        one,
        replace(one, instance="i2", since=began, at=story.now, seq=story.worker().convictions[1].seq),
    )
    assert story.worker().cache_epoch > epoch


def test_requests_served_by_several_dp_ranks_are_exposed_since_the_worker_joined() -> None:
    story = Story().up()
    story.tell(replace(joined("w0"), dp=2), proposed("w0"))
    began, story.now = story.now, story.now + timedelta(seconds=7)
    story.tell(passed("w0", canary="c1"))  # one rank has passed
    story.tell(failed("w0", canary="c1", reason="token_mismatch", confirmed=True, golden="agreed"))
    (one,) = story.worker().convictions
    assert one.since == began and not story.worker().passes


def test_a_fleet_can_be_serialized_and_restored() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0"), silent("w1"), failed("w0"))
    written = msgspec.msgpack.encode(story.fleet)
    assert msgspec.msgpack.decode(written, type=Fleet) == story.fleet


def test_evolve_shares_what_did_not_change() -> None:
    story = Story().up("w0", "w1")
    before = story.fleet
    story.record(failed("w0", under=before.number))
    assert story.fleet.workers["w1"] is before.workers["w1"]
    assert story.fleet.goldens is before.goldens
    assert before.workers["w0"].health.canaries.failures == 0


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(facts(), st.sampled_from([0, 1, 30, 100])), max_size=40))
def test_evolve_and_settle_accept_any_facts(told: list[tuple[Fact, int]]) -> None:
    fleet, now, policy = Fleet(), START, FleetPolicy()
    for name in ("w0", "w1"):
        fleet = evolve(fleet, Recorded(seq=1, at=START, fact=joined(name), id="j"))
    for seq, (fact, waited) in enumerate(told):
        now += timedelta(seconds=waited)
        fleet = evolve(fleet, Recorded(seq=seq, at=now, fact=fact, id=str(seq)))
    for decision in settle(policy, fleet, now):
        fleet = evolve(fleet, Recorded(seq=0, at=now, fact=decision, id="d"))
    assert settle(policy, fleet, now) == ()
    for worker in fleet.workers.values():
        assert worker.reasons is not None and isinstance(worker.routable, bool)


@pytest.mark.parametrize("count", [1000])
def test_a_thousand_workers_that_fail_at_once_are_decided_at_once(count: int) -> None:
    story = Story()
    for n in range(count):
        story.record(joined(f"w{n}"))
        story.record(passed(f"w{n}"))
    story.settle()
    for n in range(count):
        story.record(silent(f"w{n}"))
    assert len(story.settle()) == 3 * count
