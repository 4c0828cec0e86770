"""Recovery after silence.

A worker that was only silent is tried as soon as it answers, and returns with its full weight. A timeout of a
busy worker is no failure. Under a policy of deciders version 5 everything is decided as before.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fleet_story import Story, failed, heard, kinds, passed, request_failed, silent

from controller.deciders.fleet import FleetPolicy, load
from events.decisions import HealthStatus
from events.observations import CanaryReason

H, S, U = HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS, HealthStatus.UNHEALTHY
BEFORE = load({})


def timeouts(story: Story, *names: str, times: int = 3, every_s: float = 30, **more: Any) -> None:
    """Let canaries of these workers time out, `times` times in a row."""
    for _ in range(times):
        story.tell(*[failed(name, reason="timeout", under=story.fleet.number, **more) for name in names])
        story.wait(every_s)


def good(story: Story, *names: str) -> None:
    for name in names:
        story.tell(passed(name, under=story.fleet.number))


def whole(story: Story, *names: str) -> bool:
    return all((story.status(name), story.worker(name).weight) == (H, 1.0) for name in names)


def test_a_partition_of_12_s_ends_with_one_good_canary() -> None:
    story = Story().up("w0", "w1", "w2")
    story.wait(100)
    story.tell(silent("w0"))
    assert story.status() is U
    story.wait(9)
    assert kinds(story.tell(heard("w0"))) == ["BreakerHalfOpened"], "its trial is sent at once"
    good(story, "w0")
    assert whole(story, "w0")


def test_silent_workers_have_full_weight_after_two_good_canaries() -> None:
    names = ("w0", "w1", "w2")
    story = Story().up(*names)
    timeouts(story, *names)
    assert {story.status(name) for name in names} == {U}
    good(story, *names)
    assert {story.worker(name).breaker.position for name in names} == {"half_open"}
    good(story, *names)
    assert whole(story, *names)


def test_a_trial_that_got_no_answer_is_repeated_half_a_wait_later_once_the_worker_answers() -> None:
    story = Story().up("w0", "w1", "w2")
    timeouts(story, "w0")
    story.wait(60)
    assert story.worker().breaker.position == "half_open"
    story.tell(failed("w0", reason="timeout", under=story.fleet.number))
    assert story.worker().breaker.position == "open"
    good(story, "w0")
    story.wait(29)
    assert story.worker().breaker.position == "open"
    story.wait(1)
    good(story, "w0")
    assert whole(story, "w0")


@pytest.mark.parametrize("reason", ["exception", "token_mismatch", "logit_drift"])
def test_a_worker_that_gave_a_wrong_answer_waits_and_returns_by_the_ramp(reason: CanaryReason) -> None:
    story = Story().up("w0", "w1", "w2")
    timeouts(story, "w0", times=2)
    story.tell(failed("w0", reason=reason, under=story.fleet.number))
    timeouts(story, "w0", times=2, every_s=0)
    assert story.status() is U
    good(story, "w0")
    assert story.worker().breaker.position == "open"
    story.wait(60)
    good(story, "w0")
    assert (story.status(), story.worker().weight) == (H, 0.25)


def test_a_wrong_answer_while_out_of_service_removes_the_early_return() -> None:
    story = Story().up("w0", "w1", "w2")
    timeouts(story, "w0", every_s=0)
    story.tell(failed("w0", reason="token_mismatch", under=story.fleet.number))
    good(story, "w0")
    assert story.worker().breaker.position == "open"


def test_consecutive_failed_requests_do_not_count_as_silence() -> None:
    story = Story().up("w0", "w1", "w2")
    story.tell(request_failed("w0", 3))
    assert story.worker().breaker.position == "open"
    good(story, "w0")
    assert story.worker().breaker.position == "open"


def test_a_flapping_connection_does_not_take_a_worker_in_and_out_every_few_seconds() -> None:
    story, returned = Story().up("w0", "w1", "w2"), 0
    for _ in range(30):
        story.tell(silent("w0"))
        story.wait(4)
        story.tell(heard("w0"))
        story.wait(1)
        good(story, "w0")
        returned += whole(story, "w0")
        story.wait(5)
    assert 0 < returned <= 6, "of 30 silences in 300 s: once in 60 s"


def test_three_timeouts_with_a_progressing_engine_only_raise_a_suspicion_of_slowness() -> None:
    story = Story().up("w0", "w1", "w2")
    timeouts(story, "w0", times=2, engine_went_on=True)
    assert whole(story, "w0")
    timeouts(story, "w0", times=1, engine_went_on=True)
    assert (story.status(), story.worker().weight, story.worker().health.reason) == (S, 0.5, "slow")
    timeouts(story, "w0", times=20, engine_went_on=True)
    assert (story.status(), story.worker().breaker.position) == (S, "closed")
    for _ in range(3):
        good(story, "w0")
    assert whole(story, "w0")


def test_timeouts_of_all_workers_eject_none_while_their_engines_make_progress() -> None:
    names = ("w0", "w1", "w2")
    story = Story().up(*names)
    timeouts(story, *names, times=20, engine_went_on=True)
    assert all(story.worker(name).routable for name in names)


def test_soft_evidence_of_any_kind_leaves_half_of_the_workers_in_service() -> None:
    names = ("w0", "w1", "w2", "w3")
    story = Story().up(*names)
    timeouts(story, *names, times=20)
    assert sum(story.worker(name).routable for name in names) >= 2


def test_an_older_policy_decides_as_before() -> None:
    story = Story(BEFORE).up("w0", "w1", "w2")
    story.tell(silent("w0"))
    assert story.tell(heard("w0")) == ()
    story.wait(59)
    assert story.worker().breaker.position == "open"
    story.wait(1)
    good(story, "w0")
    assert (story.status(), story.worker().weight) == (H, 0.25)
    timeouts(story, "w1", times=3, engine_went_on=True)
    assert (story.status("w1"), story.worker("w1").breaker.position) == (U, "open")


def test_the_wait_can_be_set() -> None:
    policy = FleetPolicy(breaker=replace(FleetPolicy().breaker, wait_min=timedelta(seconds=8)))
    story = Story(policy).up("w0", "w1", "w2")
    for position in ("half_open", "open"):
        story.tell(silent("w0"))
        story.tell(heard("w0"))
        assert story.worker().breaker.position == position
        good(story, "w0")
    story.wait(8)
    assert story.worker().breaker.position == "half_open"
