"""Names the broker accounts of a fleet's processes.

The account of a worker process has the name of the process's first worker. The account of any other process has its role's
name.
"""

from functools import lru_cache

from events.subjects import token

ROLES = ("controller", "frontend", "notifier", "operator", "planner", "projector", "reader", "supervisor")
WORKER = "worker-"


def worker_user(first: str, count: int = 1) -> str:
    """Return the name of the broker account of a worker process with `count` workers, of which `first` is the first."""
    return f"{WORKER}{token(first)}{f'+{count}' if count > 1 else ''}"


@lru_cache(maxsize=1024)  # called for each message, even in a flood; a process may run a thousand workers
def workers_of(user: str) -> tuple[str, ...]:
    """Return the workers (as subject tokens) of the process with this account. Return () if the account is not one of a
    worker process."""
    first, plus, count = user.removeprefix(WORKER).partition("+")
    if not user.startswith(WORKER) or (plus and not count.isdigit()):
        return ()
    return names(first, int(count or 1))


def account_of(worker: str, registered: str) -> str:
    """Return the broker account of this worker's process.

    This is the `registered` account if that account covers the worker. Otherwise it is the account of a process that runs this
    worker alone, so that the result is always an account that may publish for this worker.
    """
    return registered if token(worker) in workers_of(registered) else worker_user(worker)


def names(first: str, count: int) -> tuple[str, ...]:
    """Return the names of the workers of one process: for `first` = w3 and `count` = 2, w3 and w4."""
    if count == 1:
        return (first,)
    stem = first.rstrip("0123456789")
    number = int(first[len(stem) :] or 0)
    return tuple(f"{stem}{number + n}" for n in range(count))
