"""Statistics of users' requests: the usual sampling parameters, and workers with unlikely tokens.
Frontends report both with `RequestsServed`. Logprobs exist only where clients requested them: requesting more would change what
engines compute. A worker with a larger share of unlikely tokens than its peers is not proven faulty, so it gets a sampled canary
at once, which can prove a fault.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from controller.runtime.canary.sampled import SamplingParameters, differ_by_chance
from events.observations import RequestsServed

WINDOWS = 120  # reports kept, per worker and for all parameters: ten minutes of one frontend's reports
TOKENS_MIN = 200  # minimum of tokens with logprobs, of a worker and of its peers together, to compare them
REQUESTS_MIN = 20  # minimum of requests with known parameters to determine the usual ones


@dataclass(slots=True)
class UserTokens:
    """Recent reports of all frontends."""

    _weighed: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)  # by worker: (tokens, unlikely)
    _drawn: deque[tuple[SamplingParameters, int]] = field(default_factory=lambda: deque(maxlen=WINDOWS))

    def add(self, fact: RequestsServed) -> None:
        """Add a frontend's report."""
        if fact.weighed:
            kept = self._weighed.setdefault(fact.worker, deque(maxlen=WINDOWS))
            kept.append((fact.weighed, min(fact.unlikely, fact.weighed)))
        if fact.sampling is not None and fact.sampling[0] > 0:
            self._drawn.append((SamplingParameters(*fact.sampling), fact.count))

    def forget(self, worker: str) -> None:
        """Drop the reports about a worker that is gone, or was replaced by a new instance."""
        self._weighed.pop(worker, None)

    @property
    def usual(self) -> SamplingParameters | None:
        """The parameters of most recent sampled requests; None while too few are known."""
        counts: Counter[SamplingParameters] = Counter()
        for drawn, count in self._drawn:
            counts[drawn] += count
        if counts.total() < REQUESTS_MIN:
            return None
        return max(counts, key=lambda drawn: (counts[drawn], drawn.name))

    def compare(self, worker: str, peers: Iterable[str]) -> tuple[int, int, float, float]:
        """Return a worker's tokens with logprobs, its unlikely ones, its peers' share of unlikely ones, and the probability of
        the difference by chance: 1.0 if too few tokens are known."""
        tokens, unlikely = self._sum((worker,))
        others, unlikely_others = self._sum(peers)
        share = unlikely_others / others if others else 0.0
        if min(tokens, others) < TOKENS_MIN:
            return tokens, unlikely, share, 1.0
        return tokens, unlikely, share, differ_by_chance(unlikely, tokens, unlikely_others, others)

    def _sum(self, workers: Iterable[str]) -> tuple[int, int]:
        reports = [one for worker in workers for one in self._weighed.get(worker, ())]
        return sum(tokens for tokens, _ in reports), sum(unlikely for _, unlikely in reports)
