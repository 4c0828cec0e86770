"""Admission by thresholds (seed 003), off by default: a busy worker gets no new request.

If all are busy, requests are refused without waiting.
"""

import asyncio
from functools import partial
from typing import Any, cast

import pytest
from frontend_kit import TOKENS, Kit, frontend, text_of
from json_types import Json
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.config.flags import gather
from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.frontend.admission.queue import ENDS_MAX, WINDOW_S, EndRate
from controller.frontend.admission.refusals import JITTER, NotAdmitted, Refusals
from controller.frontend.settings import AdmissionSettings, FrontendSettings
from controller.router.endpoints import EndpointTable
from controller.router.load.monitor import HOLDS_S
from events.errors import BadSetting
from events.observations import RequestAbandoned, RequestFailed, RequestMigrated, RequestsRejected

PROMPT = [300, 301, 302]
EXACT = TOKENS.decode(undisturbed(PROMPT, 12))
ON: Json = {"admission_control": "token-capacity"}


async def ask(kit: Kit, **headers: str) -> tuple[int, Any, Any]:
    return await kit.post("/v1/completions", headers, model="m", prompt=PROMPT, max_tokens=12)


def rejections(kit: Kit) -> dict[tuple[str, ...], float]:
    return kit.counted("dynamo_frontend_model_rejection_total", "model", "endpoint")


async def seen_full(kit: Kit, *workers: ScriptedWorker) -> None:
    """Wait until the workers have reported their load."""

    def says(name: str, used: int) -> bool:
        load = kit.plane.load(name)
        return load is not None and load.kv_used == used

    for worker in workers:
        await until(partial(says, worker.name, worker.kv_used))


async def test_by_default_no_request_is_rejected_by_load() -> None:
    worker = ScriptedWorker("w1", kv_used=100)
    async with frontend(worker, active_decode_blocks_threshold=0.1) as kit:
        await seen_full(kit, worker)
        assert (await ask(kit))[0] == 200


async def test_a_busy_worker_gets_no_new_request() -> None:
    busy, free = ScriptedWorker("w1", kv_used=86), ScriptedWorker("w2", kv_used=85)
    async with frontend(busy, free, **ON) as kit:
        await seen_full(kit, busy, free)
        for _ in range(6):
            assert (await ask(kit))[0] == 200
        assert (len(busy.requests), len(free.requests)) == (0, 6)


@pytest.mark.parametrize("status", [503, 429, 529])
async def test_n26_if_all_are_busy_the_response_has_the_configured_status_and_a_retry_time(
    status: int,
) -> None:
    workers = [ScriptedWorker(name, kv_used=99) for name in ("w1", "w2")]
    async with frontend(*workers, **ON, overload_status_code=status, retry_after_s=9) as kit:
        await seen_full(kit, *workers)
        code, body, headers = await ask(kit)
        assert (code, headers["Retry-After"]) == (status, "9"), "no answer has ended: the longest wait"
        assert body["error"]["code"] == "all_workers_busy"
        said = "Service temporarily unavailable: All workers are busy, please retry later"
        assert body["error"]["message"] == said
        assert not any(worker.requests for worker in workers)
        kit.director.report()
        (rejected,) = kit.said(RequestsRejected)
        assert (rejected.count, rejected.reason, rejected.tier) == (1, "all_workers_busy", "standard")
        assert rejections(kit) == {("m", "completions"): 1}
        for kind in (RequestMigrated, RequestAbandoned, RequestFailed):
            assert not kit.said(kind)
        for worker in workers:
            worker.kv_used = 10
        await seen_full(kit, *workers)
        assert (await ask(kit))[0] == 200


@pytest.mark.parametrize("status", [503, 429, 529])
async def test_the_official_client_retries_when_told_to_and_is_served(status: int) -> None:
    """With its default retries it asks twice more after 429 and 5xx, not before `Retry-After` is over."""
    loop, asked, answered = asyncio.get_running_loop(), list[float](), list[float]()
    worker = ScriptedWorker("w1", kv_used=99)

    async def asks(request: object) -> None:
        asked.append(loop.time())

    async def is_answered(response: object) -> None:
        answered.append(loop.time())
        worker.kv_used = 10

    async with frontend(worker, **ON, overload_status_code=status, retry_after_s=1) as kit:
        await seen_full(kit, worker)
        http = DefaultAsyncHttpxClient(event_hooks={"request": [asks], "response": [is_answered]})
        async with AsyncOpenAI(base_url=f"{kit.url}/v1", api_key="none", http_client=http) as api:
            answer = await api.completions.create(model="m", prompt=PROMPT, max_tokens=12)
        assert answer.choices[0].text == EXACT
        assert len(asked) == len(answered) == 2 and asked[1] - answered[0] > 0.99
        assert rejections(kit) == {("m", "completions"): 1}


async def test_a_model_without_workers_is_not_overloaded() -> None:
    async with frontend(**ON) as kit:
        _, body, _ = await ask(kit)
        assert body["error"]["code"] != "all_workers_busy"
        assert not rejections(kit)


async def test_n25_a_worker_with_a_free_dp_rank_is_not_busy() -> None:
    worker = ScriptedWorker("w1", kv_used=190, kv_used_by_rank=(99, 91))
    async with frontend(**ON, active_decode_blocks_threshold=0.95) as kit:
        await kit.add(worker, dp=2)
        await seen_full(kit, worker)
        assert (await ask(kit))[0] == 200
        blocks = kit.counted(
            "dynamo_frontend_worker_active_decode_blocks", "worker_id", "dp_rank", "worker_type"
        )
        assert blocks == {("w1", "0", "decode"): 99, ("w1", "1", "decode"): 91}
        worker.kv_used_by_rank, worker.kv_used = (99, 96), 195
        await seen_full(kit, worker)
        assert (await ask(kit))[0] == 503


async def test_prompts_still_to_be_prefilled_count_at_once_and_only_until_then() -> None:
    hold = asyncio.Event()
    worker = ScriptedWorker("w1", always=Act(after=0, how="error", error="invalid_request: over", hold=hold))
    async with frontend(worker, **ON, active_prefill_tokens_threshold=5) as kit:
        asking = [asyncio.create_task(ask(kit)) for _ in range(3)]  # of three tokens each
        await until(lambda: sum(task.done() for task in asking) == 1)
        (refused,) = [task for task in asking if task.done()]
        assert refused.result()[0] == 503
        await until(lambda: len(worker.requests) == 2)
        hold.set()
        await asyncio.gather(*asking)
        worker.always = Act()
        assert (await ask(kit))[0] == 200


async def test_a_stream_that_has_begun_is_not_shed_by_a_threshold() -> None:
    first, second = ScriptedWorker("w1"), ScriptedWorker("w2", kv_used=99)
    async with frontend(first, second, **ON) as kit:
        await seen_full(kit, second)
        first.acts.append(Act(after=5, how="disconnect"))
        chunks = await kit.stream(model="m", prompt=PROMPT, max_tokens=12)
        assert text_of(chunks) == EXACT
        assert len(second.requests) == 1


async def test_the_retry_time_of_a_queued_request_follows_the_rate_of_ended_answers() -> None:
    worker = ScriptedWorker("w1", step_s=0.02)
    settings = AdmissionSettings(inflight_max=1, queue_s=0.4)
    async with frontend(worker, admission=settings, retry_after_s=30, overload_status_code=429) as kit:
        assert (await ask(kit))[0] == 200
        answers = await asyncio.gather(*(ask(kit) for _ in range(6)))
        refused = [
            (code, body["error"]["code"], int(headers["Retry-After"]))
            for code, body, headers in answers
            if code != 200
        ]
        assert refused and {(code, why) for code, why, _ in refused} == {(429, "queue_timeout")}
        assert all(1 <= wait < 30 for _, _, wait in refused)


def test_thresholds_are_set_by_flags_and_variables_and_can_be_disabled_separately() -> None:
    usual = FrontendSettings()
    assert (usual.admission_control, usual.overload_status) == ("none", 503)
    assert usual.thresholds == BusyThresholds(0.85, 10_000, None)
    flags = {"active_decode_blocks_threshold": "None", "active_prefill_tokens_threshold": "none"}
    assert gather(FrontendSettings, "frontend", flags, {}).thresholds == NEVER
    environment = {
        "HOLDFAST_FRONTEND__ADMISSION_CONTROL": "token-capacity",
        "HOLDFAST_FRONTEND__ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC": "1.5",
        "HOLDFAST_FRONTEND__OVERLOAD_STATUS_CODE": "529",
    }
    found = gather(FrontendSettings, "frontend", {}, environment)
    assert found.thresholds == BusyThresholds(0.85, 10_000, 1.5)
    assert (found.admission_control, found.overload_status_code) == ("token-capacity", 529)
    dynamos = {"DYN_ADMISSION_CONTROL": "token-capacity", "DYN_HTTP_OVERLOAD_STATUS_CODE": "529"}
    theirs = gather(FrontendSettings, "frontend", {}, dynamos)
    assert (theirs.admission_control, theirs.overload_status_code) == ("token-capacity", 529)
    ours = {**dynamos, "HOLDFAST_FRONTEND__ADMISSION_CONTROL": "none"}
    assert gather(FrontendSettings, "frontend", {}, ours).admission_control == "none"
    for name, value in (
        ("active_decode_blocks_threshold", "1.5"),
        ("active_prefill_tokens_threshold", "-1"),
        ("active_prefill_tokens_threshold", "٣"),  # a digit for Python's int, but not a number in a setting
        ("active_prefill_tokens_threshold_frac", "inf"),
        ("overload_status_code", "200"),
        ("admission_control", "some"),
    ):
        with pytest.raises(BadSetting, match=f"frontend.{name} = "):
            gather(FrontendSettings, "frontend", {name: value}, {})


def test_the_retry_time_is_the_duration_of_waiting_requests_bounded_and_jittered() -> None:
    now, dice, ends, other = [100.0], [0.5], EndRate(), cast(Any, None)
    refusals = Refusals("f1", FrontendSettings(), EndpointTable(), other, other, lambda: dice[0])

    def told(model: str, before: int) -> float | None:
        error = refusals.of(NotAdmitted(), model, "standard", ends.wait_s(model, before, now[0]))
        assert (error.status, error.code) == (503, "queue_timeout")
        return error.retry_after_s

    assert told("m", 0) == 30, "no answer has ended"
    for _ in range(20):
        now[0] += 0.5
        ends.ended("m", now[0])
    assert told("m", 19) == WINDOW_S, "two answers end per second, and nineteen requests wait"
    assert (told("m", 0), told("m", 10_000)) == (1, 30)
    assert told("other", 0) == 30
    dice[0] = 0.0
    low = told("m", 19)
    dice[0] = 0.999
    assert low == WINDOW_S * (1 - JITTER) + 0.5 and told("m", 19) == 13
    now[0] += WINDOW_S + 1
    assert told("m", 0) == 30
    dice[0] = 0.5
    for _ in range(2 * ENDS_MAX):  # more than are remembered in a window
        now[0] += 0.001
        ends.ended("m", now[0])
    assert told("m", ENDS_MAX - 1) == 1


async def test_the_overload_of_a_model_is_cached_for_a_moment_only() -> None:
    workers = [ScriptedWorker(f"w{n}", kv_used=99) for n in range(2)]
    async with frontend(*workers, **ON) as kit:
        await seen_full(kit, *workers)
        now = [1000.0]
        monitor = kit.director.routing.monitor
        monitor.now = lambda: now[0]
        for worker in workers:
            assert monitor.overloaded("m"), worker
            worker.kv_used = 1
        await seen_full(kit, *workers)
        assert monitor.overloaded("m"), "it is cached for a moment"
        now[0] += len(workers) * HOLDS_S
        assert not monitor.overloaded("m")
        assert not monitor.overloaded("other")
