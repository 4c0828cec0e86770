"""The cost of a request at a worker, in blocks: prompt blocks to compute and KV blocks in use.

    prefill  = (prompt tokens to prefill at the worker + the prompt's own) / block tokens
    credit   = overlap_credit · decay · device + host_weight · host + disk_weight · disk
    copy     = (overlap_credit - 1) · blocks of the prompt, if above 0
    beside   = (request_tokens · requests in flight + recent_weight · prompt tokens sent there lately) / block tokens
    adjusted = max(prefill + copy - credit, 0)
    waiting  = prefill_scale · (adjusted + beside)
    decode   = blocks in use there + the prompt's blocks that are not in use   (+ other frontends' tokens / block tokens)
    cost     = (waiting + decode + request_weight · requests in flight) / weight

`device`, `host` and `disk` are the numbers of the prompt's blocks that the worker has cached on each tier. The other
names on the right are weights in `Pricing`, except `decay` and `weight`, which are explained below.

The lowest cost is the best. These are the rules of NVIDIA Dynamo's router, with its names and (in `Pricing()`) its
defaults, but with these differences:

- `weight` is the fleet's view of the worker (1: healthy). A worker of half the weight is assumed to be half as fast, so all its
  work costs double. An open breaker does not raise the cost, but excludes the worker (`filter.Filter`). A half-open breaker
  admits a single request, at the fleet's weight.
- If the routers of other frontends do not report to this router, their requests are counted as the worker reports them.
- Blocks in use by requests count as cached already, if the worker caches prefixes at all.
- An overlap credit above 1 adds a price (`copy`) for each block that must be computed, because that block evicts another one
  from the cache. The part of the credit above 1 can only cancel this price. It never lowers the cost of prefilling other
  prompts. If several requests at a worker use a prefix, each of them saves only an equal part of the price. The worker's
  advantage therefore shrinks with each request, and other workers get a copy of the prefix too. A block on a slower tier
  saves `host_weight` or `disk_weight` of the price.
- Prompt tokens sent to a worker in the last ten seconds or so count a little even after they have been prefilled. Among workers
  with nothing to prefill, the one with the fewest such tokens is next, so that work is also balanced over seconds.
- A request in flight also counts as `request_tokens` prompt tokens, a number that does not depend on the block size. Without this
  term, a worker with all blocks of a prompt would cost nothing, however many requests with the same prompt it has.

`decay` reduces the credit of a worker with more prompt tokens to prefill than the least loaded worker; off by
default. If prompts are not tracked (a worker that only decodes), the credit is subtracted from the decode blocks.

`costs` is the only implementation of this formula. It computes the costs of a few candidates from numbers, or those of all
candidates from columns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import msgspec
import numpy as np

from controller.router.index.index import Matches
from controller.router.load.active_sequences import Floats

TEMPERATURE_MIN = 1e-6  # below this temperature, practically only the lowest cost is drawn

Value: TypeAlias = Any
"""A number of one candidate, or a column with one for each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """The weights of the cost terms, and how sharply the lowest cost is preferred. A request may override them."""

    overlap_credit: float = 1.0  # credit for a block that the device has cached
    # how much the credit shrinks on a worker with more prompt tokens to prefill; 0 if it does not shrink
    credit_decay: float = 0.0
    prefill_scale: float = 1.0  # weight of prompt blocks to prefill, relative to blocks in use
    request_weight: float = 0.0  # blocks added to the cost per request in flight
    request_tokens: float = 0.0  # prompt tokens added to the cost per request in flight
    recent_weight: float = 0.0  # weight of recently sent prompt tokens, relative to tokens to prefill
    host_weight: float = 0.75  # credit for a block in host memory
    disk_weight: float = 0.25  # credit for a block on disk
    track_prefill: bool = True  # count unread prompt tokens
    track_blocks: bool = True  # count blocks in use
    temperature: float = 0.0  # temperature of the random choice; 0 always chooses the lowest cost


USUAL = Pricing(overlap_credit=5.0, prefill_scale=20.0, request_tokens=512.0, recent_weight=0.1)
"""The default pricing. With Dynamo's defaults a block in use costs as much as one to be computed, which drives conversations
away from where they are cached: a trace of real chats then gets 60 % of the possible hits instead of 90 % (`python -m benchmarks
routing`). A hit is worth more than the time it saves, because a second copy evicts another block.
"""


class ScoredPrompt(msgspec.Struct):
    """A prompt to be scored: its length, the hashes of its full blocks, and the ranks that have such blocks cached."""

    tokens: int  # at least 1
    block_tokens: int
    blocks: Sequence[int] = ()
    matches: Matches = msgspec.field(default_factory=Matches)

    @property
    def required_blocks(self) -> int:
        """Number of blocks of the prompt, rounded up, because the last block may be partial."""
        return -(-self.tokens // self.block_tokens)


class Terms(msgspec.Struct, kw_only=True):
    """The cost term by term: of one candidate as numbers, or of all candidates as columns. In blocks unless noted.

    Explanations contain these terms, so the field names are part of the API.
    """

    active_prefill_tokens: Value  # prompt tokens to prefill at the candidate, without this prompt
    prefill: Value = 0.0  # blocks to prefill with this prompt, as if none of it were cached
    device: Value  # blocks of this prompt that the device has cached
    host: Value  # further blocks of this prompt, in host memory
    disk: Value  # further blocks of this prompt, on disk
    sharers: Value  # requests in flight at the candidate that use all of its cached blocks of this prompt
    decay: Value = 1.0
    credit: Value = 0.0
    copy: float = 0.0  # cost of one more copy of this prompt's blocks in a cache
    adjusted_prefill: Value = 0.0
    waiting: Value = 0.0  # cost of the prompts to prefill, with the tokens added for requests in flight
    active: Value  # blocks in use at the candidate, without this prompt
    shared: Value  # blocks of this prompt that are already in use there
    others: Value  # blocks in use there by other frontends that do not report to our tracker
    decode: Value = 0.0
    kept: Value = 0.0  # the part of `decode` that counts
    requests: Value  # number of requests in flight
    lately: Value  # prompt tokens sent there recently, with exponentially decaying weight
    in_flight: Value = 0.0  # additional blocks for requests in flight
    weight: Value  # weight of the worker

    @property
    def cost(self) -> float:
        """The cost of one candidate: the sum of its counted terms, divided by its weight."""
        work: float = self.waiting + self.kept + self.in_flight
        return work / self.weight if self.weight > 0 else inf

    def at(self, index: int) -> "Terms":
        """Return the terms of the candidate at this index, taken from columns."""
        size = self.weight.shape
        found = {name: np.broadcast_to(column, size)[index].item() for name, column in self._each()}
        return Terms(**{name: int(one) if name in _COUNTS else one for name, one in found.items()})

    def shown(self) -> dict[str, float]:
        """Return all terms by name, and the cost as the last entry."""
        return {**dict(self._each()), "cost": self.cost}

    def _each(self) -> list[tuple[str, Value]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__]


_COUNTS = frozenset({"device", "host", "disk", "sharers", "shared", "requests"})


CandidateLoad: TypeAlias = tuple[Value, Value, Value, Value, Value, Value, Value, Value, Value]
"""The inputs of a candidate's cost, in the order of the names in `costs`: prompt tokens to prefill, blocks in use, requests,
recently sent prompt tokens, the prompt's blocks on the device (times `decay`), the prompt's blocks in use, the requests that
share these blocks, the blocks of other frontends, and the worker's weight."""


def costs(
    pricing: Pricing,
    prompt: ScoredPrompt,
    candidates: Iterable[CandidateLoad],
    terms: Terms | None = None,
) -> list[Value]:
    """Return the cost of a prompt at each candidate.

    Without `terms`, `candidates` has one entry of numbers per candidate. With `terms`, `candidates` has a single entry:
    columns with the numbers of all candidates. The blocks on slower tiers are then read from `terms`, and the computed
    terms are written there.
    """
    tokens, blocks, size = prompt.tokens, len(prompt.blocks), prompt.block_tokens
    tracked, scale = pricing.track_prefill, pricing.prefill_scale
    alone, extra = pricing.overlap_credit, 0.0
    if tracked and alone > 1.0:
        alone, extra = 1.0, alone - 1.0
    copy, request_weight, tracks_blocks = extra * blocks, pricing.request_weight, pricing.track_blocks
    per_request, per_token = scale * pricing.request_tokens / size, scale * pricing.recent_weight / size
    found = []
    for to_read, active, requests, lately, device, shared, sharers, others, weight in candidates:
        credit = (alone + extra / (1.0 + sharers)) * device
        if terms is not None:
            slower = pricing.host_weight * terms.host + pricing.disk_weight * terms.disk
            credit = credit + (1.0 + extra) * slower
        prefill = (to_read + tokens) / size if tracked else 0.0 * to_read
        due = prefill + copy - credit
        adjusted = (due if due > 0.0 else 0.0) if terms is None else np.maximum(due, 0.0)
        decode = active + others + (blocks - shared)
        kept = decode if tracks_blocks else 0.0 * decode
        if not tracked:
            left = kept - credit
            kept = left * (left > 0.0)
        waiting = scale * adjusted + per_request * requests + per_token * lately
        in_flight = request_weight * requests
        work = waiting + kept + in_flight
        if terms is None:
            found.append(work / weight if weight > 0.0 else inf)
            continue
        terms.prefill, terms.credit, terms.copy, terms.adjusted_prefill = prefill, credit, copy, adjusted
        terms.waiting, terms.decode, terms.kept, terms.in_flight = waiting, decode, kept, in_flight
        found.append(per_weight(work, weight))
    return found


def score(pricing: Pricing, prompt: ScoredPrompt, terms: Terms) -> Floats:
    """Return the cost of a prompt at each candidate as a column, and write the computed terms into `terms`.

    A candidate of weight 0 costs infinity. Raise ValueError for an empty prompt.
    """
    tokens, blocks, size = prompt.tokens, len(prompt.blocks), prompt.block_tokens
    if tokens < 1:
        raise ValueError("an empty prompt cannot be placed")
    to_read = terms.active_prefill_tokens
    if pricing.credit_decay and blocks:
        terms.decay = 1.0 / (1.0 + pricing.credit_decay * ((to_read - to_read.min()) / size / blocks))
    columns = (
        to_read, terms.active, terms.requests, terms.lately, terms.decay * terms.device, terms.shared, terms.sharers,
        terms.others, terms.weight,
    )  # fmt: skip
    found: Floats = costs(pricing, prompt, (columns,), terms)[0]
    return found


def per_weight(work: Floats, weights: Floats) -> Floats:
    """Return `work` divided by the weights of the workers, or infinity for weight 0."""
    return np.divide(work, weights, out=np.full_like(work, np.inf), where=weights > 0)


def pick_lowest(costs: Floats, temperature: float, draw: float) -> int:
    """Return the index of the cost that is picked. `draw` is a random number, at least 0 and below 1.

    At temperature 0 the lowest cost is picked, and exact ties are drawn with equal chances. At a higher temperature,
    each cost is picked with a probability proportional to exp(-(cost - lowest) / ((highest - lowest) · temperature)).
    An infinite cost is never picked, unless all costs are infinite.
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
