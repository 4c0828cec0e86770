"""The figures that the benchmark of moves derives from one stream."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.failures.moves import measured
from controller.demo.clients import Users
from events.observations import RequestMigrated


def moved(tokens: int) -> RequestMigrated:
    return RequestMigrated(
        frontend="f", request="r", model="m", source="w0", source_instance="w0-a", target="w1",
        target_instance="w1-a", cause="operator", method="transfer", tokens=tokens, gap_ms=9.0, attempt=2, exact=True,
    )  # fmt: skip


def test_the_pause_is_the_one_between_the_two_workers_and_not_a_longer_other_one() -> None:
    times = [
        0.0,
        0.003,
        0.006,
        0.016,
        0.020,
        0.029,
        0.032,
        0.072,
    ]  # four tokens of the source after the request
    move = measured(times, 0.007, moved(tokens=5))
    assert move.pause == pytest.approx(9)
    assert move.usual == pytest.approx(3)
    assert move.meanwhile == pytest.approx([10, 4])


async def test_a_token_without_text_is_recorded_when_every_token_is_requested() -> None:
    asked: list[object] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json()).get("logprobs"))
        events = [
            '{"text": "a", "logprobs": {"tokens": ["a"]}}',
            '{"text": "", "logprobs": {"tokens": ["?"]}}',
            '{"text": "", "logprobs": {"tokens": ["?"]}}',
            '{"text": "?", "logprobs": null, "finish_reason": "length"}',
        ]
        lines = [f'data: {{"choices": [{event}]}}\n\n' for event in events]
        text = "".join([*lines, "data: [DONE]\n\n"])
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    async with TestServer(app) as server:
        for every_token, pieces in ((False, ["a", "?"]), (True, ["a", "", "?"])):
            users = Users(str(server.make_url("/")), "m", [[1]], every_token=every_token)
            async with users.session() as session:
                got = await users.ask(session, 0, 2, "r")
            assert (got.pieces, len(got.times), got.done) == (pieces, len(pieces), True)
    assert asked == [None, 1]
