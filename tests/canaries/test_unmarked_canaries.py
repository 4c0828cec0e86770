"""Some canaries carry no mark: a worker that answers marked ones well, and users wrongly, is convicted by them."""

import pytest
from canary_world import FakeWorker, World

from controller.runtime.settings import CanarySettings


async def a_fleet(every: int) -> World:
    world = World(CanarySettings(interval_s=2.0, unmarked_every=every, sampled_every=0, canaries=8))
    for name in ("w1", "w2", "w3"):
        world.join(name, FakeWorker())
    return world


@pytest.mark.parametrize(("every", "status"), [(0, "HEALTHY"), (2, "UNHEALTHY")])
async def test_a_worker_that_lies_to_users_alone_is_convicted_by_canaries_without_a_mark(
    every: int, status: str
) -> None:
    world = await a_fleet(every)
    async with world.running():
        await world.pass_time(60)
        world.plane.workers["w1"].corrupt = lambda request: not request.canary
        await world.pass_time(120)
    assert [world.status(name) for name in ("w1", "w2", "w3")] == [status, "HEALTHY", "HEALTHY"]


async def test_a_question_is_always_asked_with_a_mark_or_never() -> None:
    world = await a_fleet(2)
    async with world.running():
        await world.pass_time(120)
    asked = [request for worker in world.plane.workers.values() for request in worker.requests]
    marked = {tuple(request.tokens) for request in asked if request.canary}
    unmarked = {tuple(request.tokens) for request in asked if not request.canary}
    assert marked and unmarked and not marked & unmarked
    for request in asked:
        assert bool(request.cache_salt) == request.canary == request.request.startswith("canary-")
