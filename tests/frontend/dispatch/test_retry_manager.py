"""The retry manager's guarantees, one by one, in the order of NVIDIA Dynamo's own tests.

Every attempt is checked for the same request id and for its input: the prompt, all accepted tokens, and exactly the remaining
`max_tokens`.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from frontend_kit import TOKENS, Kit, failing, first_goes_to, frontend, joined, text_of
from json_types import Json
from msgspec import structs
from scripted_worker import Act, ScriptedWorker, undisturbed
from waits import until

from controller.frontend.driver import RequestSink
from controller.frontend.errors import CODES
from controller.frontend.request.events import AttemptFailed, Judged, Launched, Resumed, Sent, Woken
from controller.frontend.request.failures import KINDS, PLANNED, Failure, Suspicion
from controller.frontend.request.state import AnswerProgress, RequestState, RequestTerms, refusal
from controller.frontend.request.step import step
from controller.ports import RequestPlane, Sink, WorkerUnreachable
from controller.router.endpoints import Server
from events.observations import MoveRequested, RequestAbandoned, RequestMigrated
from events.wire import Chunk, Generate

pytestmark = pytest.mark.usefixtures("both_roads")
PROMPT = [300, 301, 302]
COUNT = 12
SAID = undisturbed(PROMPT, COUNT)
EXACT = TOKENS.decode(SAID)
ENDED = "Stream ended before generation completed"
REFUSED = "the engine failed"


def broken(name: str, after: int) -> ScriptedWorker:
    """Return a worker that fails every request after this many tokens."""
    return ScriptedWorker(name, always=Act(after=after, how="error", error="engine_error: E"))


async def stream(kit: Kit, **more: object) -> list[Json]:
    """Request a streamed answer and return its events."""
    ask: Json = {"model": "m", "prompt": PROMPT, "max_tokens": COUNT, **more}
    return await kit.stream(**ask)


async def failed(kit: Kit, **more: object) -> tuple[int, Json]:
    """Request an answer that fails; return the status and the error."""
    body: Json = {"model": "m", "prompt": PROMPT, "max_tokens": COUNT, "stream": True} | more
    status, body, _ = await kit.post("/v1/completions", **body)
    return status, body["error"]


def check(requests: Sequence[Generate], begun: Sequence[int], wanted: int = COUNT) -> None:
    """Check the input of each attempt. `begun`: the number of accepted tokens that it received."""
    assert len({request.request for request in requests}) == 1
    assert [request.tokens for request in requests] == [PROMPT + undisturbed(PROMPT, n) for n in begun]
    assert [request.sampling.max_tokens for request in requests] == [wanted - n for n in begun]
    assert {request.prompt_tokens for request in requests} == {len(PROMPT)}


def failures(kit: Kit) -> dict[str, float]:
    """Return the counted failed attempts, by kind of migration."""
    found = kit.counted("dynamo_frontend_model_migration_total", "model", "migration_type")
    assert {model for model, _ in found} <= {"m"}
    return {kind: value for (_, kind), value in found.items()}


def breakers(kit: Kit) -> dict[tuple[str, ...], float]:
    """Return the number of migrations by outcome."""
    return kit.counted("dynamo_frontend_model_migration_duration_seconds_count", "migration_type", "outcome")


class BrokenConnections:
    """A request plane on which connections to some workers turn out to be broken when used."""

    def __init__(self, inner: RequestPlane) -> None:
        self._inner, self.broken = inner, set[str]()
        self.refused: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        if worker in self.broken:
            self.refused.append(worker)
            raise WorkerUnreachable("broken")
        return self._inner.open(worker, instance, request, sink)


# --- the unit tests, in Dynamo's order ----------------------------------------------------------------------------


async def test_no_failure() -> None:
    worker = ScriptedWorker("w1")
    async with frontend(worker) as kit:
        assert text_of(await stream(kit)) == EXACT
        check(worker.requests, [0])
        assert (failures(kit), breakers(kit), kit.said(RequestMigrated)) == ({}, {}, [])


async def test_the_first_dispatch_cannot_connect_and_the_next_succeeds() -> None:
    first, other = ScriptedWorker("w1"), ScriptedWorker("w2")
    async with frontend(
        between=BrokenConnections, migration_limit=0
    ) as kit:  # a failed connection costs no budget
        await first_goes_to(kit, first, other)
        plane = kit.world.plane
        assert isinstance(plane, BrokenConnections)
        plane.broken.add("w1")
        assert text_of(await stream(kit)) == EXACT
        assert (plane.refused, first.requests) == (["w1"], [])
        check(other.requests, [0])
        assert (failures(kit), breakers(kit)) == ({"new_request": 1}, {("new_request", "success"): 1})


async def test_the_first_dispatch_fails_and_the_next_succeeds() -> None:
    first, other = failing("w1", "error", 0, error="engine_shutdown"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        assert text_of(await stream(kit)) == EXACT
        check([*first.requests, *other.requests], [0, 0])
        assert (failures(kit), breakers(kit)) == ({"new_request": 1}, {("new_request", "success"): 1})


@pytest.mark.parametrize("k", [1, 5, 11])
async def test_a_stream_fails_after_k_tokens_and_the_next_succeeds(k: int) -> None:
    first, other = failing("w1", "disconnect", k), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        events = await stream(kit)
        pieces = [choice["text"] for event in events for choice in event.get("choices", ()) if choice["text"]]
        assert pieces == [TOKENS.decode([token]) for token in SAID]  # each once, in order
        check([*first.requests, *other.requests], [0, k])
        assert (failures(kit), breakers(kit)) == ({"ongoing_request": 1}, {("ongoing_request", "success"): 1})


async def test_a_stream_fails_and_no_dispatch_succeeds_after_it() -> None:
    """The client receives k tokens, then the error that ended the stream."""
    first, others = (
        failing("w1", "error", 5, error="engine_error: E"),
        [broken(f"w{n}", 0) for n in (2, 3, 4, 5)],
    )
    async with frontend(migration_limit=3) as kit:
        await first_goes_to(kit, first, others[0])
        for n, worker in enumerate(others[1:], 2):
            await kit.add(worker)
            kit.director.table.endpoints[(worker.name, "i1")].begin(requests=n)
        for worker in others:
            worker.always.error = "engine_shutdown"
        events = await stream(kit)
        assert (text_of(events), events[-1]["error"]["message"]) == (TOKENS.decode(SAID[:5]), REFUSED)
        attempts = [request for worker in [first, *others] for request in worker.requests]
        check(attempts, [0, 5, 5, 5])
        assert failures(kit) == {"ongoing_request": 1, "new_request": 3}
        assert breakers(kit) == {("ongoing_request", "failure"): 1}


async def test_a_stream_fails_and_every_next_one_fails_too() -> None:
    """The error is returned when the budget is spent: four attempts with a limit of three."""
    workers = [broken(f"w{n}", 2) for n in range(6)]
    async with frontend(*workers, migration_limit=3) as kit:
        events = await stream(kit)
        assert (text_of(events), events[-1]["error"]["message"]) == (TOKENS.decode(SAID[:8]), REFUSED)
        attempts = sorted((r for w in workers for r in w.requests), key=lambda r: len(r.tokens))
        check(attempts, [0, 2, 4, 6])
        assert failures(kit) == {"ongoing_request": 4}
        assert breakers(kit) == {("ongoing_request", "success"): 3, ("ongoing_request", "failure"): 1}
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["budget_exhausted"]


async def test_every_dispatch_fails() -> None:
    """Each fails with its own error: the same error twice is attributed to the request."""
    workers = [
        ScriptedWorker(f"w{n}", always=Act(after=0, how="error", error=f"engine_error: {word}"))
        for n, word in enumerate(("disk", "fan", "fuse", "bus", "rack", "host"))
    ]
    async with frontend(*workers, migration_limit=3) as kit:
        status, error = await failed(kit)
        assert status == 500 and error["message"] == "the engine failed"
        check([request for worker in workers for request in worker.requests], [0, 0, 0, 0])
        assert (failures(kit), breakers(kit)) == ({"new_request": 4}, {("new_request", "failure"): 1})


@pytest.mark.parametrize(("after", "kind"), [(0, "new_request"), (5, "ongoing_request")])
async def test_with_the_limit_0_a_failure_is_passed_on(after: int, kind: str) -> None:
    """It is counted anyway: the counter counts failures, whatever the budget."""
    first, other = failing("w1", "disconnect", after), ScriptedWorker("w2")
    async with frontend(migration_limit=0) as kit:
        await first_goes_to(kit, first, other)
        _, error = await failed(kit, stream=False)
        assert (error["message"], len(first.requests), other.requests) == (ENDED, 1, [])
        assert (failures(kit), breakers(kit)) == ({kind: 1}, {(kind, "failure"): 1})
        assert kit.counted("dynamo_frontend_model_migration_limit", "model") == {}  # a gauge at 0


async def test_guided_decoding_is_never_retried() -> None:
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await kit.add(first, engine="openai")
        await kit.add(other, engine="openai")
        kit.director.table.endpoints[("w2", "i1")].begin()
        events = await stream(kit, response_format={"type": "json_object"})
        assert (events[-1]["error"]["message"], other.requests) == (ENDED, [])
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["guided_decoding"]
        assert breakers(kit) == {("ongoing_request", "failure"): 1}


async def test_n_over_1_is_never_retried() -> None:
    first, other = ScriptedWorker("w1", always=Act(after=5, how="disconnect")), ScriptedWorker("w2")
    async with frontend() as kit:
        await kit.add(first)
        await kit.add(other)
        kit.director.table.endpoints[("w2", "i1")].begin(requests=50)
        events = await stream(kit, n=2)
        assert (events[-1]["error"]["message"], other.requests) == (ENDED, [])
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["n_over_1"]


@pytest.mark.parametrize(
    ("cap", "after", "moves"),
    [(3, 0, True), (2, 0, False), (8, 5, True), (7, 5, False), (1_000_000, 5, True)],
    ids=["prompt-at", "prompt-over", "decode-at", "decode-over", "far-from-it"],
)
async def test_max_seq_len_at_and_over_the_boundary(cap: int, after: int, moves: bool) -> None:
    first, other = failing("w1", "disconnect", after), ScriptedWorker("w2")
    async with frontend(migration_max_seq_len=cap) as kit:
        await first_goes_to(kit, first, other)
        status, body, _ = await kit.post("/v1/completions", model="m", prompt=PROMPT, max_tokens=COUNT)
        assert (status == 200, len(other.requests) == 1) == (moves, moves), body
        if not moves:
            assert body["error"]["message"] == ENDED
            assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["over_cap"]


@pytest.mark.parametrize(
    ("limit", "cap", "ask", "times"),
    [
        (3, 2, {}, 1),  # the prompt alone
        (3, 8, {}, 1),  # during the answer, although nothing fails
        (3, 15, {}, 0),  # exactly the whole answer
        (0, 2, {}, 0),  # it could not have moved anyway
        (3, 2, {"n": 2}, 0),
    ],
)
async def test_a_request_that_grows_too_long_is_counted_once(
    limit: int, cap: int, ask: Json, times: int
) -> None:
    async with frontend(ScriptedWorker(), migration_limit=limit, migration_max_seq_len=cap) as kit:
        assert text_of(await stream(kit, **ask)) == EXACT
        metric = "dynamo_frontend_model_migration_max_seq_len_exceeded_total"
        assert kit.counted(metric, "model") == ({("m",): times} if times else {})


async def test_stopped_before_the_next_stream_is_cancelled() -> None:
    first = failing("w1", "silence")
    async with frontend(first, reroute_s=5.0) as kit:
        asking = asyncio.create_task(stream(kit))
        await until(lambda: kit.director.driver.waiting.parked)  # no worker is there to continue it
        asking.cancel()
        await until(lambda: kit.said(RequestAbandoned))
        await kit.add(other := ScriptedWorker("w2"))
        assert (text_of(await stream(kit)), len(other.requests)) == (EXACT, 1)  # its own request only
        assert (failures(kit), breakers(kit)) == (
            {"ongoing_request": 1},
            {("ongoing_request", "cancelled"): 1},
        )


async def test_a_client_cannot_pin_a_worker_so_every_request_may_move() -> None:
    """Dynamo's `nvext` names workers; here it is an unknown field, which is accepted and ignored."""
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        assert text_of(await stream(kit, nvext={"backend_instance_id": 1, "decode_worker_id": 1})) == EXACT


@pytest.mark.parametrize(
    ("how", "error", "cause"),
    [
        ("stall", "", "stalled"),
        ("silence", "", "stalled"),
        ("error", "stream_incomplete: no finish reason", "engine_error"),
        ("error", "not_serving", "cannot_connect"),
        ("error", "overloaded", "overloaded"),
        ("error", "engine_shutdown: the worker leaves", "engine_shutdown"),
    ],
)
async def test_a_response_timeout_an_incomplete_stream_and_similar_failures_move(
    how: str, error: str, cause: str
) -> None:
    first, other = failing("w1", how, error=error), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        assert text_of(await stream(kit)) == EXACT
        check([*first.requests, *other.requests], [0, 5])
        assert [fact.cause for fact in kit.said(RequestMigrated)] == [cause]


async def test_a_blocking_reason_blocks_whatever_follows_it() -> None:
    """Errors are one word of a fixed list on the wire, translated at their source: there is no chain to search."""
    first = failing("w1", "error", 0, error="invalid_request: engine_shutdown: disconnected")
    async with frontend() as kit:
        await first_goes_to(kit, first, other := ScriptedWorker("w2"))
        status, error = await failed(kit)
        assert (status, error["code"], other.requests) == (400, "invalid_request", [])
        assert (failures(kit), kit.facts) == ({}, [])


@pytest.mark.parametrize("as_stream", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
async def test_text_held_back_as_the_start_of_a_stop_string_is_carried_over(k: int, as_stream: bool) -> None:
    """The tokens before the cut spell the start of a stop string; those after it spell the rest, or something else."""
    stop = TOKENS.decode(SAID[:4])
    for last, expected in ((stop, ""), (stop[:-1] + "\x07", EXACT)):
        first, other = failing("w1", "disconnect", k), ScriptedWorker("w2")
        async with frontend() as kit:
            await first_goes_to(kit, first, other)
            if as_stream:
                text = text_of(await stream(kit, stop=[last]))
            else:
                text, _ = await kit.complete(PROMPT, COUNT, stop=[last])
            assert text == expected


# --- the corrections of the seeds, by number -------------------------------------------------------------------------


async def test_b31_if_an_engine_cannot_send_its_kv_cache_only_the_tokens_are_replayed() -> None:
    source, other = ScriptedWorker("w1", step_s=0.01), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, source, other)  # neither registers `kv`
        asking = asyncio.create_task(stream(kit))
        await until(lambda: any(g.state.has_output for g in kit.running("w1")))
        kit.tell(MoveRequested(worker="w1", instance="i1", by="test"))
        assert text_of(await asyncio.wait_for(asking, 20)) == EXACT
        (fact,) = kit.said(RequestMigrated)
        assert (fact.method, fact.bytes, fact.refused) == (
            "reprefill",
            0,
            "its KV cache cannot be sent there",
        )
        check([*source.requests, *other.requests], [0, fact.tokens])


async def test_a_request_moved_on_purpose_that_finds_no_worker_ends_with_an_error() -> None:
    source, other = ScriptedWorker("w1", step_s=0.01), ScriptedWorker("w2")
    async with frontend(between=BrokenConnections, reroute_s=0.2) as kit:
        await first_goes_to(kit, source, other)
        asking = asyncio.create_task(stream(kit, max_tokens=400))
        await until(lambda: any(g.state.has_output for g in kit.running("w1")))
        plane = kit.world.plane
        assert isinstance(plane, BrokenConnections)
        plane.broken |= {"w1", "w2"}  # no worker is reachable from now on
        kit.tell(MoveRequested(worker="w1", instance="i1", by="test"))
        events = await asyncio.wait_for(asking, 20)
        assert events[-1]["error"]["code"] == "no_worker"
        assert [fact.reason for fact in kit.said(RequestAbandoned)] == ["no_worker"]


def test_every_reason_to_move_has_an_error_for_a_client_without_a_worker() -> None:
    assert {Failure(reason, "").error.code for reason in [*KINDS, *PLANNED]} <= CODES


async def test_b32_a_continuation_is_sampled_like_the_beginning() -> None:
    ask = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 7, "stop": ["never generated"], "stop_token_ids": [2],
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.25, "logprobs": 2,
    }  # fmt: skip
    first, other = failing("w1", "disconnect"), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        _, body = await kit.complete(PROMPT, COUNT, **ask)
        (before,), (after,) = first.requests, other.requests
        assert (before.sampling.seed, before.sampling.repetition_penalty) == (7, 1.25)
        assert structs.replace(after.sampling, max_tokens=COUNT) == before.sampling
        assert after.sampling.max_tokens == COUNT - 5
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), COUNT)


@pytest.mark.parametrize(
    "ask", [{"vllm_xargs": {"a": 1}}, {"tools": [{"type": "function"}]}, {"tool_choice": "required"}]
)
async def test_b32_fields_that_no_continuation_could_carry_are_refused_by_name(ask: Json) -> None:
    async with frontend(ScriptedWorker()) as kit:
        messages = [{"role": "user", "content": "hello"}]
        status, body, _ = await kit.post("/v1/chat/completions", model="m", messages=messages, **ask)
        assert (status, body["error"]["param"]) == (400, next(iter(ask)))


async def test_b33_token_ids_are_replayed_although_their_text_would_be_tokenized_differently() -> None:
    said = [next(i for i in range(3, 259) if TOKENS.bytes_of(i) == bytes([b])) for b in b"hello, world"]
    assert TOKENS.encode("hello", special=False) != said[:5]
    first, other = failing("w1", "disconnect", 5), ScriptedWorker("w2")
    first.follow = other.follow = lambda tokens: said[len(tokens) - len(PROMPT)]
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        assert text_of(await stream(kit)) == "hello, world"
        (after,) = other.requests
        assert after.tokens == PROMPT + said[:5]
        assert [fact.exact for fact in kit.said(RequestMigrated)] == [True]


# --- the rules behind them ----------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_both_kinds_of_failure_share_one_budget() -> None:
    """Limit 3: at most four dispatches, whatever the mix."""
    first = failing("w1", "error", 0, error="engine_error: disk")
    second = failing("w2", "error", 4, error="engine_error: fan")
    third = failing("w3", "error", 0, error="engine_error: fuse")
    others = [third, failing("w4", "error", 3, error="engine_error: bus"), ScriptedWorker("w5")]
    async with frontend(migration_limit=3) as kit:
        for n, worker in enumerate([first, second, *others]):
            await kit.add(worker)
            kit.director.table.endpoints[(worker.name, "i1")].begin(requests=n)
        events = await stream(kit)
        assert (text_of(events), "error" in events[-1]) == (TOKENS.decode(SAID[:7]), True)
        check([r for w in (first, second, *others) for r in w.requests], [0, 0, 4, 4])
        assert failures(kit) == {"new_request": 2, "ongoing_request": 2}
        assert breakers(kit) == {
            ("new_request", "success"): 1,
            ("ongoing_request", "success"): 1,
            ("ongoing_request", "failure"): 1,
        }


def test_the_largest_limit_does_not_overflow() -> None:
    state = RequestState(RequestTerms(migration_limit=2**32 - 1), 0.0, spent=2**32 - 1)
    assert refusal(state, AnswerProgress(1)) == ""
    assert refusal(structs.replace(state, spent=2**32), AnswerProgress(1)) == "budget_exhausted"


def test_a_workers_first_refusal_is_free_and_its_next_is_not() -> None:
    """A worker that cannot be connected to is asked again if no other is left, but not forever."""
    state = RequestState(RequestTerms(migration_limit=9), 0.0)
    for spent in (0, 1, 2):
        state, _ = step(state, Launched() if state.phase == "new" else Resumed(), 0.0)
        state, _ = step(state, Sent(Server(("w1", "i1"))), 0.0)
        failed = AttemptFailed(Failure("cannot_connect", ""), AnswerProgress())
        state, _ = step(state, failed, 0.0)
        assert state.spent == spent
        state, _ = step(state, Judged(Suspicion.NONE), 0.0)
        state, _ = step(state, Woken(), 10.0)


async def test_the_effective_limit_of_a_model_is_exposed() -> None:
    async with frontend(migration_limit=5) as kit:
        await kit.add(ScriptedWorker("w1"))
        assert kit.counted("dynamo_frontend_model_migration_limit", "model") == {("m",): 5}
        await kit.add(ScriptedWorker("w2"), migration_limit=2)
        assert kit.counted("dynamo_frontend_model_migration_limit", "model") == {("m",): 2}


async def test_max_tokens_and_min_tokens_fall_to_zero_and_not_below() -> None:
    first, other = failing("w1", "disconnect", 5), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        await stream(kit, min_tokens=3)
        assert [r.sampling.min_tokens for r in (*first.requests, *other.requests)] == [3, 0]


@pytest.mark.parametrize("after", [0, 5])
async def test_the_clients_wait_is_reported_and_measured(after: int) -> None:
    """From its last token before the failure to the next one; from the failure if there was none."""
    first, other = failing("w1", "error", after), ScriptedWorker("w2", step_s=0.1)
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        began = time.monotonic()
        await stream(kit, max_tokens=after + 1)
        waited_s = time.monotonic() - began
        (fact,) = kit.said(RequestMigrated)
        metric = "dynamo_frontend_model_migration_duration_seconds_sum"
        for gap_s in (fact.gap_ms / 1000, *kit.counted(metric, "outcome").values()):
            assert 0.09 <= gap_s <= waited_s


async def test_with_no_token_left_the_answer_is_complete() -> None:
    """Only the final frame was missing: no other worker is asked, and the failure is recovered at once."""
    first, other = failing("w1", "disconnect", COUNT), ScriptedWorker("w2")
    async with frontend(migration_limit=0) as kit:
        await first_goes_to(kit, first, other)
        events = await stream(kit)
        assert (text_of(events), events[-1], other.requests) == (EXACT, {"done": True}, [])
        assert (failures(kit), breakers(kit)) == ({"ongoing_request": 1}, {("ongoing_request", "success"): 1})


async def test_the_slot_of_a_failed_attempt_is_released_before_the_next_dispatch() -> None:
    first, booked = failing("w1", "error"), list[tuple[float, float, int]]()

    def follow(tokens: Sequence[int]) -> int:
        endpoint = kit.director.table.endpoints[("w1", "i1")]
        booked.append((endpoint.active, endpoint.tokens, len(kit.director.running.at(endpoint))))
        return SAID[len(tokens) - len(PROMPT)]

    async with frontend() as kit:
        await first_goes_to(kit, first, ScriptedWorker("w2", follow=follow))
        assert text_of(await stream(kit)) == EXACT
        assert set(booked) == {(0, 0, 0)}


async def test_a_worker_that_failed_a_request_is_excluded_for_that_request_only() -> None:
    first, other = failing("w1", "error"), failing("w2", "error", after=2)
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        events = await stream(kit)
        assert ("error" in events[-1], len(first.requests), len(other.requests)) == (True, 1, 1)
        kit.director.table.endpoints[("w2", "i1")].begin(requests=50)
        assert text_of(await stream(kit)) == EXACT
        assert len(first.requests) == 2


async def test_streams_of_a_life_that_has_ended_for_the_fleet_move() -> None:
    """The next life registers while the connection to the previous one still stands: its streams are sent elsewhere."""
    first, other = failing("w1", "stall", hold=asyncio.Event()), ScriptedWorker("w2")
    async with frontend() as kit:
        await first_goes_to(kit, first, other)
        asking = asyncio.create_task(stream(kit))
        await until(lambda: any(g.accepted for g in kit.running("w1")))
        kit.tell(joined(ScriptedWorker("w1", instance="i2", port=9)))
        assert text_of(await asyncio.wait_for(asking, 20)) == EXACT
        assert [fact.cause for fact in kit.said(RequestMigrated)] == ["disconnected"]


async def test_output_after_the_end_is_ignored() -> None:
    """Output of an engine after its finish or its error is dropped."""
    first = ScriptedWorker("w1", step_s=0.01)
    async with frontend(first) as kit:
        asking = asyncio.create_task(stream(kit))
        await until(lambda: any(g.accepted for g in kit.running("w1")))
        (live,) = kit.running("w1")
        assert isinstance(live, RequestSink) and live.dispatch is not None
        number = live.dispatch.stream
        live.take(Chunk(stream=number, tokens=[], finish="stop"))
        made = len(live.accepted)
        live.take(Chunk(stream=number, tokens=[300]))
        live.take(Chunk(stream=number, tokens=[], error="engine_error"))
        live.lost("disconnected", "")
        assert text_of(await asyncio.wait_for(asking, 20)) == TOKENS.decode(SAID[:made])
        assert (len(live.accepted), failures(kit)) == (made, {})


# --- the matrix of the end-to-end tests -----------------------------------------------------------------------------


def asked(chat: bool) -> tuple[str, Json]:
    if chat:
        return "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return "/v1/completions", {"model": "m", "prompt": PROMPT}


def content(choice: Json) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@pytest.mark.slow
@pytest.mark.parametrize("as_stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
@pytest.mark.parametrize("end", ["killed", "graceful"])
@pytest.mark.parametrize("cap", [None, 1_000_000, 1])
@pytest.mark.parametrize("limit", [3, 0])
async def test_the_matrix(limit: int, cap: int | None, end: str, chat: bool, as_stream: bool) -> None:
    """With limit 0, or above the length cap, a request fails with its worker; otherwise its client notices nothing."""
    how = (
        {"how": "disconnect"}
        if end == "killed"
        else {"how": "error", "error": "engine_shutdown: the worker leaves"}
    )
    goes_on = asyncio.Event()
    first, other = failing("w1", after=5, hold=goes_on, **how), ScriptedWorker("w2")
    path, body = asked(chat)
    survives = limit > 0 and cap != 1
    async with frontend(migration_limit=limit, migration_max_seq_len=cap) as kit:
        await first_goes_to(kit, first, other)
        ask = kit.stream if as_stream else kit.post
        asking: asyncio.Task[Any] = asyncio.create_task(ask(path, max_tokens=COUNT, **body))
        await until(lambda: any(one.stats.counted == 5 for one in kit.running("w1")))
        goes_on.set()  # the client has the beginning when the failure occurs
        if as_stream:
            events = await asking
            text, error = text_of(events), events[-1].get("error")
        else:
            status, answer, _ = await asking
            text, error = (content(answer["choices"][0]), None) if status == 200 else ("", answer["error"])
        whole = undisturbed(first.requests[0].tokens, COUNT)
        if survives:
            assert (text, error) == (TOKENS.decode(whole), None)
        else:
            assert error["code"] == ("disconnected" if end == "killed" else "engine_shutdown")
            assert text == (TOKENS.decode(whole[:5]) if as_stream else "")
        assert len(other.requests) == survives
        assert failures(kit) == {"ongoing_request": 1}
        assert breakers(kit) == {("ongoing_request", "success" if survives else "failure"): 1}
        over = kit.counted("dynamo_frontend_model_migration_max_seq_len_exceeded_total", "model")
        assert over == ({("m",): 1} if limit and cap == 1 else {})
