"""What users' requests tell about samplers: the parameters that are usual, and workers whose tokens are unlikely.

Frontends report both with `RequestsServed`. Logprobs are there only where clients asked for them: asking for more would change
what engines are asked to compute. A worker whose share of unlikely tokens is beyond its peers' is no proof, so it is asked a
sampled canary at once, which can be one.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from controller.runtime.canary.sampled import SamplingParameters, differ_by_chance
from events.observations import RequestsServed

WINDOWS = 120  # reports kept per worker and for all parameters: ten minutes of one frontend's
TOKENS_MIN = 200  # with logprobs, of a worker and of its peers together, before they are compared
REQUESTS_MIN = 20  # whose parameters are known, before they count as usual


@dataclass(slots=True)
class UserTokens:
    """Recent reports of all frontends."""

    _weighed: dict[str, deque[tuple[int, int]]] = field(default_factory=dict)  # by worker: (tokens, unlikely)
    _drawn: deque[tuple[SamplingParameters, int]] = field(default_factory=lambda: deque(maxlen=WINDOWS))

    def add(self, fact: RequestsServed) -> None:
        """Take a frontend's report."""
        if fact.weighed:
            kept = self._weighed.setdefault(fact.worker, deque(maxlen=WINDOWS))
            kept.append((fact.weighed, min(fact.unlikely, fact.weighed)))
        if fact.sampling is not None and fact.sampling[0] > 0:
            self._drawn.append((SamplingParameters(*fact.sampling), fact.count))

    def forget(self, worker: str) -> None:
        """Drop the reports about a worker that is gone, or begins anew."""
        self._weighed.pop(worker, None)

    @property
    def usual(self) -> SamplingParameters | None:
        """The parameters that most sampled requests were sent with lately; None while too few are known."""
        counts: Counter[SamplingParameters] = Counter()
        for drawn, count in self._drawn:
            counts[drawn] += count
        if counts.total() < REQUESTS_MIN:
            return None
        return max(counts, key=lambda drawn: (counts[drawn], drawn.name))

    def compare(self, worker: str, peers: Iterable[str]) -> tuple[int, int, float, float]:
        """Return a worker's tokens with logprobs, how many were unlikely, its peers' share of them, and how likely that is by
        chance: 1.0 where too few are known."""
        tokens, unlikely = self._sum((worker,))
        others, unlikely_others = self._sum(peers)
        share = unlikely_others / others if others else 0.0
        if min(tokens, others) < TOKENS_MIN:
            return tokens, unlikely, share, 1.0
        return tokens, unlikely, share, differ_by_chance(unlikely, tokens, unlikely_others, others)

    def _sum(self, workers: Iterable[str]) -> tuple[int, int]:
        reports = [one for worker in workers for one in self._weighed.get(worker, ())]
        return sum(tokens for tokens, _ in reports), sum(unlikely for _, unlikely in reports)
