"""Reads a long part of the journal in parallel, with one process and one broker connection per core."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing import get_context

from controller.replay.whatif.journal_stretch import StretchRead
from controller.runtime.bounded_read import history
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.port import Journal, Reopen

# minimum number of events that is read in parallel; fewer are read faster than processes start
SHARED_FROM = 100_000
STRETCHES = 3  # stretches per core, so that the first ones are folded while the last ones are still read


async def stretches(
    journal: Journal, after: int, until: int, decided: int, processes: int | None = None
) -> AsyncIterator[StretchRead]:
    """Read the events after sequence number `after`, up to and including `until`, in consecutive ranges.

    Yield each range in order. Decisions up to the sequence number `decided` are left out, because the fleet state before the
    events contains them. `processes` is the number of reading processes. None means one process per core if there are at
    least SHARED_FROM events, and a single process if there are fewer. Raise TooMuch if a range has too many events, HelperGone
    if a process is killed, or JournalUnavailable if the journal cannot be read.
    """
    reopen = journal.reopen()
    several = processes or (cores() if until - after >= SHARED_FROM else 1)
    if reopen is None or several == 1:
        async for one in in_one(history(journal, after, until), decided):
            yield one
        return
    count = STRETCHES * several
    bounds = [after + (until - after) * n // count for n in range(count + 1)]
    loop = asyncio.get_running_loop()
    with helpers(several) as pool:
        reading = [
            loop.run_in_executor(pool, _read, reopen, first, last, decided)
            for first, last in pairwise(bounds)
        ]
        try:
            for stretch in reading:
                yield await stretch
        finally:
            for stretch in reading:
                stretch.cancel()


async def in_one(batches: AsyncIterator[Sequence[Recorded]], decided: int = 0) -> AsyncIterator[StretchRead]:
    """Collect all events of `batches` into a single `StretchRead`, and yield it.

    Decisions up to the sequence number `decided` are left out, because the fleet state before the events contains them. Raise
    TooMuch if there are too many events."""
    found = StretchRead(decided)
    async for batch in batches:
        for event in batch:
            found.take(event)
    yield found


def _read(reopen: Reopen, after: int, until: int, decided: int) -> StretchRead:
    return asyncio.run(_stretch(reopen, after, until, decided))


async def _stretch(reopen: Reopen, after: int, until: int, decided: int) -> StretchRead:
    async with reopen() as journal:
        return await anext(in_one(history(journal, after, until), decided))


class HelperGone(HoldfastError):
    """A helper process ended before its work was done: the host may be out of memory."""


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))


@contextmanager
def helpers(most: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of at most `most` processes, which are forked when work is submitted.

    Raise HelperGone if a process of the pool is killed."""
    try:
        with ProcessPoolExecutor(most, get_context("fork")) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise HelperGone(HelperGone.__doc__ or "") from error
