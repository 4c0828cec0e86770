"""Rolling updates of weights: the rules that keep a model in service are necessary and sufficient."""

from dataclasses import replace
from typing import Any

import pytest

from controller.simulator.simulation import Simulation
from controller.simulator.world.scenario import draw
from events.decisions import GoldenRetired, HealthChanged

WORKERS, MINUTES = 5, 30.0
TOLD, NOT_TOLD, LAST = (
    11,
    5,
    17,
)  # seeds: engines report their lineage, or do not; canaries convict all workers of a model

pytestmark = pytest.mark.seeds


def world(seed: int, **changed: dict[str, Any]) -> Simulation:
    """Return the world of a seed with some fields of its policies changed."""
    scenario, policies = draw(seed, WORKERS, MINUTES), []
    for policy in scenario.policies:
        parts = {name: replace(getattr(policy, name), **fields) for name, fields in changed.items()}
        policies.append(replace(policy, **parts))
    return Simulation(replace(scenario, policies=tuple(policies)))


def test_without_reported_lineage_old_goldens_are_outvoted_and_all_workers_return() -> None:
    played = world(NOT_TOLD)
    result = played.run()
    assert result.violation is None
    assert result.faults["weights"] and not played.faults.updates.reports_lineage
    facts = [event.fact for event in played.broker.events]
    assert any(isinstance(fact, GoldenRetired) and fact.outvoted_by for fact in facts)


def test_with_reported_lineage_the_first_updated_workers_are_held_and_none_is_convicted() -> None:
    played = world(TOLD)
    result = played.run()
    assert result.violation is None
    assert result.faults["weights"] and played.faults.updates.reports_lineage
    facts = [event.fact for event in played.broker.events]
    assert any(isinstance(fact, HealthChanged) and fact.reason == "new_lineage" for fact in facts)
    assert not any(isinstance(fact, GoldenRetired) and fact.outvoted_by for fact in facts)


def test_without_outvoting_updated_workers_never_return() -> None:
    violation = world(NOT_TOLD, golden={"outvote": False}).run().violation
    assert violation is not None and violation.invariant == "all_well"


def test_without_the_last_serving_worker_canaries_leave_a_model_without_any() -> None:
    violation = world(LAST, budget={"keep_last": False}).run().violation
    assert violation is not None and violation.invariant == "canaries_leave_one"
    assert world(LAST).run().violation is None


def test_after_the_faults_every_worker_starts_with_the_newest_weights() -> None:
    """Two updates of a model can overlap: a worker then runs the newest weights, but would start with those of the first."""
    played = world(TOLD)
    machine = next(iter(played.machines.values()))
    machine.weights.loaded = newest = played.faults.updates._newest[machine.model] = 2
    machine.weights.after_start = 1
    played.faults.updates.heal()
    assert machine.weights.after_start == machine.weights.loaded == newest
