"""The ejection budget: doubt may eject at most half of a model's workers; convictions are not limited."""

from typing import Any

import pytest
from fleet_story import (
    Story,
    device_faulted,
    device_limited,
    device_recovered,
    drain_requested,
    engine_faulted,
    failed,
    heard,
    joined,
    kinds,
    left,
    passed,
    request_failed,
    resume,
    silent,
)

from controller.deciders.budget import BudgetPolicy
from controller.deciders.fleet import FleetPolicy
from events.decisions import HealthStatus, WeightCapped
from events.fact import Fact
from events.observations import CanaryFailed

FOUR = ("w0", "w1", "w2", "w3")


def doubt(*names: str) -> list[CanaryFailed]:
    return [failed(name) for name in names for _ in range(3)]


def kept(story: Story) -> set[str]:
    return {name for name, worker in story.fleet.workers.items() if worker.budget.kept is not None}


@pytest.mark.parametrize("share, ejected", [(0.5, 2), (0.0, 0), (0.25, 1), (0.99, 3), (1.0, 4)])
def test_simultaneous_failures_eject_no_more_than_the_share(share: float, ejected: int) -> None:
    story = Story(FleetPolicy(budget=BudgetPolicy(max_ejection_share=share))).up(*FOUR)
    story.tell(*doubt(*FOUR))
    weights = [story.worker(name).weight for name in FOUR]
    assert weights.count(0.0) == ejected
    assert weights.count(0.1) == 4 - ejected


def test_the_least_bad_stay() -> None:
    story = Story().up(*FOUR)
    story.tell(*doubt("w0", "w1"))
    assert kept(story) == set()
    story.reach_trial()
    story.tell(failed("w0"), failed("w1"))  # their trials
    story.tell(*doubt("w2"))
    assert kept(story) == {"w2"}


def test_breakers_opened_by_requests_count_as_doubt() -> None:
    story = Story().up(*FOUR)
    story.tell(*(request_failed(name, 3) for name in FOUR))
    assert len(kept(story)) == 2
    assert all(story.worker(name).health.status is HealthStatus.HEALTHY for name in FOUR)


def test_the_only_worker_is_kept_despite_any_doubt() -> None:
    story = Story().up("w0")
    decisions = story.tell(*doubt("w0"))
    assert story.worker().weight == 0.1
    assert [d.reason for d in decisions if isinstance(d, WeightCapped)] == ["ejection_budget"]


@pytest.mark.parametrize(
    "fact",
    [
        silent("w0"),
        engine_faulted("w0"),
        left("w0"),
        drain_requested("w0"),
        failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"),
        failed("w0", reason="non_finite"),
    ],
)
def test_a_convicted_worker_is_never_kept_and_does_not_count(fact: Fact) -> None:
    policy = FleetPolicy(budget=BudgetPolicy(keep_last=False))
    story = Story(policy).up("w0")
    story.tell(*doubt("w0"))
    assert kept(story) == {"w0"}
    story.tell(fact)
    assert kept(story) == set()
    assert story.worker().weight == 0.0
    story = Story(policy).up(*FOUR)
    story.tell(fact)
    story.tell(*doubt("w1", "w2", "w3"))
    assert len(kept(story)) == 2  # of three that count, one may go


MISMATCH: dict[str, Any] = {"reason": "token_mismatch", "confirmed": True, "golden": "agreed"}


def test_a_conviction_by_canary_does_not_remove_the_last_serving_worker() -> None:
    story = Story().up("w0", "w1")
    story.tell(failed("w0", **MISMATCH))
    assert (kept(story), story.worker("w0").weight) == (set(), 0.0)
    decisions = story.tell(failed("w1", **MISMATCH))
    caps = [(d.worker, d.weight, d.reason) for d in decisions if isinstance(d, WeightCapped)]
    assert caps == [("w1", 1.0, "last_serving")]
    assert story.status("w1") is HealthStatus.UNHEALTHY
    assert story.worker("w1").reasons[-1] == "serves as the last worker of its model"


@pytest.mark.parametrize("fact", [silent("w1"), left("w1"), engine_faulted("w1"), drain_requested("w1")])
def test_a_worker_convicted_by_canaries_serves_again_when_the_last_other_one_is_gone(fact: Fact) -> None:
    story = Story().up("w0", "w1")
    story.tell(failed("w0", **MISMATCH))
    story.tell(fact)
    assert (kept(story), story.worker("w0").weight) == ({"w0"}, 1.0)
    story.up("w2")
    assert (kept(story), story.worker("w0").weight) == (set(), 0.0)


def test_a_kept_last_worker_with_devices_that_allow_no_weight_is_replaced_by_another_suspect() -> None:
    story = Story().up("w0", "w1")
    story.tell(failed("w0", **MISMATCH), failed("w1", **MISMATCH))
    assert kept(story) == {"w1"}
    story.tell(device_limited("w1", 0.0))
    assert (kept(story), story.worker("w0").weight) == ({"w0"}, 1.0)
    story.tell(device_limited("w0", 0.0))
    assert [story.worker(name).weight for name in ("w0", "w1")] == [0.0, 0.0]


@pytest.mark.parametrize(
    "fact",
    [silent("w0"), engine_faulted("w0"), device_faulted("w0"), failed("w0", reason="non_finite"), left("w0")],
)
def test_the_last_worker_leaves_when_more_than_a_canarys_golden_convicts_it(fact: Fact) -> None:
    story = Story().up("w0")
    story.tell(failed("w0", **MISMATCH))
    assert story.worker().serves_suspect
    story.tell(fact)
    assert (kept(story), story.worker().weight) == (set(), 0.0)


def test_a_kept_last_worker_that_passes_its_trial_is_no_longer_kept() -> None:
    story = Story().up("w0")
    story.tell(failed("w0", **MISMATCH))
    story.wait(61)
    for _ in range(8):
        story.tell(passed("w0"))
    assert (story.status(), kept(story), story.worker().weight) == (HealthStatus.HEALTHY, set(), 0.25)


def test_a_kept_worker_is_released_when_it_recovers() -> None:
    story = Story().up(*FOUR)
    story.tell(*doubt(*FOUR))
    name = min(kept(story))
    story.wait(60)
    decisions = story.tell(passed(name))
    assert "WeightCapped" in kinds(decisions)
    assert story.worker(name).weight == 0.25
    assert story.worker(name).budget.kept is None


def test_a_cap_is_lifted_when_the_budget_grows() -> None:
    story = Story().up("w0", "w1", "w2")
    story.tell(*doubt("w0", "w1"))
    assert len(kept(story)) == 1
    story.up("w3")
    assert kept(story) == set()


def test_equally_bad_workers_do_not_alternate() -> None:
    story = Story().up(*FOUR)
    story.tell(*doubt(*FOUR))
    before = kept(story)
    for _ in range(10):
        story.wait(61)
        story.tell(*(failed(name) for name in FOUR))
        assert before <= kept(story) | {n for n in before if not story.worker(n).counts}


def test_a_kept_worker_is_not_given_up() -> None:
    story = Story().up("w0")
    story.tell(*doubt("w0"))
    for _ in range(8):
        story.reach_trial()
        story.tell(failed("w0"))
    assert story.status() is HealthStatus.UNHEALTHY
    assert story.worker().weight == 0.1


def test_each_model_has_its_own_budget() -> None:
    story = Story().up("w0", "w1").up("w2", "w3", model="qwen")
    story.tell(*doubt("w0", "w1"))
    assert len(kept(story)) == 1
    assert story.worker("w2").weight == story.worker("w3").weight == 1.0


def test_a_joining_worker_neither_counts_nor_is_kept() -> None:
    story = Story().up("w0")
    story.tell(joined("w1"))
    story.tell(*doubt("w0", "w1"))
    assert kept(story) == {"w0"}


@pytest.mark.parametrize(
    ("fact", "over"),
    [
        (device_faulted("w0"), device_recovered("w0")),
        (engine_faulted("w0"), resume("w0")),
        (failed("w0", reason="non_finite"), resume("w0")),
    ],
)
def test_a_convicted_worker_returns_only_by_its_trial(fact: Fact, over: Fact) -> None:
    story = Story().up("w0")
    story.tell(fact)
    story.tell(over)
    assert (story.status(), story.worker().weight, kept(story)) == (HealthStatus.UNHEALTHY, 0.0, set())
    story.wait(60)
    story.tell(passed("w0"))
    assert (story.status(), story.worker().weight) == (HealthStatus.HEALTHY, 0.25)


def test_a_worker_heard_again_does_not_count_before_its_trial() -> None:
    story = Story().up(*FOUR)
    story.tell(silent("w0"))
    story.tell(heard("w0"))
    story.tell(*doubt("w1", "w2", "w3"))
    assert len(kept(story)) == 2  # of three that count, one may go
    assert "w0" not in kept(story)


def test_a_worker_that_has_returned_is_kept_like_any_other() -> None:
    story = Story().up("w0")
    story.tell(silent("w0"))
    story.tell(heard("w0"))
    for _ in range(3):
        story.tell(passed("w0"))
    story.tell(*doubt("w0"))
    assert (story.status(), story.worker().weight) == (HealthStatus.UNHEALTHY, 0.1)
