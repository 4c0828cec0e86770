"""A worker whose attempts harm others is taken out of service until an operator resumes it."""

from fleet_story import Story, joined, passed, resume

from controller.deciders.fleet import FleetPolicy
from controller.deciders.health_moves import HealthPolicy
from events.decisions import HealthStatus
from events.observations import IntrusionRefused


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


def test_good_canaries_do_not_bring_it_back_and_an_operator_does() -> None:
    story = serving()
    story.tell(refused())
    for _ in range(20):
        story.tell(passed("w0"))
    assert story.status("w0") is HealthStatus.UNHEALTHY
    story.tell(resume("w0"))
    assert not story.worker("w0").health.intrusion


def test_a_report_without_ejection_or_about_another_life_moves_nothing() -> None:
    story = serving()
    story.tell(refused(eject=False), refused(instance="i0"), refused(worker="w7"))
    assert story.status("w0") is HealthStatus.HEALTHY


def test_a_policy_of_before_decides_as_before() -> None:
    story = serving(FleetPolicy(health=HealthPolicy(eject_intruders=False)))
    story.tell(refused())
    assert story.status("w0") is HealthStatus.HEALTHY
