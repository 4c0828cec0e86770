"""The limit that most workers have registered: each is a vote, so that no single claim sets it."""

from collections import Counter
from collections.abc import Sequence


def usual(claims: Sequence[int]) -> int:
    """Return the value that most of these have, and of several the largest."""
    counts = Counter(claims)
    return max(counts, key=lambda value: (counts[value], value))
