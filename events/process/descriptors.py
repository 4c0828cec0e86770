"""How many files and sockets may this process have open? As many as it is allowed to: most systems begin with 1,024, and a
frontend holds a connection to every worker, a process of many workers a port and several connections for each."""

import resource
from collections.abc import Callable

from events.errors import HoldfastError


class TooFewDescriptors(HoldfastError):
    """The limit of open files is too low."""


ENOUGH = 65_536
SPARE = 128  # what a frontend or a controller has open beside its connections to workers

Limits = tuple[int, int]  # what holds, and what it may be raised to


def require(wanted: int, advice: str, get: Callable[[int], Limits] = resource.getrlimit) -> int:
    """Return how many a process may have open. Raise TooFewDescriptors if `wanted` is more."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    most = max(soft, ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH))
    if most < wanted:
        raise TooFewDescriptors(
            f"{wanted} open files are needed, and {most} are allowed (ulimit -Hn): raise that, or {advice}"
        )
    return most


def allow(
    wanted: int = 0,
    get: Callable[[int], Limits] = resource.getrlimit,
    put: Callable[[int, Limits], None] = resource.setrlimit,
) -> int:
    """Raise the limit as far as it goes, but no further than ENOUGH, and return it. Raise TooFewDescriptors if `wanted` is
    more."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    most = require(wanted, "put fewer workers into one process", get)
    if soft != resource.RLIM_INFINITY and soft < most:
        put(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections() -> int:
    """Raise the limit, and return how many connections to workers a frontend or a controller may have."""
    return max(1, allow() - SPARE)
