"""Unmarked canaries use their own connection, to workers that report treating both alike."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from scripted_worker import ScriptedWorker
from waits import until

from controller.adapters.request_plane.client import ProbePlanes, RequestPlaneClient, cover_name
from controller.adapters.request_plane.worker_links import Address
from events.wire import Generate, Sampling


@asynccontextmanager
async def planes_to(worker: ScriptedWorker) -> AsyncIterator[ProbePlanes]:
    await worker.start()
    planes = ProbePlanes(RequestPlaneClient("canary"), RequestPlaneClient(cover_name()))
    planes.set_workers({worker.name: Address(worker.instance, worker.url)})
    running = asyncio.ensure_future(planes.run())
    try:
        await until(lambda: all(plane and plane.connected for plane in (planes.marked, planes.unmarked)))
        yield planes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await worker.stop()


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("marked", [True, False])
async def test_only_a_worker_that_treats_both_alike_gets_unmarked_canaries(alike: bool, marked: bool) -> None:
    worker = ScriptedWorker(alike=alike)
    async with planes_to(worker) as planes:
        asked = Generate(0, "r1", [1, 2, 3], 3, Sampling(max_tokens=4), canary=marked)
        tokens = [token async for chunk in planes.ask("w1", asked) for token in chunk.tokens]
        assert len(tokens) == 4
        (request,) = worker.requests
        assert request.canary is (marked or not alike)
        names = set(worker.hellos)
        assert "canary" in names and len(names) == 2
        assert all(name == "canary" or name.startswith("frontend-") for name in names)
