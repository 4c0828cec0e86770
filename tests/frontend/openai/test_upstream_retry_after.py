"""Servers that say when to retry: their workers get no new requests until then.

The client gets the shortest of the times.
"""

import asyncio
from collections import deque

from frontend_kit import Kit, first_goes_to, frontend, keep_busy
from scripted_worker import Act, ScriptedWorker
from waits import turns, until

from events.observations import RequestAbandoned, RequestFailed

PROMPT = list(range(300, 340))


def closing(name: str, seconds: float, times: int | None = None) -> ScriptedWorker:
    """Return a worker with a server that answers 429 to all requests, or to the first `times`."""
    act = Act(0, "close", closes_s=seconds)
    if times is None:
        return ScriptedWorker(name, always=act)
    return ScriptedWorker(name, acts=deque([act] * times))


def attempts(*workers: ScriptedWorker) -> list[int]:
    return [len(worker.requests) for worker in workers]


async def ask(kit: Kit) -> tuple[int, str, str | None]:
    """Return status, code and Retry-After of one response."""
    status, body, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
    return status, body.get("error", {}).get("code", ""), headers.get("Retry-After")


def closed(kit: Kit, worker: str) -> bool:
    """Return whether the frontend knows that a worker is closed."""
    load = kit.plane.external_load(worker)
    return load is not None and load.closed_s > 0


async def ticks(kit: Kit) -> None:
    """Let the frontend tick a few times: waiting requests are retried with each."""
    for _ in range(3):
        kit.director.tick()
        await turns(10)


async def test_a_request_is_tried_once_per_worker_and_the_client_gets_the_shortest_time() -> None:
    """One request used to make 24 attempts in 10 s. Now it makes one per worker, and none counts against a worker's health."""
    workers = [closing("w0", 45.0), closing("w1", 17.0), closing("w2", 33.0)]
    async with frontend(*workers) as kit:
        assert await ask(kit) == (503, "upstream_overloaded", "17")
        assert attempts(*workers) == [1, 1, 1]
        assert await ask(kit) == (503, "upstream_overloaded", "17")  # and no worker is asked again
        assert attempts(*workers) == [1, 1, 1]
        assert not kit.said(RequestFailed) and not kit.director.breakers.open


async def test_the_status_is_that_of_an_overload() -> None:
    """`--overload-status-code` applies here, too."""
    async with frontend(closing("w0", 60.0), overload_status_code=429) as kit:
        assert await ask(kit) == (429, "upstream_overloaded", "60")


async def test_other_workers_serve_meanwhile() -> None:
    """A closed worker gets no new request; requests that it refused are answered by another one."""
    refusing, open_ = closing("w0", 60.0), ScriptedWorker("w1")
    async with frontend(refusing, open_) as kit:
        for _ in range(6):
            assert (await ask(kit))[0] == 200
        assert attempts(refusing) <= [1]
        assert len(open_.requests) == 6


async def test_a_worker_is_asked_again_after_its_time() -> None:
    """Requests wait for a short time in the queue instead of being refused."""
    worker = closing("w0", 3.0, times=1)
    async with frontend(worker) as kit:
        assert (await ask(kit))[1] == "upstream_overloaded"
        later = asyncio.ensure_future(ask(kit))
        await until(lambda: kit.director.admission.queued("m"))
        worker.closed_s = 0.0
        assert (await later)[0] == 200
        assert attempts(worker) == [2]


async def test_a_queued_request_is_not_sent_to_the_worker_that_declined_it() -> None:
    """If another worker is only busy, the request waits for that one."""
    refusing, busy = closing("w0", 60.0), ScriptedWorker("w1", always=Act(None, "finish"))
    async with frontend(refusing, busy, admission={"inflight_max": 1}) as kit:
        endpoint = kit.director.table.endpoints["w1", "i1"]
        endpoint.begin(requests=100)
        endpoint.holds = 1
        answer = kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
        asking = asyncio.ensure_future(answer)
        await until(lambda: refusing.requests)
        refusing.closed_s = 0.0  # open again, but not to be asked a second time
        await until(lambda: not closed(kit, "w0"))
        await ticks(kit)
        assert attempts(refusing) == [1] and kit.director.admission.queued("m") == 1
        endpoint.end(requests=100)
        status, _, _ = await asking
        assert status == 200 and attempts(refusing, busy) == [1, 1]


async def test_a_worker_that_declined_is_not_asked_again_after_another_workers_failure() -> None:
    """A request that a third worker failed afterwards used to be sent again to the first one whenever its server reopened."""
    declining, failing = closing("w0", 60.0), ScriptedWorker("w1", always=Act(0, "error"))
    busy = ScriptedWorker("w2")
    async with frontend(declining, failing, busy) as kit:
        keep_busy(kit, "w1", "i1")
        endpoint = kit.director.table.endpoints["w2", "i1"]
        endpoint.begin(requests=100)
        endpoint.holds = 1
        asking = asyncio.ensure_future(ask(kit))
        await until(lambda: kit.director.driver.waiting.parked)
        assert attempts(declining, failing, busy) == [1, 1, 0]
        declining.closed_s = 0.0
        await until(lambda: not closed(kit, "w0"))
        await ticks(kit)
        assert kit.director.driver.waiting.parked
        assert attempts(declining, failing, busy) == [1, 1, 0]
        endpoint.end(requests=100)
        assert (await asking)[0] == 200
        assert attempts(declining, failing, busy) == [1, 1, 1]


async def test_before_the_first_token_a_failed_request_gets_the_time_of_the_closed_workers() -> None:
    """The client used to wait 10 s and get the failed worker's error without Retry-After. w2 is closed before it is asked."""
    failing = ScriptedWorker("w0", always=Act(0, "error"))
    declining, closed_ = closing("w1", 30.0), ScriptedWorker("w2", closed_s=45.0)
    async with frontend() as kit:
        await first_goes_to(kit, failing, declining)
        await kit.add(closed_)
        await until(lambda: closed(kit, "w2"))
        assert await ask(kit) == (503, "upstream_overloaded", "30")
        assert attempts(failing, declining, closed_) == [1, 1, 0]
        (abandoned,) = kit.said(RequestAbandoned)
        assert abandoned.reason == "upstream_overloaded"


async def test_before_the_first_token_a_failed_request_waits_for_a_worker_that_reopens_soon() -> None:
    failing, soon = ScriptedWorker("w0", always=Act(0, "error")), ScriptedWorker("w1", closed_s=5.0)
    async with frontend() as kit:
        await first_goes_to(kit, failing, soon)
        await until(lambda: closed(kit, "w1"))
        asking = asyncio.ensure_future(ask(kit))
        await until(lambda: kit.director.driver.waiting.parked)
        soon.closed_s = 0.0
        assert (await asking)[0] == 200
        assert attempts(failing, soon) == [1, 1]


async def test_a_stream_that_has_begun_waits_for_a_closed_worker() -> None:
    """A stream that lost its worker is parked while the other one is closed, and continues there after its time."""
    first = ScriptedWorker("w0", acts=deque([Act(3, "disconnect")]), always=Act(0, "error"))
    second = ScriptedWorker("w1")
    async with frontend(first) as kit:
        second.closed_s = 5.0
        await kit.add(second)
        await until(lambda: closed(kit, "w1"))
        asking = asyncio.ensure_future(kit.complete(PROMPT, 8))
        await until(lambda: kit.director.driver.waiting.parked)
        assert not second.requests
        second.closed_s = 0.0
        text, _ = await asking
        assert text and len(second.requests) == 1


async def test_a_request_that_waited_without_success_for_closed_workers_gets_their_time() -> None:
    """A worker that closes repeatedly leaves its queue without a slot: the response has its time, not the queue's estimate."""
    worker = ScriptedWorker("w0")
    async with frontend(worker, admission={"queue_s": 0.5}) as kit:
        worker.closed_s = 0.4
        await until(lambda: closed(kit, "w0"))
        assert await ask(kit) == (503, "upstream_overloaded", "1")
        assert not worker.requests
