"""The what-if questions that a report answers for an incident: canaries, failures, breaker wait."""

from typing import Any

from controller.deciders.fleet import load
from controller.replay.whatif.comparison import Comparison, compare
from controller.replay.whatif.question import INTERVAL, PolicyChange
from controller.replay.whatif.recording import Recording
from controller.replay.whatif.text import setting

SOONER = 3.0  # this many times the recorded number of canaries


def usual(recording: Recording) -> list[PolicyChange]:
    """Return the questions that would change the policy that was in force."""
    was = load(recording.policy)
    found = [PolicyChange({INTERVAL: float(f"{recording.interval_s / SOONER:.2g}")})]
    if was.health.failures_max > 1:
        found.append(PolicyChange({"health.failures_max": 1}))
    breaker = was.breaker
    wait_s = breaker.wait_min.total_seconds()
    return [*found, PolicyChange({"breaker.wait_min": wait_s / 2})] if wait_s else found


def answers(recording: Recording, incident: str) -> list[dict[str, Any]]:
    """Return the answers as plain JSON; none if the fault for which the incident was opened is unknown."""
    found: list[dict[str, Any]] = []
    for question in usual(recording):
        answer = compare(recording, question, incident=incident)
        if [one.fault.incident for one in answer.faults] != [incident]:
            return []
        found.append(_row(answer))
    return found


def _row(answer: Comparison) -> dict[str, Any]:
    ((name, was, now),) = answer.changed
    (fault,) = answer.faults
    exposed = next(one for one in answer.totals if one.name == "answers exposed")
    return {
        "setting": name,
        "was": setting(name, was),
        "asked": setting(name, now),
        "again": {
            measure: None if value == float("inf") else value for measure, value in fault.again.items()
        },
        "would": {measure: one.as_json() for measure, one in fault.would.items()},
        "exposed": {"recorded": exposed.recorded, "would": exposed.would.as_json()},
    }
