"""A stream moves from one worker to another with its KV cache, and its tokens stay the same."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_contract import prompt
from faults import Watched
from move_kit import COUNT, Cancel, Committed, Declined, End, Road, road, simulated
from playing import Playing
from prometheus_client import CollectorRegistry, generate_latest

from events.wire import Stay
from workers.admin.server import WorkerMetrics
from workers.engines.engine import MoveEnded
from workers.engines.simulated.sequence import EngineShape
from workers.shutdown import DRAINING, drain, shut_down


async def test_a_moved_stream_has_the_same_tokens_as_an_undisturbed_one(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        committed = await way.moved(move)
        assert await way.rest(move) == await way.undisturbed(move)
        assert committed.blocks == committed.bytes // 4096 > 12  # 100 tokens: blocks of two ranks
        assert committed.link == "shm" and 0 < committed.stopped_ms < 1000
        await way.is_empty()
        ours, theirs = way.source.server.counters, way.target.server.counters
        assert ours.moves == {("out", "committed"): 1} and theirs.moves == {("in", "committed"): 1}
        assert ours.moved_bytes == {"out": committed.bytes} and theirs.moved_bytes == {"in": committed.bytes}
        assert (ours.cancelled, ours.completed, theirs.requests, theirs.completed) == (0, 0, 1, 1)
        page = metrics(way.target)
        assert (
            'holdfast_worker_moves_total{direction="in",model="sim",outcome="committed",worker_id="w"} 1.0'
            in page
        )
        assert (
            'holdfast_worker_moves_total{direction="out",model="sim",outcome="failed",worker_id="w"} 0.0'
            in page
        )
        assert 'holdfast_worker_move_stopped_seconds_count{model="sim",worker_id="w"} 1.0' in page
        assert f'moved_bytes_total{{direction="in",model="sim",worker_id="w"}} {committed.bytes}.0' in page


def metrics(end: End) -> str:
    """Return the worker's metrics as /metrics renders them."""
    worker: Any = SimpleNamespace(
        config=SimpleNamespace(name="w"), engine=end.engine, server=end.server, kv=None
    )
    registry = CollectorRegistry()
    registry.register(WorkerMetrics([worker]))
    return generate_latest(registry).decode()


async def test_blocks_of_a_cached_prefix_are_not_transferred(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin(length=200)
        warm = way.target.frontend.ask(move.tokens, max_tokens=1)
        await way.target.frontend.answer(warm)
        reserved = await way.reserve(move)
        assert reserved.cached_tokens == 192
        way.ship(move)
        committed = await way.target.wait_for(Committed, move.there)
        length = 200 + len(move.accepted) + len(committed.tokens)
        assert committed.blocks == 2 * (-(-(length - 1) // 16) - 12)
        assert await way.rest(move) == await way.undisturbed(move)
        await way.is_empty()


async def test_a_long_stream_is_sent_in_pieces(tmp_path: Path) -> None:
    async with road(tmp_path, piece_bytes=3 * 4096, take_bytes=5 * 4096) as way:
        move = await way.begin(length=1000)
        await way.moved(move)
        assert await way.rest(move) == await way.undisturbed(move)
        await way.is_empty()


async def test_several_streams_move_at_once_while_others_decode(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        moves = [await way.begin(length=50 + 90 * n, salt=n) for n in range(4)]
        stays = await way.begin(salt=9)
        await asyncio.gather(*(way.moved(move) for move in moves))
        for move, tokens in zip(
            moves, await asyncio.gather(*(way.rest(move) for move in moves)), strict=True
        ):
            assert tokens == await way.undisturbed(move)
        await way.stays(stays)
        await way.is_empty()


async def test_a_stream_moves_there_and_back(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        committed = await way.moved(move)
        way.source.frontend.say(Cancel(move.stream))
        tokens = move.accepted + committed.tokens
        back = Road(way.target, way.source, way.root)
        again = await way.begin(salt=5)  # a different prompt, so that stream numbers differ
        there, frontend = move.there, way.target.frontend
        await frontend.until(lambda: len(frontend.tokens(there)) > 20)
        turned = type(move)(move.tokens + tokens, there, {**move.sampling, "max_tokens": COUNT - len(tokens)})
        turned.accepted = frontend.tokens(there)
        await back.reserve(turned, request=f"r{move.stream}", prompt_tokens=len(move.tokens))
        back.ship(turned)
        assert tokens + await back.rest(turned) == await way.undisturbed(move)
        await way.stays(again)
        await way.is_empty()


async def test_a_target_without_room_declines_before_a_byte_moves(tmp_path: Path) -> None:
    small = EngineShape(context_tokens=512, kv_blocks=32, tp=2)
    async with road(tmp_path, target=lambda: simulated(small)) as way:
        other = way.target.frontend.ask(prompt(salt=4), max_tokens=400)
        await way.target.frontend.until(lambda: way.target.frontend.tokens(other))
        move = await way.begin(length=300)
        declined = await way.target.wait_for(Declined, way.ask_for_room(move))
        assert "KV blocks are in use" in declined.reason
        assert way.target.server.moves.landing.receiver is None and not list(tmp_path.iterdir())
        assert way.target.server.counters.moves == {("in", "declined"): 1}
        await way.stays(move)
        await way.target.frontend.answer(other)
        await way.is_empty()


@pytest.mark.parametrize("when", ["reserved", "shipping", "committed"])
async def test_a_stream_that_gets_stay_continues_at_its_source(tmp_path: Path, when: str) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        if when != "reserved":
            way.ship(move)
        if when == "committed":
            await way.target.wait_for(Committed, move.there)
        way.source.frontend.say(Stay(move.stream))
        way.target.frontend.say(Cancel(move.there))
        await way.stays(move)
        await way.is_empty()
        assert way.source.frame_of(Declined, move.stream) is None


@pytest.mark.parametrize("how", ["drain", "depart"])
async def test_a_drain_waits_for_streams_that_move_and_counts_them(tmp_path: Path, how: str) -> None:
    async with road(tmp_path) as way:
        move, server = await way.begin(), way.source.server
        if how == "drain":
            draining = asyncio.ensure_future(drain(server, DRAINING, 20.0))
        else:
            left = shut_down(server, 20.0, graceful=True, hurried=asyncio.Event())
            draining = asyncio.ensure_future(left)
        await way.moved(move)
        assert await way.rest(move) == await way.undisturbed(move)
        drained = await draining
        assert (drained.completed, drained.migrated) == (0, 1)


async def test_a_worker_that_does_not_wait_for_streams_lets_moving_streams_finish_their_move(
    tmp_path: Path,
) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        moves, stays = await way.begin(), await way.begin(salt=2)
        sent_on = asyncio.Event()

        async def leave() -> None:
            way.source.server.output.send_elsewhere("engine_shutdown: it need not wait")
            sent_on.set()

        way.source.engine.at["stop"] = leave
        await way.moved(moves)
        assert sent_on.is_set()
        ended = way.source.frontend.end
        await way.source.frontend.until(lambda: ended(stays.stream))
        assert await way.rest(moves) == await way.undisturbed(moves)
        assert ended(moves.stream) is None
        await way.is_empty()


async def test_frontends_get_a_moment_to_move_the_streams_of_a_worker_that_does_not_wait(
    tmp_path: Path,
) -> None:
    async with road(tmp_path) as way:
        move, server = await way.begin(), way.source.server
        leaving = asyncio.ensure_future(shut_down(server, 20.0, graceful=False, hurried=asyncio.Event()))
        frontend = way.source.frontend
        await frontend.until(lambda: frontend.beats and frontend.beats[-1].draining)
        assert frontend.end(move.stream) is None, "it learns that the worker leaves before its streams end"
        await frontend.until(lambda: frontend.end(move.stream))
        end = frontend.end(move.stream)
        assert end is not None and "does not wait" in (end.error or "")
        drained = await leaving
        assert (drained.completed, drained.migrated) == (0, 1)


async def test_a_stream_that_cannot_leave_a_worker_that_does_not_wait_is_sent_on(tmp_path: Path) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()

        async def leave() -> None:
            way.source.server.output.send_elsewhere("engine_shutdown: it need not wait")
            raise MoveEnded("it was preempted")

        way.source.engine.at["stop"] = leave
        await way.reserve(move)
        way.ship(move)
        await way.source.frontend.until(lambda: way.source.frontend.end(move.stream))
        end = way.source.frontend.end(move.stream)
        assert end is not None and "need not wait" in (end.error or "")
        way.target.frontend.say(Cancel(move.there))
        await way.is_empty()


async def test_a_transport_that_both_workers_have_carries_the_blocks(tmp_path: Path) -> None:
    playing = Playing()
    async with road(tmp_path, transport=lambda: playing) as way:
        move = await way.begin()
        assert (await way.moved(move)).link == "playing"
        assert await way.rest(move) == await way.undisturbed(move)
        await way.is_empty()
        assert not playing.offered and not playing.open
