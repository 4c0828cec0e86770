"""Planned moves that fail at any point, on either side: the stream continues and nothing is left."""

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from faults import POINTS, SOURCE_POINTS, Watched, line, over_tcp
from hypothesis import given, settings
from hypothesis import strategies as st
from move_kit import COUNT, STEP_S, Cancel, Committed, Declined, Move, Road, road
from plain_frontend import DEADLINE_S
from waits import turns, until

from events.wire import Ship, Stay
from workers.engines.engine import MoveEnded, MoveRefused
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import Grant

Act = Callable[[Road, Move], Awaitable[None]]


async def stay(way: Road, move: Move) -> None:
    way.source.frontend.say(Stay(move.stream))
    way.target.frontend.say(Cancel(move.there))
    await until(lambda: not len(way.source.server.moves.source))


async def give_up_there(way: Road, move: Move) -> None:
    way.target.frontend.say(Cancel(move.there))
    await until(lambda: all(one.why for one in way.target.server.moves.target.incoming.values()))


async def engine_raises(way: Road, move: Move) -> None:
    raise RuntimeError("an unexpected error")


async def engine_refuses(way: Road, move: Move) -> None:
    raise MoveRefused("not like this")


async def engine_has_ended(way: Road, move: Move) -> None:
    raise MoveEnded("it was preempted")


async def distrust(way: Road, move: Move) -> None:
    way.source.server.output.distrust("corrupt", "a canary has convicted this worker")


async def drain_there(way: Road, move: Move) -> None:
    from workers.shutdown import DRAINING

    way.target.server.refuse(DRAINING)


KEEPS: dict[str, Act] = {
    "stay": stay,
    "cancel at the target": give_up_there,
    "the engine raises": engine_raises,
    "the engine refuses": engine_refuses,
    "the engine has lost it": engine_has_ended,
    "the source is convicted": distrust,
    "the target drains": drain_there,
}


async def cancel_here(way: Road, move: Move) -> None:
    way.source.frontend.say(Cancel(move.stream))
    await until(lambda: not way.source.server.in_flight)


async def lose_source(way: Road, move: Move) -> None:
    way.source.frontend.transport.abort()
    await until(lambda: not way.source.server.in_flight)


async def lose_target(way: Road, move: Move) -> None:
    way.target.frontend.transport.abort()
    await until(lambda: not way.target.server.connections.any_greeted)


async def lose_both(way: Road, move: Move) -> None:
    await lose_source(way, move)
    await lose_target(way, move)


def watch(way: Road, point: str, move: Move, act: Act) -> asyncio.Event:
    """Run `act` at a point of the move; return a flag that is set afterwards."""
    happened = asyncio.Event()

    async def happen() -> None:
        happened.set()
        await act(way, move)

    end = way.source if point in SOURCE_POINTS else way.target
    end.engine.at[point] = happen
    return happened


@pytest.mark.slow
@pytest.mark.parametrize("act", KEEPS)
@pytest.mark.parametrize("point", POINTS)
async def test_the_stream_stays_at_its_source_after_a_failure(tmp_path: Path, point: str, act: str) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        happened = watch(way, point, move, KEEPS[act])
        await way.reserve(move)
        way.ship(move)
        async with asyncio.timeout(DEADLINE_S):
            await happened.wait()
        declined = way.source if point in SOURCE_POINTS else way.target
        if act != "stay" and not (act == "cancel at the target" and declined is way.target):
            await settled(way, move)
        await finish_here(way, move)
        await way.stays(move)
        await way.is_empty()


async def test_a_stream_cancelled_during_its_commit_does_not_decode_at_the_target(tmp_path: Path) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        happened = watch(way, "committed", move, give_up_there)
        await way.reserve(move)
        way.ship(move)
        async with asyncio.timeout(DEADLINE_S):
            await happened.wait()
        await until(lambda: not len(way.target.server.moves.target))
        assert way.target.engine.load().running == 0
        await finish_here(way, move)
        await way.stays(move)
        await way.is_empty()


async def settled(way: Road, move: Move) -> None:
    """Wait until the source or the target has reported the result of the move."""
    ends = ((way.source, move.stream), (way.target, move.there))
    await until(
        lambda: any(
            end.frame_of(Declined, stream) or end.frame_of(Committed, stream) or end.frontend.end(stream)
            for end, stream in ends
        ),
        DEADLINE_S,
    )


async def finish_here(way: Road, move: Move) -> None:
    """Do what a frontend does to cancel a move."""
    way.target.frontend.say(Cancel(move.there))
    way.source.frontend.say(Stay(move.stream))


@pytest.mark.slow
@pytest.mark.parametrize("act", ["stay", "cancel at the target", "the engine refuses"])
@pytest.mark.parametrize("point", ["first block", "tail", "take", "commit"])
async def test_memory_of_a_failed_move_is_freed_at_once(tmp_path: Path, point: str, act: str) -> None:
    """It must not wait for Python's cycle collection of errors and their frames."""
    async with road(tmp_path, Watched, Watched) as way:
        gc.collect()
        gc.disable()
        try:
            for salt in range(2):
                move = await way.begin(salt=salt)
                happened = watch(way, point, move, KEEPS[act])
                await way.reserve(move)
                way.ship(move)
                async with asyncio.timeout(DEADLINE_S):
                    await happened.wait()
                await finish_here(way, move)
                way.source.frontend.say(Cancel(move.stream))
                await way.is_empty()
            mappings = way.source.server.moves.trust.mappings
            kept = 0 if mappings is None else len(mappings.mapped)
            await until(lambda: deleted(tmp_path) <= kept)
        finally:
            gc.enable()


def deleted(root: Path) -> int:
    """Return how many mapped regions have no file any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(root) in line and line.endswith("(deleted)") for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("act", [cancel_here, lose_source, lose_target, lose_both])
@pytest.mark.parametrize("point", POINTS)
async def test_a_cancelled_or_disconnected_side_leaves_nothing_behind(
    tmp_path: Path, point: str, act: Act
) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        happened = watch(way, point, move, act)
        await way.reserve(move)
        way.ship(move)
        async with asyncio.timeout(DEADLINE_S):
            await happened.wait()
        if act is lose_target:
            way.source.frontend.say(Stay(move.stream))
            await way.stays(move)
        elif act is not lose_both:
            way.target.frontend.say(Cancel(move.there))
        await way.is_empty()


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("point", ["reserved", "first block", "tail", "take"])
async def test_a_worker_that_shuts_down_ends_its_moves(tmp_path: Path, point: str, side: str) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def wait(way: Road, move: Move) -> None:
            reached.set()
            await go_on.wait()

        if point != "reserved":
            watch(way, point, move, wait)
        await way.reserve(move)
        if point == "reserved":
            reached.set()
        else:
            way.ship(move)
        async with asyncio.timeout(DEADLINE_S):
            await reached.wait()
        closing = asyncio.ensure_future((way.source if side == "source" else way.target).server.close())
        await turns()
        go_on.set()
        await closing
        if side == "target":
            way.source.frontend.say(Stay(move.stream))
            await way.stays(move)
            await until(lambda: way.source.empty and way.target.empty)
            assert not list(tmp_path.iterdir())
        else:
            way.target.frontend.say(Cancel(move.there))
            await way.is_empty()


async def test_a_stream_that_ends_during_its_move_has_its_whole_answer(tmp_path: Path) -> None:
    async with road(tmp_path, Watched, Watched) as way:
        move = await way.begin()

        async def let_it_end(way: Road, move: Move) -> None:
            way.set_speed()
            await until(lambda: not way.source.server.in_flight)

        happened = watch(way, "first block", move, let_it_end)
        await way.reserve(move)
        way.ship(move)
        async with asyncio.timeout(DEADLINE_S):
            await happened.wait()
        await way.stays(move)
        await way.target.wait_for(Declined, move.there)
        assert way.source.frame_of(Declined, move.stream) is None
        await way.is_empty()


async def test_a_stopped_stream_continues_by_itself_without_a_message_of_the_frontend(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.moved(move)
        declined = await way.source.wait_for(Declined, move.stream)
        assert "did not take over in time" in declined.reason
        way.target.frontend.say(Cancel(move.there))
        await way.stays(move)
        await way.is_empty()


async def test_an_unused_reservation_is_freed(tmp_path: Path) -> None:
    from datetime import timedelta

    async with road(tmp_path, policy=ReservationPolicy(lasts=timedelta(seconds=0.2))) as way:
        move = await way.begin()
        await way.reserve(move)
        declined = await way.target.wait_for(Declined, move.there)
        assert "deadline has passed" in declined.reason
        way.ship(move)
        await way.source.wait_for(Declined, move.stream)
        await way.stays(move)
        await way.is_empty()


@pytest.mark.parametrize("shards", ["both", "one"])
@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize("at", [5, 300, 5000, 20_000])
async def test_a_transfer_that_is_cut_or_flipped_is_refused(
    tmp_path: Path, at: int, flip: int, shards: str
) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        async with line(move.grants, at, flip) as grants:
            if shards == "one":
                grants[0] = move.grants[0]
            way.source.frontend.say(Ship(move.stream, grants))
            declined = await way.source.wait_for(Declined, move.stream)
            assert declined.reason and "take over in time" not in declined.reason
            way.target.frontend.say(Cancel(move.there))  # unknown if not even the ticket was readable
        await way.stays(move)
        await way.is_empty()


async def test_a_source_on_another_host_sends_over_tcp(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        move.grants = over_tcp(move.grants)
        way.ship(move)
        assert (await way.target.wait_for(Committed, move.there)).link == "tcp"
        assert await way.rest(move) == await way.undisturbed(move)
        await way.is_empty()


def changed(grants: list[bytes], **fields: Any) -> list[bytes]:
    read = [msgspec.msgpack.decode(one, type=Grant) for one in grants]
    return [msgspec.msgpack.encode(msgspec.structs.replace(one, **fields)) for one in read]


def described(grants: list[bytes], **fields: Any) -> list[bytes]:
    read = [msgspec.msgpack.decode(one, type=Grant) for one in grants]
    made = [msgspec.structs.replace(one.description, **fields) for one in read]
    return [
        msgspec.msgpack.encode(msgspec.structs.replace(one, description=other))
        for one, other in zip(read, made, strict=True)
    ]


BAD: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "nothing": (lambda g: [], "0 grants for 2 shards"),
    "one too few": (lambda g: g[:1], "1 grants for 2 shards"),
    "another order": (lambda g: g[::-1], "rank is"),
    "rubbish": (lambda g: [b"\xc1", b""], "cannot decode the grants"),
    "of other fields": (lambda g: [msgspec.msgpack.encode(["a", 1])] * 2, "cannot decode the grants"),
    "another model": (lambda g: described(g, model="other"), "model is 'other' there"),
    "another dtype": (lambda g: described(g, dtype="float16"), "dtype is 'float16' there"),
    "no time": (lambda g: changed(g, seconds=-1.0), "invalid values"),
    "too much time": (lambda g: changed(g, seconds=float("inf")), "invalid values"),
    "blocks before the first": (lambda g: changed(g, first_block=-1), "invalid values"),
    "shards apart": (lambda g: [g[0], *changed(g[1:], first_block=1)], "different blocks"),
    "an unknown ticket": (lambda g: changed(g, ticket="x"), "reservation does not exist"),
    "a file outside the regions": (lambda g: changed(g, region="/etc/passwd", ticket="x"), "reservation does not exist"),
    "a port without a listener": (lambda g: over_tcp(g, 1), "cannot connect to the target"),
    "too little room": (lambda g: changed(g, bytes=1), "has room for only"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
async def test_invalid_grants_are_declined_and_the_stream_continues(tmp_path: Path, bad: str) -> None:
    async with road(tmp_path) as way:
        move = await way.begin(length=40)
        await way.reserve(move)
        made, words = BAD[bad]
        way.source.frontend.say(Ship(move.stream, made(move.grants)))
        assert words in (await way.source.wait_for(Declined, move.stream)).reason
        way.target.frontend.say(Cancel(move.there))
        await way.stays(move)
        await way.is_empty()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"request": "another"}, "request_id"),
        ({"prompt_tokens": 7}, "prompt_tokens"),
        ({"temperature": 0.1}, "sampling_state"),
        ({"seed": 8}, "sampling_state"),
        ({"min_p": 0.2}, "sampling_state"),
        ({"logit_bias": {300: 1.0}}, "sampling_state"),
        ({"max_tokens": 9000}, "stop_criteria"),
        ({"tokens": [5] * 150}, "do not continue"),
    ],
)
async def test_a_stream_that_differs_from_the_reserved_one_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        honest = move.sampling
        if not change.keys() & {"request", "prompt_tokens", "tokens"}:
            move.sampling, change = {**honest, **change}, {}
        await way.reserve(move, **change)
        move.sampling = honest
        way.ship(move)
        reasons = [await way.target.wait_for(Declined, move.there)]
        assert any(words in one.reason for one in reasons)
        way.source.frontend.say(Stay(move.stream))
        await way.stays(move)
        await way.is_empty()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"canary": True}, "canaries"),
        ({"tokens": []}, " 0 known tokens"),
        ({"prompt_tokens": 0}, " 0 prompt tokens"),
        ({"prompt_tokens": 10_000}, "10000 prompt tokens"),
        ({"room": 3}, "room for 3 tokens"),
    ],
)
async def test_an_invalid_reservation_is_declined(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        declined = await way.target.wait_for(Declined, way.ask_for_room(move, **change))
        assert words in declined.reason
        await way.stays(move)
        await way.is_empty()


async def test_a_worker_that_refuses_requests_declines_moves(tmp_path: Path) -> None:
    from workers.shutdown import DRAINING

    async with road(tmp_path) as way:
        move = await way.begin()
        way.target.server.refuse(DRAINING)
        assert "draining" in (await way.target.wait_for(Declined, way.ask_for_room(move))).reason
        way.target.server.refuse(None)
        await way.reserve(move)
        way.target.server.deregister()
        assert "leaving" in (await way.target.wait_for(Declined, move.there)).reason
        assert "leaving" in (await way.target.wait_for(Declined, way.ask_for_room(move))).reason
        await way.stays(move)
        await way.is_empty()


async def test_only_streams_that_decode_here_are_shipped(tmp_path: Path) -> None:
    async with road(tmp_path) as way:
        move = await way.begin()
        await way.reserve(move)
        way.source.frontend.say(Ship(99, move.grants))
        assert "stream does not exist" in (await way.source.wait_for(Declined, 99)).reason
        way.ship(move)
        way.ship(move)
        assert "already being shipped" in (await way.source.wait_for(Declined, move.stream)).reason
        assert await way.rest(move) == await way.undisturbed(move)
        await way.is_empty()


ACTS: dict[str, Act] = {**KEEPS, "cancel at the source": cancel_here}


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(POINTS), st.sampled_from(sorted(ACTS))), max_size=3),
    st.integers(0, 2**16),
)
def test_moves_broken_at_random_leave_no_block_and_no_file(
    tmp_path_factory: pytest.TempPathFactory, broken: list[tuple[str, str]], seed: int
) -> None:
    uvloop.run(_broken(tmp_path_factory.mktemp("shm"), broken, random.Random(seed)))


async def _broken(root: Path, broken: list[tuple[str, str]], chance: random.Random) -> None:
    """Move one stream after the other, each with its own failure, while another only decodes; then one without a failure."""
    async with road(root, Watched, Watched) as way:
        other = await way.begin(salt=9)
        for n, (point, act) in enumerate(broken):
            way.set_speed(STEP_S)
            move = await way.begin(length=chance.randint(5, 200), salt=n, most=COUNT)
            watch(way, point, move, ACTS[act])
            way.ask_for_room(move)
            await until(partial(target_answered, way, move))
            way.ship(move)
            await settled(way, move) if act not in (
                "stay",
                "cancel at the target",
                "cancel at the source",
            ) else None
            await finish_here(way, move)
            if act != "cancel at the source":
                await way.stays(move)
            way.source.server.moves.trust.regain("corrupt")
            way.target.server.refuse(None)
            way.source.engine.at.clear()
            way.target.engine.at.clear()
        way.set_speed(STEP_S)
        last = await way.begin(salt=8)
        await way.moved(last)
        assert await way.rest(last) == await way.undisturbed(last)
        await way.stays(other)
        await way.is_empty()


def target_answered(way: Road, move: Move) -> bool:
    """Whether the target has answered; if so, keep its grants."""
    from events.wire import Reserved

    if (reserved := way.target.frame_of(Reserved, move.there)) is not None:
        move.grants = reserved.grants
    return reserved is not None or way.target.frame_of(Declined, move.there) is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_a_dozen_concurrent_moves_each_cancelled_at_its_own_moment(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with road(tmp_path) as way:
        moves = [await way.begin(length=chance.randint(5, 400), salt=n, most=2 * COUNT) for n in range(12)]
        ends = [chance.choice(("moves", "stays", "is cancelled")) for _ in moves]

        async def play(move: Move, end: str, after: int) -> list[int]:
            """Play one move; return the source's tokens if the stream has ended there."""
            await way.reserve(move)
            way.ship(move)
            if end == "moves":
                return await way.switch(move)
            await turns(after)
            if end == "stays":
                await finish_here(way, move)
            else:
                way.source.frontend.say(Cancel(move.stream))
                way.target.frontend.say(Cancel(move.there))
            return []

        played = (play(move, end, chance.randint(0, 300)) for move, end in zip(moves, ends, strict=True))
        async with asyncio.timeout(2 * DEADLINE_S):
            answers = await asyncio.gather(*played)
        for move, end, before in zip(moves, ends, answers, strict=True):
            if end == "stays":
                await way.stays(move)
            elif end == "moves":
                way.set_speed()
                assert before + await way.target.frontend.answer(move.there) == await way.undisturbed(move)
        await way.is_empty()
        assert way.target.server.counters.moves["in", "committed"] >= ends.count("moves")
