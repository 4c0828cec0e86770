"""A worker that sends more frames than an engine can compute loses its connection, and its streams go elsewhere at once."""

import asyncio

from test_worker_connection import connection_with

from controller.adapters.request_plane.frame_budget import FRAMES, FrameBudget
from events import wire
from events.wire import Beat, Chunk, Load, Step


def test_an_honest_worker_is_far_below_its_budget() -> None:
    budget = FrameBudget(0.0)
    assert not any(
        budget.take(10, 100_000, n / 100) for n in range(2000)
    )  # 1,000 steps and 10 MB in a second


async def test_a_flood_ends_the_connection() -> None:
    connection, heard = connection_with(1)
    frame = wire.encode(Step([Chunk(9, [1])]))
    connection.budget.take(int(FRAMES.messages.burst) - 10_000, 0, asyncio.get_running_loop().time())
    while not connection.budget.exceeded:
        connection.data_received(frame * 10_000)
    assert (1, "disconnected") in heard


async def test_an_impossible_load_ends_the_connection() -> None:
    connection, heard = connection_with(1)
    connection.data_received(wire.encode(Beat("idle", 0.0, load=Load(closed_s=-1e9))))
    assert (1, "disconnected") in heard
