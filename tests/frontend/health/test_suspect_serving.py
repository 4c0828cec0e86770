"""The last serving worker of a model stays in service although canaries convict it.

Its answers are marked and reported.
"""

import asyncio
from datetime import UTC, datetime

from frontend_kit import TOKENS, Kit, canary, convict, frontend, text_of
from scripted_worker import ScriptedWorker, undisturbed
from waits import until

from controller.deciders.fleet import DECIDERS_VERSION, FleetPolicy
from events.decisions import HealthStatus, PolicyAdopted, WeightCapped
from events.observations import CanaryFailed, CanaryPassed, RequestExposed, RequestMigrated

PROMPT = [300, 301, 302]
HEADER = "X-Holdfast-Suspect"


def adopt(kit: Kit, *, keep_last: bool = True) -> None:
    written = dict(FleetPolicy().adopted)
    written["budget"] = {**written["budget"], "keep_last": keep_last}
    kit.tell(PolicyAdopted(policy=written, deciders_version=DECIDERS_VERSION, decided_at=datetime.now(UTC)))


def evidence(worker: ScriptedWorker) -> CanaryFailed:
    found = {"reason": "token_mismatch", "confirmed": True, "golden": "agreed"}
    fact: CanaryFailed = canary(CanaryFailed, worker, **found)
    return fact


def keep(kit: Kit, worker: ScriptedWorker, weight: float | None = 1.0) -> None:
    """Let the controller decide on the conviction of the last worker."""
    kit.health(worker, HealthStatus.UNHEALTHY, 0.0, "token_mismatch")
    kit.tell(
        WeightCapped(
            worker=worker.name,
            instance=worker.instance,
            weight=weight,
            reason="last_serving" if weight is not None else "within_budget",
            decided_at=datetime.now(UTC),
        )
    )


async def test_a_stream_of_the_last_serving_worker_is_not_disturbed_by_its_conviction() -> None:
    worker = ScriptedWorker("w1", step_s=0.03)
    async with frontend() as kit:
        adopt(kit)
        await kit.add(worker)
        kit.tell(canary(CanaryPassed, worker))
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=20))
        await until(lambda: any(len(one.accepted) >= 4 for one in kit.running("w1")))
        kit.tell(evidence(worker))
        assert kit.director.table.endpoints["w1", "i1"].routable
        await kit.ticks()  # until the decision
        keep(kit, worker)
        assert text_of(await asking) == TOKENS.decode(undisturbed(PROMPT, 20))
        assert kit.said(RequestMigrated) == []
        assert len(worker.requests) == 1
        assert {fact.action for fact in kit.said(RequestExposed)} == {"continue"}


async def test_answers_of_the_last_serving_worker_have_the_header_and_each_token_is_reported_once() -> None:
    worker = ScriptedWorker("w1")
    async with frontend() as kit:
        adopt(kit)
        await kit.add(worker)
        _, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=3)
        assert HEADER not in headers
        convict(kit, worker)
        keep(kit, worker)
        before = len(kit.said(RequestExposed))
        for stream in (False, True):
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "stream": stream}
            async with kit.http.post(kit.url + "/v1/completions", json=body) as response:
                assert (response.status, response.headers[HEADER]) == (200, "token_mismatch")
                await response.read()
        await until(lambda: len(kit.said(RequestExposed)) >= before + 2)
        await kit.ticks(25)  # another report is due and has nothing to add
        facts = kit.said(RequestExposed)[before:]
        assert [(fact.first, fact.last, fact.finished) for fact in facts] == [(0, 4, True)] * 2


async def test_the_mark_ends_when_another_worker_serves_again() -> None:
    worker, other = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend() as kit:
        adopt(kit)
        await kit.add(worker)
        convict(kit, worker)
        keep(kit, worker)
        await kit.add(other)
        keep(kit, worker, None)
        status, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=3)
        assert (status, headers["X-Holdfast-Worker"]) == (200, "w2")
        assert HEADER not in headers


async def test_a_convicted_worker_that_is_not_the_last_gets_no_request_from_the_evidence_on() -> None:
    bad, good = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend() as kit:
        adopt(kit)
        await kit.add(bad)
        await kit.add(good)
        kit.tell(evidence(bad))
        assert not kit.director.table.endpoints["w1", "i1"].routable


async def test_without_the_setting_the_last_worker_leaves_service_with_the_evidence() -> None:
    worker = ScriptedWorker("w1")
    async with frontend() as kit:
        adopt(kit, keep_last=False)
        await kit.add(worker)
        kit.tell(evidence(worker))
        assert not kit.director.table.endpoints["w1", "i1"].routable
