"""`SettleCache` gives the same decisions as `settle`, and does not settle a calm fleet again."""

import random
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from fleet_story import START, Story, joined, left, passed
from test_fleet_properties import POLICY, SLO, random_fact

from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import Fleet, FleetPolicy, SettleCache, next_due, settle
from events.decisions import DegradationChanged
from events.fact import Decision

CARRIED = FleetPolicy(degradation=DegradationPolicy(slos={"llama": replace(SLO, slo_throughput_rps=10.0)}))
LATER = [timedelta(seconds=s) for s in (0.2, 1, 4.9, 5, 10, 29.9, 30, 50, 60, 61, 300, 3600)]


class Counted:
    """`settle`, with a count of its calls."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, policy: FleetPolicy, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
        self.times += 1
        return settle(policy, fleet, now)


@pytest.mark.parametrize("seed", range(12))
def test_a_calm_fleet_stays_calm_until_next_due(seed: int) -> None:
    r, story, named = random.Random(seed), Story(POLICY), 0
    for _ in range(80):
        story.record(random_fact(r, story, 4))
        story.now += timedelta(seconds=r.choice([0, 0, 1, 10, 40]))
        story.settle()
        fleet, due = story.fleet, next_due(POLICY, story.fleet, story.now)
        last = story.now + timedelta(days=1) if due is None else due - timedelta(microseconds=1)
        assert settle(POLICY, fleet, last) == ()
        named += due is not None and settle(POLICY, fleet, due) != ()
    assert named > 5


def test_the_end_of_a_dwell_is_a_next_due_time() -> None:
    story = Story(CARRIED).up("w0", "w1", "w2", "w3")
    story.wait(60)
    story.tell(left("w0"), left("w1"), left("w2"))
    degraded = story.fleet.models["llama"]
    story.tell(joined("w0", "i2"), joined("w1", "i2"))
    story.tell(passed("w0", "i2"), passed("w1", "i2"))  # three workers carry the SLO again
    due = next_due(CARRIED, story.fleet, story.now)
    assert degraded.level and degraded.since and due == degraded.since + CARRIED.degradation.dwell
    assert [type(d) for d in settle(CARRIED, story.fleet, due)][:1] == [DegradationChanged]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_asking_repeatedly_gives_the_decisions_of_settle(seed: int) -> None:
    r, story, counted = random.Random(seed), Story(POLICY), Counted()
    asking, asked = SettleCache(POLICY, counted), 0
    for _ in range(60):
        story.record(random_fact(r, story, 4))
        for wait in LATER[: r.choice((2, 5, len(LATER)))]:
            at = story.now + wait
            assert asking.due(story.fleet, at) == settle(POLICY, story.fleet, at)
            asked += 1
        story.now += wait
        story.settle()
    assert counted.times < 0.9 * asked


def test_a_calm_fleet_is_settled_once_until_a_fact_changes_it() -> None:
    story, counted = Story().up("w0", "w1"), Counted()
    asking = SettleCache(story.policy, counted)
    for second in range(100):
        assert asking.due(story.fleet, START + timedelta(hours=1, seconds=second)) == ()
    assert counted.times == 1
    story.record(passed("w0", under=story.fleet.number))
    asking.due(story.fleet, START + timedelta(hours=2))
    assert counted.times == 2


def test_a_due_decision_is_returned_until_it_is_absorbed() -> None:
    asking, fresh = SettleCache(POLICY), Fleet()
    assert asking.due(fresh, START) == asking.due(fresh, START) != ()
