"""Incidents: one incident from the first symptom to recovery or death."""

from fleet_story import (
    Story,
    drain_requested,
    failed,
    joined,
    kinds,
    left,
    only,
    passed,
    request_failed,
    silent,
)

from controller.deciders.fleet import FleetPolicy
from controller.deciders.incident import IncidentPolicy
from events.decisions import IncidentClosed, IncidentOpened
from events.fact import Decision


def decisions(story: Story) -> list[Decision]:
    return [event.fact for event in story.events if isinstance(event.fact, Decision)]


def test_everything_from_first_symptom_to_recovery_carries_one_id() -> None:
    story = Story().up("w0", "w1", "w2")
    before = len(decisions(story))
    story.tell(failed("w0"))
    story.tell(failed("w0"))
    story.tell(failed("w0"))
    story.wait(60)
    for _ in range(3):
        story.tell(passed("w0"))
    told = decisions(story)[before:]
    assert kinds(told) == [
        "IncidentOpened",
        "HealthChanged",  # SUSPICIOUS
        "HealthChanged",  # UNHEALTHY
        "BreakerOpened",
        "BreakerHalfOpened",
        "BreakerClosed",
        "HealthChanged",  # 0.25
        "HealthChanged",  # 0.5
        "HealthChanged",  # 1.0
        "IncidentClosed",
    ]
    assert {d.incident for d in told} == {f"incident-{told[0].number}"}
    incident = only(told, IncidentOpened)
    assert (incident.subject, incident.symptom) == ("worker:w0", "exception")
    assert only(told, IncidentClosed).outcome == "recovered"
    assert story.fleet.incidents == {}
    assert story.worker().incident == ""


def test_an_open_incident_is_part_of_the_fleet() -> None:
    story = Story().up("w0", "w1")
    story.tell(failed("w0"))
    (open_one,) = story.fleet.incidents.values()
    assert (open_one.id, open_one.subject) == (story.worker().incident, "worker:w0")


def test_death_closes_an_incident() -> None:
    story = Story().up("w0", "w1")
    closed = [d for d in story.tell(left("w0", mode="immediate")) if isinstance(d, IncidentClosed)]
    assert [d.outcome for d in closed] == ["dead"]


def test_a_worker_that_returns_as_a_new_instance_continues_its_incident() -> None:
    story = Story().up("w0", "w1")
    story.tell(silent("w0"))
    opened = story.worker().incident
    story.tell(joined("w0", "i2"))
    assert story.worker().incident == opened
    closed = story.tell(passed("w0", "i2"))
    assert [(d.incident, d.outcome) for d in closed if isinstance(d, IncidentClosed)] == [
        (opened, "recovered")
    ]


def test_a_breaker_alone_is_an_incident() -> None:
    story = Story().up("w0", "w1")
    story.tell(request_failed("w0", 3))
    story.wait(60)
    assert isinstance(story.tell(passed("w0"))[-1], IncidentClosed)


def test_a_requested_drain_is_no_incident() -> None:
    story = Story().up("w0", "w1")
    story.tell(drain_requested("w0"))
    story.wait(60)
    assert not any(isinstance(d, IncidentOpened) for d in decisions(story))


def test_with_the_setting_off_a_suspicion_opens_no_incident() -> None:
    story = Story(FleetPolicy(incident=IncidentPolicy(suspicion=False))).up("w0", "w1")
    assert kinds(story.tell(failed("w0"))) == ["HealthChanged"]
    assert story.tell(failed("w0")) == ()
    assert kinds(story.tell(failed("w0")))[0] == "IncidentOpened"


def test_two_workers_have_two_incidents() -> None:
    story = Story().up("w0", "w1", "w2")
    story.tell(silent("w0"), silent("w1"))
    assert len(story.fleet.incidents) == 2
    assert story.worker("w0").incident != story.worker("w1").incident
