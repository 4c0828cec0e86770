"""Near ties: positions where two tokens are so close that a correct engine may choose either. Pure functions.

Greedy decoding is not invariant under batching: the last bits of a logit depend on the batch, so a correct engine flips a
near tie now and then, and everything behind the flipped token differs as well. Such a flip is no evidence of corruption.

- A golden answer is cut before its first near tie (`usable`), so that most questions have none.
- Where a tie is left (an older golden, a tolerance that grew), a differing token counts only where the margin between it and
  the expected token is larger than the tie margin (`margin`), and nothing behind it is compared.
- An engine without logprobs shows no margins. There a tie is found by repetition (`HiddenTies`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from events.observations import TopK

TOKENS_MIN = 8  # a golden is not cut shorter than this: it would compare too little


def margin(golden: TopK, answer: TopK, expected: int, got: int) -> float | None:
    """Return by how much the expected token leads the one that came instead; None where no logprobs tell.

    The golden's logprobs decide. A token that they do not list was below the last one listed, so the lead is at least that.
    Without them (a configured answer) it is the lead that the answer itself shows, the other way round.
    """
    if golden:
        return _lead(dict(golden), expected, got)
    return _lead(dict(answer), got, expected) if answer else None


def _lead(listed: dict[int, float], first: int, second: int) -> float:
    last = min(listed.values())
    return listed.get(first, last) - listed.get(second, last)


def usable(top_k: Iterable[TopK], margin_min: float, length: int) -> int:
    """Return how many of `length` tokens stand before the first whose margin is below `margin_min`."""
    for place, top in enumerate(top_k):
        if len(top) > 1 and top[0][1] - top[1][1] < margin_min:
            return place
    return length


@dataclass(slots=True)
class HiddenTies:
    """Near ties of one canary key whose engine gives no logprobs, found by answers that come out one way and the other.

    A worker that answers the same question both ways shows a tie, or is intermittently corrupt. It is a tie where another
    worker does so too at the same place, or where there is no other worker to compare it with.
    """

    _flips: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # by canary and position: workers
    _ties: dict[str, int] = field(default_factory=dict)  # by canary: the first position that is a tie

    def note(self, canary: str, position: int, worker: str, *, alone: bool) -> bool:
        """Take a worker's flip at a position; return whether it counts as a tie."""
        if position >= self._ties.get(canary, position + 1):
            return True
        workers = self._flips.setdefault((canary, position), set())
        workers.add(worker)
        if alone or len(workers) > 1:
            self._ties[canary] = position
            return True
        return False

    def first(self, canary: str) -> int | None:
        """Return the first position of a canary that is known to be a tie."""
        return self._ties.get(canary)
