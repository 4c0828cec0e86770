"""Near ties: positions where two tokens are so close that a correct engine may choose either.

Pure functions.
Greedy decoding is not invariant under batching: the last bits of a logit depend on the batch. So a correct engine sometimes
flips a near tie, and all tokens after the flipped one differ as well. Such a flip is no evidence of corruption.

- A golden is truncated before its first near tie (`usable`), so most goldens contain none.
- If a tie remains (an older golden, or a tolerance that grew), a differing token counts only if the margin between it and
  the expected token is larger than the tie margin (`margin`), and nothing after it is compared.
- An engine without logprobs shows no margins. There a tie is found by repetition (`HiddenTies`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from events.observations import TopK

TOKENS_MIN = 8  # a golden is not truncated below this: too few tokens would be compared


def margin(golden: TopK, answer: TopK, expected: int, got: int) -> float | None:
    """Return the lead of the expected token over the one that the answer has; None without logprobs.

    The golden's logprobs decide. A token that they do not list was below the last one listed, so the lead is at least that.
    Without them (a configured answer) it is the lead that the answer's own logprobs show, in reverse.
    """
    if golden:
        return _lead(dict(golden), expected, got)
    return _lead(dict(answer), got, expected) if answer else None


def _lead(listed: dict[int, float], first: int, second: int) -> float:
    last = min(listed.values())
    return listed.get(first, last) - listed.get(second, last)


def usable(top_k: Iterable[TopK], margin_min: float, length: int) -> int:
    """Return how many of `length` tokens precede the first one with a margin below `margin_min`."""
    for place, top in enumerate(top_k):
        if len(top) > 1 and top[0][1] - top[1][1] < margin_min:
            return place
    return length


@dataclass(slots=True)
class HiddenTies:
    """Near ties of one canary key with an engine that reports no logprobs, found by answers that vary.

    A worker that gives two answers to the same question either met a near tie or is intermittently corrupt. It counts as a tie
    if another worker varies at the same position, or if there is no other worker to compare with.
    """

    _flips: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # by canary and position: workers
    _ties: dict[str, int] = field(default_factory=dict)  # by canary: the first position that is a tie

    def note(self, canary: str, position: int, worker: str, *, alone: bool) -> bool:
        """Record a worker's flip at a position; return whether it counts as a tie."""
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
