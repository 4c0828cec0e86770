"""The broker accounts of a fleet's processes: a role's name, or the name of a process's first worker."""

from functools import lru_cache

from events.subjects import token

ROLES = ("controller", "frontend", "notifier", "operator", "planner", "projector", "reader", "supervisor")
WORKER = "worker-"


def worker_user(first: str, count: int = 1) -> str:
    """Return the broker account of the process with `count` workers, of which this is the first."""
    return f"{WORKER}{token(first)}{f'+{count}' if count > 1 else ''}"


@lru_cache(maxsize=1024)  # called for each message, also in a flood; a process may have a thousand workers
def workers_of(user: str) -> tuple[str, ...]:
    """Return the workers (as subject tokens) of the process with this account; empty if it is no worker process's account."""
    first, plus, count = user.removeprefix(WORKER).partition("+")
    if not user.startswith(WORKER) or (plus and not count.isdigit()):
        return ()
    return names(first, int(count or 1))


def account_of(worker: str, registered: str) -> str:
    """Return the account of a worker's process: the `registered` one if it covers the worker, else that of a process
    with this worker alone. So the result is always an account that may publish for this worker."""
    return registered if token(worker) in workers_of(registered) else worker_user(worker)


def names(first: str, count: int) -> tuple[str, ...]:
    """Return the names of one process's workers: for w3 and a count of 2, w3 and w4."""
    if count == 1:
        return (first,)
    stem = first.rstrip("0123456789")
    number = int(first[len(stem) :] or 0)
    return tuple(f"{stem}{number + n}" for n in range(count))
