"""Names the broker accounts of a fleet's processes.

The account of a worker process has the name of the process's first worker. The account of any other process has its role's
name.
"""

from functools import lru_cache

from events.subjects import token

ROLES = ("controller", "frontend", "notifier", "operator", "planner", "projector", "reader", "supervisor")
WORKER = "worker-"


def worker_user(first: str, count: int = 1) -> str:
    """Return the broker account of a worker process with `count` workers, the first of which is `first`."""
    return f"{WORKER}{token(first)}{f'+{count}' if count > 1 else ''}"


@lru_cache(maxsize=1024)  # called for each message, even in a flood; a process may run a thousand workers
def workers_of(user: str) -> tuple[str, ...]:
    """Return the names of the workers that share the broker account `user`: all workers of one process.

    The names are in the form that subjects contain. Return () if the account is not that of a worker process.
    """
    first, plus, count = user.removeprefix(WORKER).partition("+")
    if not user.startswith(WORKER) or (plus and not count.isdigit()):
        return ()
    return names(first, int(count or 1))


def account_of(worker: str, registered: str) -> str:
    """Return the broker account of this worker's process.

    `registered` is the account that the worker's registration names. If the process of that account runs this worker, return
    `registered`. Otherwise the registration is false: return the account of a process that runs only this worker.
    """
    return registered if token(worker) in workers_of(registered) else worker_user(worker)


def names(first: str, count: int) -> tuple[str, ...]:
    """Return the names of the workers of one process: for `first` = w3 and `count` = 2, w3 and w4."""
    if count == 1:
        return (first,)
    stem = first.rstrip("0123456789")
    number = int(first[len(stem) :] or 0)
    return tuple(f"{stem}{number + n}" for n in range(count))
