"""With deadlines, a worker gets a request only if it has a slot and KV blocks for it.

Otherwise the request would be admitted and wait there. A worker has 64 KV blocks of 16 tokens, runs eight requests at once, and
generates a token every 10 ms.
"""

import asyncio
from typing import Any

import pytest
from waits import virtual

from benchmarks.overload.clients import Attempt, Clients, Coming
from benchmarks.overload.world import Machines, VirtualFrontend, world
from benchmarks.virtual_loop import VirtualLoop
from controller.frontend.settings import FrontendSettings
from controller.router.load.monitor import FILLED_MAX, RequiredRoom
from controller.router.selection.filter import AllBusy
from events.wire import Load
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

LOOP = VirtualLoop
BLOCKS, TOKENS, SECOND = 64, 16, 100
SHAPE = EngineShape(context_tokens=1024, kv_blocks=BLOCKS, block_tokens=TOKENS, batch_max=8, waiting_max=64)
TIMING = ConstantTiming(itl_s=0.01, prefill_tokens_per_s=1e5)
LATE_S = 0.05  # a later first token has waited for something


def fleet(count: int = 1) -> Any:
    return world(
        Machines(SHAPE, TIMING, count), FrontendSettings.model_validate({"admission_control": "deadline"})
    )


def coming(key: int, blocks: int, at_s: float = 0.0, seconds: float = 1.0, like: int | None = None) -> Coming:
    """Return a request with a prompt of this many blocks. Its tokens are unique, or those of `like`."""
    first = 300 + 100 * (key if like is None else like)
    prompt = [first + n % 100 for n in range(blocks * TOKENS)]
    return Coming(key, at_s, prompt, int(SECOND * seconds), "standard", "c", 30.0)


async def asked(one: VirtualFrontend, *requests: Coming) -> list[Attempt]:
    clients = Clients([one])
    await clients.run(requests)
    return sorted(clients.attempts, key=lambda attempt: attempt.coming.key)


async def test_a_request_with_a_slot_but_without_blocks_waits_in_the_queue() -> None:
    async with fleet() as (one,):
        asking = asyncio.create_task(asked(one, coming(0, 40), coming(1, 40, 0.1)))
        await virtual(0.5)
        assert (one.waiting(), one.plane.own["w0"]) == (1, 1), "it is not at the worker"
        first, second = await asking
        assert first.good and second.good and first.ended_s - 0.1 <= (second.first_s or 0.0) <= first.ended_s


async def test_a_request_that_needs_less_is_admitted_at_the_same_time() -> None:
    async with fleet() as (one,):
        done = await asked(one, coming(0, 40), coming(1, 8, 0.1))
        assert (done[1].first_s or 1.0) < LATE_S


async def test_a_request_goes_to_the_worker_with_enough_blocks() -> None:
    async with fleet(2) as (one,):
        done = await asked(one, coming(0, 40), coming(1, 8, 0.1), coming(2, 40, 0.2))
        assert all((attempt.first_s or 1.0) < LATE_S for attempt in done)


async def test_sent_requests_count_before_the_worker_reports_them() -> None:
    async with fleet() as (one,):
        asking = asyncio.create_task(asked(one, coming(0, 40), coming(1, 40, 0.001)))
        await virtual(0.01)
        assert (one.waiting(), one.plane.own["w0"]) == (1, 1)
        assert all(attempt.good for attempt in await asking)


async def test_admitted_requests_count_before_they_are_sent() -> None:
    """Two requests wait when blocks become free, and both are admitted in the same moment."""
    async with fleet() as (one,):
        asking = asyncio.create_task(
            asked(one, coming(0, 60, seconds=0.3), coming(1, 40, 0.1), coming(2, 40, 0.1))
        )
        await virtual(0.6)
        assert (one.waiting(), one.plane.own["w0"]) == (1, 1)
        assert all(attempt.good for attempt in await asking)


async def test_blocks_already_in_use_there_are_not_needed_again() -> None:
    async with fleet() as (one,):
        done = await asked(one, coming(0, 40), coming(1, 40, 0.1, like=0), coming(2, 40, 0.2, like=0))
        assert all((attempt.first_s or 1.0) < LATE_S for attempt in done)


async def test_an_idle_worker_gets_even_a_request_that_fills_it() -> None:
    async with fleet() as (one,):
        (done,) = await asked(one, coming(0, int(BLOCKS * FILLED_MAX) + 1, seconds=0.1))
        assert done.good and (done.first_s or 1.0) < LATE_S


async def test_answers_are_expected_to_grow_like_previous_ones() -> None:
    """Two prompts of 24 blocks fit together, but their answers of 30 blocks each do not."""
    async with fleet() as (one,):
        done = await asked(one, coming(0, 24, seconds=4.8), coming(1, 24, 6.0, 4.8), coming(2, 24, 6.1, 0.1))
        assert done[0].good and (done[2].first_s or 0.0) > 4.0
        # no other request runs: its growth does not matter
        done = await asked(one, coming(3, 24, seconds=0.1))
        assert (done[0].first_s or 1.0) < LATE_S


@pytest.mark.parametrize(("canaries", "sent"), [(0, 8), (1, 7), (3, 5)])
async def test_a_canary_occupies_a_slot(canaries: int, sent: int) -> None:
    async with fleet() as (one,):
        plane = one.plane
        plane.load = lambda worker: Load(running=canaries, kv_total=BLOCKS, canaries=canaries)
        asking = asyncio.create_task(asked(one, *(coming(key, 1) for key in range(10))))
        await virtual(0.5)
        assert (plane.own["w0"], one.waiting()) == (sent, 10 - sent)
        assert all(attempt.good for attempt in await asking)


async def test_nested_room_queries_do_not_affect_each_other() -> None:
    async with fleet() as (one,):
        asking = asyncio.create_task(asked(one, coming(0, 40)))
        await virtual(0.1)
        routing = one.director.routing
        (endpoint,) = one.director.table.endpoints.values()
        with routing.monitor.asking(RequiredRoom(held=40 * TOKENS)):
            with routing.monitor.asking(RequiredRoom(held=TOKENS)):
                assert routing.room(endpoint.model, endpoint.lineage) is endpoint
            with pytest.raises(AllBusy):
                routing.room(endpoint.model, endpoint.lineage)
        assert routing.room(endpoint.model, endpoint.lineage) is endpoint
        assert all(attempt.good for attempt in await asking)
