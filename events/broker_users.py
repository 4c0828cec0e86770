"""What does the broker call each process of a fleet? A role by its name, a worker's process by that of its first worker."""

from functools import lru_cache

from events.subjects import token

ROLES = ("controller", "frontend", "notifier", "operator", "planner", "projector", "reader", "supervisor")
WORKER = "worker-"


def worker_user(first: str, count: int = 1) -> str:
    """Return what the broker calls the process in which `count` workers live, the first of this name."""
    return f"{WORKER}{token(first)}{f'+{count}' if count > 1 else ''}"


@lru_cache(maxsize=1024)  # a flood asks for each message, and a process may have a thousand workers
def workers_of(user: str) -> tuple[str, ...]:
    """Return the workers, as tokens, that live in a process that is called so; none where it is no worker's."""
    first, plus, count = user.removeprefix(WORKER).partition("+")
    if not user.startswith(WORKER) or (plus and not count.isdigit()):
        return ()
    return names(first, int(count or 1))


def account_of(worker: str, registered: str) -> str:
    """Return the account of the process in which a worker lives: the `registered` one, if the worker can be one of its, or else
    that of a process of its own. So nobody's account is named but one that may speak for this worker."""
    return registered if token(worker) in workers_of(registered) else worker_user(worker)


def names(first: str, count: int) -> tuple[str, ...]:
    """Return the workers of one process: w3 and a count of 2 are w3 and w4."""
    if count == 1:
        return (first,)
    stem = first.rstrip("0123456789")
    number = int(first[len(stem) :] or 0)
    return tuple(f"{stem}{number + n}" for n in range(count))
