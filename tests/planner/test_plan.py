"""The planner's decisions, including the failures of other planners, each as a test."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planner.plan import Change, ModelView, PlannerPolicy, Proposal, plan
from controller.planner.sizing import LEAST, MOST, Minute, Objectives, Seen, Traffic, sustained_pressure
from events.observations import Profile

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
PROFILE = Profile(
    kv_blocks=40_000,
    block_tokens=16,
    max_batch=32,
    prefill_tokens_per_s=4000.0,
    tpot_ms=((1, 25.0), (32, 40.0)),
)
OBJECTIVES = Objectives(ttft_ms=1500.0, tpot_ms=80.0)
TEN = 700  # requests per minute that need about ten workers


def minute(requests: int, late: float = 0.0, workers: float = 0.0) -> Minute:
    return Minute(Traffic.of([(1000, 200)] * requests), late, workers)


def view(provisioned: int, minutes: Sequence[Seen] | int = TEN, **more: Any) -> ModelView:
    if isinstance(minutes, int):
        minutes = [minute(minutes)] * 30
    asked: dict[str, Any] = {"model": "m", "profile": PROFILE, "objectives": OBJECTIVES} | more
    return ModelView(provisioned=provisioned, minutes=minutes, **asked)


def planned(view: ModelView, policy: PlannerPolicy | None = None, age_s: float = 0.0) -> Proposal:
    (proposal,) = plan(policy or PlannerPolicy(), [view], NOW, age_s)
    return proposal


def ago(minutes: float, before: int, after: int) -> Change:
    return Change(NOW - timedelta(minutes=minutes), before, after)


NEEDED = planned(view(1)).needed


def test_a_sufficient_number_of_workers_stays() -> None:
    assert 5 < NEEDED < 20
    proposal = planned(view(NEEDED))
    assert (proposal.after, proposal.why, proposal.held) == (NEEDED, "hold", "")


def test_more_workers_are_proposed_when_needed() -> None:
    proposal = planned(view(NEEDED - 3))
    assert (proposal.after, proposal.why) == (NEEDED, "up")
    assert proposal.bound and proposal.forecast is not None


def test_fewer_workers_are_proposed_when_sufficient() -> None:
    proposal = planned(view(NEEDED + 4))
    assert (proposal.after, proposal.why) == (NEEDED, "down")


def test_a_change_is_bounded() -> None:
    policy = PlannerPolicy(step_max=2, step_share=0.0)
    assert planned(view(2), policy).after == 4
    assert planned(view(40), policy).after == 38
    assert planned(view(40), PlannerPolicy(step_max=2, step_share=0.25)).after == 30


# --- failures of other planners


@pytest.mark.parametrize("unknown", [3, 30])
def test_an_outage_of_reports_is_not_low_load(unknown: int) -> None:
    """An outage of its metrics made another planner go below its floor."""
    minutes: list[Seen] = [*[minute(TEN)] * 30, *[None] * unknown]
    proposal = planned(view(NEEDED + 10, minutes))
    assert (proposal.after, proposal.why) == (NEEDED + 10, "hold")
    assert "no frontend reported traffic" in proposal.held


def test_an_unreported_minute_is_not_a_minute_without_traffic() -> None:
    minutes: list[Seen] = [*[minute(TEN)] * 30, None]
    assert planned(view(NEEDED, minutes)).after == NEEDED


def test_a_model_below_its_floor_is_scaled_up_even_without_data() -> None:
    proposal = planned(view(1, [None] * 5), PlannerPolicy(workers_min=3))
    assert (proposal.after, proposal.why) == (3, "floor")


def test_the_limit_of_changes_does_not_keep_a_model_below_its_floor() -> None:
    """Found by `holdfast simulate --seed 136 --workers 4`: an operator's trials had used up the hour's changes."""
    used_up = [ago(60 - n, 3, 1) for n in range(2, 14)]
    for minutes in ([None] * 5, [minute(TEN)] * 30):
        assert planned(view(1, minutes, floor=3, changes=used_up)).why == "floor"


def test_a_model_without_any_traffic_keeps_its_floor() -> None:
    assert planned(view(4, [minute(0)] * 30), PlannerPolicy(workers_min=2)).after == 2
    assert planned(view(4, [minute(0)] * 30, floor=3)).after == 3


def test_a_stale_state_store_stops_planning() -> None:
    proposal = planned(view(1), age_s=10.5)
    assert (proposal.after, proposal.held) == (1, "the state store is 10 s behind")
    assert planned(view(NEEDED - 1), age_s=9.5).after == NEEDED


@pytest.mark.slow
def test_no_worker_is_removed_if_the_rest_could_not_take_its_traffic() -> None:
    """Another planner alternated between 2 and 1: each was idle enough for one to go, and one alone was too busy."""
    for requests in range(20, 400, 20):
        changes: list[Change] = []
        there, seen = 2, []
        for n in range(120):
            at = view(there, [minute(requests)] * 30, changes=changes)
            (proposal,) = plan(PlannerPolicy(), [at], NOW + timedelta(minutes=n), 0.0)
            if proposal.after != there:
                changes.append(Change(NOW + timedelta(minutes=n), there, proposal.after))
                there = proposal.after
            seen.append(there)
        assert len(changes) <= 1, (requests, seen)


def test_a_reversed_reduction_delays_the_next_one() -> None:
    """Traffic that alternates between one and two workers would otherwise add and remove one for ever."""
    more = NEEDED + 4
    once = [ago(9, more, NEEDED), ago(7, NEEDED, more)]
    twice = [ago(40, more, NEEDED), ago(38, NEEDED, more), *once]
    late = [ago(20, more, NEEDED), ago(7, NEEDED, more)]
    assert planned(view(more, changes=late)).after == NEEDED, "that was a different load"
    assert planned(view(more, changes=once)).after == NEEDED, "6 minutes are over"
    assert planned(view(more, changes=twice)).held == "the last change was 420 s ago", "12 are not"
    assert planned(view(NEEDED - 1, changes=twice)).why == "up", "it does not delay an increase"


def test_all_models_together_stay_within_their_gpus() -> None:
    views = [view(3, model="a", gpus=2), view(3, model="b", gpus=4), view(3, 10, model="c", gpus=1)]
    policy = PlannerPolicy(gpus_max=30)
    proposals = plan(policy, views, NOW, 0.0)
    used = sum(one.gpus * proposal.after for one, proposal in zip(views, proposals, strict=True))
    assert 24 <= used <= 30
    assert [proposal.after > 3 for proposal in proposals] == [True, True, False]
    assert "the budget of 30 GPUs is used up" in proposals[0].held


def test_an_exceeded_budget_neither_removes_nor_adds_workers() -> None:
    proposals = plan(PlannerPolicy(gpus_max=4), [view(3, model="a"), view(3, model="b")], NOW, 0.0)
    assert [proposal.after for proposal in proposals] == [3, 3]


def test_an_operators_number_applies_until_it_is_released() -> None:
    proposal = planned(view(NEEDED, set_by_operator=2))
    assert (proposal.after, proposal.why) == (2, "operator")
    assert planned(view(2, set_by_operator=2)).after == 2
    assert planned(view(2)).why == "up"


def test_two_planners_that_read_the_same_decide_the_same() -> None:
    views = [view(3, model="a"), view(30, model="b", changes=[ago(10, 20, 30)])]
    assert plan(PlannerPolicy(), views, NOW, 1.0) == plan(PlannerPolicy(), views, NOW, 2.0)


def test_a_lost_worker_is_replaced() -> None:
    proposal = planned(view(NEEDED, lost=2))
    assert (proposal.after, proposal.why) == (NEEDED + 2, "lost")


# --- frequency of changes


def test_the_planner_waits_between_changes() -> None:
    assert planned(view(NEEDED - 3, changes=[ago(0.5, NEEDED - 5, NEEDED - 3)])).held.startswith(
        "the last change"
    )
    assert planned(view(NEEDED - 3, changes=[ago(1.5, NEEDED - 5, NEEDED - 3)])).after == NEEDED
    assert planned(view(NEEDED + 4, changes=[ago(2, 3, NEEDED + 4)])).held.startswith("the last change")
    assert planned(view(NEEDED + 4, changes=[ago(4, 3, NEEDED + 4)])).after == NEEDED


def test_the_number_of_changes_per_hour_is_limited() -> None:
    many = [ago(59 - n, 5, 6) for n in range(12)]
    assert planned(view(NEEDED - 3, changes=many)).held == "12 changes within the hour"
    assert planned(view(NEEDED - 3, changes=many[1:])).after == NEEDED
    assert planned(view(NEEDED + 4, changes=many[3:])).held == "9 changes within the hour", (
        "some are reserved for increases"
    )
    assert planned(view(NEEDED + 4, changes=many[4:])).after == NEEDED


@pytest.mark.slow
def test_a_reduction_needs_fewer_workers_to_have_sufficed_for_a_while() -> None:
    busy_before: list[Seen] = [*[minute(TEN)] * 30, minute(100)]
    assert planned(view(NEEDED, busy_before)).after == NEEDED
    calm: list[Seen] = [*[minute(TEN)] * 30, *[minute(100)] * 12]
    assert planned(view(NEEDED, calm)).after < NEEDED


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 3000)), min_size=0, max_size=20),
    st.integers(0, 60),
    st.integers(0, 10),
    st.integers(0, 8),
    st.floats(0, 30),
)
def test_every_proposal_stays_within_the_bounds(
    came: list[int | None], provisioned: int, floor: int, lost: int, age_s: float
) -> None:
    policy = PlannerPolicy(workers_max=50, gpus_max=200)
    minutes: list[Seen] = [None if one is None else minute(one) for one in came]
    at = view(provisioned, minutes, floor=floor, lost=min(lost, provisioned), gpus=4)
    proposal = planned(at, policy, age_s)
    step = max(policy.step_max, int(policy.step_share * provisioned))
    assert abs(proposal.after - provisioned) <= step
    assert proposal.after <= max(50, provisioned)
    if proposal.after < provisioned:
        assert proposal.after - at.lost >= min(max(1, floor), provisioned - at.lost)
        assert age_s <= policy.stale_s
    if proposal.after > provisioned:
        assert proposal.after * 4 <= 200


# --- the pressure that workers sustain


def test_late_answers_despite_a_sufficient_number_add_workers() -> None:
    just_enough = [minute(TEN, late=TEN * 0.05, workers=NEEDED)] * 30
    assert planned(view(NEEDED, just_enough)).after > NEEDED
    in_time = [minute(TEN, late=TEN * 0.005, workers=NEEDED)] * 30
    assert planned(view(NEEDED, in_time)).after == NEEDED


def test_the_bearable_pressure_is_the_highest_with_few_late_answers() -> None:
    def at(workers: float, late: float) -> list[Minute]:
        return [minute(TEN, late * TEN, workers)] * 5

    assert sustained_pressure([], PROFILE, OBJECTIVES) == 1.0
    assert sustained_pressure(at(NEEDED * 10, 0.0), PROFILE, OBJECTIVES) == 1.0, (
        "no data there: the model is trusted"
    )
    assert sustained_pressure(at(NEEDED, 0.005), PROFILE, OBJECTIVES) == 1.0
    assert sustained_pressure(at(NEEDED, 0.05), PROFILE, OBJECTIVES) == pytest.approx(0.95), (
        "the next pressure that may be sustained"
    )
    more = [*at(NEEDED, 0.05), *at(NEEDED / 0.95, 0.02), *at(NEEDED / 0.75, 0.0)]
    assert sustained_pressure(more, PROFILE, OBJECTIVES) == pytest.approx(0.9)


def test_a_sustained_pressure_is_exceeded_a_little_and_a_failed_one_is_not_repeated() -> None:
    def at(pressure: float, late: float, minutes: int = 5) -> list[Minute]:
        return [minute(TEN, late * TEN, NEEDED / pressure)] * minutes

    assert sustained_pressure(at(1.0, 0.0), PROFILE, OBJECTIVES) == pytest.approx(1.15)
    assert sustained_pressure(at(1.0, 0.0, minutes=3), PROFILE, OBJECTIVES) == 1.0, "too short to be sure"
    assert sustained_pressure([*at(1.0, 0.0), *at(1.12, 0.002)], PROFILE, OBJECTIVES) == pytest.approx(1.25)
    assert sustained_pressure([*at(1.0, 0.0), *at(1.12, 0.05)], PROFILE, OBJECTIVES) == 1.0


@given(st.lists(st.tuples(st.floats(0.3, 2.0), st.floats(0.0, 0.2)), max_size=40), st.floats(0.0, 1.0))
def test_the_bearable_pressure_is_bounded_and_does_not_fall_with_fewer_late_answers(
    seen: list[tuple[float, float]], part: float
) -> None:
    def borne(factor: float) -> float:
        minutes = [minute(TEN, late * TEN * factor, NEEDED / pressure) for pressure, late in seen]
        return sustained_pressure(minutes, PROFILE, OBJECTIVES)

    assert LEAST <= borne(1.0) <= borne(part) <= MOST
