"""Dead workers are removed from the fleet; workers that wait to join are awaited."""

from dataclasses import replace
from datetime import timedelta
from typing import Literal

import pytest
from fleet_story import START, Story, awaited, device_faulted, joined, kinds, left, passed, silent

from controller.deciders import worker_removal
from controller.deciders.fleet import FleetPolicy, evolve, load, next_due
from controller.deciders.fold import AWAITED_FOR
from controller.deciders.worker_removal import DEPARTED_MAX, ForgettingPolicy
from events.decisions import HealthStatus, WorkerForgotten
from events.order import Order

AFTER = ForgettingPolicy().forget_after
assert AFTER is not None
AFTER_S = AFTER.total_seconds()


def test_a_worker_that_left_is_shown_for_ten_minutes_and_its_model_goes_with_the_last() -> None:
    story = Story().up("w0", "w1")
    story.tell(left("w0"))
    assert story.status("w0") is HealthStatus.DEAD and AFTER_S == 600
    assert story.wait(AFTER_S - 1) == () and "w0" in story.fleet.workers
    assert next_due(story.policy, story.fleet, story.now) == START + timedelta(seconds=AFTER_S)
    assert kinds(story.wait(1)) == ["WorkerForgotten"]
    assert set(story.fleet.workers) == {"w1"} and set(story.fleet.models) == {"llama"}
    story.tell(left("w1"))
    story.wait(AFTER_S)
    assert not story.fleet.workers and not story.fleet.models


def test_a_journal_folds_identically_for_every_new_reader_under_any_policy() -> None:
    story = Story(FleetPolicy(forgetting=ForgettingPolicy(forget_after=timedelta(seconds=5)))).up("w0", "w1")
    story.tell(awaited("w2"), left("w0"))
    story.wait(5)
    order = Order(evolve, Story().fleet.__class__())
    for event in story.events:
        order.absorb(event)
    assert order.shown == story.fleet and "w0" not in order.shown.workers


def test_a_policy_from_before_this_setting_forgets_no_worker() -> None:
    """So decisions made under it are decided again alike."""
    written = {name: value for name, value in FleetPolicy().adopted.items() if name != "forgetting"}
    assert load(FleetPolicy().adopted) == FleetPolicy()
    story = Story(load(written)).up("w0")
    story.tell(left("w0"))
    assert story.wait(1e6) == () and next_due(story.policy, story.fleet, story.now) is None


def test_a_worker_with_an_awaited_next_life_is_not_forgotten() -> None:
    story = Story().up("w0")
    story.tell(left("w0", mode="immediate"), awaited("w0", "i2"))
    for _ in range(8):
        story.wait(120)
        story.tell(awaited("w0", "i2"))
    assert story.status() is HealthStatus.DEAD
    story.tell(joined("w0", "i2"), passed("w0", "i2"))
    assert story.worker().weight == 1.0 and not story.fleet.awaited


def test_convictions_outlive_the_forgetting_of_a_worker() -> None:
    story = Story().up("w0", "w1")
    story.tell(device_faulted("w0"))
    story.tell(left("w0"))
    story.wait(AFTER_S)
    assert "w0" not in story.fleet.workers
    story.tell(joined("w0", "i2"), passed("w0", "i2"))
    assert story.worker().weight == 0.0, "one lucky canary does not clear a bad device"
    assert "w0" not in story.fleet.departed


def test_a_late_fact_of_a_forgotten_life_restores_no_worker() -> None:
    story = Story().up("w0", "w1")
    story.tell(silent("w0"))
    story.wait(60)
    story.tell(left("w0"))
    story.wait(AFTER_S)
    before = story.fleet
    story.tell(joined("w0"), passed("w0"), awaited("w0"))
    assert story.fleet.workers == before.workers and not story.fleet.awaited


def test_remembered_workers_are_bounded_and_convicted_ones_are_dropped_last() -> None:
    story = Story().up("w0", "w1")
    story.tell(device_faulted("w0"))
    bad, good = story.worker("w0"), story.worker("w1")
    departed = worker_removal.remember({}, bad)
    for n in range(DEPARTED_MAX):
        departed = worker_removal.remember(
            departed, replace(good, joined=replace(good.joined, worker=f"x{n}"))
        )
    assert len(departed) == DEPARTED_MAX and "w0" in departed and "x0" not in departed


def test_a_waiting_worker_is_awaited_until_it_has_joined() -> None:
    story = Story()
    story.tell(awaited("w0", reason="cannot connect to http://u"))
    waiting = story.fleet.awaited["w0"]
    assert (waiting.reason, waiting.model, waiting.since) == ("cannot connect to http://u", "", START)
    story.wait(60)
    story.tell(awaited("w0", reason="it is loading", model="m"))
    waiting = story.fleet.awaited["w0"]
    assert (waiting.reason, waiting.model, waiting.since) == ("it is loading", "m", START)
    story.tell(joined("w0", "i2"))
    assert not story.fleet.awaited, "its next life has joined, whatever happened to the one that waited"


def test_a_worker_that_has_served_before_is_awaited_with_its_former_model() -> None:
    story = Story().up("w0", model="qwen")
    story.tell(left("w0", mode="immediate"), awaited("w0", "i2"))
    assert story.fleet.awaited["w0"].model == "qwen"


@pytest.mark.parametrize(
    ("mode", "gone"), [("graceful", True), ("immediate", False), ("self_initiated", False)]
)
def test_only_a_graceful_exit_ends_the_wait(
    mode: Literal["graceful", "immediate", "self_initiated"], gone: bool
) -> None:
    """After any other exit its supervisor may start another life."""
    story = Story()
    story.tell(awaited("w0"), awaited("w1"))
    story.tell(left("w0", mode=mode), left("w1", "another life"))
    assert (set(story.fleet.awaited) == {"w1"}) is gone


def test_a_worker_that_stops_reporting_is_no_longer_awaited() -> None:
    story = Story().up("w9")
    story.tell(awaited("w0"))
    story.wait(60)
    story.tell(awaited("w1"))
    story.now = START + AWAITED_FOR
    story.tell(passed("w9"))
    assert set(story.fleet.awaited) == {"w0", "w1"}
    story.wait(1)
    story.tell(passed("w9"))
    assert set(story.fleet.awaited) == {"w1"}


def test_a_decision_about_another_life_forgets_no_worker() -> None:
    story = Story().up("w0")
    forgotten = WorkerForgotten(
        worker="w0", instance="i0", number=story.fleet.number + 1, decided_at=story.now
    )
    story.record(forgotten, through=story.order.last_seq)
    assert "w0" in story.fleet.workers
