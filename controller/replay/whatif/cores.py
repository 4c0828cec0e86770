"""Work that is done by several processes of this host at once, each from a copy of what there is."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from events.errors import HoldfastError


class HelperGone(HoldfastError):
    """A process that was to do a part of the work has ended before it was done: is there enough memory?"""


def cores() -> int:
    """Return how many processes can compute at once."""
    return len(os.sched_getaffinity(0))


@contextmanager
def helpers(most: int) -> Iterator[ProcessPoolExecutor]:
    """Yield so many processes at most, forked when they are given something to do. Raise HelperGone."""
    try:
        with ProcessPoolExecutor(most, get_context("fork")) as pool:
            yield pool
    except BrokenProcessPool as error:
        raise HelperGone(HelperGone.__doc__ or "") from error
