"""What does it cost to send a request to a worker? In blocks: of prompt that must be computed, and of KV cache in use.

    prefill  = (prompt tokens still to be read there + the prompt's own) / block tokens
    credit   = overlap_credit · decay · device + host_weight · host + disk_weight · disk      blocks it has already
    copy     = (overlap_credit - 1) · blocks, where that is above 0; see below
    beside   = (request_tokens · requests in flight + recent_weight · prompt tokens sent there lately) / block tokens
    waiting  = prefill_scale · (max(prefill + copy - credit, 0) + beside)
    decode   = blocks in use there, with those of this prompt that are not      (+ other frontends' tokens / block tokens)
    cost     = (waiting + decode + request_weight · requests in flight) / weight

The lowest is the best. These are the rules of NVIDIA Dynamo's router, with its names and (in `Pricing()`) its defaults, but
for some things:

- `weight` is what the fleet thinks of the worker (1: all is well). One with half the weight is taken for twice as slow:
  all that it would have to do costs double. A breaker that is open does not raise the cost, it takes the worker out of the
  choice (`pick.Filter`); one that is half open lets a single request in, at the weight that the fleet gives it.
- What other frontends have in flight there is counted, as the worker reports it, where their routers do not tell us.
- What is in use by requests is taken for cached already where prefixes are cached at all.
- A credit above 1 says what a block that must be computed costs beyond that: it takes another one's place in the cache
  (`copy`). So it is not taken off what is to be read there for others, and of a prefix that several requests there have in
  use each has its share: many pay for one more copy, and a hot prefix gets as many as it needs. A block on a slower tier
  spares its part of that, too.
- Prompt tokens that were sent there in the last ten seconds or so weigh a little, also when they have been read. Of several
  workers that have nothing to read, the one with the least of them is next: so work is shared over seconds, too.
- A request in flight weighs something in tokens too, which means the same in blocks of any size. Without it nothing speaks
  against a worker that has all of a prompt, however many requests with the same one it has.

`decay` makes what a worker has cached count the less, the more it has to read compared with the least laden; off by
default. Where prompts are not tracked (a worker that only decodes), the credit is taken from the decode blocks.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf

import msgspec
import numpy as np

from controller.router.index.index import Matches
from controller.router.load.active_sequences import Floats, Loads

TEMPERATURE_MIN = 1e-6  # of a draw: below it, all but the lowest are as good as excluded


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What each term of the cost weighs, and how sharply the lowest is preferred. A request may have its own."""

    overlap_credit: float = 1.0  # of a block that is on the device already
    credit_decay: float = 0.0
    prefill_scale: float = 1.0
    request_weight: float = 0.0  # blocks in use for each request in flight
    request_tokens: float = 0.0  # prompt tokens to be read for each request in flight
    recent_weight: float = (
        0.0  # of prompt tokens that were sent there lately, against those that are still to be read
    )
    host_weight: float = 0.75  # credit for a block in the host's memory
    disk_weight: float = 0.25
    track_prefill: bool = True  # count what is still to be read
    track_blocks: bool = True  # count what is in use
    temperature: float = 0.0  # 0: always the lowest


USUAL = Pricing(overlap_credit=5.0, prefill_scale=20.0, request_tokens=512.0, recent_weight=0.1)
"""What is used unless something else is set. With Dynamo's defaults a block in use weighs as much as one to be computed, and
drives conversations away from where they are cached: on a trace of real chats 60 % of the possible hits instead of 90 %
(`python -m benchmarks routing`). A hit is worth more than the time it saves: a second copy takes another one's place.
"""


class ScoredPrompt(msgspec.Struct):
    """What is to be placed: a prompt's length, the sequence hashes of its full blocks, and who has them cached."""

    tokens: int  # at least 1
    block_tokens: int
    blocks: Sequence[int] = ()
    matches: Matches = msgspec.field(default_factory=Matches)

    @property
    def required_blocks(self) -> int:
        """How many blocks it takes, the last of them perhaps not full."""
        return -(-self.tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Terms:
    """One candidate's cost, term by term. Blocks, where it says nothing else. Explanations show it: its names are on the wire."""

    active_prefill_tokens: float  # still to be read there, without this prompt
    prefill: float  # to be read there with it, as if nothing were cached
    device: int  # of this prompt, on the device already
    host: int  # more of it, in the host's memory
    disk: int
    sharers: int  # requests in flight there that have all of it in use that is cached there
    decay: float
    credit: float
    copy: float  # what one more copy of this prompt costs
    adjusted_prefill: float
    waiting: (
        float  # what all that is to be read there costs, and requests in flight as if they had to read more
    )
    active: float  # in use there, without this prompt
    shared: int  # of this prompt, in use there already
    others: float  # in use there by other frontends, as far as they do not tell us
    decode: float
    kept: float  # of that, what counts
    requests: int  # in flight
    lately: float  # prompt tokens that were sent there, each counting the less the longer ago that was
    in_flight: float  # what they cost besides
    weight: float  # of the worker

    @property
    def cost(self) -> float:
        """What is compared: all that there is to do, per weight."""
        work = self.waiting + self.kept + self.in_flight
        return work / self.weight if self.weight > 0 else inf

    def shown(self) -> dict[str, float]:
        """Return all terms by their names, the cost last."""
        return {**asdict(self), "cost": self.cost}


@dataclass(frozen=True, slots=True)
class Overlaps:
    """How many of a prompt's blocks each candidate has: cached on each tier, and in use."""

    device: Floats
    host: Floats  # beyond those on the device
    disk: Floats  # beyond both
    shared: Floats
    sharers: Floats  # requests in flight that have all of it in use that is cached there


@dataclass(frozen=True, slots=True)
class Scores:
    """The costs of all candidates, in their order, and what they are made of."""

    loads: Loads
    overlaps: Overlaps
    prefill: Floats
    decay: Floats
    credit: Floats
    copy: float
    adjusted: Floats
    waiting: Floats
    external_blocks: Floats
    decode: Floats
    kept: Floats
    in_flight: Floats
    weights: Floats
    costs: Floats

    def terms(self, index: int) -> Terms:
        """Return one candidate's cost, term by term."""
        overlaps = self.overlaps
        return Terms(
            active_prefill_tokens=float(self.loads.prefill_tokens[index]),
            prefill=float(self.prefill[index]),
            device=int(overlaps.device[index]),
            host=int(overlaps.host[index]),
            disk=int(overlaps.disk[index]),
            sharers=int(overlaps.sharers[index]),
            decay=float(self.decay[index]),
            credit=float(self.credit[index]),
            copy=self.copy,
            adjusted_prefill=float(self.adjusted[index]),
            waiting=float(self.waiting[index]),
            active=float(self.loads.blocks[index]),
            shared=int(overlaps.shared[index]),
            others=float(self.external_blocks[index]),
            decode=float(self.decode[index]),
            kept=float(self.kept[index]),
            requests=int(self.loads.requests[index]),
            lately=float(self.loads.recent_tokens[index]),
            in_flight=float(self.in_flight[index]),
            weight=float(self.weights[index]),
        )


def score(
    pricing: Pricing,
    *,
    tokens: int,
    blocks: int,
    block_tokens: int,
    loads: Loads,
    overlaps: Overlaps,
    external_blocks: Floats,
    weights: Floats,
) -> Scores:
    """Return what a prompt of so many tokens and full blocks costs on each candidate. Raise ValueError for an empty one.

    `external_blocks`: blocks in use there that our tracker knows nothing of. `weights`: of the candidates' workers; those
    with none cost infinitely much.
    """
    if tokens < 1:
        raise ValueError("an empty prompt cannot be placed")
    prefill = (loads.prefill_tokens + tokens) / block_tokens
    if not pricing.track_prefill:
        prefill = np.zeros_like(prefill)
    decay = np.ones_like(prefill)
    if pricing.credit_decay and blocks:
        lead = (loads.prefill_tokens - loads.prefill_tokens.min()) / block_tokens / blocks
        decay = 1.0 / (1.0 + pricing.credit_decay * lead)
    extra = max(pricing.overlap_credit - 1.0, 0.0) if pricing.track_prefill else 0.0
    copy = extra * blocks
    each_cached = pricing.overlap_credit - extra + extra / (1.0 + overlaps.sharers)
    slower = pricing.host_weight * overlaps.host + pricing.disk_weight * overlaps.disk
    credit = each_cached * decay * overlaps.device + (1.0 + extra) * slower
    adjusted = np.maximum(prefill + copy - credit, 0.0)
    decode = loads.blocks + external_blocks + (blocks - overlaps.shared)
    kept = decode if pricing.track_blocks else np.zeros_like(decode)
    if not pricing.track_prefill:
        kept = np.maximum(kept - credit, 0.0)
    beside = pricing.request_tokens * loads.requests + pricing.recent_weight * loads.recent_tokens
    waiting = pricing.prefill_scale * (adjusted + beside / block_tokens)
    in_flight = pricing.request_weight * loads.requests
    work = waiting + kept + in_flight
    costs = per_weight(work, weights)
    return Scores(
        loads=loads,
        overlaps=overlaps,
        prefill=prefill,
        decay=decay,
        credit=credit,
        copy=copy,
        adjusted=adjusted,
        waiting=waiting,
        external_blocks=external_blocks,
        decode=decode,
        kept=kept,
        in_flight=in_flight,
        weights=weights,
        costs=costs,
    )


def per_weight(work: Floats, weights: Floats) -> Floats:
    """Return what work costs on workers of these weights: infinitely much on one without any."""
    return np.divide(work, weights, out=np.full_like(work, np.inf), where=weights > 0)


def pick_lowest(costs: Floats, temperature: float, draw: float) -> int:
    """Return the index of the cost that is picked. `draw`: a random number, at least 0 and below 1.

    Temperature 0: the lowest; exact ties are drawn, each with the same chance. Above: each with a chance proportional to
    exp(-(cost - lowest) / ((highest - lowest) · temperature)); none that is infinite, unless all are.
    """
    lowest = costs.min()
    if temperature <= 0.0 or lowest == np.inf:
        ties = np.flatnonzero(costs == lowest)
        return int(ties[int(draw * len(ties))])
    finite = np.flatnonzero(costs < np.inf)
    spread = float(costs[finite].max() - lowest)
    if spread <= 0.0:
        return int(finite[int(draw * len(finite))])
    shares = (costs - lowest) / spread
    sums = np.cumsum(np.exp(-shares / max(temperature, TEMPERATURE_MIN)))
    return min(int(np.searchsorted(sums, draw * sums[-1], side="right")), len(costs) - 1)
