"""A failed request continues exactly elsewhere: every kind of failure, at every point.

The tests use a whole frontend. The answers are compared with the undisturbed one: the scripted worker's next token depends on
the whole sequence.
"""

import asyncio
import gc
from collections.abc import Sequence
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
from frontend_kit import TOKENS, Kit, failing, first_goes_to, frontend, text_of
from json_types import Json
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.frontend.driver import RequestSink
from controller.frontend.errors import FAULTS
from controller.frontend.request.failures import classify
from events.decisions import HealthStatus
from events.observations import RequestAbandoned, RequestExposed, RequestMigrated
from events.refusal import RequestRefusal

pytestmark = pytest.mark.usefixtures("both_roads")
PROMPT = [300, 301, 302]
EXACT = TOKENS.decode(undisturbed(PROMPT, 12))


async def migrate(kit: Kit, first: ScriptedWorker, other: ScriptedWorker, **ask: Any) -> list[Json]:
    await first_goes_to(kit, first, other)
    return await kit.stream(model="m", prompt=PROMPT, max_tokens=12, **ask)


async def test_no_failure_needs_no_migration() -> None:
    async with frontend(ScriptedWorker("w1"), ScriptedWorker("w2")) as kit:
        text, _ = await kit.complete(PROMPT, 12)
        assert (text, kit.said(RequestMigrated)) == (EXACT, [])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["finish", "disconnect", "error", "stall"])
async def test_a_finished_request_is_freed_at_once_and_not_by_the_garbage_collector(how: str) -> None:
    async with frontend() as kit:
        first = failing("w1", how, None if how == "finish" else 5, error="overloaded")
        gc.collect()  # garbage of other tests does not count
        gc.disable()
        try:
            assert text_of(await migrate(kit, first, ScriptedWorker("w2"))) == EXACT
            assert (await kit.complete(PROMPT, 12))[0] == EXACT
            assert len(kit.said(RequestMigrated)) == (how != "finish")
            await until(lambda: not any(isinstance(one, RequestSink) for one in gc.get_objects()))
        finally:
            gc.enable()


ENDS = [
    ("disconnect", "", "disconnected"),
    ("silence", "", "stalled"),
    ("stall", "", "stalled"),
    ("error", "engine_error: CUDA", "engine_error"),
    ("error", "engine_shutdown", "engine_shutdown"),
    ("error", "stream_incomplete: no finish reason", "engine_error"),
    ("error", "non_finite", "engine_error"),
    ("error", "something_new: of a later version", "engine_error"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "cause", "after"),
    [
        *((*one, after) for one in ENDS for after in (0, 5)),
        (
            "error",
            "overloaded",
            "overloaded",
            5,
        ),  # before a token this is no failure: see scheduling/test_room.py
    ],
)
async def test_a_stream_continues_at_the_same_position(how: str, error: str, cause: str, after: int) -> None:
    first, other = failing("w1", how, after, error=error), ScriptedWorker("w2")
    async with frontend() as kit:
        events = await migrate(kit, first, other)
        assert text_of(events) == EXACT
        assert events[-1] == {"done": True}
        (fact,) = kit.said(RequestMigrated)
        assert (fact.cause, fact.tokens, fact.source, fact.target) == (cause, after, "w1", "w2")
        assert (fact.attempt, fact.exact, fact.method) == (2, True, "reprefill")
        assert fact.kind_of_move == ("ongoing_request" if after else "new_request")


async def test_the_continuation_requests_the_rest_under_the_same_id() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        _, body, headers = await kit.post(
            "/v1/completions",
            {"X-Request-Id": "my-request"},
            model="m",
            prompt=PROMPT,
            max_tokens=12,
            min_tokens=7,
        )
        (before,), (after,) = first.requests, other.requests
        assert before.request == after.request == headers["X-Request-Id"] == "my-request"
        assert (after.prompt_tokens, len(after.tokens)) == (3, 8)
        assert (after.sampling.max_tokens, after.sampling.min_tokens) == (7, 2)
        assert after.sampling.seed == before.sampling.seed is not None
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert headers["X-Holdfast-Worker"] == "w2"


async def test_a_connection_that_cannot_be_established_costs_no_budget() -> None:
    async with frontend(ScriptedWorker("w9"), migration_limit=1) as kit:
        gone = [ScriptedWorker(f"w{n}") for n in range(3)]
        for worker in gone:
            await kit.add(worker)
            await worker.stop()
        text, _ = await kit.complete(PROMPT, 12)
        assert text == EXACT


async def test_a_missing_final_frame_is_no_reason_to_move() -> None:
    first, other = failing("w1", "disconnect", after=12), ScriptedWorker("w2")
    async with frontend() as kit:
        events = await migrate(kit, first, other)
        assert text_of(events) == EXACT
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert other.requests == []


async def test_with_an_exhausted_budget_the_client_gets_the_original_error() -> None:
    workers = [
        ScriptedWorker(f"w{n}", always=Act(after=2, how="error", error="engine_error: E")) for n in range(6)
    ]
    async with frontend(*workers, migration_limit=3) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=12)
        assert events[-1]["error"] == {
            "message": "the engine failed",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 8))  # four attempts, two tokens each
        assert sum(len(worker.requests) for worker in workers) == 4
        (fact,) = kit.said(RequestAbandoned)
        assert (fact.reason, fact.tokens) == ("budget_exhausted", 8)
        assert len(kit.said(RequestMigrated)) == 3
        metrics = kit.director.render_metrics().decode()
        labels = 'endpoint="completions",error_type="internal",model="m",request_type="stream",status="error"'
        assert f"dynamo_frontend_requests_total{{{labels}}} 1.0" in metrics
        assert 'dynamo_frontend_active_requests{model="m"} 0.0' in metrics


async def test_series_used_by_alerts_exist_at_0_from_a_models_first_request() -> None:
    """The increase of a series that first appears at 1 is lost (B26)."""
    async with frontend(ScriptedWorker("w1")) as kit:
        await kit.complete(PROMPT, 4)
        shown = kit.director.render_metrics().decode()
    for endpoint in ("chat_completions", "completions"):
        assert f'dynamo_frontend_model_rejection_total{{endpoint="{endpoint}",model="m"}} 0.0' in shown
        for kind, fault in product(("stream", "unary"), FAULTS):
            labels = (
                f'endpoint="{endpoint}",error_type="{fault}",model="m",request_type="{kind}",status="error"'
            )
            assert f"dynamo_frontend_requests_total{{{labels}}} 0.0" in shown
    for action in get_args(get_type_hints(RequestExposed)["action"]):
        assert f'holdfast_requests_exposed_total{{action="{action}"}} 0.0' in shown
    for cause in ("disconnected", "stalled", "unhealthy", "drain"):
        assert f'holdfast_resume_seconds_count{{cause="{cause}"}} 0.0' in shown
    for begun in ("new_request", "ongoing_request"):
        labels = f'migration_type="{begun}",model="m",outcome="failure"'
        assert f"dynamo_frontend_model_migration_duration_seconds_count{{{labels}}} 0.0" in shown


async def test_the_original_error_is_the_answers_and_not_that_of_recovery_attempts() -> None:
    first = failing("w1", "error", error="engine_error: E")
    full = ScriptedWorker("w2", always=Act(after=0, how="error", error="overloaded: full"))
    async with frontend(reroute_s=1.0) as kit:
        events = await migrate(kit, first, full)
        assert events[-1]["error"]["message"] == "the engine failed"
        assert kit.said(RequestMigrated) == [], "it never started on the other worker"
        (fact,) = kit.said(RequestAbandoned)
        assert (fact.reason, fact.worker) == ("no_worker", "w1")


async def hold_on(kit: Kit, good: ScriptedWorker) -> asyncio.Task[object]:
    """Start a stream on a healthy worker, so that not all are silent, and make it look the busiest."""
    await kit.add(good)
    asking = asyncio.create_task(kit.complete([400], 400))
    await until(lambda: good.active)
    kit.director.table.endpoints[(good.name, good.instance)].begin(requests=50)
    return asking


async def test_streams_of_workers_that_fall_silent_together_do_not_move_among_them() -> None:
    good = ScriptedWorker("w0", step_s=0.01)
    dead = [ScriptedWorker(f"w{n}", step_s=0.02) for n in range(1, 7)]
    async with frontend(migration_limit=3) as kit:
        other = await hold_on(kit, good)
        for worker in dead:
            await kit.add(worker)
        asking = [asyncio.create_task(kit.complete([*PROMPT, n], 60)) for n in range(6)]
        await until(lambda: all(worker.active for worker in dead))
        for worker in dead:  # one host, which lost power
            worker.silent = True
        texts = [text for text, _ in await asyncio.gather(*asking)]
        assert texts == [TOKENS.decode(undisturbed([*PROMPT, n], 60)) for n in range(6)]
        assert {(fact.target, fact.attempt) for fact in kit.said(RequestMigrated)} == {("w0", 2)}
        other.cancel()


async def test_a_move_to_a_connection_that_breaks_too_waits_for_more_to_break() -> None:
    first, second = failing("w1", "disconnect"), failing("w2", "disconnect", after=0)
    dying = [ScriptedWorker(f"w{n}", always=Act(after=0, how="disconnect")) for n in (3, 4)]
    async with frontend(migration_limit=3) as kit:
        for worker in (first, second, *dying):
            await kit.add(worker)
        await kit.add(good := ScriptedWorker("w5"))
        for n, worker in enumerate((second, *dying, good), 1):
            kit.director.table.endpoints[(worker.name, "i1")].begin(requests=10 * n)
        asking = asyncio.create_task(kit.complete(PROMPT, 12))
        await until(lambda: second.requests)
        for worker in dying:  # the same host, some milliseconds later
            await worker.stop()
        text, _ = await asking
        assert (text, [worker.requests for worker in dying]) == (EXACT, [[], []])
        assert [fact.target for fact in kit.said(RequestMigrated)] == ["w2", "w5"]


async def test_workers_that_have_been_silent_for_long_are_asked_last() -> None:
    good = ScriptedWorker("w0", step_s=0.01)
    dead = [ScriptedWorker(f"w{n}") for n in range(1, 7)]
    async with frontend(migration_limit=3) as kit:
        other = await hold_on(kit, good)
        for worker in dead:
            await kit.add(worker)
            worker.silent = True
        text, _ = await kit.complete(PROMPT, 12)  # by the time of the third move the idle ones are known
        assert text == EXACT
        other.cancel()


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        (TRACE, TRACE),
        ("cc" + TRACE[2:] + "-more", TRACE),  # of a later version: only the known part
        (None, ""),
        ("", ""),
        (TRACE.upper(), ""),
        (TRACE + "-more", ""),
        (TRACE[:-3], ""),
        ("ff" + TRACE[2:], ""),
        ("00-" + "0" * 32 + TRACE[35:], ""),
        (TRACE[:36] + "0" * 16 + "-01", ""),
    ],
)
async def test_the_clients_trace_is_passed_on(given: str | None, carried: str) -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    headers = {} if given is None else {"traceparent": given}
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        status, _, _ = await kit.post("/v1/completions", headers, model="m", prompt=PROMPT, max_tokens=12)
        said = zip(kit.facts, kit.traces, strict=True)
        assert (status, [trace for fact, trace in said if isinstance(fact, RequestMigrated)]) == (
            200,
            [carried],
        )
        assert [r.traceparent for worker in (first, other) for r in worker.requests] == [carried, carried]


async def test_two_trace_headers_count_as_none() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        ask = {"model": "m", "prompt": PROMPT, "max_tokens": 12}
        twice = [("traceparent", TRACE), ("traceparent", TRACE)]
        async with kit.http.post(kit.url + "/v1/completions", json=ask, headers=twice) as answer:
            assert answer.status == 200
        assert kit.said(RequestMigrated) and set(kit.traces) == {""}


async def test_an_abandoned_traced_request_is_reported_in_its_trace() -> None:
    async with frontend(ScriptedWorker("w1", always=Act(after=2, how="error"))) as kit:
        await kit.post("/v1/completions", {"traceparent": TRACE}, model="m", prompt=PROMPT, max_tokens=9)
        (place,) = [n for n, fact in enumerate(kit.facts) if isinstance(fact, RequestAbandoned)]
        assert kit.traces[place] == TRACE


async def test_repeated_failures_before_the_first_token_are_an_http_error() -> None:
    workers = [
        ScriptedWorker(word, always=Act(after=0, how="error", error=f"engine_error: {word}"))
        for word in ("disk", "fan")
    ]
    async with frontend(*workers) as kit:
        for stream in (True, False):
            status, body, _ = await kit.post(
                "/v1/completions", model="m", prompt=PROMPT, max_tokens=12, stream=stream
            )
            assert (status, body["error"]["code"]) == (500, "engine_error")
        assert {fact.reason for fact in kit.said(RequestAbandoned)} == {"all_workers_failed"}


async def test_a_limit_of_zero_disables_migration() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend(migration_limit=0) as kit:
        events = await migrate(kit, first, other)
        assert events[-1]["error"]["message"] == "Stream ended before generation completed"
        assert events[-1]["error"]["code"] == "disconnected"
        assert other.requests == []


async def test_n27_the_smallest_limit_applies() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await kit.add(first)
        await kit.add(other, migration_limit=0)
        kit.director.table.endpoints[("w2", "i1")].begin()
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=12)
        assert "error" in events[-1]


@pytest.mark.parametrize(("cap", "moves"), [(8, True), (7, False), (3, False)])
async def test_a_request_exactly_at_the_cap_still_moves(cap: int, moves: bool) -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend(migration_max_seq_len=cap) as kit:
        events = await migrate(kit, first, other)
        assert (text_of(events) == EXACT) is moves
        if not moves:
            (fact,) = kit.said(RequestAbandoned)
            assert fact.reason == "over_cap"
            metrics = kit.director.render_metrics().decode()
            assert 'model_migration_max_seq_len_exceeded_total{model="m"} 1.0' in metrics


async def test_a_prompt_over_the_cap_still_runs() -> None:
    async with frontend(ScriptedWorker(), migration_max_seq_len=2) as kit:
        text, _ = await kit.complete(PROMPT, 12)
        assert text == EXACT


async def test_a_request_with_n_over_one_does_not_move() -> None:
    first, other = failing("w1", "disconnect"), failing("w2", "disconnect")
    first.always = other.always = Act(after=5, how="disconnect")
    async with frontend(first, other) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=12, n=2)
        assert events[-1]["error"]["code"] == "disconnected"
        assert "n_over_1" in {fact.reason for fact in kit.said(RequestAbandoned)}


async def test_several_prompts_move_independently() -> None:
    first, other = ScriptedWorker("w1", always=Act(after=5, how="disconnect")), ScriptedWorker("w2")
    async with frontend(first, other) as kit:
        status, body, _ = await kit.post(
            "/v1/completions", model="m", prompt=[PROMPT, [*PROMPT, 303]], max_tokens=12
        )
        assert status == 200, body
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [EXACT, TOKENS.decode(undisturbed([*PROMPT, 303], 12))]
        assert kit.said(RequestMigrated)


async def test_a_constraint_without_a_grammar_does_not_move() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        for worker in (first, other):
            await kit.add(worker, engine="openai")
        kit.director.table.endpoints[("w2", "i1")].begin()
        lark = 'start: "a" | NAME\nNAME: /b+/'
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=12, guided_grammar=lark)
        assert events[-1]["error"]["code"] == "disconnected"
        assert first.requests[0].guided == {"guided_grammar": lark}
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["guided_decoding"]


async def test_a_client_error_does_not_move_and_blames_no_worker() -> None:
    workers = [
        ScriptedWorker(n, always=Act(after=0, how="error", error="invalid_request: top_k is too large"))
        for n in ("w1", "w2")
    ]
    async with frontend(*workers) as kit:
        for _ in range(5):
            status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12)
            assert status == 400 and "it names top_k)" in body["error"]["message"]
        assert sum(len(worker.requests) for worker in workers) == 5
        assert kit.facts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_servers_refusal_is_reported_without_its_text_and_blames_no_worker(stream: bool) -> None:
    """A grammar that vLLM cannot compile, sent six times, used to open both breakers and give the client a 500."""
    refusal = RequestRefusal('"bogus" is not a type', 422, "UnprocessableEntityError", "response_format")
    workers = [ScriptedWorker(n, always=Act(after=0, how="error", error=refusal.error)) for n in ("w1", "w2")]
    async with frontend(*workers) as kit:
        for _ in range(6):
            status, body, headers = await kit.post(
                "/v1/completions", model="m", prompt=PROMPT, max_tokens=12, stream=stream
            )
            assert (status, body["error"]) == (
                422,
                {
                    "message": "the model server refused the request (HTTP 422; it names response_format). "
                    "Its own text is not passed on",
                    "type": "UnprocessableEntityError",
                    "param": "response_format",
                    "code": "invalid_request",
                },
            )
            assert "Retry-After" not in headers
        assert sum(len(worker.requests) for worker in workers) == 6
        assert kit.facts == []
        assert set(kit.director.breakers.positions().values()) == {"closed"}


async def test_failed_workers_are_excluded_and_a_new_life_is_not() -> None:
    """The only worker dies mid-stream, and its next instance continues."""
    first = failing("w1", "disconnect")
    async with frontend(first, reroute_s=5.0) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: first.requests and not first.active)  # it has sent its five tokens and closed
        await first.stop()
        second = ScriptedWorker("w1", instance="i2")
        await kit.add(second)
        assert text_of(await asking) == EXACT
        assert second.requests[0].tokens[3:] == undisturbed(PROMPT, 5)


def answering(kit: Kit, worker: ScriptedWorker) -> bool:
    """Return whether a stream that still runs on this worker has received tokens from it."""
    return any(live.state.has_output for live in kit.running(worker.name, worker.instance))


async def test_a_request_without_a_worker_in_time_fails() -> None:
    only = ScriptedWorker("w1", step_s=0.02)
    async with frontend(only, reroute_s=0.2) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=40))
        await until(lambda: answering(kit, only))
        await only.stop()
        assert (await asking)[-1]["error"]["code"] == "disconnected"
        (fact,) = kit.said(RequestAbandoned)
        assert fact.reason == "no_worker"


@pytest.mark.parametrize("how", ["disconnect", "silence"])
@pytest.mark.parametrize("after", [0, 5])
async def test_the_only_worker_continues_when_its_connection_is_restored(how: str, after: int) -> None:
    only = failing("w1", how, after)
    async with frontend(only, reroute_s=5.0) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        if how == "silence":
            await until(lambda: kit.director.driver.waiting.parked)
            only.silent = False
        events = await asking
        assert (text_of(events), events[-1]) == (EXACT, {"done": True})
        (fact,) = kit.said(RequestMigrated)
        assert (fact.source, fact.target, fact.tokens, fact.attempt) == ("w1", "w1", after, 2)


async def test_an_unreachable_worker_is_asked_again_when_all_others_have_failed() -> None:
    first, other = failing("w1", "disconnect", after=2), failing("w2", "error")
    async with frontend(reroute_s=5.0) as kit:
        assert text_of(await migrate(kit, first, other)) == EXACT
        assert [fact.target for fact in kit.said(RequestMigrated)] == ["w2", "w1"]
        assert (len(first.requests), len(other.requests)) == (2, 1)


async def test_the_only_worker_is_asked_again_within_the_limit() -> None:
    only = ScriptedWorker("w1", always=Act(after=1, how="disconnect"))
    async with frontend(only, reroute_s=5.0, migration_limit=2) as kit:
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=12)
        assert events[-1]["error"]["code"] == "disconnected"
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 3))
        (fact,) = kit.said(RequestAbandoned)
        assert (fact.reason, len(only.requests)) == ("budget_exhausted", 3)


async def test_a_worker_out_of_service_is_not_asked_again_even_as_the_only_one() -> None:
    only = ScriptedWorker("w1", step_s=0.02)
    async with frontend(only, reroute_s=0.3) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=40))
        await until(lambda: answering(kit, only))
        only.drop()
        kit.health(only, HealthStatus.UNHEALTHY, 0.0)
        assert (await asking)[-1]["error"]["code"] == "disconnected"
        assert len(only.requests) == 1


async def test_workers_without_room_cost_no_budget() -> None:
    wait = Act(after=0, how="error", error="overloaded: 256 wait")
    full, last = [ScriptedWorker(f"w{n}", always=wait) for n in range(4)], ScriptedWorker("w9")
    async with frontend(*full, migration_limit=1) as kit:
        await kit.add(last)
        kit.director.table.endpoints[("w9", "i1")].begin(requests=50)
        text, _ = await kit.complete(PROMPT, 12)
        assert text == EXACT
        assert all(worker.requests for worker in full) and len(last.requests) == 1


async def test_a_worker_that_runs_out_of_room_mid_stream_costs_budget() -> None:
    first, other = failing("w1", "error", 5, error="overloaded"), ScriptedWorker("w2")
    async with frontend(migration_limit=0) as kit:
        await first_goes_to(kit, first, other)
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12)
        assert (status, body["error"]["code"], other.requests) == (503, "overloaded", [])


async def test_a_request_never_moves_across_revisions() -> None:
    first, other = failing("w1", "error"), ScriptedWorker("w2")
    async with frontend(first, reroute_s=0.2) as kit:
        kit.director.table.endpoints[("w1", "i1")].end()  # the first request goes to w1
        await kit.add(other, revision="r2")
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=12)
        assert (status, body["error"]["code"]) == (500, "engine_error")
        assert other.requests == []


async def test_one_stream_survives_two_failures() -> None:
    workers = [failing(f"w{n}", how) for n, how in enumerate(("disconnect", "error", "disconnect"))]
    async with frontend(*workers) as kit:
        good = ScriptedWorker("w9")
        await kit.add(good)
        kit.director.table.endpoints[("w9", "i1")].begin(requests=50)
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=18)
        assert text_of(events) == TOKENS.decode(undisturbed(PROMPT, 18))
        assert [fact.attempt for fact in kit.said(RequestMigrated)] == [2, 3, 4]


async def test_a_client_that_leaves_while_no_worker_can_continue() -> None:
    async with frontend(failing("w1", "silence"), reroute_s=5.0) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: kit.director.driver.waiting.parked)
        asking.cancel()
        await until(lambda: kit.said(RequestAbandoned))
        (fact,) = kit.said(RequestAbandoned)
        assert (fact.reason, fact.tokens) == ("cancelled", 5)
        assert not kit.director.driver.waiting.parked


async def test_an_unhealthy_worker_is_left_at_once_and_a_draining_one_waits() -> None:
    first, other = ScriptedWorker("w1", step_s=0.02), ScriptedWorker("w2", step_s=0.02)
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: first.active)
        kit.health(first, HealthStatus.DRAINING, 0.0)
        await kit.ticks()
        assert (first.active, other.active) == (1, 0)
        kit.health(first, HealthStatus.UNHEALTHY, 0.0)
        assert text_of(await asking) == EXACT
        (fact,) = kit.said(RequestMigrated)
        assert (fact.cause, fact.target) == ("unhealthy", "w2")
        await until(lambda: first.active == 0)


async def test_a_slow_worker_is_not_left_without_a_target() -> None:
    only = ScriptedWorker("w1", step_s=0.02)
    async with frontend(only) as kit:
        asking = asyncio.create_task(kit.stream(model="m", prompt=PROMPT, max_tokens=12))
        await until(lambda: only.active)
        kit.health(only, HealthStatus.UNHEALTHY, 0.0, "canaries: timeout")
        assert text_of(await asking) == EXACT


# --- state carried across the cut -------------------------------------------------------------------------


def bytes_of(text: str) -> list[int]:
    """Return one token per byte of a text: every character is cut."""
    return [next(i for i in range(3, 259) if TOKENS.bytes_of(i) == bytes([b])) for b in text.encode()]


def reciting(tokens: Sequence[int]) -> Any:
    """Return a `follow` that recites `tokens` after the prompt, on any worker."""
    return lambda sequence: tokens[len(sequence) - len(PROMPT)]


@pytest.mark.parametrize("cut", range(0, 12))
async def test_characters_survive_a_cut_inside_them(cut: int) -> None:
    text = "é😀ñ你b"
    tokens = bytes_of(text)
    first, other = failing("w1", "disconnect", cut), ScriptedWorker("w2")
    first.follow = other.follow = reciting(tokens)
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        events = await kit.stream(model="m", prompt=PROMPT, max_tokens=len(tokens))
        assert text_of(events) == text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", [1, 3, 5, 7])
async def test_a_stop_string_is_detected_across_the_cut(cut: int, stream: bool) -> None:
    tokens = bytes_of("abc STOP def")
    first, other = failing("w1", "disconnect", cut), ScriptedWorker("w2")
    first.follow = other.follow = reciting(tokens)
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        if stream:
            options = {"include_usage": True}
            events = await kit.stream(
                model="m", prompt=PROMPT, max_tokens=12, stop=["STOP"], stream_options=options
            )
            assert text_of(events) == "abc "
            assert events[-3]["choices"][0]["finish_reason"] == "stop"
            assert events[-2]["usage"]["completion_tokens"] == 8
        else:
            text, body = await kit.complete(PROMPT, 12, stop=["STOP"])
            assert (text, body["choices"][0]["finish_reason"]) == ("abc ", "stop")
            assert body["usage"]["completion_tokens"] == 8
        await until(lambda: other.active == 0)


async def test_logprobs_continue_across_the_cut() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        _, body = await kit.complete(PROMPT, 12, logprobs=2)
        shown = body["choices"][0]["logprobs"]
        assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == 12
        assert "".join(shown["tokens"]) == EXACT


# --- classification ---------------------------------------------------------------------------------------


def test_errors_are_classified_by_their_first_word() -> None:
    assert classify("engine_shutdown").reason == "engine_shutdown"
    assert classify("non_finite: layer 3").error.code == "non_finite"
    assert classify("what is this").reason == "engine_error"
