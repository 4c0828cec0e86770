"""Runs the work of a process until SIGTERM or SIGINT."""

import asyncio
import signal
from collections.abc import Coroutine


def stop_signal() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set, instead of ending the process."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def run_until(
    stop: asyncio.Event, *works: Coroutine[object, object, None], leave_s: float | None = None
) -> None:
    """Run all coroutines until `stop` is set or one of them ends. Then cancel the other coroutines and wait until they have
    ended.

    This wait takes at most `leave_s` seconds, or has no limit if `leave_s` is None. Raise the error of a coroutine that failed
    before `stop` was set.
    """
    running = [asyncio.ensure_future(work) for work in works]
    tasks = {*running, asyncio.ensure_future(stop.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for ended in running:
            if ended.done():
                ended.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=leave_s)
