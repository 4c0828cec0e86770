"""Statistics of sampled answers: how likely a correct sampler gives them. Pure functions.

A sampled canary is the prompt of a canary, sent with a temperature above 0. The canary's greedy golden gives the probability of
each token at each position, as long as the answer equals the golden. The first differing token has a p-value: the probability
that a correct sampler draws, at this position, any token that is at most as likely. Later tokens are not judged.

One small p-value can be chance. So the canary is repeated with another seed, and the p-values are combined (Fisher's method).
Every simplification makes p-values larger, which favours the worker: see `surprise`.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from events.observations import RequestsServed, TopK

SURPRISE_MIN = 1e-6  # lower bound of a p-value
UNLISTED_MIN = 1e-4  # lower bound of the unlisted tokens' total probability, because logprobs are rounded
TEMPERATURE_MAX = 1.0  # above this temperature, the weight of tokens outside the top k cannot be bounded


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """The sampling parameters of a sampled canary."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens

    @property
    def name(self) -> str:
        """A short name of the parameters, which becomes part of a sampled canary's id."""
        return f"t{self.temperature:g}-p{self.top_p:g}-k{self.top_k}"

    @property
    def bounded(self) -> "SamplingParameters":
        """The same parameters with a temperature of at most TEMPERATURE_MAX, so that answers can be judged."""
        return SamplingParameters(min(self.temperature, TEMPERATURE_MAX), self.top_p, self.top_k)


def surprise(
    golden: Sequence[TopK],
    expected: Sequence[int],
    got: Sequence[int],
    drawn: SamplingParameters,
    tolerance: float,
) -> float:
    """Return the p-value of `got`: the probability that a correct sampler gives an answer at least as unlikely.

    `expected` and `golden` are the tokens and the top logprobs of the golden. `drawn` has the parameters of the sampler.

    1.0 if no token differs, or if the golden has fewer than two logprobs at the first differing position. If position i (from 0)
    is the first that differs, the p-value of its token is multiplied by (i + 1)(i + 2). The factor is needed because any position
    can be the first to differ. The inverses of these factors sum up to 1, so the result is a valid p-value of the whole answer.
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
    """Return an upper bound of the probability that a correct sampler draws a token that is at most as likely as `token`.

    `top` lists the golden's best tokens with their logprobs. Each unlisted token is at most as likely as the last listed one. At
    temperatures up to 1, this gives an upper bound of the total weight of the unlisted tokens. Top-p and top-k exclude tokens.
    This makes each remaining token likelier, by a factor of at most 1 divided by the total probability of the remaining tokens.
    Each logprob may be wrong by `tolerance`.
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
    """Combine independent p-values by Fisher's method: return the probability that their product is this small by chance."""
    exponent = -sum(math.log(max(one, SURPRISE_MIN)) for one in surprises)
    term = total = math.exp(-exponent)
    for place in range(1, len(surprises)):
        term *= exponent / place
        total += term
    return min(1.0, total)


def differ_by_chance(unlikely: int, tokens: int, peers_unlikely: int, peers_tokens: int) -> float:
    """Return an upper bound (Chernoff) of the probability that chance explains a worker's number of unlikely tokens.

    `unlikely` of the worker's `tokens` tokens are unlikely, and `peers_unlikely` of the `peers_tokens` tokens of its peers. The
    bound assumes that a correct worker has unlikely tokens as often as its peers. Unlikely tokens occur in clusters within
    one request, so CLUSTER tokens count as one independent observation.
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


# reports kept per worker, and in total for the parameters: ten minutes of one frontend's reports
WINDOWS = 120
TOKENS_MIN = 200  # tokens with logprobs that a worker, and its peers together, need for a comparison
REQUESTS_MIN = 20  # requests with known sampling parameters needed to determine the usual parameters


@dataclass(slots=True)
class UserTokens:
    """Collects the frontends' reports about users' requests (`RequestsServed`): sampling parameters and unlikely tokens.

    Only requests for which clients wanted logprobs are counted, because requesting logprobs for other requests would change what
    engines compute. If a worker's share of unlikely tokens is larger than its peers' share, this does not prove a fault. The
    worker then gets a sampled canary at once, which can prove a fault.
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
        """Drop the reports about a worker that is gone or has been replaced by a new instance."""
        self._weighed.pop(worker, None)

    @property
    def common_parameters(self) -> SamplingParameters | None:
        """The most frequent parameters of users' recent requests at a temperature above 0.

        None while fewer than REQUESTS_MIN such requests are known.
        """
        counts: Counter[SamplingParameters] = Counter()
        for drawn, count in self._drawn:
            counts[drawn] += count
        if counts.total() < REQUESTS_MIN:
            return None
        return max(counts, key=lambda drawn: (counts[drawn], drawn.name))

    def compare(self, worker: str, peers: Iterable[str]) -> tuple[int, int, float, float]:
        """Compare a worker's share of unlikely tokens with its peers' share.

        Return four numbers:

        - how many tokens of the worker have logprobs;
        - how many of these are unlikely;
        - the peers' share of unlikely tokens;
        - an upper bound of the probability that the difference is chance. It is 1.0 if the worker or its peers have fewer than
          TOKENS_MIN tokens with logprobs.
        """
        tokens, unlikely = self._sum((worker,))
        others, unlikely_others = self._sum(peers)
        share = unlikely_others / others if others else 0.0
        if min(tokens, others) < TOKENS_MIN:
            return tokens, unlikely, share, 1.0
        return tokens, unlikely, share, differ_by_chance(unlikely, tokens, unlikely_others, others)

    def _sum(self, workers: Iterable[str]) -> tuple[int, int]:
        reports = [one for worker in workers for one in self._weighed.get(worker, ())]
        return sum(tokens for tokens, _ in reports), sum(unlikely for _, unlikely in reports)
