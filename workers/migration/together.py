"""Doing the same with all shards at once."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of these at once. The first failure ends the others, and is raised when they have ended.

    No TaskGroup: in Python 3.11 it swallows a cancellation that meets a failure.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failed = [one for one in tasks if one.done() and not one.cancelled() and one.exception()]
        if ending := [one for one in tasks if not one.done()]:
            for one in ending:
                one.cancel()
            await asyncio.wait(ending)
            for one in ending:
                if not one.cancelled():
                    one.exception()  # the first one counts
    try:
        for one in failed or tasks:
            one.result()
    finally:  # else they and their errors would keep each other, and what they worked on
        del one, tasks, failed, ending
