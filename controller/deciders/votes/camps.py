"""Votes on the answer to a canary, grouped by the answer that they give."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from events.observations import TopK


@dataclass(frozen=True, slots=True)
class Vote:
    """One worker's answer."""

    worker: str
    instance: str
    tokens: tuple[int, ...]
    top_k: tuple[TopK, ...] = ()
    cause: str = ""
    revised: bool = False  # it answers otherwise than it did: it contradicts its own provisional golden
    passed: bool = (
        False  # it passed the canary: its answer was compared with the golden one by the canary loop
    )


def camps(votes: Iterable[Vote], tolerance: float) -> list[list[Vote]]:
    """Return the votes grouped by the answer that they give."""
    found: list[list[Vote]] = []
    for vote in votes:
        camp = next((camp for camp in found if agrees(camp[0], vote, tolerance)), None)
        if camp is None:
            found.append([vote])
        else:
            camp.append(vote)
    return found


def agrees(one: Vote, other: Vote, tolerance: float) -> bool:
    """Return whether two answers are the same: equal tokens, and logprobs within the tolerance where both have them."""
    if one.tokens != other.tokens:
        return False
    if tolerance <= 0 or not one.top_k or not other.top_k:
        return True
    return distance(one.top_k, other.top_k) <= tolerance


def distance(one: Sequence[TopK], other: Sequence[TopK]) -> float:
    """Return the largest difference of a logprob over the tokens that both list at the same position."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=False):
        listed = dict(theirs)
        for token, logprob in mine:
            if token in listed:
                worst = max(worst, abs(logprob - listed[token]))
    return worst


def margin(top_k: Sequence[TopK]) -> float:
    """Return the smallest top-1/top-2 logprob difference over an answer; 0 where a position has no top two."""
    return min((top[0][1] - top[1][1] if len(top) > 1 else 0.0 for top in top_k), default=0.0)
