"""Checks the source of an observation: a worker's facts must come from the worker's own process.

Source and source number identify a duplicate (`events.order`). So a forged fact with the next number of another source would
make every reader drop that source's next fact. The broker lets a worker process publish only on subjects with the names of its
own workers. So the subject proves the worker, and this module checks whether the source is the process of that worker. A process
with several workers has the name of its first worker.

Note: the check covers the kinds that workers publish. Accounts that publish the other kinds are trusted.
"""

from events.fact import Fact
from events.permissions import PUBLISHES
from events.subjects import token

OF_WORKERS = ("worker", "watch")
COUNT_MAX = 100_000  # workers of one process
_PUBLISHED_BY_WORKERS = frozenset(PUBLISHES["worker"])
_PUBLISHED_BY = {role: frozenset(kinds) for role, kinds in PUBLISHES.items()}


def forged(fact: Fact, source: str) -> str:
    """Return why this source cannot have published this fact. Return an empty string if the source may have published it."""
    role, _, rest = source.partition(":")
    kind = fact.__class__
    if kind not in _PUBLISHED_BY_WORKERS:  # no account of a worker may publish it
        return ""
    if role in OF_WORKERS:
        first, worker = token(rest.rpartition(":")[0]), token(str(getattr(fact, "worker", "")))
        return "" if lives_in(worker, first) else f"its source is {first}, and it is about {worker}"
    if role in _PUBLISHED_BY and kind not in _PUBLISHED_BY[role]:
        return f"its source is a {role}, which publishes no {fact.kind()}"
    return ""


def lives_in(worker: str, first: str) -> bool:
    """Return whether a worker can belong to the process that has `first` as its first worker."""
    if worker == first:
        return True
    stem = first.rstrip("0123456789")
    number = worker.removeprefix(stem)
    if not worker.startswith(stem) or not number.isdigit():
        return False
    apart = int(number) - int(first[len(stem) :] or 0)
    return 0 <= apart < COUNT_MAX and worker == f"{stem}{int(number)}"
