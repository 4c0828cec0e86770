"""Admission by deadlines, through a whole frontend with simulated engines, in virtual time.

A worker runs two requests at once, prefills 10,000 prompt tokens per second and generates a token every 10 ms: 100 tokens take
a second.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from fleet_history import EPOCH
from json_types import Json
from mortal_machines import MortalMachines
from waits import virtual

from benchmarks.overload.clients import Attempt, Clients, Coming
from benchmarks.overload.world import LIFE, Machines, VirtualFrontend, world
from benchmarks.virtual_loop import VirtualLoop
from controller.config.flags import gather
from controller.deciders.fleet import Fleet, FleetPolicy, evolve, settle
from controller.frontend.admission.pool import REPEATS_LEAST
from controller.frontend.admission.queue import QueuedRequest
from controller.frontend.openai.request_head import AdmissionHeaders, Head
from controller.frontend.settings import FrontendSettings
from controller.router.load.monitor import AHEAD_S
from events.errors import BadSetting
from events.fact import Fact, Recorded
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    Profile,
    RequestAbandoned,
    RequestMigrated,
    RequestsRejected,
    WorkerLeft,
)
from workers.engines.admission import AdaptiveEngine
from workers.engines.engine import Engine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming, StepPlan

LOOP = VirtualLoop
SHAPE = EngineShape(context_tokens=16_384, kv_blocks=4096, batch_max=2, waiting_max=64)
TIMING = ConstantTiming(itl_s=0.01, prefill_tokens_per_s=10_000)
SECOND = 100  # tokens that take one second
LONG = [300 + n * n % 1700 for n in range(12_000)]
CONTROL: Json = {"admission_control": "deadline"}


def machines(count: int = 1) -> MortalMachines:
    return MortalMachines(SHAPE, TIMING, count)


def settings(**changes: object) -> FrontendSettings:
    return FrontendSettings.model_validate(CONTROL | changes)


def coming(
    key: int,
    at_s: float = 0.0,
    answer: int = SECOND,
    tier: str = "standard",
    client: str = "c",
    deadline_s: float = 60.0,
) -> Coming:
    return Coming(key, at_s, [300 + key] * 8, answer, tier, client, deadline_s)


async def asked(one: VirtualFrontend, *requests: Coming, retries: int = 0) -> list[Attempt]:
    """Send these requests at their times, and return their outcomes in order of arrival."""
    clients = Clients([one], retries)
    await clients.run(requests)
    return sorted(clients.attempts, key=lambda attempt: (attempt.coming.key, attempt.number))


async def answer(one: VirtualFrontend, **asked: Any) -> web.Response:
    """Return the response to one request that is not streamed."""
    body = {"model": "sim", "prompt": [300, 301], "max_tokens": 4, "ignore_eos": True}
    body |= {name: asked.pop(name) for name in list(asked) if name in ("prompt", "max_tokens", "user")}
    id, tier = asked.pop("id", ""), asked.pop("tier", "standard")
    head = Head("completions", id, tier, "", "", asked=AdmissionHeaders(**asked))
    response = await one.endpoints.answer(head, json.dumps(body).encode(), asyncio.Transport())
    assert response is not None
    return response


async def busy(
    one: VirtualFrontend, places: int = 2, seconds: float = 100.0
) -> list["asyncio.Task[web.Response]"]:
    """Fill a worker's slots for this long."""
    tasks = [
        asyncio.create_task(answer(one, max_tokens=int(seconds * SECOND), deadline_s=60.0))
        for _ in range(places)
    ]
    await virtual(0.05)
    return tasks


async def ended(tasks: "list[asyncio.Task[web.Response]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_request_is_answered_at_once_while_there_is_room() -> None:
    async with world(machines(), settings()) as (one,):
        (attempt,) = await asked(one, coming(0, deadline_s=0.5))
        assert attempt.status == 200 and attempt.good
        assert attempt.first_s is not None and attempt.first_s < 0.01


async def test_a_request_that_would_be_served_in_time_waits_and_is_served() -> None:
    async with world(machines(), settings()) as (one,):
        attempts = await asked(one, *(coming(key, deadline_s=10.0) for key in range(6)))
        assert [attempt.status for attempt in attempts] == [200] * 6
        assert all(attempt.good for attempt in attempts)
        waited = [round(attempt.first_s or 0.0) for attempt in attempts]
        assert waited == [0, 0, 1, 1, 2, 2]


async def test_a_request_that_would_be_late_is_refused_at_once_with_a_retry_time() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one)
        response = await answer(one, max_tokens=SECOND, deadline_s=0.2)
        error = json.loads(response.body)["error"]  # type: ignore[arg-type]
        assert (response.status, error["code"]) == (429, "deadline")
        assert "with a deadline of 0.2 s: please retry later" in error["message"]
        assert response.headers["X-Holdfast-Refused"] == "deadline"
        told_ms = int(response.headers["retry-after-ms"])
        assert told_ms > 0 and int(response.headers["Retry-After"]) == max(1, -(-told_ms // 1000))
        one.director.report()
        (rejected,) = [fact for fact in one.facts if isinstance(fact, RequestsRejected)]
        assert (rejected.count, rejected.reason, rejected.tier) == (1, "deadline", "standard")
        assert not [fact for fact in one.facts if isinstance(fact, RequestMigrated | RequestAbandoned)]
        await ended(places)


async def test_no_worker_ever_has_more_requests_than_its_batch() -> None:
    async with world(machines(2), settings()) as (one,):
        clients = asyncio.create_task(asked(one, *(coming(key, deadline_s=50.0) for key in range(20))))
        for _ in range(50):
            await virtual(0.05)
            assert all(endpoint.active <= 2 for endpoint in one.director.table.endpoints.values())
        assert [attempt.status for attempt in await clients] == [200] * 20


async def test_premium_is_served_first_and_the_others_by_their_tier() -> None:
    async with world(machines(), settings()) as (one,):
        tiers = ("best_effort", "standard", "premium")
        first = [coming(key, deadline_s=30.0) for key in range(2)]
        line = [coming(2 + n, 0.1, tier=tier, deadline_s=30.0) for n, tier in enumerate(tiers * 2)]
        attempts = await asked(one, *first, *line)
        waited = {tier: [a.first_s or 0.0 for a in attempts[2:] if a.coming.tier == tier] for tier in tiers}
        assert max(waited["premium"]) < min(waited["standard"])
        assert max(waited["standard"]) < min(waited["best_effort"])


async def test_clients_of_a_tier_share_workers_regardless_of_their_number_of_requests() -> None:
    async with world(machines(), settings()) as (one,):
        greedy = [coming(key, client="greedy", deadline_s=30.0) for key in range(10)]
        modest = [coming(10 + n, 0.1, client="modest", deadline_s=30.0) for n in range(2)]
        attempts = await asked(one, *greedy, *modest)
        assert all(attempt.first_s is not None and attempt.first_s < 2.1 for attempt in attempts[10:])
        assert attempts[9].first_s == pytest.approx(5.0, abs=0.2)


async def test_a_cancelled_request_costs_no_prefill() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one, seconds=1.0)
        waiting = await busy(one, 1)
        assert one.waiting() == 1
        await ended(waiting)
        assert one.waiting() == 0
        await asyncio.gather(*places)
        await virtual(1.0)
        assert not one.plane.own


async def test_a_request_that_times_out_in_the_queue_is_refused_and_costs_no_prefill() -> None:
    async with world(machines(), settings()) as (one,):
        loop = asyncio.get_running_loop()
        places = await busy(one, seconds=5.0)
        began = loop.time()
        response = await answer(one, max_tokens=SECOND, deadline_s=3.0)
        assert (response.status, response.headers["X-Holdfast-Refused"]) == (429, "deadline")
        assert loop.time() - began == pytest.approx(3.0, abs=0.05)
        assert one.plane.own == {"w0": 2} and one.waiting() == 0
        await ended(places)


async def test_a_deadline_shorter_than_the_prefill_is_refused_without_retry() -> None:
    async with world(machines(), settings()) as (one,):
        response = await answer(one, prompt=LONG[:8000], deadline_s=0.3)
        assert (response.status, response.headers["X-Holdfast-Refused"]) == (422, "deadline_unattainable")
        assert response.headers["x-should-retry"] == "false" and "Retry-After" not in response.headers
        usual = await answer(one, prompt=LONG[:8000])
        assert usual.status == 200, "the model's objective of 500 ms does not apply to a prefill of 800 ms"


async def test_the_tiers_deadline_applies_if_the_request_has_none() -> None:
    given = settings(ttft_deadlines="premium=100,standard=30000")
    async with world(machines(), given) as (one,):
        places = await busy(one, seconds=3.0)
        assert (await answer(one, tier="premium")).status == 429
        assert (await answer(one, tier="best_effort")).status == 429, "the model's objective: 500 ms"
        assert (await answer(one, tier="standard")).status == 200
        await ended(places)


async def test_a_request_that_does_not_want_to_queue_is_not_queued() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one, seconds=3.0)
        assert (await answer(one, deadline_s=30.0, line_s=0.01)).status == 429
        assert (await answer(one, deadline_s=30.0)).status == 200
        await ended(places)


async def test_requests_that_leave_the_queue_by_choice_do_not_tighten_the_margin_of_others() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one)
        (endpoint,) = one.director.table.endpoints.values()
        pool = one.director.admission.deadlines.pool(endpoint.model, endpoint.lineage)
        before = pool.margin(1)
        for _ in range(5):
            assert (await answer(one, deadline_s=60.0, line_s=0.5, max_tokens=1)).status == 429
        assert pool.margin(1) == before
        assert (await answer(one, deadline_s=0.5, max_tokens=1)).status == 429, "this one was late"
        assert pool.margin(1) < before
        await ended(places)


async def test_a_pool_is_forgotten_with_its_workers_but_not_while_requests_wait() -> None:
    async with world(machines(), settings()) as (one,):
        admission = one.director.admission
        (endpoint,) = one.director.table.endpoints.values()
        model, lineage = endpoint.model, endpoint.lineage
        pool = admission.deadlines.pool(model, lineage)
        tasks = await busy(one, 3)
        assert one.waiting() == 1
        one.director.table.set_static([])
        admission.forget()
        assert admission.deadlines.pool(model, lineage) is pool
        await ended(tasks)
        admission.forget()
        assert admission.deadlines.pool(model, lineage) is not pool


async def test_a_frontend_among_others_starts_with_its_share_of_the_workers() -> None:
    async with world(machines(), settings(), frontends=4) as (one, *_):
        await virtual(0.5)
        pool = one.director.admission.deadlines.pool("sim", ("r", "t"))
        assert pool.wait_s(QueuedRequest("sim", tier=1, client="c", work=2.0), 0.0, 8.0) == pytest.approx(0.5)


async def test_repeats_are_refused_first_if_there_are_too_many_and_told_not_to_retry() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one)
        waiting = await busy(one, 1)
        refused = [await answer(one, deadline_s=0.1, id=f"r{n}") for n in range(8)]
        assert {response.headers["X-Holdfast-Refused"] for response in refused} == {"deadline"}
        repeats = []
        for n in range(int(REPEATS_LEAST) + 2):
            task = asyncio.create_task(answer(one, deadline_s=500.0, id=f"r{n}"))
            await virtual(0.01)
            repeats.append(task)
        over = [task.result() for task in repeats if task.done()]
        assert len(over) == 2
        assert {(r.status, r.headers["X-Holdfast-Refused"]) for r in over} == {(429, "retry_budget")}
        assert all(response.headers["x-should-retry"] == "false" for response in over)
        await ended([*places, *waiting, *repeats])


async def test_the_retry_count_of_openais_client_marks_a_repeat() -> None:
    async with world(machines(), settings()) as (one,):
        places = await busy(one)
        waiting = await busy(one, 1)
        repeats = [
            asyncio.create_task(answer(one, deadline_s=500.0, retries=1))
            for _ in range(int(REPEATS_LEAST) + 1)
        ]
        await virtual(0.05)
        assert [task.done() for task in repeats].count(True) == 1
        await ended([*places, *waiting, *repeats])


async def test_a_model_without_workers_is_a_503_and_not_an_overload() -> None:
    async with world(machines(), settings()) as (one,):
        for endpoint in one.director.table.endpoints.values():
            endpoint.weight = 0.0
        response = await answer(one)
        assert (response.status, response.headers["X-Holdfast-Refused"]) == (503, "no_routable_worker")


def lived(policy: FleetPolicy, fleet: Fleet, *facts: Fact) -> Fleet:
    """Return the fleet after these facts and all decisions that follow from them."""
    for fact in facts:
        fleet = evolve(fleet, Recorded(0, EPOCH, fact, "id"))
    for decision in settle(policy, fleet, EPOCH):
        fleet = evolve(fleet, Recorded(0, EPOCH, decision, f"decision:{decision.number}"))
    return fleet


@pytest.mark.parametrize("before", [0, 1], ids=["nothing_queued", "behind_another"])
async def test_a_request_waits_for_a_suspect_about_to_serve_as_the_last_worker(before: int) -> None:
    policy, workers = FleetPolicy(), machines(2)
    canary: Json = {"canary_key": "", "canary": "c0", "check_type": "scheduled"}
    canary |= {"sent_under": 1000, "sent_at": EPOCH, "latency_ms": 1.0, "instance": LIFE}
    wrong = CanaryFailed(
        **canary, worker="w0", reason="token_mismatch", confirmed=True, golden="agreed", got=(1,)
    )
    async with world(workers, settings()) as (one,):
        fleet = lived(policy, Fleet(), *workers.joined())
        fleet = lived(policy, fleet, *(CanaryPassed(**canary, worker=name) for name in ("w0", "w1")))
        fleet = lived(policy, fleet, wrong)
        one.director.absorb(fleet, ())
        assert [e.weight for e in one.director.table.endpoints.values()] == [0.0, 1.0]
        workers.kill("w1")  # its server is being replaced; no decision has been made yet
        asked = [asyncio.create_task(answer(one)) for _ in range(1 + before)]
        await virtual(0.3)
        assert [task.done() for task in asked] == [False] * len(asked)
        one.director.absorb(
            lived(policy, fleet, WorkerLeft(worker="w1", instance=LIFE, mode="immediate")), ()
        )
        assert [response.status for response in await asyncio.gather(*asked)] == [200] * len(asked)


async def test_a_worker_gets_no_more_prompts_than_it_prefills_in_a_moment() -> None:
    async with world(Machines(SHAPE, TIMING, 1), settings()) as (one,):
        long = Coming(0, 0.0, LONG, 4, "standard", "a", 60.0)
        short = Coming(1, 0.01, [5] * 8, 4, "standard", "b", 60.0)
        first, second = await asked(one, long, short)
        assert first.status == second.status == 200
        assert AHEAD_S < 12_000 / 10_000 and (second.first_s or 0.0) > 0.5, (
            "it waited in the frontend, not at the worker"
        )


async def test_a_worker_that_dies_loses_no_admitted_stream() -> None:
    kit = machines(3)
    async with world(kit, settings()) as (one,):
        clients = asyncio.create_task(
            asked(one, *(coming(key, key * 0.1, deadline_s=20.0) for key in range(30)))
        )
        await virtual(1.5)
        kit.kill("w1")
        one.director.changed()
        attempts = await clients
        assert not any(attempt.failed for attempt in attempts)
        assert {attempt.status for attempt in attempts} == {200}
        for fact in one.facts:
            assert not isinstance(fact, RequestAbandoned)


async def test_two_frontends_share_the_workers_and_lose_no_request() -> None:
    async with world(machines(2), settings(), frontends=2) as both:
        clients = Clients(both)
        await clients.run([coming(key, key * 0.05, deadline_s=30.0) for key in range(24)])
        assert {attempt.status for attempt in clients.attempts} == {200}
        assert not any(attempt.failed for attempt in clients.attempts)


class _FourTimesAsSlow(ConstantTiming):
    """Steps take four times as long as registered, in proportion to the requests that share them."""

    def step_s(self, plan: StepPlan) -> float:
        return 0.001 * plan.decodes

    def profile(self, shape: EngineShape) -> Profile:
        batch = shape.batch_max
        return replace(super().profile(shape), tpot_ms=((1, 0.25), (batch, batch / 4)))


class _AdaptiveMachines(Machines):
    """Workers that run fewer requests at once while their steps are late."""

    def engine(self) -> Engine:
        return AdaptiveEngine(super().engine())


@pytest.mark.slow
async def test_a_worker_with_slow_steps_gets_only_as_many_requests_as_it_can_serve_now() -> None:
    shape = replace(SHAPE, batch_max=64)
    async with world(_AdaptiveMachines(shape, _FourTimesAsSlow(), 1), settings()) as (one,):
        requests = [coming(key, key * 0.05, answer=200, deadline_s=300.0) for key in range(400)]
        clients = asyncio.create_task(asked(one, *requests))
        await virtual(40.0)
        (endpoint,) = one.director.table.endpoints.values()
        seen = []
        for _ in range(20):
            await virtual(0.5)
            seen.append(endpoint.active)
        assert one.waiting() > 0 and max(seen) <= 32, "of 64"
        assert [attempt.status for attempt in await clients] == [200] * 400


async def test_premium_of_one_frontend_is_served_before_all_other_tiers_of_the_other() -> None:
    """There are four slots: premium needs three, and the other frontend's clients would fill all of them twice."""
    async with world(machines(2), settings(), frontends=2) as both:
        clients = Clients(both)
        others = [
            coming(2 * n, n * 0.125, tier="best_effort", client=f"c{n % 4}", deadline_s=4.0)
            for n in range(160)
        ]
        premium = [
            coming(2 * n + 1, 2.0 + n / 3, tier="premium", client="p", deadline_s=2.0) for n in range(50)
        ]
        await clients.run(sorted([*others, *premium], key=lambda one: one.at_s))
        good = [one.good for one in clients.attempts if one.coming.tier == "premium"]
        assert len(good) == 50 and sum(good) >= 40, (
            "it would be 37 if each frontend ordered only its own tiers"
        )
        served = [one for one in clients.attempts if one.coming.tier == "best_effort" and one.good]
        assert served, "the other tiers get the remaining slots"


@pytest.mark.parametrize("text", ["premium", "=5", "premium=soon", "premium=0", "premium=-1"])
def test_invalid_deadlines_of_tiers_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"frontend\.ttft_deadlines"):
        gather(FrontendSettings, "frontend", {"ttft_deadlines": text}, {})


def test_deadlines_are_set_by_flags_and_variables_and_change_dependent_defaults() -> None:
    environment = {
        "HOLDFAST_FRONTEND__ADMISSION_CONTROL": "deadline",
        "HOLDFAST_FRONTEND__TTFT_DEADLINES": '{"premium": 250}',
        "HOLDFAST_FRONTEND__ADMISSION__FAIRNESS_BY": "user,header",
    }
    found = gather(FrontendSettings, "frontend", {"ttft_deadlines": "premium=500, standard=2e3"}, environment)
    assert found.ttft_deadlines == {"premium": 500.0, "standard": 2000.0}
    assert found.admission.fairness_by == ("user", "header")
    assert (found.overload_status, found.inflight_per_batch) == (429, 1.0)
    usual = FrontendSettings()
    assert (usual.overload_status, usual.inflight_per_batch) == (503, 4.0)
    assert FrontendSettings(admission_control="deadline", overload_status_code=529).overload_status == 529
