"""`--park`: running answers of the last tier are preempted for the best tier, and continue exactly.

In virtual time. A worker runs two requests at once and generates a token every 10 ms: 100 tokens take a second.
"""

import asyncio
import json
from typing import Any

import pytest
from mortal_machines import MortalMachines
from waits import virtual

from benchmarks.overload.clients import Attempt, Clients, Coming
from benchmarks.overload.world import Machines, VirtualFrontend, world
from benchmarks.virtual_loop import VirtualLoop
from controller.frontend.openai.request_head import AdmissionHeaders, Head
from controller.frontend.openai.sse import KEEP_ALIVE
from controller.frontend.settings import FrontendSettings
from events.fact import Observation
from events.observations import (
    RequestAbandoned,
    RequestFailed,
    RequestMigrated,
    RequestPreempted,
    RequestResumed,
    RequestsServed,
)
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

LOOP = VirtualLoop
SHAPE = EngineShape(context_tokens=16_384, kv_blocks=4096, batch_max=2, waiting_max=64)
TIMING = ConstantTiming(itl_s=0.01, prefill_tokens_per_s=10_000)
SECOND = 100  # tokens that take one second


def settings(**changes: object) -> FrontendSettings:
    return FrontendSettings.model_validate({"admission_control": "deadline", "park": True} | changes)


def coming(
    key: int, at_s: float, tier: str, seconds: float = 1.0, deadline_s: float = 60.0, client: str = "c"
) -> Coming:
    return Coming(key, at_s, [300 + key] * 8, int(seconds * SECOND), tier, client, deadline_s)


async def asked(one: VirtualFrontend, *requests: Coming) -> dict[int, Attempt]:
    clients = Clients([one])
    await clients.run(requests)
    return {attempt.coming.key: attempt for attempt in clients.attempts}


class Reader(asyncio.Transport):
    """A client that records everything it receives, and when."""

    def __init__(self) -> None:
        super().__init__()
        self.read = b""
        self.came: list[tuple[float, bytes]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.read += bytes(data)
        self.came.append((asyncio.get_running_loop().time(), bytes(data)))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    @property
    def ids(self) -> list[int]:
        """The received tokens."""
        events = [line[6:] for line in self.read.splitlines() if line.startswith(b"data: {")]
        return [
            token
            for event in events
            for choice in json.loads(event)["choices"]
            for token in choice["token_ids"]
        ]


def stream(
    one: VirtualFrontend, client: Reader, tier: str = "best_effort", seconds: float = 4.0, **more: object
) -> "asyncio.Task[object]":
    body = {
        "model": "sim", "prompt": [300, 301, 302], "max_tokens": int(seconds * SECOND), "stream": True,
        "ignore_eos": True, "seed": 7, "temperature": 0.8, "return_token_ids": True,
    } | more  # fmt: skip
    head = Head("completions", "", tier, "", "", asked=AdmissionHeaders(deadline_s=60.0))
    return asyncio.create_task(one.endpoints.answer(head, json.dumps(body).encode(), client))


def said(one: VirtualFrontend, *kinds: type[Observation]) -> list[Any]:
    return [fact for fact in one.facts if isinstance(fact, kinds)]


async def undisturbed(**more: Any) -> list[int]:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        client = Reader()
        await stream(one, client, **more)
        return client.ids


async def test_a_preempted_answer_continues_token_for_token() -> None:
    whole = await undisturbed()
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        clients = [Reader(), Reader()]
        running = [stream(one, client) for client in clients]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, "premium", seconds=2.0, deadline_s=0.3))
        assert done[0].status == 200 and done[0].good
        await asyncio.gather(*running)
        assert [client.ids for client in clients] == [whole, whole]
        (put_off,), (resumed,) = said(one, RequestPreempted), said(one, RequestResumed)
        assert put_off.request == resumed.request and put_off.tier == "best_effort"
        assert put_off.tokens == resumed.tokens == pytest.approx(100, abs=3)
        assert resumed.exact and resumed.gap_ms == pytest.approx(2000, abs=50), (
            "as long as the premium request took"
        )


async def test_the_preempted_answers_worker_is_not_considered_slow() -> None:
    """The time of the preemption says nothing about the worker before or after it."""
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader()) for _ in range(2)]
        await virtual(1.0)
        await asked(one, *(coming(n, 0.0, "premium", seconds=20.0, deadline_s=0.3) for n in range(2)))
        await asyncio.gather(*running)
        one.director.report()
        assert len(said(one, RequestPreempted)) == 2
        served = said(one, RequestsServed)
        assert sum(fact.count for fact in served) == 4
        assert all(fact.itl_ms == pytest.approx(10.0, abs=0.2) for fact in served)


async def test_a_preemption_counts_as_no_failure_and_no_migration() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader()) for _ in range(2)]
        await virtual(1.0)
        await asked(one, coming(0, 0.0, "premium", deadline_s=0.3))
        shown = one.director.render_metrics().decode()
        await asyncio.gather(*running)
        assert not said(one, RequestMigrated, RequestAbandoned, RequestFailed)
        shown = one.director.render_metrics().decode()
        assert 'holdfast_preempted_requests_total{model="sim",tier="best_effort"} 1.0' in shown
        assert "holdfast_put_off_requests 0.0" in shown
        counted = [
            line
            for line in shown.splitlines()
            if "migration_total{" in line or "resume_seconds_count{" in line
        ]
        assert not [line for line in counted if not line.endswith(" 0.0")]


async def test_without_park_premium_is_refused_at_once() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings(park=False)) as (one,):
        running = [stream(one, Reader()) for _ in range(2)]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, "premium", deadline_s=0.3))
        assert (done[0].status, done[0].refused) == (429, "deadline")
        await asyncio.gather(*running)


@pytest.mark.parametrize(("runs", "comes"), [("standard", "premium"), ("best_effort", "standard")])
async def test_only_the_last_tier_is_preempted_and_only_for_the_best(runs: str, comes: str) -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader(), runs) for _ in range(2)]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, comes, deadline_s=0.3))
        assert (done[0].status, done[0].refused) == (429, "deadline")
        await asyncio.gather(*running)
        assert not said(one, RequestPreempted)


async def test_no_answer_is_preempted_if_a_slot_becomes_free_in_time() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader(), seconds=1.2), stream(one, Reader(), seconds=4.0)]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, "premium", deadline_s=5.0))
        assert done[0].good and not said(one, RequestPreempted)
        await asyncio.gather(*running)


async def test_waiting_premium_gets_room_before_it_is_late() -> None:
    """It was admitted because it was predicted to be in time, but would be late."""
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader(), seconds=40.0) for _ in range(2)]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, "premium", deadline_s=20.0))
        assert done[0].good and len(said(one, RequestPreempted)) == 1
        assert done[0].first_s is not None and done[0].first_s < 12.0
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_the_answer_that_is_cheapest_to_recompute_is_preempted() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        old, young = Reader(), Reader()
        running = [stream(one, old)]
        await virtual(1.0)
        running.append(stream(one, young))
        await virtual(1.0)
        await asked(one, coming(0, 0.0, "premium", deadline_s=0.3))
        (put_off,) = said(one, RequestPreempted)
        assert 95 < put_off.tokens < 130, "and not the other one, which has a hundred more"
        await asyncio.gather(*running)


async def test_clients_of_preempted_answers_get_comments() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings(park_s=100.0)) as (one,):
        clients = [Reader(), Reader()]
        running = [stream(one, client) for client in clients]
        await virtual(1.0)
        await asked(one, *(coming(n, 0.0, "premium", seconds=35.0, deadline_s=0.3) for n in range(2)))
        await asyncio.gather(*running)
        for client in clients:
            comments = [at for at, data in client.came if KEEP_ALIVE in data]
            assert len(comments) == 3
            assert client.read.count(b"data: [DONE]") == 1


@pytest.mark.slow
async def test_no_answer_is_preempted_for_longer_than_the_limit_or_again_after_it() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings(park_s=5.0)) as (one,):
        clients = [Reader(), Reader()]
        running = [stream(one, client) for client in clients]
        await virtual(1.0)
        premium = [
            coming(n, n * 0.5, "premium", seconds=1.0, deadline_s=1.5, client=f"p{n}") for n in range(60)
        ]
        done = await asked(one, *premium)
        await asyncio.gather(*running)
        assert len({fact.request for fact in said(one, RequestPreempted)}) == 2
        of_each: dict[str, float] = {}
        for fact in said(one, RequestResumed):
            of_each[fact.request] = of_each.get(fact.request, 0.0) + fact.gap_ms / 1000
        assert max(of_each.values()) < 7.5, (
            "then it comes before all others, and may wait for a slot at the worker"
        )
        assert not said(one, RequestAbandoned)
        assert sum(attempt.good for attempt in done.values()) > 50


async def test_a_preempted_answer_comes_before_later_requests_of_its_tier() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        clients = [Reader(), Reader()]
        running = [stream(one, client) for client in clients]
        await virtual(1.0)
        premium = [coming(n, 0.0, "premium", seconds=2.0, deadline_s=0.3) for n in range(2)]
        later = [coming(10 + n, 0.5, "best_effort", client="later") for n in range(4)]
        done = await asked(one, *premium, *later)
        await asyncio.gather(*running)
        assert all(attempt.status == 200 for attempt in done.values())
        resumed = said(one, RequestResumed)
        assert len(resumed) == 2 and all(fact.gap_ms < 2200 for fact in resumed)
        assert min(done[10 + n].first_s or 0.0 for n in range(4)) > 3.0, "the later requests run 3 s longer"


async def test_a_client_that_leaves_during_preemption_is_removed() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader()) for _ in range(2)]
        await virtual(1.0)
        premium = asyncio.create_task(asked(one, *(coming(n, 0.0, "premium", 2.0, 0.3) for n in range(2))))
        await virtual(0.5)
        assert len(one.director.preemption.put_off) == 2
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await premium
        await virtual(0.5)
        assert len(one.director.preemption.put_off) == 0 and not said(one, RequestResumed)
        (endpoint,) = one.director.table.endpoints.values()
        assert (endpoint.active, endpoint.kept.requests, endpoint.tokens) == (0, 0, 0)


async def test_the_worker_of_a_preempted_answer_may_die() -> None:
    whole = await undisturbed()
    kit = MortalMachines(SHAPE, TIMING, 2)
    async with world(kit, settings()) as (one,):
        clients = [Reader() for _ in range(4)]
        running = [stream(one, client) for client in clients]
        await virtual(1.0)
        premium = asyncio.create_task(asked(one, *(coming(n, 0.0, "premium", 2.0, 0.3) for n in range(2))))
        await virtual(0.5)
        assert len(one.director.preemption.put_off) == 2
        kit.kill(said(one, RequestPreempted)[0].worker)
        one.director.changed()
        await asyncio.gather(*running, premium)
        assert [client.ids for client in clients] == [whole] * 4
        assert not said(one, RequestAbandoned)


async def test_answers_with_several_choices_are_not_preempted() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        running = [stream(one, Reader(), n=2)]
        await virtual(1.0)
        done = await asked(one, coming(0, 0.0, "premium", deadline_s=0.3))
        assert done[0].status == 429
        await asyncio.gather(*running)


async def test_kv_blocks_are_freed_if_they_are_what_is_missing() -> None:
    shape = EngineShape(context_tokens=1024, kv_blocks=66, batch_max=8, waiting_max=64)
    slow = ConstantTiming(itl_s=0.05, prefill_tokens_per_s=10_000)
    async with world(Machines(shape, slow, 1), settings()) as (one,):
        clients = [Reader(), Reader()]
        running = [
            stream(one, clients[0], seconds=4.0, prompt=list(range(300, 780))),
            stream(one, clients[1], seconds=4.0, prompt=list(range(800, 1280))),
        ]
        await virtual(1.1)  # 64 of 66 blocks are in use, and the worker has reported it
        done = await asked(one, coming(0, 0.0, "premium", seconds=0.1, deadline_s=1.0))
        await asyncio.gather(*running)
        assert done[0].good and len(said(one, RequestPreempted)) == 1
        assert all(len(client.ids) == 400 for client in clients)


async def test_no_answer_is_preempted_on_a_worker_that_would_accept_no_other() -> None:
    async with world(Machines(SHAPE, TIMING, 2), settings()) as (one,):
        running = [
            stream(one, Reader(), tier) for tier in ("best_effort", "best_effort", "standard", "standard")
        ]
        await virtual(1.0)
        for endpoint in one.director.table.endpoints.values():
            if any(g.request.tier == "best_effort" for g in one.director.running.at(endpoint)):
                endpoint.weight = 0.0
        done = await asked(one, coming(0, 0.0, "premium", deadline_s=0.3))
        assert done[0].status == 429 and not said(one, RequestPreempted)
        await asyncio.gather(*running)


def test_park_needs_admission_by_deadlines() -> None:
    with pytest.raises(ValueError, match="needs --admission-control deadline"):
        FrontendSettings(park=True)
