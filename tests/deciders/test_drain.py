"""Drains: their causes, deadlines and outcomes."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import pytest
from fleet_story import (
    Story,
    drain_requested,
    drained,
    kinds,
    left,
    only,
    passed,
    resume,
    shutdown,
)

from events.decisions import DrainEnded, DrainStarted, HealthStatus
from events.fact import Decision

DR, DEAD = HealthStatus.DRAINING, HealthStatus.DEAD


def outcomes(decisions: Iterable[Decision]) -> list[str]:
    return [d.outcome for d in decisions if isinstance(d, DrainEnded)]


@pytest.mark.parametrize(
    "wish, wait",
    [
        (None, 45),
        (5.0, 5),
        (0.0, 0),
        (-3.0, 0),
        (float("nan"), 45),
        (float("inf"), 86_400),
        (1e12, 86_400),
    ],
)
def test_an_operator_sets_the_deadline(wish: float | None, wait: float) -> None:
    story = Story().up("w0", "w1")
    started = [d for d in story.tell(drain_requested("w0", deadline_s=wish)) if isinstance(d, DrainStarted)]
    assert started[0].deadline == story.now + timedelta(seconds=wait)
    assert story.worker().weight == 0.0


def test_n24_the_default_leaves_time_to_stop_within_the_usual_60_s() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    deadline = story.worker().drain.deadline
    assert deadline is not None and deadline - story.now <= timedelta(seconds=45)


def test_past_its_deadline_a_worker_that_is_not_empty_is_dead() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0", deadline_s=10.0))
    assert story.wait(14.9) == ()
    assert outcomes(story.wait(0.1)) == ["deadline"]
    assert story.status() is DEAD


def test_empty_and_left_is_dead() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    assert outcomes(story.tell(drained("w0"))) == ["empty"]
    assert story.status() is DR
    story.tell(left("w0"))
    assert story.status() is DEAD


def test_a_worker_that_leaves_while_draining_ends_the_drain() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    assert outcomes(story.tell(left("w0"))) == ["left"]
    assert not story.worker().drain.active


def test_resume_ends_the_drain_and_a_good_canary_the_health() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    assert outcomes(story.tell(resume("w0"))) == ["resumed"]
    assert story.worker().weight == 0.0
    story.tell(passed("w0"))
    assert story.worker().weight == 0.25


def test_a_resume_and_a_new_request_together_drain_again() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    decisions = story.tell(resume("w0"), drain_requested("w0", deadline_s=3.0))
    assert kinds(decisions) == ["DrainEnded", "DrainStarted"]
    assert story.worker().drain.active
    story.tell(passed("w0"))
    assert story.status() is DR


def test_a_repeated_drain_request_changes_nothing() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    deadline = story.worker().drain.deadline
    story.now += timedelta(seconds=20)
    assert story.tell(drain_requested("w0"), shutdown("w0")) == ()
    assert story.worker().drain.deadline == deadline


def test_a_drain_request_for_another_life_or_a_dead_worker_is_ignored() -> None:
    story = Story().up("w0", "w1")
    assert story.tell(drain_requested("w0", "old")) == ()
    story.tell(left("w0"))
    assert story.tell(drain_requested("w0")) == ()


def test_shutdown_drains_within_its_grace() -> None:
    story = Story().up("w0", "w1")
    decisions = story.tell(shutdown("w0"))
    assert kinds(decisions) == ["HealthChanged", "DrainStarted"]
    started = only(decisions, DrainStarted)
    assert (started.reason, started.deadline) == ("shutdown: graceful", story.now + timedelta(seconds=60))


def test_a_drain_request_that_reached_the_journal_after_its_deadline_is_ignored() -> None:
    story = Story().up("w0", "w1")
    late, in_time = story.now - timedelta(microseconds=1), story.now
    before = story.worker("w0")
    assert story.tell(replace(drain_requested("w0"), until=late)) == ()
    assert story.worker("w0") == before
    assert "DrainStarted" in kinds(story.tell(replace(drain_requested("w0"), until=in_time)))
    draining = story.worker("w0")
    story.tell(replace(resume("w0"), until=late))
    assert story.worker("w0") == draining
