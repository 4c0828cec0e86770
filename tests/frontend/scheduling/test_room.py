"""A request turned away for lack of room waits in the queue again: no failure, no migration, no blame.

A worker never gets more than it reports it can hold, as far as this frontend can know.
"""

import asyncio
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from frontend_kit import PROFILE, TOKENS, Kit, first_goes_to, frontend, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import turns, until

from controller.adapters.request_plane.connection import without
from controller.frontend.settings import AdmissionSettings
from events.decisions import DegradationChanged, HealthStatus, Knobs
from events.observations import RequestAbandoned, RequestFailed, RequestMigrated, RequestsRejected
from events.wire import Load

PROMPT = [300, 301, 302]
EXACT = TOKENS.decode(undisturbed(PROMPT, 12))
SMALL = replace(PROFILE, max_batch=2)
FULL = Act(after=0, how="error", error="overloaded: 2 requests are waiting already")


def no_failure_was_reported(kit: Kit) -> None:
    """Check that there is no trace of a failure: no fact, no counter, no breaker."""
    for kind in (RequestMigrated, RequestAbandoned, RequestFailed):
        assert not kit.said(kind), kind
    assert not kit.counted("dynamo_frontend_model_migration_total", "model", "migration_type")
    assert not kit.counted("dynamo_frontend_model_migration_duration_seconds_count", "model", "outcome")
    assert not kit.counted("holdfast_local_breaker_state", "worker_id")


async def test_a_request_turned_away_goes_to_another_worker_without_a_failure() -> None:
    async with frontend() as kit:
        first, other = ScriptedWorker("w1", acts=deque([FULL])), ScriptedWorker("w2")
        await first_goes_to(kit, first, other)
        assert (await kit.complete(PROMPT, 12))[0] == EXACT
        assert (len(first.requests), len(other.requests)) == (1, 1)
        no_failure_was_reported(kit)


async def test_a_request_turned_away_everywhere_waits_for_room_and_is_served() -> None:
    async with frontend(ScriptedWorker("w1", acts=deque([FULL, FULL, FULL]))) as kit:
        assert (await kit.complete(PROMPT, 12))[0] == EXACT
        assert len(kit.workers[0].requests) == 4
        assert not kit.said(RequestsRejected)
        no_failure_was_reported(kit)


async def test_a_request_that_waits_too_long_for_room_is_refused_like_any_other() -> None:
    async with frontend(ScriptedWorker("w1", always=FULL), admission=AdmissionSettings(queue_s=0.3)) as kit:
        status, body, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12)
        assert (status, body["error"]["code"]) == (503, "queue_timeout")
        assert headers["Retry-After"] == "30", (
            "no answer has ended: the request that was turned away had not begun"
        )
        kit.director.report()
        (rejected,) = kit.said(RequestsRejected)
        assert (rejected.count, rejected.reason, rejected.tier) == (1, "queue_timeout", "standard")
        no_failure_was_reported(kit)


async def test_a_request_that_waits_for_room_and_is_cancelled_is_removed() -> None:
    async with frontend(ScriptedWorker("w1", always=FULL)) as kit:
        asked = asyncio.create_task(kit.complete(PROMPT, 12))
        await until(lambda: kit.director.admission.queued("m") == 1)
        asked.cancel()
        await until(lambda: kit.director.admission.queued("m") == 0)
        no_failure_was_reported(kit)


async def test_a_stream_that_has_begun_comes_before_waiting_requests() -> None:
    """Its worker dies, and the other one holds two: the moved stream is next there, not the request that arrived first."""
    async with frontend() as kit:
        dies, other = ScriptedWorker("w1", always=Act(after=5, how="stall")), ScriptedWorker("w2")
        await first_goes_to(kit, dies, other, profile=replace(PROFILE, max_batch=1), waiting_max=0)
        stream = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: kit.running("w1"))
        waits = asyncio.create_task(kit.complete(PROMPT, 12))
        await until(lambda: kit.director.admission.queued("m") == 1)
        await dies.stop()
        await until(lambda: len(kit.director.driver.waiting.parked) == 1)
        kit.director.table.endpoints["w2", "i1"].end(requests=1)  # the requests that kept it busy
        events = await stream
        assert (text_of(events), events[-1]) == (EXACT, {"done": True})
        assert (await waits)[0] == EXACT
        assert [len(one.tokens) > len(PROMPT) for one in other.requests] == [True, False], (
            "the request that had begun comes first"
        )


@pytest.mark.parametrize("workers", [1, 2])
async def test_no_worker_gets_more_than_it_reports_it_can_hold_and_all_are_served(workers: int) -> None:
    """Forty requests at once, for workers with a batch of two and room for two waiting requests."""
    most: dict[str, int] = {}
    made = [ScriptedWorker(f"w{n}", step_s=0.5) for n in range(workers)]
    async with frontend() as kit:
        for one in made:
            await kit.add(one, profile=SMALL, waiting_max=2)

        async def watch() -> None:
            while True:
                for one in made:
                    most[one.name] = max(most.get(one.name, 0), one.active)
                await turns()

        watching = asyncio.create_task(watch())
        asked = [asyncio.create_task(kit.complete(PROMPT, 12)) for _ in range(40)]
        await until(lambda: kit.director.admission.queued("m") == 40 - 4 * workers)
        await until(lambda: sum(one.active for one in made) == 4 * workers)
        for one in made:
            one.step_s = 0.001
        assert {(await one)[0] for one in asked} == {EXACT}
        watching.cancel()
        assert most == {one.name: 4 for one in made}
        assert not kit.said(RequestsRejected)
        no_failure_was_reported(kit)


async def test_other_frontends_requests_leave_less_room() -> None:
    worker = ScriptedWorker("w1", others=3)
    async with frontend() as kit:
        await kit.add(worker, profile=SMALL, waiting_max=2)
        await until(lambda: (load := kit.plane.external_load("w1")) is not None and load.running == 3)
        worker.step_s = 0.3
        asked = [asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12)) for _ in range(2)]
        await until(lambda: kit.director.admission.queued("m") == 1)
        await until(lambda: bool(worker.requests))
        assert (len(worker.requests), kit.director.admission.queued("m")) == (1, 1)
        for one in asked:
            one.cancel()


async def test_if_other_frontends_wait_too_each_gets_only_its_share() -> None:
    async with frontend() as kit:
        await kit.add(ScriptedWorker("w1", step_s=0.3), profile=SMALL, waiting_max=2)
        kit.director.peers.on_links("", {"frontend": "f2", "workers": {}, "waiting": {"m": 7}})
        asked = [asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12)) for _ in range(4)]
        await until(lambda: kit.director.admission.queued("m") == 2)
        await until(lambda: kit.workers[0].requests[1:])
        await kit.ticks()
        assert len(kit.workers[0].requests) == 2, "half of four"
        kit.director.peers.on_links("", {"frontend": "f2", "workers": {}, "waiting": {}})
        await until(lambda: len(kit.workers[0].requests) == 4)
        for one in asked:
            one.cancel()


async def test_answers_of_one_request_wait_for_room_independently() -> None:
    worker = ScriptedWorker("w1", step_s=0.002)
    async with frontend() as kit:
        await kit.add(worker, profile=SMALL, waiting_max=0)
        _, body = await kit.complete(PROMPT, 12, n=5)
        assert [choice["text"] for choice in body["choices"]] == [EXACT] * 5
        assert len(worker.requests) == 5
        no_failure_was_reported(kit)


def test_an_invalid_report_of_links_counts_as_no_waiting_requests(kit_of_peers: Any) -> None:
    peers, _ = kit_of_peers
    for waiting in (None, 7, "m", ["m"], {"m": 1}):
        peers.on_links("", {"frontend": "f2", "workers": {}, "waiting": waiting})
        assert peers.contenders == ({"m": 2} if waiting == {"m": 1} else {})


def test_a_silent_frontend_has_no_waiting_requests(kit_of_peers: Any) -> None:
    peers, clock = kit_of_peers
    peers.on_links("", {"frontend": "f2", "workers": {}, "waiting": {"m": 1}})
    peers.on_links("", {"frontend": "f1", "workers": {}, "waiting": {"m": 9}})
    assert peers.contenders == {"m": 2}, "this frontend's own queue does not count"
    clock[0] += 10
    peers.names()
    assert peers.contenders == {}


@pytest.fixture
def kit_of_peers() -> object:
    from controller.frontend.scheduling.scheduler import Peers

    clock = [0.0]
    return Peers(lambda: clock[0], "f1"), clock


async def asked(
    kit: Kit,
) -> tuple[dict[tuple[str, ...], float], dict[tuple[str, ...], float], dict[tuple[str, ...], float]]:
    """Send a request that is refused. Return the counts: by type, as overload, and as another refusal."""
    status, _, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12)
    assert status == 503
    return (
        kit.counted("dynamo_frontend_requests_total", "endpoint", "error_type"),
        kit.counted("dynamo_frontend_model_rejection_total", "model", "endpoint"),
        kit.counted("holdfast_refused_requests_total", "model", "endpoint", "reason"),
    )


async def test_an_overload_is_counted_only_as_overload() -> None:
    async with frontend(ScriptedWorker("w1", always=FULL), admission=AdmissionSettings(queue_s=0.1)) as kit:
        ended, rejected, refused = await asked(kit)
        assert ended == {("completions", "overload"): 1}
        assert (rejected, refused) == ({("m", "completions"): 1}, {})


async def test_other_refusals_are_not_counted_as_overload() -> None:
    async with frontend(ScriptedWorker("w1")) as kit:
        kit.tell(
            DegradationChanged(
                decided_at=datetime.now(UTC),
                model="m",
                before=0,
                after=4,
                ratio=0.1,
                capacity_rps=1.0,
                knobs=Knobs(accept_new=False),
            )
        )
        ended, rejected, refused = await asked(kit)
        assert ended == {("completions", "not_accepting"): 1}
        assert (rejected, refused) == ({}, {("m", "completions", "not_accepting"): 1})
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0)
        ended, rejected, refused = await asked(kit)
        assert ended == {("completions", "unavailable"): 1}
        assert (rejected, refused) == ({}, {("m", "completions", "no_routable_worker"): 1})


async def test_being_turned_away_costs_no_budget_and_is_no_attempt() -> None:
    first = ScriptedWorker(
        "w1", acts=deque([FULL, FULL, FULL, Act(after=5, how="error", error="engine_error: E")])
    )
    async with frontend(migration_limit=1) as kit:
        await first_goes_to(
            kit, first, ScriptedWorker("w2"), profile=replace(PROFILE, max_batch=1), waiting_max=0
        )
        asked = asyncio.create_task(kit.complete(PROMPT, 12))
        await until(lambda: len(first.requests) == 4)
        kit.director.table.endpoints["w2", "i1"].end(requests=1)  # the requests that kept it busy
        assert (await asked)[0] == EXACT
        (fact,) = kit.said(RequestMigrated)
        assert (fact.attempt, fact.source, fact.target, fact.tokens) == (2, "w1", "w2", 5)


def test_canaries_do_not_count_as_requests() -> None:
    assert without(Load(running=2, waiting=3, canaries=2), 1).running == 2
    assert without(Load(running=1, canaries=1, active_tokens=8), 0) == Load()


async def test_the_time_to_first_token_includes_the_wait_in_the_queue() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker(
        "w1", acts=deque([Act(after=1, how="error", error="invalid_request: over", hold=hold)])
    )
    async with frontend() as kit:
        await kit.add(worker, profile=replace(PROFILE, max_batch=1), waiting_max=0)
        first = asyncio.create_task(kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: len(worker.requests) == 1)
        second = asyncio.create_task(kit.complete(PROMPT, 12))
        await until(lambda: kit.director.admission.queued("m") == 1)
        await kit.ticks(6)  # more than 0.2 s
        hold.set()
        await first
        assert (await second)[0] == EXACT
        waited = kit.counted("dynamo_frontend_time_to_first_token_seconds_sum", "model")
        assert waited["m",] > 0.2


@pytest.mark.parametrize(
    ("reported", "used"), [(0.25, 0.25), (1.0, 1.0), (7.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0)]
)
def test_no_worker_can_attract_requests_by_the_weight_that_it_reports(reported: float, used: float) -> None:
    assert without(Load(weight=reported), 0).weight == used
