"""Capacity and the degradation ladder: what a fleet can carry, and what it gives up below that."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from fleet_story import (
    PROFILE,
    START,
    Story,
    drain_requested,
    engine_faulted,
    joined,
    kinds,
    left,
    passed,
    silent,
)
from hypothesis import given
from hypothesis import strategies as st

from controller.deciders.capacity import Slo, attainable, fleet_capacity, tpot_ms, worker_capacity
from controller.deciders.degradation import (
    Degradation,
    DegradationPolicy,
    decide,
    knobs_of,
)
from controller.deciders.fleet import FleetPolicy, load
from controller.deciders.tiers import TIERS, Tiers
from events.decisions import DegradationChanged, Knobs
from events.observations import Profile

LONG_AGO = START - timedelta(days=1)
ONE = worker_capacity(PROFILE, Slo()).effective_capacity_rps


def ladder(workers: float, **slo: Any) -> FleetPolicy:
    """Return a policy with an SLO that needs the capacity of this many workers."""
    wanted = Slo(slo_throughput_rps=workers * ONE, **slo)
    return FleetPolicy(degradation=DegradationPolicy(slos={"llama": wanted}))


def level(story: Story) -> int:
    return story.fleet.models["llama"].level


def at_ratio(ratio: float, state: Degradation, now: datetime = START) -> DegradationChanged | None:
    policy = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=ONE)})
    state, twice = replace(state, served_since=LONG_AGO), [(PROFILE, 2.0)]  # provisioned at twice the SLO
    decision = next(decide(policy, state, [(PROFILE, ratio)], now, twice), None)
    assert decision is None or isinstance(decision, DegradationChanged)
    return decision


@pytest.mark.parametrize(
    "ratio, expected",
    [
        (1.5, 0),
        (1.0, 0),
        (0.99, 1),
        (0.75, 1),
        (0.74, 2),
        (0.5, 2),
        (0.49, 3),
        (0.25, 3),
        (0.24, 4),
        (0.0, 4),
    ],
)
def test_the_levels_begin_at_their_ratios(ratio: float, expected: int) -> None:
    decision = at_ratio(ratio, Degradation("m"))
    assert (decision.after if decision else 0) == expected


@pytest.mark.parametrize("before, entry", [(1, 1.0), (2, 0.75), (3, 0.5), (4, 0.25)])
def test_b23_a_level_is_left_only_above_its_entry_and_after_the_dwell(before: int, entry: float) -> None:
    state = Degradation("m", level=before, since=START)
    later = START + timedelta(seconds=10)
    assert at_ratio(entry + 0.04, state, later) is None
    assert at_ratio(entry + 0.051, state, later - timedelta(seconds=1)) is None
    decision = at_ratio(entry + 0.051, state, later)
    assert decision is not None and decision.after == before - 1


@pytest.mark.parametrize("provisioned", [1.0, 1.02, 1.05])
def test_b23_a_level_is_left_with_all_that_is_provisioned(provisioned: float) -> None:
    """A model provisioned at 100 to 105 % of its SLO returns to level 0 at full capacity, and not below it."""
    policy = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=ONE)})
    state = Degradation("m", level=1, since=LONG_AGO, served_since=LONG_AGO)
    full = [(PROFILE, 1.0)] * 20
    scale = provisioned / 20
    policy = replace(policy, slos={"m": Slo(slo_throughput_rps=ONE / scale)})
    [left] = decide(policy, state, full, START, full)
    assert isinstance(left, DegradationChanged) and left.after == 0
    one_short = [*full[1:], (PROFILE, 0.5)]
    assert not list(decide(policy, state, one_short, START, full))
    assert list(decide(policy, state, full, START, [*full, (PROFILE, 1.0)])) == [left] * (provisioned == 1.05)


def test_b23_a_lower_level_is_left_with_all_that_is_provisioned_too() -> None:
    """Every exit is capped: a model at 77 % of its SLO returns to level 1, the best that it can hold."""
    policy = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=100 * ONE)})
    state = Degradation("m", level=2, since=LONG_AGO, served_since=LONG_AGO)
    full = [(PROFILE, 1.0)] * 77
    [left] = decide(policy, state, full, START, full)
    assert isinstance(left, DegradationChanged) and left.after == 1


@pytest.mark.parametrize("workers", [3, 6, 7, 10, 49, 1000])
def test_b23_equal_workers_that_sum_to_a_little_less_than_one_are_enough(workers: int) -> None:
    """Rounding must not change a level: each comparison has a tolerance (a sum of tenths is 0.9999999999999998 or so)."""
    policy = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=ONE * workers * (1 + 4e-16))})
    for level in (0, 1):
        state = Degradation("m", level=level, since=LONG_AGO, served_since=LONG_AGO)
        full = [(PROFILE, 1.0)] * workers
        assert [d.after for d in decide(policy, state, full, START, full)] == [0] * level  # type: ignore[attr-defined]
    assert at_ratio(0.9999999999999998, Degradation("m")) is None
    assert at_ratio(0.9999, Degradation("m")) is not None


def test_b23_a_worker_that_should_not_serve_holds_no_level() -> None:
    """Workers that should serve are provisioned: not dead, drained or joining ones."""
    story = Story(ladder(2.0)).up("w0", "w1")
    story.wait(6)
    story.tell(left("w0"))
    assert level(story) == 2
    story.up("w2")
    story.tell(joined("w3"))
    story.wait(11)
    assert level(story) == 0 and not story.worker("w3").routable


def test_a_policy_of_version_5_leaves_levels_as_it_did() -> None:
    """A policy from before these fields existed decides as it did then: with the margin alone, to the last bit."""
    written = {"degradation": {"entries": [1.0, 0.75, 0.5, 0.25], "margin": 0.05}}
    old = load(written).degradation
    assert (old.exit_at_provisioned, old.tolerance) == (False, 0.0)
    assert "exit_at_provisioned" not in FleetPolicy(degradation=old).adopted["degradation"]
    assert load(FleetPolicy().adopted) == FleetPolicy()
    old = replace(old, slos={"m": Slo(slo_throughput_rps=ONE)})
    state = Degradation("m", level=1, since=LONG_AGO, served_since=LONG_AGO)
    assert not list(decide(old, state, [(PROFILE, 1.0)], START, [(PROFILE, 1.0)]))
    assert list(decide(old, replace(state, level=0), [(PROFILE, 0.9999999999999998)], START))


def test_b23_a_ratio_that_jitters_around_an_entry_causes_one_event() -> None:
    state, changes, now = Degradation("m", served_since=LONG_AGO), 0, START
    policy = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=ONE)})
    for step in range(200):
        now += timedelta(seconds=5)
        trembling = [(PROFILE, 0.75 + (0.03 if step % 2 else -0.03))]
        for decision in decide(policy, state, trembling, now, [(PROFILE, 2.0)]):
            assert isinstance(decision, DegradationChanged)
            state = replace(state, level=decision.after, since=now)
            changes += 1
    assert changes == 1  # to level 2, where it stays


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(5))
def test_b22_every_level_sets_all_four_knobs(before: int, after: int) -> None:
    ratio = {0: 2.0, 1: 0.9, 2: 0.6, 3: 0.4, 4: 0.1}[after]
    decision = at_ratio(ratio, Degradation("m", level=before, since=None))
    assert (decision.knobs if decision else knobs_of(before)) == SEEDS_TABLE[after]


SEEDS_TABLE = {
    0: Knobs(batch_size=1.0, shed_tier=None, latency=1.0, accept_new=True),
    1: Knobs(batch_size=0.75, shed_tier=None, latency=1.0, accept_new=True),
    2: Knobs(batch_size=0.75, shed_tier="best_effort", latency=1.0, accept_new=True),
    3: Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0, accept_new=True),
    4: Knobs(batch_size=0.5, shed_tier="best_effort", latency=2.0, accept_new=False),
}


def test_b19_capacity_is_requests_per_second_by_littles_law() -> None:
    profile = Profile(
        kv_blocks=1280,
        block_tokens=16,
        max_batch=64,
        prefill_tokens_per_s=1e9,
        tpot_ms=((1, 10.0), (64, 10.0)),
    )
    slo = Slo(mean_prompt_tokens=1024, mean_output_tokens=1024)
    capacity = worker_capacity(profile, slo)
    assert capacity.max_concurrent_sequences == 10
    assert capacity.rps_kv == pytest.approx(10 / 10.24, rel=1e-3)
    assert capacity.rps_compute == pytest.approx(64 / 10.24, rel=1e-3)
    assert capacity.effective_capacity_rps == capacity.rps_kv


def test_b20_load_does_not_lower_capacity() -> None:
    """A profile holds registered values only: free blocks and running requests cannot affect it."""
    assert set(Profile.__dataclass_fields__) == {
        "kv_blocks",
        "block_tokens",
        "max_batch",
        "prefill_tokens_per_s",
        "tpot_ms",
        "prefill_tokens_max",
    }


def test_b21_the_slos_bound_the_capacity_and_zero_divides_nothing() -> None:
    free = worker_capacity(PROFILE, Slo()).rps_compute
    assert worker_capacity(PROFILE, Slo(max_batch_size=4)).rps_compute < free
    assert worker_capacity(PROFILE, Slo(slo_tpot_ms=12.0)).rps_compute < free
    assert worker_capacity(PROFILE, Slo(slo_ttft_ms=77.0)).rps_compute < free
    assert worker_capacity(PROFILE, Slo(slo_tpot_ms=5.0)).effective_capacity_rps == 0
    assert worker_capacity(PROFILE, Slo(slo_ttft_ms=5.0)).effective_capacity_rps == 0
    off = DegradationPolicy(slos={"m": Slo(slo_throughput_rps=0.0)})
    assert list(decide(off, Degradation("m", served_since=LONG_AGO), [], START)) == []


def test_a_latency_that_no_worker_could_meet_alone_is_ignored() -> None:
    """PROFILE takes 10 ms per token of a lone stream, and about 77 ms to read the default prompt."""
    prefill_ms = 1000 * Slo().mean_prompt_tokens / PROFILE.prefill_tokens_per_s
    slow = Slo(slo_throughput_rps=ONE / 2, slo_tpot_ms=4.0, slo_ttft_ms=prefill_ms / 3)
    free = Slo(slo_throughput_rps=ONE / 2, slo_tpot_ms=None, slo_ttft_ms=None)
    workers = [(PROFILE, 1.0), (PROFILE, 0.0)]
    assert attainable(slow, workers) == free
    assert attainable(Slo(), workers) == Slo()
    barely = Slo(slo_tpot_ms=5.0, slo_ttft_ms=prefill_ms * 0.51)
    assert attainable(barely, workers) == barely, "it could be met with the relaxed SLOs"
    assert attainable(slow, []) == slow
    state = Degradation("m", served_since=LONG_AGO)
    policy = DegradationPolicy(slos={"m": slow})
    assert list(decide(policy, state, workers, START)) == [], (
        "otherwise a slow engine would accept no request"
    )
    (decision,) = decide(policy, state, [(PROFILE, 0.3)], START)
    assert isinstance(decision, DegradationChanged) and decision.after == 2


def test_a_single_objective_is_enough_and_may_apply_to_all_models() -> None:
    policy = load(
        {"degradation": {"slos": {"*": {"slo_throughput_rps": 5.0}, "m": {"slo_throughput_rps": 9.0}}}}
    )
    slo = policy.degradation.slo("another")
    assert slo == Slo(slo_throughput_rps=5.0, slo_ttft_ms=500.0, slo_tpot_ms=30.0, max_batch_size=256)
    assert policy.degradation.slo("m") == replace(slo, slo_throughput_rps=9.0)
    assert FleetPolicy().degradation.slo("m") is None


def test_a_worker_on_the_ramp_counts_as_capacity() -> None:
    story = Story(ladder(1.9)).up("w0", "w1")
    story.wait(5)
    story.tell(engine_faulted("w0"))
    assert level(story) == 2
    story.wait(60)
    story.tell(passed("w0"))
    assert story.fleet.workers["w0"].weight < 1 == story.fleet.workers["w0"].carries
    story.wait(10)
    assert level(story) == 0 and story.fleet.workers["w0"].weight < 1


def test_b24_the_event_reports_the_cost_of_the_level_and_the_ratio_leaves_it_out() -> None:
    decision = at_ratio(0.9, Degradation("m"))
    assert decision is not None
    assert decision.ratio == pytest.approx(0.9)
    assert decision.capacity_rps == pytest.approx(0.9 * ONE)
    assert 0 < decision.predicted_rps < decision.capacity_rps


def test_b24_level_3_is_judged_by_the_relaxed_slo_and_does_not_oscillate() -> None:
    slo = Slo(slo_throughput_rps=ONE, slo_tpot_ms=11.0)
    policy = DegradationPolicy(slos={"m": slo})
    strict = worker_capacity(PROFILE, slo).effective_capacity_rps / ONE
    relaxed = worker_capacity(PROFILE, slo, latency=2.0).effective_capacity_rps / ONE
    weight = 0.3 / relaxed
    assert strict * weight < 0.25 < relaxed * weight < 0.5
    state, now = Degradation("m", served_since=LONG_AGO), START
    levels = []
    for _ in range(20):
        now += timedelta(seconds=60)
        for decision in decide(policy, state, [(PROFILE, weight)], now):
            assert isinstance(decision, DegradationChanged)
            state = replace(state, level=decision.after, since=now)
            levels.append(decision.after)
            assert decision.ratio == pytest.approx(relaxed * weight)
    assert levels == [3]


@pytest.mark.parametrize(
    "header, tier, known",
    [
        (None, "standard", True),
        ("premium", "premium", True),
        (" Best_Effort ", "best_effort", True),
        ("gold", "best_effort", False),
        ("  ", "standard", True),
    ],
)
def test_b25_an_unknown_tier_is_the_lowest(header: str | None, tier: str, known: bool) -> None:
    assert Tiers().tier_of(header) == (tier, known)


def test_the_tiers_are_a_setting_and_the_last_is_shed() -> None:
    policy = DegradationPolicy(
        slos={"m": Slo(slo_throughput_rps=ONE)},
        priority_tiers=("gold", "silver", "lead"),
        tier_default="silver",
    )
    state = Degradation("m", served_since=LONG_AGO)
    (decision,) = decide(policy, state, [(PROFILE, 0.6)], START)
    assert isinstance(decision, DegradationChanged) and decision.knobs.shed_tier == "lead"
    tiers = Tiers.of(FleetPolicy(degradation=policy).adopted)
    assert tiers == policy.tiers
    assert [tiers.tier_of(name) for name in (None, "gold", "premium")] == [
        ("silver", True),
        ("gold", True),
        ("lead", False),
    ]
    assert [tiers.sheds(decision.knobs, tier) for tier in tiers.names] == [False, False, True]
    assert [tiers.rank(tier) for tier in ("gold", "lead", "premium")] == [0, 2, 3]


def test_an_old_policy_has_the_default_tiers() -> None:
    assert Tiers.of({"degradation": {"slos": {}}}) == Tiers.of({}) == Tiers(TIERS, "standard")


@pytest.mark.parametrize(
    ("tiers", "default", "what"),
    [
        (("gold",), "gold", "two distinct tiers"),
        (("gold", "gold"), "gold", "two distinct tiers"),
        (("Gold", "lead"), "lead", "lower-case letters"),
        (("gold", ""), "gold", "lower-case letters"),
        (("gold", "lead"), "standard", "not one of the priority_tiers"),
    ],
)
def test_invalid_tiers_are_rejected(tiers: tuple[str, ...], default: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DegradationPolicy(priority_tiers=tiers, tier_default=default)


def test_b25_shedding_has_one_source_of_truth() -> None:
    assert [Tiers().sheds(SEEDS_TABLE[n], "best_effort") for n in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert not any(Tiers().sheds(SEEDS_TABLE[n], tier) for n in range(5) for tier in ("premium", "standard"))
    assert [Tiers().sheds(Knobs(shed_tier="standard"), tier) for tier in TIERS] == [False, True, True]
    assert [Tiers().sheds(Knobs(shed_tier="of a later version"), tier) for tier in TIERS] == [
        False,
        False,
        True,
    ]


def test_n21_fifteen_of_sixteen_are_enough_only_with_a_reserve() -> None:
    names = [f"w{n}" for n in range(16)]
    for reserve, expected in ((1.0, 1), (1.07, 0)):
        story = Story(ladder(16 / reserve))
        for name in names:
            story.record(joined(name))
            story.record(passed(name))
        story.settle()
        story.wait(5)
        assert level(story) == 0
        story.tell(silent("w5"))
        assert level(story) == expected


def test_n22_the_cost_of_a_level_is_computed_from_the_profile() -> None:
    """Batch x 0.75 is not throughput x 0.8: these workers step faster with fewer streams, and lose a tenth."""
    decision = at_ratio(0.9, Degradation("m"))
    assert decision is not None
    smaller = worker_capacity(replace(PROFILE, max_batch=PROFILE.max_batch * 3 // 4), Slo())
    assert decision.capacity_rps == pytest.approx(0.9 * ONE)
    assert decision.predicted_rps == pytest.approx(0.9 * smaller.effective_capacity_rps)


def test_without_a_throughput_slo_the_ladder_is_off() -> None:
    story = Story().up("w0", "w1")
    story.tell(silent("w0"), silent("w1"))
    assert level(story) == 0


def test_no_level_before_the_first_worker_was_routable() -> None:
    story = Story(ladder(2))
    story.tell(joined("w0"), joined("w1"))
    story.wait(100)
    assert level(story) == 0
    story.tell(passed("w0"))
    story.wait(4)
    assert level(story) == 0  # it is only starting
    story.wait(1)
    assert level(story) == 2


def test_draining_the_last_worker_is_level_4_and_its_return_level_0() -> None:
    story = Story(ladder(0.9)).up("w0")
    story.wait(5)
    story.tell(drain_requested("w0"))
    assert level(story) == 4
    assert story.fleet.models["llama"].knobs.accept_new is False
    story.tell(joined("w0", "i2"))
    story.wait(5)
    story.tell(passed("w0", "i2"))
    assert level(story) == 4  # the dwell
    story.wait(5)
    assert level(story) == 0
    assert story.fleet.models["llama"].knobs == Knobs()


def test_switching_the_slo_off_ends_the_degradation() -> None:
    story = Story(ladder(4)).up("w0", "w1")
    story.wait(5)
    assert level(story) == 2
    story.policy = FleetPolicy()
    assert kinds(story.settle()) == ["PolicyAdopted", "DegradationChanged", "IncidentClosed"]
    assert level(story) == 0


def test_a_level_belongs_to_the_incident_that_cost_the_capacity() -> None:
    story = Story(ladder(1.9)).up("w0", "w1")
    story.wait(5)
    assert level(story) == 0
    decisions = story.tell(silent("w0"))
    assert kinds(decisions) == ["IncidentOpened", "HealthChanged", "BreakerOpened", "DegradationChanged"]
    assert len({d.incident for d in decisions}) == 1
    story.tell(left("w0"), joined("w0", "i2"))
    story.tell(passed("w0", "i2"))
    back = story.wait(10)
    assert [d.incident for d in back if isinstance(d, DegradationChanged)] == [decisions[0].incident]


def test_the_curve_is_linear_between_its_points_and_proportional_beyond() -> None:
    profile = replace(PROFILE, tpot_ms=((1, 10.0), (11, 20.0)))
    assert [tpot_ms(profile, n) for n in (0, 1, 6, 11, 22)] == [10.0, 10.0, 15.0, 20.0, 40.0]


curves = st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e4)), max_size=4).map(
    lambda points: tuple(sorted(points))
)
profiles = st.builds(
    Profile,
    kv_blocks=st.integers(-1, 100_000),
    block_tokens=st.integers(0, 128),
    max_batch=st.integers(-1, 512),
    prefill_tokens_per_s=st.floats(-1, 1e6),
    tpot_ms=curves,
)
maybe = st.one_of(st.none(), st.floats(0, 1e5))
slos = st.builds(
    Slo,
    slo_throughput_rps=maybe,
    slo_ttft_ms=maybe,
    slo_tpot_ms=maybe,
    max_batch_size=st.one_of(st.none(), st.integers(0, 512)),
    mean_prompt_tokens=st.integers(0, 10_000),
    mean_output_tokens=st.integers(0, 10_000),
)


def gains(curve: Sequence[tuple[float, float]]) -> bool:
    """Return whether a larger batch never lowers the tokens per second, as on real hardware."""
    return all(x1 > x0 and y0 * x1 >= y1 * x0 for (x0, y0), (x1, y1) in pairwise(curve))


@given(profiles, slos)
def test_any_profile_and_slo_give_a_capacity(profile: Profile, slo: Slo) -> None:
    capacity = worker_capacity(profile, slo)
    assert capacity.effective_capacity_rps >= 0
    relaxed = worker_capacity(profile, slo, latency=2.0)
    rounding = 1 - 1e-9  # of a share of the same curve, reached by another way
    if gains(profile.tpot_ms):
        assert relaxed.rps_compute >= rounding * capacity.rps_compute
    twice = fleet_capacity([(profile, 1.0), (profile, 1.0)], slo)
    assert twice.effective_capacity_rps == pytest.approx(2 * capacity.effective_capacity_rps)
