"""Votes on the answer to a canary, grouped by answer."""

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
    revised: bool = False  # its answer has changed: it contradicts its own provisional golden
    passed: bool = False  # it passed the canary: the canary loop compared its answer with the golden


def camps(votes: Iterable[Vote], tolerance: float, tie_margin: float = 0.0) -> list[list[Vote]]:
    """Return the votes grouped by answer."""
    found: list[list[Vote]] = []
    for vote in votes:
        camp = next((camp for camp in found if agrees(camp[0], vote, tolerance, tie_margin)), None)
        if camp is None:
            found.append([vote])
        else:
            camp.append(vote)
    return found


def agrees(one: Vote, other: Vote, tolerance: float, tie_margin: float = 0.0) -> bool:
    """Return whether two answers are the same: equal tokens, and logprobs within the tolerance where both have them.

    With a `tie_margin` answers also count as the same if they diverge at a near tie: the tokens after it cannot be compared.
    """
    place = parting(one.tokens, other.tokens)
    if place is None:
        if len(one.tokens) != len(other.tokens):
            return False
    elif not (_is_tie(one, other, place, tie_margin) and _is_tie(other, one, place, tie_margin)):
        return False
    if tolerance <= 0 or not one.top_k or not other.top_k:
        return True
    return distance(one.top_k[:place], other.top_k[:place]) <= tolerance


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position at which both answers have a token and these differ; None if there is none."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def _is_tie(own: Vote, other: Vote, place: int, tie_margin: float) -> bool:
    """Return whether one worker rated the other's token nearly as likely as its own at this position."""
    if tie_margin <= 0 or place >= len(own.top_k):
        return False
    listed = dict(own.top_k[place])
    mine, theirs = listed.get(own.tokens[place]), listed.get(other.tokens[place])
    return mine is not None and theirs is not None and abs(mine - theirs) <= tie_margin


def distance(one: Sequence[TopK], other: Sequence[TopK]) -> float:
    """Return the largest logprob difference over the tokens that both list at the same position."""
    worst = 0.0
    for mine, theirs in zip(one, other, strict=False):
        listed = dict(theirs)
        for token, logprob in mine:
            if token in listed:
                worst = max(worst, abs(logprob - listed[token]))
    return worst


def margin(top_k: Sequence[TopK]) -> float:
    """Return the smallest top-1/top-2 logprob difference of an answer; 0 if a position has no top two."""
    return min((top[0][1] - top[1][1] if len(top) > 1 else 0.0 for top in top_k), default=0.0)
