"""A replay against a real server: what it sends, when, and what it reports of the answers."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

import pytest
from scripted import Scripted, serving

from controller.trace.replay import request_bodies
from controller.trace.replay.driver import Limits, Replay
from controller.trace.replay.endpoint import BadEndpoint, ReplayTarget
from controller.trace.replay.measures import AnswerSlo, ReplayMeasures
from controller.trace.replay.plan import PlannedRequest, ReplayShape, plan
from controller.trace.rows import TraceRow

LATE_S = 2.0  # allowance for a busy machine
SHORT = [TraceRow(0, 8, 3, [])] * 20


async def replayed(
    server: Scripted,
    rows: Iterable[TraceRow],
    stop_after_s: float | None = None,
    *,
    chat: bool = False,
    **limits: Any,
) -> ReplayMeasures:
    """Replay against a server, and return the measurements."""
    target, measures = ReplayTarget(server.url), ReplayMeasures(AnswerSlo())
    try:
        worded = await request_bodies.find(target, str((await target.model(""))["id"]), chat=chat)
        replay = Replay(target, worded, plan(rows, 16, ReplayShape()), measures, Limits(**limits))
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        async with asyncio.timeout(60):
            await replay.run(stop)
    finally:
        await target.close()
    return measures


async def test_every_request_is_sent_once_at_its_time_with_its_tokens() -> None:
    rows = [TraceRow(50 * n, 40, 3 + n % 3, [0, 1, 10 + n]) for n in range(12)]
    with serving(cached=32) as server:
        before = time.perf_counter()
        measures = await replayed(server, rows)
    assert len({asked.name for asked in server.asked}) == 12
    asked = sorted(server.asked, key=lambda one: one.at)
    assert all(one.at - before > 0.05 * n - 0.002 for n, one in enumerate(asked))
    assert asked[-1].at - asked[0].at < 0.55 + LATE_S
    prompts = [one.body["prompt"] for one in asked]
    assert {len(prompt) for prompt in prompts} == {40} and len(
        {tuple(prompt[:32]) for prompt in prompts}
    ) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 12
    assert (measures.sent, measures.whole, measures.failed, measures.shorter) == (12, 12, 0, 0)
    assert measures.tokens.output == sum(row.output_length for row in rows) == measures.tokens.events
    assert (measures.tokens.input, measures.tokens.cached, measures.ttft.count) == (480, 384, 12)
    assert measures.generator.late.count == 12 and measures.generator.held.count == 0


async def test_token_times_are_those_of_the_server() -> None:
    with serving(ttft_s=0.1, itl_s=0.1) as server:
        measures = await replayed(server, [TraceRow(0, 8, 5, [])] * 4)
    assert measures.ttft.min >= 0.1 and measures.ttft.percentiles(0.5)[0] < 0.1 + LATE_S
    assert measures.itl.count == 16 and 0.05 <= measures.itl.percentiles(0.5)[0] < 0.1 + LATE_S
    assert measures.tpot.max >= 0.05 and measures.e2e.min >= 0.5


async def test_each_kind_of_failure_is_counted_and_other_requests_continue() -> None:
    faults = {2: "503", 4: "broke", 6: "error", 8: "hang", 10: "json", 12: "silent"}
    with serving(faults=faults, itl_s=0.001) as server:
        measures = await replayed(server, SHORT, timeout_s=3.0)
    assert measures.errors == {
        "HTTP 503 queue_full": 1, "broke off": 1, "error event disconnected": 1, "timeout": 1, "incomplete": 2,
    }  # fmt: skip
    assert measures.samples["error event disconnected"] == "no worker is left"
    assert (measures.sent, measures.whole, measures.failed, measures.in_flight) == (20, 14, 6, 0)


async def test_concurrency_is_limited_and_holding_back_is_not_lateness() -> None:
    with serving(ttft_s=0.3) as server:
        measures = await replayed(server, [TraceRow(0, 8, 3, [])] * 9, concurrency=3)
    assert server.in_flight_max == 3 == measures.in_flight_max
    assert measures.whole == 9 and measures.generator.held.count == 6
    assert measures.generator.held.max >= 0.6
    assert measures.generator.late.percentiles(0.5)[0] < 0.3


async def test_after_its_seconds_sending_stops_and_answers_are_awaited() -> None:
    with serving(ttft_s=0.3) as server:
        measures = await replayed(
            server, [TraceRow(at, 8, 3, []) for at in (0, 10, 20, 3_000, 3_010)], seconds=1.5
        )
    assert (measures.sent, measures.whole) == (3, 3)
    with serving(faults={1: "hang"}) as server:  # also while requests are held back
        began = time.perf_counter()
        measures = await replayed(server, SHORT, concurrency=1, seconds=0.2, timeout_s=0.5)
    assert measures.sent == 1 and time.perf_counter() - began < 5 + LATE_S


async def test_a_stopped_replay_cancels_requests_in_flight() -> None:
    with serving(faults={2: "hang"}) as server:
        measures = await replayed(
            server, [TraceRow(0, 8, 3, []), TraceRow(0, 8, 3, []), TraceRow(60_000, 8, 3, [])], 1.5
        )
    assert (measures.sent, measures.whole, measures.cut, measures.failed) == (2, 1, 1, 0)
    assert 0.5 < measures.seconds < 10


async def test_a_plan_that_fails_ends_it() -> None:
    def bad() -> Any:
        yield from plan(SHORT[:2], 16, ReplayShape())
        raise BadEndpoint("the file is gone")

    with serving() as server:
        target = ReplayTarget(server.url)
        worded = await request_bodies.find(target, "m", chat=False)
        replay = Replay(target, worded, bad(), ReplayMeasures(AnswerSlo()), Limits())
        with pytest.raises(BadEndpoint, match="the file is gone"):
            await replay.run(asyncio.Event())
        await target.close()


async def test_a_text_only_server_gets_words_for_the_same_number_of_tokens() -> None:
    blocks, tokens = 120, 1920
    rows = [TraceRow(0, tokens, 3, [*range(blocks - 1), last]) for last in (900, 901)]
    for told, chat in (({"text_only": True, "strict": True}, False), ({}, True)):
        with serving(**told) as server:
            measures = await replayed(server, rows, chat=chat)
        assert measures.whole == 2 and measures.tokens.input / 2 - 7 * chat == pytest.approx(tokens, rel=0.02)
        asked = [one.body for one in server.asked]
        one, two = (str(body["messages"][0]["content"] if chat else body["prompt"]).split() for body in asked)
        shared = len(one) * (blocks - 1) // blocks
        assert len(one) == len(two) < tokens and one[:shared] == two[:shared] and one != two
        assert {"ignore_eos" in body for body in asked} == {chat}
        assert {one.path for one in server.asked} == {"/v1/chat/completions" if chat else "/v1/completions"}


async def test_answers_that_end_early_are_counted() -> None:
    with serving(tokens_max=4) as server:
        measures = await replayed(server, [TraceRow(0, 8, 3, []), TraceRow(0, 8, 9, [])])
    assert (measures.whole, measures.shorter) == (2, 1)


async def test_requests_are_sent_in_time_even_if_each_turn_of_the_loop_is_long() -> None:
    """A loop with much to read returns to its sender after many milliseconds: it must then send all that is due."""

    def block() -> None:
        time.sleep(0.03)  # the length of a turn, which is what is tested
        if not over:
            asyncio.get_running_loop().call_soon(block)

    over: list[bool] = []
    with serving() as server:
        asyncio.get_running_loop().call_later(0.3, block)
        asyncio.get_running_loop().call_later(4, over.append, True)
        measures = await replayed(server, [TraceRow(2 * n, 8, 3, []) for n in range(200)])
        over.append(True)
    assert measures.generator.late.percentiles(0.9)[0] < 2.0 and measures.whole == 200


async def test_late_sending_does_not_lengthen_measured_times() -> None:
    def rows() -> Any:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 2.0)
        yield TraceRow(0, 8, 3, [])
        yield from [TraceRow(500, 8, 3, [])] * 9

    with serving() as server:
        measures = await replayed(server, rows())
    late_s, ttft_s = measures.generator.late.percentiles(0.5)[0], measures.ttft.percentiles(0.5)[0]
    assert late_s > 1.0 and late_s > ttft_s


async def test_a_burst_is_sent_at_once() -> None:
    def planned() -> Any:
        for _ in range(300):
            yield from plan([TraceRow(0, 2000, 3, list(range(4)))], 512, ReplayShape())

    with serving(ttft_s=0.2) as server:
        target, measures = ReplayTarget(server.url), ReplayMeasures(AnswerSlo())
        worded = await request_bodies.find(target, "m", chat=False)
        burst: Iterable[PlannedRequest] = planned()
        await Replay(target, worded, iter(burst), measures, Limits()).run(asyncio.Event())
        await target.close()
    assert measures.whole == 300 and measures.in_flight_max > 100
