"""A worker that sends more frames than an engine can compute loses its connection.

Its streams move elsewhere at once.
"""

import asyncio

from test_worker_connection import connection_with

from controller.adapters.request_plane.connection import FRAMES, FrameBudget
from events import wire
from events.intrusion.send_budget import Rate, TrafficLimit
from events.wire import Beat, Chunk, Load, Step


def test_a_real_engine_is_far_below_the_budget() -> None:
    budget = FrameBudget(0.0)
    for turn in range(2000):  # 1,000 steps and 10 MB in a second
        budget.frames, budget.size = budget.frames + 10, budget.size + 100_000
        assert budget.spend(turn / 100) == ""


async def test_a_flood_ends_the_connection() -> None:
    connection, heard = connection_with(1)
    frame = wire.encode(Step([Chunk(9, [1])]))
    connection.budget.frames = int(FRAMES.messages.burst) - 10_000
    while not connection.budget.exceeded:
        connection.data_received(frame * 10_000)
    assert (1, "disconnected") in heard


async def test_the_budget_is_checked_in_time_however_small_it_is() -> None:
    """At most a hundredth of the burst is counted before the budget is checked, also of a small one."""
    limit = TrafficLimit(messages=Rate(per_s=1.0, burst=50.0), size=Rate(per_s=1e9, burst=1e9))
    connection, heard = connection_with(1)
    connection.budget = FrameBudget(asyncio.get_running_loop().time(), limit)
    frame = wire.encode(Step([Chunk(9, [1])]))
    for _ in range(50):
        connection.data_received(frame)
    before = connection.budget.exceeded
    for _ in range(3):
        connection.data_received(frame)
    assert (before, connection.budget.exceeded) == (False, True)
    assert (1, "disconnected") in heard


async def test_an_impossible_load_ends_the_connection() -> None:
    connection, heard = connection_with(1)
    connection.data_received(wire.encode(Beat("idle", 0.0, load=Load(closed_s=-1e9))))
    assert (1, "disconnected") in heard
