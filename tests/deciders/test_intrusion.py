"""Intruders are ejected until an operator resumes them; impossible registrations are rejected."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from fleet_story import Story, joined, passed, resume

from controller.deciders.fleet import FleetPolicy
from controller.deciders.fold import Fleet, evolve
from controller.deciders.health_state import HealthPolicy
from events.decisions import HealthStatus
from events.fact import Recorded
from events.intrusion.registration import impossible
from events.observations import IntrusionRefused, WorkerJoined


def refused(*, eject: bool = True, instance: str = "i1", worker: str = "w0") -> IntrusionRefused:
    return IntrusionRefused(
        who=f"worker-{worker}",
        tried="flood a frontend",
        times=1,
        worker=worker,
        instance=instance,
        eject=eject,
    )


def serving(policy: FleetPolicy | None = None) -> Story:
    story = Story(policy)
    for name in ("w0", "w1"):
        story.tell(joined(name), passed(name))
    assert story.status("w0") is HealthStatus.HEALTHY
    return story


def test_an_intruder_is_taken_out_of_service_with_its_reason() -> None:
    story = serving()
    story.tell(refused())
    assert story.status("w0") is HealthStatus.UNHEALTHY
    assert story.worker("w0").health.reason == "intrusion: flood a frontend"
    assert story.status("w1") is HealthStatus.HEALTHY


def test_an_intruder_returns_by_an_operators_resume_not_by_good_canaries() -> None:
    story = serving()
    story.tell(refused())
    for _ in range(20):
        story.tell(passed("w0"))
    assert story.status("w0") is HealthStatus.UNHEALTHY
    story.tell(resume("w0"))
    assert not story.worker("w0").health.intrusion


def test_an_intrusion_report_without_ejection_or_about_another_life_changes_nothing() -> None:
    story = serving()
    story.tell(refused(eject=False), refused(instance="i0"), refused(worker="w7"))
    assert story.status("w0") is HealthStatus.HEALTHY


def test_an_older_policy_decides_as_before() -> None:
    story = serving(FleetPolicy(health=HealthPolicy(eject_intruders=False)))
    story.tell(refused())
    assert story.status("w0") is HealthStatus.HEALTHY


AT = datetime(2026, 1, 1, tzinfo=UTC)
IMPOSSIBLE: list[dict[str, Any]] = [
    {"context_tokens": 0},
    {"context_tokens": -1},
    {"context_tokens": 1 << 40},
    {"tp": 0},
    {"dp": 1 << 20},
    {"waiting_max": -1},
    {"migration_limit": -3},
    {"profile": {"kv_blocks": -1}},
    {"profile": {"prefill_tokens_per_s": 1e300}},
    {"profile": {"prefill_tokens_per_s": float("nan")}},
    {"profile": {"tpot_ms": ((1, 1e300),)}},
    {"profile": {"tpot_ms": ((-1, 5.0),)}},
    {"profile": {"tpot_ms": ((1, 1.0),) * 5000}},
]


def claiming(**values: Any) -> WorkerJoined:
    honest = joined("w0")
    profile = replace(honest.profile, **values.pop("profile", {}))
    return replace(honest, profile=profile, **values)


def test_an_honest_registration_has_nothing_impossible() -> None:
    assert impossible(claiming()) == ""


@pytest.mark.parametrize("values", IMPOSSIBLE, ids=str)
def test_an_impossible_value_keeps_a_worker_out_of_the_fleet(values: dict[str, Any]) -> None:
    fact = claiming(**values)
    assert impossible(fact)
    assert not evolve(Fleet(), Recorded(1, AT, fact, "e1")).workers


def test_an_impossible_second_registration_leaves_the_first_life_in_place() -> None:
    fleet = evolve(Fleet(), Recorded(1, AT, claiming(), "e1"))
    again = replace(claiming(context_tokens=-1), instance="i2")
    assert evolve(fleet, Recorded(2, AT, again, "e2")) is fleet


def test_a_journal_of_decider_version_5_is_folded_as_it_was() -> None:
    fleet = Fleet(deciders_version=5)
    assert evolve(fleet, Recorded(1, AT, claiming(context_tokens=0), "e1")).workers
