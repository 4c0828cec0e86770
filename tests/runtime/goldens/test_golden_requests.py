"""An operator's requests about goldens, from their validation to the workers' next answers."""

from datetime import timedelta
from typing import Any

import pytest
from canary_world import World

from controller.ports import Command, GoldenWish
from controller.runtime.canary.golden_requests import request_goldens
from controller.runtime.command_answers import NotPossible, UnknownWorker
from controller.runtime.settings import CanarySettings
from events.observations import GoldenAnswer, GoldenProposed, GoldenRequested

SETTINGS = CanarySettings(interval_s=10)


async def ask(world: World, **wish: Any) -> GoldenRequested:
    command = Command("id-1", world.clock.now() + timedelta(seconds=5))
    fact = await request_goldens(world.fleet, world.journal, GoldenWish(**wish), "ann", command)
    world.turn()
    return fact


def statuses(world: World) -> set[str]:
    return {golden.status for golden in world.fleet.goldens.values()}


async def test_the_goldens_of_a_lone_worker_are_agreed_when_an_operator_approves_them() -> None:
    world = World(SETTINGS)
    world.join("w0")
    async with world.running():
        await world.pass_time(30)
        assert statuses(world) == {"provisional"}
        fact = await ask(world, act="approve", model="m")
        assert len(fact.canaries) == 4 and fact.command == "id-1" and fact.until is not None
        assert statuses(world) == {"agreed"}
        world.plane.workers["w0"].corrupt = lambda request: True
        await world.until(lambda: world.fleet.workers["w0"].health.corrupt, 60)


async def test_an_updated_worker_returns_when_its_answers_are_approved() -> None:
    world = World(SETTINGS)
    for name in ("w0", "w1"):
        world.join(name)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w0"].weights = 1
        await world.until(lambda: world.fleet.workers["w0"].health.corrupt, 60)
        await world.until(lambda: len(next(iter(world.fleet.goldens.values())).contradictions) == 1, 60)
        await world.pass_time(30)  # all canaries were asked again
        await ask(world, act="approve", worker="w0")
        await world.until(lambda: world.status("w0") == "HEALTHY", 60)


async def test_record_uses_the_named_workers_answers_although_others_live() -> None:
    world = World(SETTINGS)
    for name in ("w0", "w1", "w2"):
        world.join(name)
    async with world.running():
        await world.pass_time(30)
        before = len(world.facts(GoldenProposed))
        await ask(world, act="record", worker="w2")
        assert statuses(world) == {"retired"}
        await world.until(lambda: statuses(world) <= {"provisional", "agreed"}, 30)
        assert {fact.worker for fact in world.facts(GoldenProposed)[before:]} == {"w2"}
        await world.until(lambda: statuses(world) == {"agreed"}, 120)


async def test_after_a_recorders_death_other_workers_may_answer() -> None:
    world = World(SETTINGS)
    for name in ("w0", "w1", "w2"):
        world.join(name)
    async with world.running():
        await world.pass_time(30)
        world.plane.workers["w2"].hangs = True
        await ask(world, act="record", worker="w2")
        await world.pass_time(5)
        assert statuses(world) == {"retired"}
        world.leave("w2")
        await world.until(lambda: statuses(world) == {"agreed"}, 120)


async def test_an_imported_golden_is_asked_although_its_question_is_not_in_the_pool() -> None:
    world = World(SETTINGS)
    world.join("w0")
    key = world.fleet.workers["w0"].joined.canary_key
    answer = GoldenAnswer(canary="theirs", prompt=(5, 6, 7), tokens=(1, 2, 3))
    async with world.running():
        await ask(world, act="approve", canary_key=key, answers=(answer,))
        await world.until(lambda: world.fleet.workers["w0"].health.corrupt, 60)
    prompts = [tuple(request.tokens) for request in world.plane.workers["w0"].requests]
    assert (5, 6, 7) in prompts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ({"act": "approve", "worker": "w9"}, "'w9'"),
        ({"act": "approve", "worker": "w0"}, "no whole answer of w0 that is not agreed"),
        ({"act": "approve", "model": "m"}, "no provisional golden"),
        ({"act": "approve", "model": "other"}, "model 'other' has no provisional golden"),
        ({"act": "retire", "canary_key": "nope"}, "no golden in use under 'nope'"),
        (
            {"act": "retire", "model": "m", "canaries": ("c",)},
            "model 'm' has no golden of canary 'c'; it has: ",
        ),
        ({"act": "record", "worker": "w0", "canaries": ("c",)}, "there is no golden of canary 'c'"),
    ],
)
async def test_a_request_that_would_change_nothing_is_refused_and_not_recorded(
    wish: dict[str, Any], why: str
) -> None:
    world = World(SETTINGS)
    for name in ("w0", "w1"):
        world.join(name)
    async with world.running():
        await world.pass_time(30)
        with pytest.raises((NotPossible, UnknownWorker), match=why):
            await ask(world, **wish)
    assert not world.facts(GoldenRequested)


async def test_a_model_with_several_canary_keys_requires_a_key() -> None:
    world = World(SETTINGS)
    world.join("w0")
    world.join("w1", engine_version="2")
    async with world.running():
        await world.pass_time(30)
        with pytest.raises(NotPossible, match="under 2 canary keys: select one with --key"):
            await ask(world, act="approve", model="m")
        await ask(world, act="approve", canary_key=world.fleet.workers["w1"].joined.canary_key)
    assert statuses(world) == {"provisional", "agreed"}
