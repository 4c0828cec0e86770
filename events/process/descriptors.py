"""Raises the process's limit of open files and sockets as far as allowed.

Most systems start a process with a limit of 1,024. A frontend holds a connection to every worker. A process with many workers
holds a port and several connections for each worker.
"""

import resource
from collections.abc import Callable

from events.errors import HoldfastError


class TooFewDescriptors(HoldfastError):
    """The limit of open files is too low."""


ENOUGH = 65_536
SPARE = 128  # files that a frontend or a controller has open besides its connections to workers

Limits = tuple[int, int]  # the current limit, and its maximum


def require(wanted: int, advice: str, get: Callable[[int], Limits] = resource.getrlimit) -> int:
    """Return how many files this process could open if its limit were raised as far as allowed. Do not change the limit.

    Raise TooFewDescriptors, with `advice`, if that number is below `wanted`.
    """
    soft, hard = get(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ENOUGH
    most = max(soft, ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH))
    if most < wanted:
        raise TooFewDescriptors(
            f"{wanted} open files are needed, but {most} are allowed (ulimit -Hn): raise the limit, or {advice}"
        )
    return most


def allow(
    wanted: int = 0,
    get: Callable[[int], Limits] = resource.getrlimit,
    put: Callable[[int, Limits], None] = resource.setrlimit,
) -> int:
    """Raise the process's limit of open files as far as allowed, up to 65,536 (ENOUGH), and return the new limit.

    Raise TooFewDescriptors if the new limit is below `wanted`.
    """
    soft, hard = get(resource.RLIMIT_NOFILE)
    most = require(wanted, "put fewer workers into one process", get)
    if soft != resource.RLIM_INFINITY and soft < most:
        put(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connections() -> int:
    """Raise the process's limit of open files, and return how many connections to workers a frontend or a controller may then
    open."""
    return max(1, allow() - SPARE)
