"""A rolling update of weights under the same model name, which the engine does not report.

No request fails, and the updated workers return without a command.
"""

from itertools import permutations
from typing import Any

import pytest
from canary_world import World

from controller.deciders.budget import BudgetPolicy
from controller.deciders.fleet import FleetPolicy
from controller.deciders.golden import GoldenPolicy
from controller.runtime.settings import CanarySettings
from events.decisions import GoldenAgreed, GoldenRetired, WeightCapped
from events.observations import CanaryFailed

SETTINGS = CanarySettings(interval_s=10)
BETWEEN_S = 25.0  # between two servers' updates
RETURNS_S = 60.0  # maximum, after the new golden


async def fleet(count: int, settings: CanarySettings = SETTINGS, policy: FleetPolicy | None = None) -> World:
    """Return a serving fleet with goldens that its workers agree on."""
    world = World(settings, policy)
    for number in range(count):
        world.join(f"w{number}")
    return world


def serving(world: World) -> list[str]:
    return [name for name, worker in world.fleet.workers.items() if worker.routable]


async def watched(world: World, seconds: float, every_s: float = 0.25) -> None:
    """Let time pass, and assert that a worker serves at every moment."""
    end = world.clock.monotonic() + seconds
    while world.clock.monotonic() < end:
        await world.pass_time(every_s)
        assert serving(world), f"no worker serves at {world.clock.monotonic():.1f}"


def returned(world: World, *names: str) -> bool:
    return all(world.status(name) == "HEALTHY" and world.fleet.workers[name].weight == 1.0 for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("order", [*permutations(range(2)), *permutations(range(3))], ids=str)
async def test_a_rolling_update_of_two_or_three_servers_always_leaves_one_serving(
    order: tuple[int, ...],
) -> None:
    world = await fleet(len(order))
    async with world.running():
        await world.pass_time(30)
        for number in order:
            world.plane.workers[f"w{number}"].weights = 1
            await watched(world, BETWEEN_S)
        await watched(world, RETURNS_S)
        if len(order) == 2:
            assert returned(world, "w0", "w1")
        first = [f"w{number}" for number in order[:2]]
        assert returned(world, *first)
        assert len({fact.canary for fact in world.facts(GoldenRetired)}) == 4
        await watched(world, 600, every_s=1)
    assert returned(world, *(f"w{number}" for number in order))


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5, 6, 7), (7, 2, 5, 0, 3, 6, 1, 4)], ids=str)
async def test_a_rolling_update_of_eight_servers_leaves_half_of_them_or_more(order: tuple[int, ...]) -> None:
    world = await fleet(8)
    fewest = 8
    async with world.running():
        await world.pass_time(30)
        for number in order:
            world.plane.workers[f"w{number}"].weights = 1
            for _ in range(100):
                await world.pass_time(0.25)
                fewest = min(fewest, len(serving(world)))
        await watched(world, 900, every_s=1)
    assert fewest >= 3
    assert returned(world, *(f"w{number}" for number in order))


@pytest.mark.slow
async def test_the_first_updated_worker_returns_within_a_minute_of_the_new_golden_without_a_command() -> None:
    world = await fleet(2)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w0"].weights = 1
        await world.until(lambda: world.status("w0") == "UNHEALTHY", 60)
        await world.pass_time(300)  # hours may pass between two servers
        assert world.status("w0") == "UNHEALTHY"
        world.plane.workers["w1"].weights = 1
        await world.until(lambda: len(world.facts(GoldenRetired)) == 4, 60)
        took = await world.until(lambda: world.status("w0") == "HEALTHY", RETURNS_S)
    assert took < RETURNS_S
    agreed = world.facts(GoldenAgreed)[-4:]
    assert all(fact.by == ("w0", "w1") for fact in agreed)


async def test_a_worker_that_agrees_with_neither_answer_is_still_convicted() -> None:
    world = await fleet(4)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w3"].weights = 7
        for name in ("w0", "w1", "w2"):
            world.plane.workers[name].weights = 1
        await world.until(lambda: returned(world, "w0", "w1", "w2"), 200)
        await world.pass_time(120)
    assert world.fleet.workers["w3"].health.corrupt
    assert not world.fleet.workers["w3"].routable


@pytest.mark.slow
async def test_one_corrupt_worker_never_outvotes_the_others() -> None:
    world = await fleet(2)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w0"].corrupt = lambda request: True
        await world.pass_time(600)
    assert not world.facts(GoldenRetired)
    assert world.fleet.workers["w0"].health.corrupt
    assert returned(world, "w1")


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["server", "account"])
async def test_workers_of_one_server_or_one_broker_account_have_one_vote(shared: str) -> None:
    world = World(SETTINGS)
    for name in ("w0", "w1", "w2"):
        about: dict[str, Any] = {shared: "one"} if name != "w2" else {}
        world.join(name, **about)
    async with world.running():
        await world.pass_time(30)
        for name in ("w0", "w1"):
            world.plane.workers[name].weights = 1
        await world.pass_time(300)
    assert not world.facts(GoldenRetired)
    assert returned(world, "w2")


@pytest.mark.slow
async def test_new_weights_that_only_change_logprobs_are_agreed_as_well() -> None:
    world = await fleet(3)
    async with world.running():
        await world.pass_time(60)
        for name in ("w0", "w1"):
            world.plane.workers[name].drift = 0.5
        await world.until(lambda: not returned(world, "w0") and not returned(world, "w1"), 60)
        await world.until(lambda: returned(world, "w0", "w1"), 300)
        assert {fact.reason for fact in world.facts(CanaryFailed)} == {"logit_drift"}
        world.plane.workers["w2"].drift = 0.5
        await world.until(lambda: returned(world, "w0", "w1", "w2"), 900)


@pytest.mark.slow
async def test_with_deciders_version_5_the_golden_stays_and_the_fleet_is_lost() -> None:
    """The behaviour of version 5: kept as the reason for the new rules, and for journals of that version."""
    policy = FleetPolicy(golden=GoldenPolicy(outvote=False), budget=BudgetPolicy(keep_last=False))
    world = await fleet(2, policy=policy)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w0"].weights = 1
        await world.pass_time(BETWEEN_S)
        world.plane.workers["w1"].weights = 1
        await world.pass_time(300)
    assert serving(world) == []
    assert not world.facts(GoldenRetired)


@pytest.mark.slow
async def test_the_last_serving_worker_is_removed_only_when_another_serves_again() -> None:
    world = await fleet(2)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w0"].corrupt = lambda request: True
        await world.until(lambda: world.status("w0") == "UNHEALTHY", 60)
        assert not world.facts(WeightCapped)
        world.plane.workers["w1"].weights = 3
        await world.until(lambda: world.status("w1") == "UNHEALTHY", 60)
        assert serving(world) == ["w1"]  # the one of the two that was convicted last
        assert world.fleet.workers["w1"].serves_suspect
        world.plane.workers["w0"].corrupt = lambda request: False
        await world.until(lambda: world.status("w0") == "HEALTHY", 300)
        assert serving(world) == ["w0"]
    assert [(f.worker, f.weight, f.reason) for f in world.facts(WeightCapped)] == [
        ("w1", 1.0, "last_serving"),
        ("w1", None, "within_budget"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
async def test_goldens_given_by_only_one_worker_do_not_block_an_update(order: tuple[int, int]) -> None:
    """The second server is updated before every canary was asked there."""
    world = World(SETTINGS)
    world.join("w0")
    async with world.running():
        await world.pass_time(10)
        world.join("w1")
        await world.until(lambda: world.status("w1") == "HEALTHY", 10)
        for number in order:
            world.plane.workers[f"w{number}"].weights = 1
            await watched(world, BETWEEN_S)
        await world.until(lambda: returned(world, "w0", "w1"), 200)
    assert all(golden.status == "agreed" for golden in world.fleet.goldens.values())
