"""A request waits for a convicted worker about to stand in when the last other worker fails."""

import asyncio

import pytest
from frontend_kit import TOKENS, Kit, convict, frontend, text_of
from scripted_worker import Act, ScriptedWorker, undisturbed
from test_suspect_serving import HEADER, adopt, keep
from waits import until

from events.decisions import HealthStatus
from events.observations import RequestAbandoned

PROMPT = [300, 301, 302]
LOST = Act(after=5, how="error", error="upstream_lost: connection refused")


async def fleet(kit: Kit, *workers: ScriptedWorker, keep_last: bool = True) -> None:
    """Convict the first worker, which is out of service while the others serve."""
    adopt(kit, keep_last=keep_last)
    for worker in workers:
        await kit.add(worker)
    convict(kit, workers[0])
    kit.health(workers[0], HealthStatus.UNHEALTHY, 0.0, "token_mismatch")


async def parked(kit: Kit) -> None:
    await until(lambda: kit.director.driver.waiting.parked)


async def test_a_stream_that_loses_its_last_worker_waits_until_the_suspect_serves() -> None:
    suspect, last = ScriptedWorker("w1"), ScriptedWorker("w2", always=LOST)
    async with frontend() as kit:
        await fleet(kit, suspect, last)
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=20))
        await parked(kit)
        kit.health(last, HealthStatus.UNHEALTHY, 0.0, "engine_fault")
        keep(kit, suspect)
        assert text_of(await asking) == TOKENS.decode(undisturbed(PROMPT, 20))
        assert not kit.said(RequestAbandoned)


async def test_a_new_request_waits_in_the_queue_until_the_suspect_serves() -> None:
    suspect, last = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend() as kit:
        await fleet(kit, suspect, last)
        kit.health(last, HealthStatus.UNHEALTHY, 0.0, "engine_fault")
        asking = asyncio.create_task(kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=3))
        await until(lambda: kit.director.admission.queued("m"))
        keep(kit, suspect)
        status, _, headers = await asking
        assert (status, headers["X-Holdfast-Worker"], headers[HEADER]) == (200, "w1", "token_mismatch")


@pytest.mark.parametrize("keep_last", [False, True])
async def test_without_a_suspect_or_the_setting_no_request_waits(keep_last: bool) -> None:
    suspect, last = ScriptedWorker("w1"), ScriptedWorker("w2", always=LOST)
    async with frontend() as kit:
        await fleet(kit, suspect, last, keep_last=keep_last)
        if keep_last:
            kit.health(suspect, HealthStatus.DEAD, 0.0, "left: graceful")
        status, _, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=20)
        assert status == 502
        kit.health(last, HealthStatus.UNHEALTHY, 0.0, "engine_fault")
        status, said, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=20)
        assert status == 503
        assert "no_routable_worker" in str(said)


async def test_a_request_that_the_suspect_has_failed_too_does_not_wait() -> None:
    suspect, last = ScriptedWorker("w1", always=LOST), ScriptedWorker("w2", always=LOST)
    async with frontend() as kit:
        await fleet(kit, suspect, last)
        kit.health(last, HealthStatus.UNHEALTHY, 0.0, "engine_fault")
        keep(kit, suspect)
        status, _, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=20)
        assert status == 502
