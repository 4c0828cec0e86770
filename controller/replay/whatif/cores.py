"""Parallel work in forked processes of this host, each with a copy of the parent's memory."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from events.errors import HoldfastError


class HelperGone(HoldfastError):
    """A helper process ended before its work was done: the host may be out of memory."""


def cores() -> int:
    """Return the number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0))


@contextmanager
def helpers(most: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of at most `most` processes, which are forked when work is submitted. Raise HelperGone."""
    try:
        with ProcessPoolExecutor(most, get_context("fork")) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise HelperGone(HelperGone.__doc__ or "") from error
