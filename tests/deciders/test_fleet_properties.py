"""Invariants of all machines together under any facts in any order."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import pytest
from fleet_story import (
    Story,
    awaited,
    device_faulted,
    device_limited,
    device_recovered,
    disputed,
    drain_requested,
    drained,
    engine_faulted,
    failed,
    heard,
    joined,
    left,
    passed,
    proposed,
    request_failed,
    resume,
    served,
    shutdown,
    silent,
    slow,
    slow_cleared,
)

from controller.deciders.capacity import Slo
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.fleet import Fleet, FleetPolicy, evolve, settle
from controller.deciders.golden import at_odds, is_undisputed
from events.decisions import BreakerClosed, BreakerHalfOpened, BreakerOpened, HealthStatus
from events.fact import Decision, Fact, Recorded
from events.order import Order

SLO = Slo(slo_throughput_rps=40.0, slo_ttft_ms=500.0, slo_tpot_ms=30.0)
POLICY = FleetPolicy(degradation=DegradationPolicy(slos={"llama": SLO}))


def random_fact(r: random.Random, story: Story, workers: int) -> Fact:
    """Return a plausible random fact; many are late, repeated or about a former life."""
    name = f"w{r.randrange(workers)}"
    known = story.fleet.workers.get(name)
    if known is None:
        return joined(name)
    now = known.joined.instance
    it = now if r.random() < 0.93 else f"i{r.randrange(1, 4)}"
    under = max(0, story.fleet.number - (0 if r.random() < 0.8 else r.randrange(12)))
    canary = f"c{r.randrange(3)}"
    key: dict[str, Any] = {"under": under}
    choices: list[tuple[int, Callable[[], Fact]]] = [
        (30, lambda: passed(name, it, canary=canary, **key)),
        (8, lambda: passed(name, it, canary=canary, slow=True, **key)),
        (12, lambda: failed(name, it, canary=canary, **key)),
        (
            2,
            lambda: failed(
                name, it, reason="token_mismatch", confirmed=True, golden=r.choice(GOLDENS), **key
            ),
        ),
        (1, lambda: failed(name, it, reason="non_finite", **key)),
        (1, lambda: failed(name, it, reason="latency_spike", **key)),
        (8, lambda: served(name, instance=it, **key)),
        (10, lambda: request_failed(name, r.randrange(1, 5), instance=it, **key)),
        (3, lambda: slow(name, it)),
        (1, lambda: slow_cleared(name, it)),
        (2, lambda: silent(name, it)),
        (2, lambda: heard(name, it)),
        (1, lambda: device_faulted(name, it, fatal=r.random() < 0.7)),
        (1, lambda: device_recovered(name, it)),
        (2, lambda: device_limited(name, r.choice(LIMITS), it, device=r.choice(["gpu0", "gpu1"]))),
        (1, lambda: device_recovered(name, it, device=r.choice(["gpu0", "gpu1"]), fault_class="throttle")),
        (1, lambda: engine_faulted(name, it, fatal=r.random() < 0.7)),
        (2, lambda: drain_requested(name, it, r.choice([None, 0.0, 5.0, float("nan"), -1.0]))),
        (2, lambda: resume(name, it)),
        (1, lambda: shutdown(name, it)),
        (2, lambda: drained(name, it)),
        (1, lambda: left(name, it)),
        (1, lambda: awaited(name, r.choice([it, f"i{int(now[1:]) + 1}"]), model=r.choice(["", "qwen"]))),
        (3, lambda: joined(name, f"i{int(now[1:]) + (r.random() < 0.7)}")),
        (2, lambda: proposed(name, r.choice([(1, 2), (1, 2), (3,)]), instance=it, canary=canary)),
        (1, lambda: disputed(name, (4,), against="w0", instance=it, canary=canary)),
    ]
    return r.choices([make for _, make in choices], [weight for weight, _ in choices])[0]()


LIMITS = (0.0, 0.1, 0.5, 0.9, 1.0, float("nan"), -1.0, 7.0)
GOLDENS: tuple[Literal["agreed", "provisional", "none"], ...] = ("agreed", "provisional", "none")


def random_story(seed: int, steps: int = 250, workers: int = 5, policy: FleetPolicy = POLICY) -> Story:
    """Play a random history in which more facts arrive between reading and appending, as in production."""
    r = random.Random(seed)
    story = Story(policy)
    for _ in range(steps):
        for _ in range(r.randrange(1, 4)):
            story.record(random_fact(r, story, workers))
        story.now += timedelta(seconds=r.choice([0, 0, 0.1, 1, 1, 5, 20, 70]))
        decisions, through = settle(policy, story.fleet, story.now), story.order.last_seq
        for _ in range(r.choice([0, 0, 0, 1, 2])):
            story.record(random_fact(r, story, workers))
        for decision in decisions:
            story.record(decision, through=through)
    return story


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_a_second_settle_decides_nothing(seed: int) -> None:
    r = random.Random(seed)
    story = Story(POLICY)
    for _ in range(120):
        story.record(random_fact(r, story, 5))
        story.now += timedelta(seconds=r.choice([0, 0, 1, 10, 40]))
        story.settle()  # asserts that a second settle says nothing


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_device_limit_caps_the_weight_and_changes_nothing_else(seed: int) -> None:
    r = random.Random(seed)
    story = Story(POLICY)
    limits: dict[tuple[str, str], float] = {}
    story.up(*(f"w{n}" for n in range(4)))
    for _ in range(150):
        name, device = f"w{r.randrange(4)}", f"gpu{r.randrange(2)}"
        known = story.fleet.remembered(name)
        assert known is not None
        instance = known.joined.instance
        if r.random() < 0.5:
            weight = r.choice((0.0, 0.1, 0.5, 0.9, 1.0))
            limits[name, device] = weight
            story.tell(device_limited(name, weight, instance, device=device))
        elif r.random() < 0.5:
            limits.pop((name, device), None)
            story.tell(device_recovered(name, instance, device=device, fault_class="throttle"))
        else:
            story.tell(r.choice((passed, failed, slow))(name, instance))
        story.wait(r.choice((0, 1, 70)))
        for worker, w in story.fleet.workers.items():
            limit = min((value for (name, _), value in limits.items() if name == worker), default=1.0)
            in_service = w.health.status in (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS)
            assert w.health.weight == (min(w.health.unlimited, limit) if in_service else 0.0)


@pytest.mark.slow
def test_only_a_disputed_golden_can_put_workers_in_doubt() -> None:
    r, doubted = random.Random(0), 0
    for _ in range(20):
        story = Story(POLICY)
        story.up(*(f"w{n}" for n in range(4)))
        for _ in range(100):
            name, canary = f"w{r.randrange(4)}", f"c{r.randrange(6)}"
            said = proposed(name, r.choice([(1, 2), (3,), (4,)]), canary=canary)
            story.tell(said if r.random() < 0.3 else random_fact(r, story, 5))
            lives = {name: one.joined.instance for name, one in story.fleet.workers.items()}
            for state in story.fleet.goldens.values():
                doubted += bool(at_odds(state, lives))
                assert not (is_undisputed(state) and at_odds(state, lives))
    assert doubted > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_a_random_history_keeps_every_rule(seed: int) -> None:
    story = random_story(seed)
    replay_equals_live(story)
    a_snapshot_and_the_rest_equal_the_whole(story, cut=random.Random(seed).randrange(len(story.events)))
    at_most_one_trial_at_a_time_and_moves_alternate(story)
    dead_is_dead_and_not_routable(story)
    every_incident_closes_at_recovery_or_death(story)


def replay_equals_live(story: Story) -> None:
    again: Order[Fleet] = Order(evolve, Fleet())
    for event in story.events:
        again.absorb(event)
    assert again.shown == story.fleet
    assert again.settled == story.order.settled


def a_snapshot_and_the_rest_equal_the_whole(story: Story, cut: int) -> None:
    first: Order[Fleet] = Order(evolve, Fleet())
    for event in story.events[:cut]:
        first.absorb(event)
    rest = Order(evolve, first.settled, first.position, dict(first.sources))
    for event in story.events[first.position.through :]:
        rest.absorb(event)
    assert rest.shown == story.fleet


def at_most_one_trial_at_a_time_and_moves_alternate(story: Story) -> None:
    position: dict[tuple[str, str], str] = {}
    allowed = {
        BreakerOpened: {"closed", "half_open"},
        BreakerHalfOpened: {"open"},
        BreakerClosed: {"half_open"},
    }
    after = {BreakerOpened: "open", BreakerHalfOpened: "half_open", BreakerClosed: "closed"}
    for event in story.events:
        if isinstance(event.fact, BreakerOpened | BreakerHalfOpened | BreakerClosed):
            kind, life = type(event.fact), (event.fact.worker, event.fact.instance)
            assert position.get(life, "closed") in allowed[kind]
            position[life] = after[kind]


def dead_is_dead_and_not_routable(story: Story) -> None:
    order: Order[Fleet] = Order(evolve, Fleet())
    dead: set[tuple[str, str]] = set()
    for event in story.events:
        order.absorb(event)
        for name, worker in order.settled.workers.items():
            life = (name, worker.joined.instance)
            if worker.health.status is HealthStatus.DEAD:
                dead.add(life)
                assert not worker.routable
            else:
                assert life not in dead


def every_incident_closes_at_recovery_or_death(story: Story) -> None:
    for name in story.fleet.workers:
        story.record(replace(left(name), instance=story.fleet.workers[name].joined.instance))
    story.settle()
    assert not [i for i in story.fleet.incidents.values() if i.subject.startswith("worker:")]
    assert all(not worker.incident for worker in story.fleet.workers.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_every_batch_is_decided_again_identically(seed: int) -> None:
    """Repeat each decision as `replay verify` does: fold everything that its controller had read, and settle again."""
    story = random_story(seed, steps=100)
    order: Order[Fleet] = Order(evolve, Fleet())
    seen: list[Recorded] = []
    expected: list[Decision] = []
    for event in story.events:
        if isinstance(event.fact, Decision):
            if not expected:
                at = Fleet()
                rerun: Order[Fleet] = Order(evolve, at)
                for past in seen:
                    if isinstance(past.fact, Decision) or past.seq <= event.through:
                        rerun.last_seq = past.seq - 1  # the gap is intended: later events were not read
                        rerun.absorb(past)
                expected = list(settle(POLICY, rerun.shown, event.fact.decided_at))
            assert expected.pop(0) == event.fact
        seen.append(event)
        order.absorb(event)
    assert not expected


def test_raw_stream_order_is_wrong_in_some_histories() -> None:
    wrong = 0
    histories = 40
    for seed in range(histories):
        story = random_story(seed, steps=60)
        raw = Fleet()
        for event in story.events:
            raw = evolve(raw, event)
        wrong += raw != story.fleet
    assert 0 < wrong < histories  # 16 of 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_the_budget_is_never_exceeded(seed: int) -> None:
    r = random.Random(seed)
    story = Story(POLICY).up(*(f"w{n}" for n in range(6)))
    for _ in range(150):
        for _ in range(r.randrange(1, 7)):  # simultaneous failures
            story.record(random_fact(r, story, 6))
        story.now += timedelta(seconds=r.choice([0, 0, 1, 30, 70]))
        story.settle()
        counted = [w for w in story.fleet.workers.values() if w.counts]
        ejected = [w for w in counted if w.weight == 0.0]
        assert len(ejected) <= len(counted) / 2
        for worker in story.fleet.workers.values():
            if worker.health.status in (HealthStatus.DEAD, HealthStatus.DRAINING) or worker.health.convicted:
                if worker.serves_suspect:
                    others = [o for o in story.fleet.workers.values() if o is not worker and o.weight > 0]
                    assert worker.health.corrupt and not others, "only as the last worker"
                else:
                    assert worker.weight == 0.0 and worker.budget.kept is None
