"""Convictions: which requests are reported as exposed, what is done about them, and what is unknown."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, canary, convict, frontend, joined, text_of
from scripted_worker import Act, ScriptedWorker, next_token, undisturbed
from waits import until

from controller.adapters.clock import SystemClock
from controller.frontend.director import Director, ServedUntil
from controller.frontend.health.exposure import ServedSpan, ServedSpans, SpanHistory
from controller.frontend.settings import FactSettings
from controller.processes import last_served as served
from events.decisions import HealthChanged, HealthStatus
from events.observations import (
    CanaryFailed,
    CanaryPassed,
    ExposureUnknown,
    RequestExposed,
    RequestMigrated,
    ResumeRequested,
    WorkerLeft,
)

PROMPT = [300, 301, 302]
EXACT = TOKENS.decode(undisturbed(PROMPT, 12))


def corrupt(tokens: Sequence[int]) -> int:
    """Return a wrong token, always."""
    return 259 + (next_token(tokens) + 1 - 259) % 1789


async def pass_the_margin() -> None:
    """Wait longer than the margin between two machines' clocks."""
    await asyncio.sleep(0.5)  # facts are compared by the real clock


async def midway(kit: Kit, bad: ScriptedWorker, good: ScriptedWorker, stream: bool) -> asyncio.Task[Any]:
    """Start a request on the bad worker and return it when it has some tokens."""
    await kit.add(bad)
    await kit.add(good)
    kit.director.table.endpoints[(good.name, good.instance)].begin(requests=50)
    kit.tell(canary(CanaryPassed, bad))
    ask: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 12}
    call = kit.stream(**ask) if stream else kit.post("/v1/completions", **ask)
    asking = asyncio.create_task(call)
    await until(lambda: bad.active)
    await until(
        lambda: any(
            f
            for s in kit.director.table.endpoints.values()
            for f in kit.director.running.at(s)
            if len(f.accepted) >= 4
        )
    )
    return asking


async def test_continue_continues_from_the_accepted_tokens_and_reports_them() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2")
    async with frontend() as kit:
        asking = await midway(kit, bad, good, stream=True)
        convict(kit, bad)
        events = await asking
        (fact,) = kit.said(RequestExposed)
        assert (fact.worker, fact.instance, fact.first, fact.finished, fact.action) == (
            "w1",
            "i1",
            0,
            False,
            "continue",
        )
        kept = good.requests[0].tokens[3:]
        assert len(kept) == fact.last + 1 >= 4
        assert text_of(events) == TOKENS.decode(kept + undisturbed(PROMPT + kept, 12 - len(kept)))
        (move,) = kit.said(RequestMigrated)
        assert (move.cause, move.exact) == ("unhealthy", False)
        assert not bad.active


async def test_continue_restarts_if_the_client_has_received_nothing() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2")
    async with frontend() as kit:
        asking = await midway(kit, bad, good, stream=False)
        convict(kit, bad)
        _, body, _ = await asking
        assert body["choices"][0]["text"] == EXACT
        assert body["usage"]["completion_tokens"] == 12
        (fact,) = kit.said(RequestExposed)
        assert fact.action == "restart"


@pytest.mark.parametrize(("setting", "stream"), [("restart", True), ("error", True), ("error", False)])
async def test_the_stream_ends_with_an_error_if_tokens_were_sent_or_by_policy(
    setting: str, stream: bool
) -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2")
    async with frontend(on_corruption=setting) as kit:
        asking = await midway(kit, bad, good, stream)
        convict(kit, bad)
        answer = await asking
        error = answer[-1]["error"] if stream else answer[1]["error"]
        assert error["code"] == "corrupt_output"
        (fact,) = kit.said(RequestExposed)
        assert fact.action == "error"


async def test_finished_requests_are_reported_and_those_before_the_last_pass_are_not() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        await kit.complete(PROMPT, 4)
        await pass_the_margin()
        kit.tell(canary(CanaryPassed, worker))
        _, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
        # another canary detects other faults, so its pass proves nothing
        kit.tell(canary(CanaryPassed, worker, canary="c2"))
        convict(kit, worker)
        (fact,) = kit.said(RequestExposed)
        assert (fact.request, fact.first, fact.last) == (headers["X-Request-Id"], 0, 4)
        assert (fact.finished, fact.action) == (True, "none")
        assert kit.said(ExposureUnknown) == []


async def test_an_exposed_request_is_reported_in_its_own_trace() -> None:
    worker, trace = ScriptedWorker("w1"), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with frontend(worker) as kit:
        kit.tell(canary(CanaryPassed, worker))
        for headers in ({"traceparent": trace}, {}):
            await kit.post("/v1/completions", headers, model="m", prompt=PROMPT, max_tokens=5)
        convict(kit, worker)
        traces = zip(kit.facts, kit.traces, strict=True)
        assert [t for fact, t in traces if isinstance(fact, RequestExposed)] == [trace, ""]


async def test_non_finite_numbers_convict_unconfirmed_since_that_canarys_own_pass() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        kit.tell(canary(CanaryPassed, worker))
        await kit.complete(PROMPT, 4)
        await pass_the_margin()
        kit.tell(canary(CanaryPassed, worker))
        _, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
        kit.tell(canary(CanaryFailed, worker, reason="non_finite", confirmed=False, golden="agreed"))
        kit.health(worker, HealthStatus.UNHEALTHY, 0.0, "non_finite")
        assert [fact.request for fact in kit.said(RequestExposed)] == [headers["X-Request-Id"]]
        assert kit.said(ExposureUnknown) == []


async def test_a_request_that_has_moved_is_still_reported() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2", step_s=0.02)
    async with frontend() as kit:
        asking = await midway(kit, bad, good, stream=True)
        bad.drop()  # it continues elsewhere with wrong tokens, before the conviction
        await until(lambda: good.active)
        convict(kit, bad)
        await asking
        (fact,) = kit.said(RequestExposed)
        assert (fact.first, fact.finished, fact.action) == (0, False, "continue")
        assert fact.last < 11


async def test_restarting_on_a_healthy_worker_costs_no_budget() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2", step_s=0.02)
    async with frontend(migration_limit=1) as kit:
        asking = await midway(kit, bad, good, stream=False)
        bad.drop()
        await until(lambda: good.active)
        convict(kit, bad)
        status, body, _ = await asking
        assert (status, body["choices"][0]["text"]) == (200, EXACT), body
        assert [fact.action for fact in kit.said(RequestExposed)] == ["restart"]


async def test_every_choice_of_an_answer_is_reported() -> None:
    bad = ScriptedWorker("w1", follow=corrupt, step_s=0.02)
    async with frontend(bad, on_corruption="error") as kit:
        kit.tell(canary(CanaryPassed, bad))
        ask: dict[str, Any] = {"model": "m", "prompt": PROMPT, "max_tokens": 30, "n": 2}
        asking = asyncio.create_task(kit.post("/v1/completions", **ask))
        endpoint = kit.director.table.endpoints[("w1", "i1")]
        await until(
            lambda: sum(len(generation.accepted) > 3 for generation in kit.director.running.at(endpoint)) == 2
        )
        convict(kit, bad)
        status, body, _ = await asking
        assert (status, body["error"]["code"]) == (502, "corrupt_output")
        said = [(fact.finished, fact.action) for fact in kit.said(RequestExposed)]
        assert said == [(False, "error"), (False, "error")]


async def test_new_requests_do_not_go_to_a_convicted_worker_before_the_decision() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt), ScriptedWorker("w2")
    async with frontend(bad, good) as kit:
        kit.tell(
            canary(CanaryFailed, bad, reason="logit_drift", confirmed=True, golden="agreed", distance=0.5)
        )
        for _ in range(4):
            text, _ = await kit.complete(PROMPT, 12)
            assert text == EXACT
        assert bad.requests == []


async def test_a_frontend_that_started_later_reports_unknown_exposure() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        passed = datetime.now(UTC) - timedelta(minutes=5)
        kit.tell(canary(CanaryPassed, worker, sent_at=passed))
        convict(kit, worker)
        (fact,) = kit.said(ExposureUnknown)
        assert fact.since == passed
        assert fact.since < fact.until <= datetime.now(UTC)


async def test_a_full_memory_reports_what_it_has_dropped() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker, facts=FactSettings(exposure_entries_max=2)) as kit:
        kit.tell(canary(CanaryPassed, worker))
        for _ in range(5):
            await kit.complete(PROMPT, 4)
        convict(kit, worker)
        assert len(kit.said(RequestExposed)) == 2
        (fact,) = kit.said(ExposureUnknown)
        assert "no longer remembers" in fact.why


async def test_a_full_memory_never_drops_running_requests() -> None:
    bad, good = ScriptedWorker("w1", follow=corrupt, step_s=0.02), ScriptedWorker("w2", step_s=0.02)
    async with frontend(facts=FactSettings(exposure_entries_max=2)) as kit:
        asking = await midway(kit, bad, good, stream=True)
        for _ in range(3):
            await kit.complete(PROMPT, 1)
        convict(kit, bad)
        await asking
        assert [fact.action for fact in kit.said(RequestExposed) if not fact.finished] == ["continue"]


async def test_convictions_before_the_journal_was_read_are_reported_as_unknown() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker, live=False) as kit:  # as after a restart: the fold is still being read
        passed = datetime.now(UTC) - timedelta(minutes=5)
        kit.tell(canary(CanaryPassed, worker, sent_at=passed))
        convict(kit, worker)
        kit.director.go_live()
        (fact,) = kit.said(ExposureUnknown)
        assert (fact.worker, fact.instance, fact.since) == ("w1", "i1", passed)


async def test_a_conviction_in_one_batch_with_the_next_life_reports_requests_of_the_last() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        kit.tell(canary(CanaryPassed, worker))
        await kit.complete(PROMPT, 4)
        failed = canary(CanaryFailed, worker, reason="token_mismatch", confirmed=True, golden="agreed")
        kit.tell(  # one batch, as after an outage of the broker
            failed,
            WorkerLeft(worker="w1", instance="i1", mode="immediate", exit=-9),
            replace(joined(worker), instance="i2"),
        )
        (fact,) = kit.said(RequestExposed)
        assert (fact.instance, fact.first, fact.last) == ("i1", 0, 3)


async def test_the_next_life_of_a_convicted_worker_reuses_nothing_computed_before() -> None:
    one, two = ScriptedWorker("w1"), ScriptedWorker("w1", instance="i2")
    async with frontend(one) as kit:
        await kit.complete(PROMPT, 1)
        convict(kit, one)
        await kit.add(two)
        await kit.complete(PROMPT, 1)
        assert one.requests[-1].cache_epoch == 0
        assert two.requests[-1].cache_epoch == kit.fleet.workers["w1"].cache_epoch > 0


async def test_all_ranks_of_a_convicted_worker_are_reported_by_number() -> None:
    worker = ScriptedWorker("w1", step_s=0.01)
    async with frontend() as kit:
        await kit.add(worker, dp=2)
        await asyncio.gather(*(kit.complete([number, *PROMPT], 4) for number in (1, 2)))
        convict(kit, worker)
        said = {request.request: request.rank for request in worker.requests}
        assert {fact.request: fact.rank for fact in kit.said(RequestExposed)} == said
        assert set(said.values()) == {0, 1}


async def test_history_triggers_no_action() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker, live=False) as kit:
        convict(kit, worker)
        assert kit.facts == []


def failure(worker: ScriptedWorker, which: str = "c1") -> Any:
    return canary(
        CanaryFailed,
        worker,
        canary=which,
        reason="token_mismatch",
        confirmed=True,
        golden="agreed",
        attempts=2,
    )


def acquitted(worker: ScriptedWorker, number: int) -> HealthChanged:
    """Return the decision that returns a convicted worker to service."""
    return HealthChanged(
        number=number,
        worker=worker.name,
        instance=worker.instance,
        before=HealthStatus.UNHEALTHY,
        after=HealthStatus.HEALTHY,
        reason="trial_passed",
        weight=0.25,
        decided_at=datetime.now(UTC),
    )


async def test_a_worker_convicted_and_acquitted_in_one_batch_has_its_requests_reported() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        kit.tell(canary(CanaryPassed, worker))
        await kit.complete(PROMPT, 4)
        passed = canary(CanaryPassed, worker, sent_at=datetime.now(UTC) + timedelta(seconds=1))
        kit.tell(
            failure(worker), passed, acquitted(worker, 1)
        )  # a frontend that was stopped reads it all at once
        assert not kit.director.table.endpoints[("w1", "i1")].corrupt
        (fact,) = kit.said(RequestExposed)  # the pass after the failure clears no request
        assert (fact.first, fact.last) == (0, 3)
        assert kit.said(ExposureUnknown) == []


async def test_a_breaker_that_opens_before_the_canary_fails_hides_no_exposure() -> None:
    bad = ScriptedWorker("w1", follow=corrupt)
    async with frontend(bad, ScriptedWorker("w2")) as kit:
        kit.tell(canary(CanaryPassed, bad))
        kit.director.table.endpoints[("w2", "i1")].begin(requests=50)
        _, _, finished = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
        bad.always = Act(after=2, how="error", error="non_finite: NaN in the logits")
        for _ in range(3):
            await kit.complete(PROMPT, 5)  # it continues elsewhere, and opens this frontend's own breaker
        endpoint = kit.director.table.endpoints[("w1", "i1")]
        assert not kit.director.breakers.allowed(endpoint)
        kit.health(bad, HealthStatus.SUSPICIOUS, 0.5)
        convict(kit, bad)
        said = kit.said(RequestExposed)
        assert [(fact.first, fact.last) for fact in said] == [(0, 4), (0, 1), (0, 1), (0, 1)]
        assert said[0].request == finished["X-Request-Id"]
        assert {fact.finished for fact in said} == {True}


async def test_no_token_is_reported_as_exposed_twice() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        kit.tell(canary(CanaryPassed, worker, sent_at=datetime.now(UTC) - timedelta(minutes=5)))
        await kit.complete(PROMPT, 4)
        convict(kit, worker)
        kit.tell(ResumeRequested(worker="w1", instance="i1", by="operator"), acquitted(worker, 1))
        _, _, headers = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=5)
        convict(kit, worker)  # by the same canary, which has not passed in between
        first, second = kit.said(RequestExposed)
        assert first.request != second.request == headers["X-Request-Id"]
        assert len(kit.said(ExposureUnknown)) == 1  # the time before this frontend started, once


def before(kit: Kit, *, seconds_ago: float) -> ServedUntil:
    return ServedUntil(datetime.now(UTC) - timedelta(seconds=seconds_ago), kit.seq)


async def restarted(kit: Kit, worker: ScriptedWorker, served: ServedUntil | None) -> list[Any]:
    """Let a worker be convicted and acquitted while no frontend runs. Return the next frontend's reports."""
    kit.tell(failure(worker), *(canary(CanaryPassed, worker) for _ in range(8)), acquitted(worker, 1))
    kit.director = Director(kit.world, kit.director.settings)
    kit.director.absorb(kit.fleet, ())
    kit.director.go_live(served)
    return kit.said(ExposureUnknown)


async def test_a_conviction_that_began_and_ended_while_a_frontend_was_down_is_reported_as_unknown_once() -> (
    None
):
    worker = ScriptedWorker("w1")
    async with frontend(worker, live=False) as kit:
        passed = datetime.now(UTC) - timedelta(seconds=60)
        kit.tell(canary(CanaryPassed, worker, sent_at=passed))
        (fact,) = await restarted(kit, worker, before(kit, seconds_ago=30))
        assert (fact.worker, fact.instance, fact.since) == ("w1", "i1", passed)
        assert passed < fact.until <= datetime.now(UTC)
        kit.tell(replace(joined(worker), instance="i2"))
        assert len(kit.said(ExposureUnknown)) == 1


async def test_a_frontend_reports_only_what_its_predecessor_served_and_could_not_report() -> None:
    for ago, read_it in ((120.0, False), (30.0, True)):
        worker = ScriptedWorker("w1")
        async with frontend(worker, live=False) as kit:
            kit.tell(canary(CanaryPassed, worker, sent_at=datetime.now(UTC) - timedelta(seconds=60)))
            last = before(kit, seconds_ago=ago)
            if read_it:
                last = replace(last, seq=last.seq + 1)
            assert await restarted(kit, worker, last) == []


async def test_an_acquitted_worker_has_no_exposure_if_no_frontend_served() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker, live=False) as kit:
        kit.tell(canary(CanaryPassed, worker, sent_at=datetime.now(UTC) - timedelta(seconds=60)))
        assert await restarted(kit, worker, None) == []  # no frontend of this name was ever there


async def test_requests_served_while_a_frontend_still_read_the_journal_are_reported() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker, live=False) as kit:
        kit.tell(canary(CanaryPassed, worker))
        await kit.complete(PROMPT, 4)
        convict(kit, worker)
        kit.director.go_live(before(kit, seconds_ago=600))
        (fact,) = kit.said(RequestExposed)
        assert (fact.first, fact.last) == (0, 3)


def test_the_state_left_by_a_frontend_is_found_again(tmp_path: Path) -> None:
    path = served.path_of(tmp_path, "f0")
    assert served.read(path) is None
    left = ServedUntil(datetime.now(UTC), 17)
    served.write(path, left)
    assert served.read(path) == left
    path.write_text("{}")
    assert served.read(path) is None
    (tmp_path / "plain").write_text("")
    served.write(tmp_path / "plain" / "x.json", left)  # cannot be written: logged only


# --- the history ------------------------------------------------------------------------------------------


def test_a_span_knows_which_tokens_came_since_an_instant() -> None:
    served_span = ServedSpan("r", "m", 10, 1)
    for at in range(5):
        served_span.add(float(at), 2)
    assert served_span.since(0.0) == (10, 19)
    assert served_span.since(2.5) == (14, 19)  # to within a mark: rather too many than too few
    assert served_span.since(4.0) == (18, 19)
    assert served_span.since(4.1) is None


def test_a_short_span_has_no_marks_and_is_known_as_a_whole() -> None:
    served_span = ServedSpan("r", "m", 10, 1)
    for at in (1.0, 1.1, 1.2):
        served_span.add(at, 2)
    assert (served_span.marks, served_span.since(0.5), served_span.since(1.1), served_span.since(1.3)) == (
        None,
        (10, 15),
        (10, 15),
        None,
    )
    served_span.add(1.3, 1)
    assert (served_span.marks, served_span.since(1.25), served_span.since(1.3)) == (
        [(1.3, 16)],
        (10, 16),
        (16, 16),
    )


def test_a_history_drops_what_no_conviction_can_reach() -> None:
    history = SpanHistory(100)
    for at in range(10):
        served_span = ServedSpan("r", "m", 0, 1)
        served_span.add(float(at), 1)
        history.add(served_span)
        history.close(served_span)
    history.trim(5.0)
    assert [served_span.last_at for served_span in history.served_spans] == [5.0, 6.0, 7.0, 8.0, 9.0]


def test_lives_that_have_left_are_dropped() -> None:
    now = datetime.now(UTC)
    exposures = ServedSpans("f", 10, SystemClock())
    exposures.note(ServedSpan("r", "m", 0, 1, key=("w1", "i1")))
    exposures.keep({("w1", "i2")})
    assert exposures.tokens_sent(("w1", "i1"), now) == []
