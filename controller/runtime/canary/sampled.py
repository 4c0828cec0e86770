"""The probability that a correct sampler drew an answer, and statistics of users' requests. Pure.

A sampled canary is the prompt of a canary, sent with a temperature above 0. The greedy golden of the canary gives the
probability of each token at each position, as long as the answer follows the golden. The first token that
departs from it has a p-value: the probability that a correct sampler draws a token at most this likely there. What follows is
not judged.

One small p-value is chance. The canary is repeated with another seed, and the p-values are combined (Fisher's method). Every
simplification makes p-values larger: see `surprise`.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from events.observations import RequestsServed, TopK

SURPRISE_MIN = 1e-6  # lower bound of a p-value
UNLISTED_MIN = 1e-4  # lower bound of the total probability of the unlisted tokens: logprobs are rounded
TEMPERATURE_MAX = 1.0  # of a sampled canary: above it, the weight outside the top k cannot be bounded


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters of a sampled canary."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all

    @property
    def name(self) -> str:
        """A short name, for the ids of sampled canaries."""
        return f"t{self.temperature:g}-p{self.top_p:g}-k{self.top_k}"

    @property
    def bounded(self) -> "SamplingParameters":
        """The nearest parameters for which draws can be judged."""
        return SamplingParameters(min(self.temperature, TEMPERATURE_MAX), self.top_p, self.top_k)


def surprise(
    golden: Sequence[TopK],
    expected: Sequence[int],
    got: Sequence[int],
    drawn: SamplingParameters,
    tolerance: float,
) -> float:
    """Return the p-value of an answer: 1.0 if it follows the golden as far as it goes, or cannot be judged.

    The first differing position could be any. So the p-value of position i is multiplied by (i + 1)(i + 2). The inverses of
    these factors sum up to 1, so the smallest p-value of an answer is still a p-value.
    """
    for place, (right, token) in enumerate(zip(expected, got, strict=False)):
        if right == token:
            continue
        if place >= len(golden) or len(golden[place]) < 2:
            return 1.0
        tail = _tail(golden[place], token, drawn, tolerance)
        return min(1.0, max(SURPRISE_MIN, tail) * (place + 1) * (place + 2))
    return 1.0


def _tail(top: TopK, token: int, drawn: SamplingParameters, tolerance: float) -> float:
    """Return an upper bound of the probability of drawing a token no likelier than `token`.

    Unlisted tokens are below the last one listed; at temperatures up to 1 that bounds their total weight. Cutting by top-p and
    top-k makes the remaining tokens likelier, at most by the inverse of the share kept. Logprobs may be off by the tolerance.
    """
    power = 1 / drawn.temperature
    listed = sorted(top, key=lambda pair: -pair[1])
    weights = [math.exp(value * power) for _, value in listed]
    unlisted = max(UNLISTED_MIN, 1 - sum(math.exp(value) for _, value in listed))
    unlisted *= math.exp(listed[-1][1] * (power - 1))
    total = sum(weights) + unlisted
    kept = sum(weights[: drawn.top_k]) / total if drawn.top_k else 1.0
    limit = dict(listed).get(token)
    likelier = (
        0.0 if limit is None else sum(w for (_, v), w in zip(listed, weights, strict=True) if v <= limit)
    )
    tail = (likelier + unlisted) / (total * min(kept, drawn.top_p))
    return min(1.0, tail * math.exp(2 * tolerance * power))


def combined(surprises: Sequence[float]) -> float:
    """Return the combined p-value of independent p-values (Fisher): the probability of so small a product by chance."""
    exponent = -sum(math.log(max(one, SURPRISE_MIN)) for one in surprises)
    term = total = math.exp(-exponent)
    for place in range(1, len(surprises)):
        term *= exponent / place
        total += term
    return min(1.0, total)


def differ_by_chance(unlikely: int, tokens: int, peers_unlikely: int, peers_tokens: int) -> float:
    """Return an upper bound of the probability of a worker's unlikely tokens at its peers' share (Chernoff's bound).

    Unlikely tokens are clustered by request, so ten of them count as one.
    """
    share = unlikely / tokens if tokens else 0.0
    usual = (peers_unlikely + CLUSTER) / (peers_tokens + CLUSTER)
    if share <= usual or usual >= 1:
        return 1.0
    divergence = share * math.log(share / usual)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - usual))
    return math.exp(-divergence * tokens / CLUSTER)


CLUSTER = 10


WINDOWS = 120  # reports kept, per worker and for all parameters: ten minutes of one frontend's reports
TOKENS_MIN = 200  # minimum of tokens with logprobs, of a worker and of its peers together, to compare them
REQUESTS_MIN = 20  # minimum of requests with known parameters to determine the usual ones


@dataclass(slots=True)
class UserTokens:
    """Users' requests, as reported by all frontends with `RequestsServed`: the usual sampling parameters, and unlikely tokens.

    Logprobs exist only where clients requested them: requesting more would change what engines compute. A worker with a larger
    share of unlikely tokens than its peers is not proven faulty, so it gets a sampled canary at once, which can prove a fault.
    """

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
