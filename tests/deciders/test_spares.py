"""Spares wait with their weights loaded, and replace lost workers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fleet_story import (
    Story,
    awaited,
    device_faulted,
    device_limited,
    drain_requested,
    failed,
    heard,
    joined,
    kinds,
    left,
    passed,
    resume,
    shutdown,
    silent,
)
from hypothesis import given
from hypothesis import strategies as st

from controller.deciders.fleet import FleetPolicy, evolve
from controller.deciders.spares import SparesPolicy
from controller.read_model.rows import COLUMNS, worker_row
from events.decisions import HealthStatus, SpareActivated, SpareReleased, WorkerDecision
from events.fact import Decision, Fact
from events.observations import Topology, WorkerJoined

RELEASE = FleetPolicy(spares=SparesPolicy(on_return="release"))


def spare(worker: str, instance: str = "i1", **changes: Any) -> WorkerJoined:
    return replace(joined(worker, instance), spare=True, **changes)


def fleet(*spares: str, policy: FleetPolicy | None = None) -> Story:
    """Return a story with two workers that serve, and spares that have passed their first canary."""
    story = Story(policy).up("w0", "w1")
    for name in spares:
        story.tell(spare(name))
        story.tell(passed(name))
    return story


def serving(story: Story) -> set[str]:
    return {name for name, worker in story.fleet.workers.items() if worker.routable}


def kept(story: Story) -> set[str]:
    return {name for name, worker in story.fleet.workers.items() if worker.spare.kept}


def test_a_spare_is_healthy_and_gets_no_requests() -> None:
    story = fleet("s0")
    one = story.worker("s0")
    assert (one.health.status, one.health.weight, one.weight) == (HealthStatus.HEALTHY, 1.0, 0.0)
    assert not one.expected and one.carries == 0.0 and one.reasons == ("spare",) and one.fully_healthy


def test_a_silent_worker_is_replaced_at_once_at_full_weight() -> None:
    story = fleet("s0")
    decisions = story.tell(silent("w0"))
    (activated,) = [one for one in decisions if isinstance(one, SpareActivated)]
    assert (activated.worker, activated.replaces, activated.reason) == ("s0", "w0", "silent")
    assert activated.incident == story.worker("w0").incident != ""
    assert story.worker("s0").weight == 1.0 and serving(story) == {"w1", "s0"}
    assert story.worker("w0").spare.kept and story.worker("s0").spare.place == "w0"


@pytest.mark.parametrize(
    "loss",
    [
        lambda story: story.tell(left("w0", mode="self_initiated")),
        lambda story: story.tell(left("w0", mode="immediate")),
        lambda story: story.tell(device_faulted("w0")),
        lambda story: story.tell(failed("w0", reason="non_finite")),
        lambda story: story.tell(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed")),
    ],
    ids=["ended by itself", "killed", "device", "non-finite", "corrupt"],
)
def test_a_conviction_counts_as_a_loss(loss: object) -> None:
    story = fleet("s0")
    assert callable(loss)
    assert "SpareActivated" in kinds(loss(story))


def test_a_device_that_allows_no_weight_is_a_loss_and_is_named() -> None:
    story = fleet("s0")
    assert "SpareActivated" not in kinds(story.tell(device_limited("w0", 0.3, device="gpu0")))
    decisions = story.tell(device_limited("w0", 0.0, device="gpu1"))
    (activated,) = [one for one in decisions if isinstance(one, SpareActivated)]
    assert activated.reason == "device gpu1 throttle"


def test_the_activation_of_a_spare_is_the_cause_of_the_models_capacity() -> None:
    story = fleet("s0")
    (activated,) = [one for one in story.tell(silent("w0")) if isinstance(one, SpareActivated)]
    after = [e.fact for e in story.events if isinstance(e.fact, WorkerDecision)]
    assert after[-1] == activated and story.fleet.models["llama"].cause == f"decision:{activated.number}"


def test_the_state_store_shows_spares_and_the_places_that_they_fill() -> None:
    story = fleet("s0", "s1")
    story.tell(silent("w0"))
    rows = {
        name: dict(zip(COLUMNS["workers"], worker_row(w), strict=True))
        for name, w in story.fleet.workers.items()
    }
    shown = {name: (row["spare"], row["place"], row["routable"]) for name, row in rows.items()}
    assert shown == {
        "w0": (True, "", False), "w1": (False, "", True), "s0": (False, "w0", True), "s1": (True, "", False),
    }  # fmt: skip


def test_doubt_is_a_loss_only_after_a_trial_has_failed() -> None:
    story = fleet("s0")
    for _ in range(3):
        decisions = story.tell(failed("w0"))
    assert story.status("w0") is HealthStatus.UNHEALTHY and "SpareActivated" not in kinds(decisions)
    retry_at = story.worker("w0").breaker.retry_at
    assert retry_at is not None
    story.wait((retry_at - story.now).total_seconds())
    assert "SpareActivated" in kinds(story.tell(failed("w0")))


def test_a_worker_that_leaves_gracefully_is_not_replaced() -> None:
    story = fleet("s0")
    decisions = [*story.tell(drain_requested("w0")), *story.tell(left("w0")), *story.tell(left("w1"))]
    assert "SpareActivated" not in kinds(decisions) and kept(story) == {"s0"}


def test_a_worker_that_shuts_itself_down_is_lost_before_and_after_it_leaves() -> None:
    story = fleet("s0")
    assert "SpareActivated" in kinds(story.tell(shutdown("w0", mode="self_initiated")))
    late = Story().up("w0", "w1")
    late.tell(shutdown("w0", mode="self_initiated"), left("w0", mode="self_initiated"))
    late.tell(spare("s0"))
    assert "SpareActivated" in kinds(late.tell(passed("s0")))


def test_a_worker_that_is_killed_while_draining_is_not_replaced() -> None:
    story = fleet("s0")
    decisions = [*story.tell(drain_requested("w0")), *story.tell(left("w0", mode="immediate"))]
    assert "SpareActivated" not in kinds(decisions)


def test_a_spare_lost_as_the_returned_worker_recovers_is_not_replaced_twice() -> None:
    story = fleet("s0", "s1", policy=RELEASE)
    story.tell(silent("w0"))
    taker = next(name for name in ("s0", "s1") if not story.worker(name).spare.kept)
    story.tell(joined("w0", "i2"))
    story.record(story.stamp(passed("w0", "i2")))
    decisions = story.tell(silent(taker))
    assert [k for k in kinds(decisions) if k.startswith("Spare")] == ["SpareReleased"]
    assert serving(story) == {"w0", "w1"} and len(kept(story)) == 2


def test_an_unhealthy_spare_replaces_no_worker() -> None:
    story = Story().up("w0", "w1")
    story.tell(spare("s0"))
    assert "SpareActivated" not in kinds(story.tell(silent("w0")))
    assert "SpareActivated" in kinds(story.tell(passed("s0")))


@pytest.mark.parametrize(
    "changes", [{"revision": "r2"}, {"tp": 8}, {"dp": 2}, {"model": "mistral"}, {"dtype": "fp8"}]
)
def test_a_spare_of_another_kind_replaces_no_worker(changes: dict[str, Any]) -> None:
    story = Story().up("w0", "w1")
    story.tell(spare("s0", **changes))
    story.tell(passed("s0"))
    assert "SpareActivated" not in kinds(story.tell(silent("w0")))


def test_a_spare_on_another_host_is_preferred() -> None:
    story = Story()
    for name, host, is_spare in (("w0", "a", False), ("s0", "a", True), ("s1", "b", True)):
        story.tell(replace(joined(name), spare=is_spare, topology=Topology(host=host)))
        story.tell(passed(name))
    story.tell(silent("w0"))
    assert serving(story) == {"s1"}


def test_a_returning_worker_becomes_the_spare() -> None:
    story = fleet("s0")
    story.tell(silent("w0"))
    story.tell(joined("w0", "i2"))
    decisions = story.tell(passed("w0", "i2"))
    assert story.status("w0") is HealthStatus.HEALTHY and not {"SpareActivated", "SpareReleased"} & {
        *kinds(decisions)
    }
    assert serving(story) == {"w1", "s0"} and kept(story) == {"w0"}
    story.tell(silent("s0"))
    assert serving(story) == {"w1", "w0"} and story.worker("w0").spare.place == ""


def test_with_release_a_returning_worker_gets_its_place_back() -> None:
    story = fleet("s0", policy=RELEASE)
    story.tell(silent("w0"))
    story.tell(joined("w0", "i2"))
    decisions = story.tell(passed("w0", "i2"))
    (released,) = [one for one in decisions if isinstance(one, SpareReleased)]
    assert (released.worker, released.returned) == ("s0", "w0")
    assert serving(story) == {"w0", "w1"} and kept(story) == {"s0"}


def test_a_returning_worker_gets_its_place_back_only_at_full_weight() -> None:
    story = fleet("s0", policy=RELEASE)
    story.tell(device_faulted("w0"))
    assert kept(story) == {"w0"}
    story.tell(resume("w0"))
    for _ in range(6):
        retry_at = story.worker("w0").breaker.retry_at
        if retry_at is not None and retry_at > story.now:
            story.wait((retry_at - story.now).total_seconds())
        story.tell(passed("w0"))
        full = story.worker("w0").health.weight == 1.0
        assert kept(story) == ({"s0"} if full else {"w0"})
    assert kept(story) == {"s0"}


def test_a_lost_replacement_is_replaced_by_the_next_spare_for_the_same_place() -> None:
    story = fleet("s0", "s1", policy=RELEASE)
    story.tell(silent("w0"))
    story.tell(silent("s0"))
    assert serving(story) == {"w1", "s1"} and story.worker("s1").spare.place == "w0"
    story.tell(joined("w0", "i2"))
    story.tell(passed("w0", "i2"))
    assert serving(story) == {"w0", "w1"} and kept(story) == {"s0", "s1"}


def test_a_lost_worker_that_is_heard_again_stays_a_spare() -> None:
    story = fleet("s0")
    story.tell(silent("w0"))
    story.tell(heard("w0"))
    story.tell(passed("w0"))
    assert story.worker("w0").fully_healthy and serving(story) == {"w1", "s0"}


def test_the_role_of_a_spare_outlives_its_life_and_its_forgetting() -> None:
    story = fleet("s0")
    story.tell(left("w0", mode="immediate"))
    story.wait(700)
    assert "w0" not in story.fleet.workers
    story.tell(joined("w0", "i2"))
    story.tell(passed("w0", "i2"))
    assert kept(story) == {"w0"}


def test_a_worker_that_registers_another_role_starts_with_it() -> None:
    story = fleet("s0")
    story.tell(left("s0"))
    story.tell(joined("s0", "i2"))
    story.tell(passed("s0", "i2"))
    assert serving(story) == {"w0", "w1", "s0"}


def test_without_a_spare_no_place_changes() -> None:
    story = Story().up("w0", "w1")
    assert not {"SpareActivated", "SpareReleased"} & {*kinds(story.tell(silent("w0")))}
    assert "spares" not in FleetPolicy().adopted and "spares" in RELEASE.adopted


def test_a_decision_about_a_former_life_assigns_no_place() -> None:
    story = fleet("s0")
    before = story.fleet
    said = SpareActivated(
        worker="s0",
        instance="i0",
        replaces="w0",
        reason="silent",
        decided_at=story.now,
        number=before.number + 1,
    )
    event = story.record(awaited("other"))
    assert evolve(before, replace(event, fact=said)).workers == before.workers


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["silent", "killed", "device", "back", "good", "bad", "wait", "resumed", "drain"]),
        st.integers(0, 4),
    ),
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FleetPolicy(), RELEASE], ids=["swap", "release"])
@given(events=EVENTS)
def test_no_spare_has_traffic_and_no_place_is_taken_twice(
    policy: FleetPolicy, events: list[tuple[str, int]]
) -> None:
    names = ("w0", "w1", "w2", "s0", "s1")
    story = Story(policy).up("w0", "w1", "w2")
    for name in ("s0", "s1"):
        story.tell(spare(name))
        story.tell(passed(name))
    lives = dict.fromkeys(names, 1)
    for what, number in events:
        name = names[number]
        life = f"i{lives[name]}"
        if what == "wait":
            decisions = story.wait(20)
        elif what == "back":
            lives[name] += 1
            decisions = story.tell(replace(joined(name, f"i{lives[name]}"), spare=name.startswith("s")))
        else:
            facts: dict[str, Callable[[str, str], Fact]] = {
                "silent": silent, "killed": lambda n, i: left(n, i, mode="immediate"), "device": device_faulted,
                "good": passed, "bad": failed, "resumed": resume, "drain": drain_requested,
            }  # fmt: skip
            decisions = story.tell(facts[what](name, life))
        _check(story, decisions)


def _check(story: Story, decisions: tuple[Decision, ...]) -> None:
    workers = story.fleet.workers
    places = [worker.spare.place or name for name, worker in workers.items() if not worker.spare.kept]
    assert len(places) == len(set(places)) <= 3, places
    assert not any(worker.routable for worker in workers.values() if worker.spare.kept)
    for one in decisions:
        if isinstance(one, SpareActivated):
            assert one.worker != one.replaces
    waiting = [w for w in workers.values() if w.spare.kept and w.fully_healthy]
    lost = [w for w in workers.values() if not w.spare.kept and w.lost]
    assert not (waiting and lost), "a spare waits beside an empty place"
