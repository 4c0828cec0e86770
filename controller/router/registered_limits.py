"""The limit that most workers have registered: each is a vote, so that no single claim sets it."""

from collections import Counter
from collections.abc import Iterable, Sequence


def usual(claims: Sequence[int]) -> int:
    """Return the value that most of these have, and of several the largest."""
    counts = Counter(claims)
    return max(counts, key=lambda value: (counts[value], value))


def confirmed(claims: Iterable[tuple[int, str]]) -> int:
    """Return the largest value that workers of two broker accounts have or exceed; of one account alone, its largest. `claims`:
    each worker's value and account."""
    most: dict[str, int] = {}
    for value, account in claims:
        most[account] = max(value, most.get(account, value))
    return sorted(most.values(), reverse=True)[:2][-1]
