"""The hang watch: one silent connection of many is lost, all at once are spared for a while.

A connection with unread data is not lost.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, cast

from waits import until

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.hang import HangPolicy, Process
from controller.adapters.request_plane.worker_links import HangWatch

QUICK = replace(HangPolicy(), tick_s=0.001, lag_s=1.0, all_silent_s=60.0)


class Quiet:
    """A connection with one stream, in its own process."""

    def __init__(self, *, hangs: bool, unread: bool = False) -> None:
        self.detector, self.open_streams = self, 1
        self.hangs, self.unread = hangs, unread
        self.asked, self.lost = 0, False

    def suspect(self, now: float) -> str:
        self.asked += 1
        return "no step" if self.hangs else ""

    def readable(self) -> bool:
        return self.unread

    def silent_s(self, now: float) -> float:
        return 0.0

    def excuse(self, lag_s: float, now: float) -> None:
        """Do nothing: it has no clock."""

    def lose(self, cause: str, why: str) -> None:
        self.lost, self.hangs = True, False


class Late:
    """A process of workers, which records the time of its next check."""

    look_due = inf

    def excuse(self, lag_s: float, now: float) -> None:
        """Do nothing: it has no clock."""


async def watched(
    policy: HangPolicy, connections: list[Quiet], over: Callable[[], bool], process: Late
) -> int:
    """Watch these connections until a condition holds, and return how many were found hung."""
    named = cast(
        dict[str, WorkerConnection],
        {f"w{number}": connection for number, connection in enumerate(connections)},
    )
    watch = HangWatch(policy, lambda: named, lambda: [cast(Process, process)], lambda: None)
    running = asyncio.create_task(watch.run())
    try:
        await until(over, 30, every_s=0.001)
    finally:
        running.cancel()
        await asyncio.wait([running])
    return watch.hangs


async def watch_a_while(*connections: Quiet, **policy: Any) -> tuple[int, list[bool]]:
    """Watch until the first was checked about ten times or all are lost. Return how many hung, and which were lost."""
    quick = replace(QUICK, lag_s=0.002, **policy)
    hangs = await watched(quick, [*connections], lambda: connections[0].asked > 10, Late())
    return hangs, [connection.lost for connection in connections]


async def test_one_silent_connection_among_others_is_lost() -> None:
    assert await watch_a_while(Quiet(hangs=True), Quiet(hangs=False)) == (1, [True, False])


async def test_connections_that_are_all_silent_at_once_are_spared_for_a_while() -> None:
    assert await watch_a_while(Quiet(hangs=True), Quiet(hangs=True)) == (0, [False, False])
    assert await watch_a_while(Quiet(hangs=True), Quiet(hangs=True), all_silent_s=0.0) == (2, [True, True])


async def test_a_connection_with_unread_data_is_not_lost() -> None:
    assert await watch_a_while(Quiet(hangs=True, unread=True), Quiet(hangs=False)) == (0, [False, False])


async def test_processes_learn_the_time_of_their_next_check() -> None:
    process = Late()
    await watched(QUICK, [Quiet(hangs=False)], lambda: process.look_due < inf, process)
    assert process.look_due <= asyncio.get_running_loop().time() + QUICK.tick_s
