"""What does it cost to send a request to a worker? In blocks: of prompt that must be computed, and of KV cache in use.

    prefill  = (prompt tokens still to be read there + the prompt's own) / block tokens
    credit   = overlap_credit · decay · device + host_weight · host + disk_weight · disk      blocks it has already
    copy     = (overlap_credit - 1) · blocks, where that is above 0; see below
    beside   = (request_tokens · requests in flight + recent_weight · prompt tokens sent there lately) / block tokens
    adjusted = max(prefill + copy - credit, 0)
    waiting  = prefill_scale · (adjusted + beside)
    decode   = blocks in use there, with those of this prompt that are not      (+ other frontends' tokens / block tokens)
    cost     = (waiting + decode + request_weight · requests in flight) / weight

The lowest is the best. These are the rules of NVIDIA Dynamo's router, with its names and (in `Pricing()`) its defaults, but
for some things:

- `weight` is what the fleet thinks of the worker (1: all is well). One with half the weight is taken for twice as slow:
  all that it would have to do costs double. A breaker that is open does not raise the cost, it takes the worker out of the
  choice (`filter.Filter`); one that is half open lets a single request in, at the weight that the fleet gives it.
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

`costs` is the one place where this stands: with numbers it says what each of a few candidates costs, with columns what all of
them do.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeAlias

import msgspec
import numpy as np

from controller.router.index.index import Matches
from controller.router.load.active_sequences import Floats

TEMPERATURE_MIN = 1e-6  # of a draw: below it, all but the lowest are as good as excluded

Value: TypeAlias = Any
"""A number of one candidate, or a column with one for each candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """What each term of the cost weighs, and how sharply the lowest is preferred. A request may have its own."""

    overlap_credit: float = 1.0  # of a block that is on the device already
    credit_decay: float = 0.0
    prefill_scale: float = 1.0
    request_weight: float = 0.0  # blocks in use for each request in flight
    request_tokens: float = 0.0  # prompt tokens to be read for each request in flight
    recent_weight: float = 0.0  # of prompt tokens that were sent there lately, against those still to be read
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
    """What is to be placed: a prompt's length, the sequence hashes of its full blocks, and which ranks have them cached."""

    tokens: int  # at least 1
    block_tokens: int
    blocks: Sequence[int] = ()
    matches: Matches = msgspec.field(default_factory=Matches)

    @property
    def required_blocks(self) -> int:
        """How many blocks it takes, the last of them perhaps not full."""
        return -(-self.tokens // self.block_tokens)


class Terms(msgspec.Struct, kw_only=True):
    """The cost term by term, of one candidate or, as columns, of all. Blocks, where it says nothing else. Explanations show
    it: its names are on the wire."""

    active_prefill_tokens: Value  # still to be read there, without this prompt
    prefill: Value = 0.0  # to be read there with it, as if nothing were cached
    device: Value  # of this prompt, on the device already
    host: Value  # more of it, in the host's memory
    disk: Value
    sharers: Value  # requests in flight there that have all of it in use that is cached there
    decay: Value = 1.0
    credit: Value = 0.0
    copy: float = 0.0  # what one more copy of this prompt costs
    adjusted_prefill: Value = 0.0
    waiting: Value = 0.0  # what is to be read there costs, and requests in flight as if they had to read more
    active: Value  # in use there, without this prompt
    shared: Value  # of this prompt, in use there already
    others: Value  # in use there by other frontends, as far as they do not tell us
    decode: Value = 0.0
    kept: Value = 0.0  # of that, what counts
    requests: Value  # in flight
    lately: Value  # prompt tokens that were sent there, each counting the less the longer ago that was
    in_flight: Value = 0.0  # what they cost besides
    weight: Value  # of the worker

    @property
    def cost(self) -> float:
        """What is compared, of one candidate: all that there is to do, per weight."""
        work: float = self.waiting + self.kept + self.in_flight
        return work / self.weight if self.weight > 0 else inf

    def at(self, index: int) -> "Terms":
        """Return one candidate's, of columns."""
        size = self.weight.shape
        found = {name: np.broadcast_to(column, size)[index].item() for name, column in self._each()}
        return Terms(**{name: int(one) if name in _COUNTS else one for name, one in found.items()})

    def shown(self) -> dict[str, float]:
        """Return all terms by their names, the cost last."""
        return {**dict(self._each()), "cost": self.cost}

    def _each(self) -> list[tuple[str, Value]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__]


_COUNTS = frozenset({"device", "host", "disk", "sharers", "shared", "requests"})


CandidateLoad: TypeAlias = tuple[Value, Value, Value, Value, Value, Value, Value, Value, Value]
"""What the cost of a candidate depends on, in the order of the names in `costs`: prompt tokens to be read there, blocks in use,
requests, prompt tokens sent there lately; of the prompt's blocks those on its device (times their decay) and those in use; the
requests that share these; the blocks of others; the weight of the worker."""


def costs(
    pricing: Pricing,
    prompt: ScoredPrompt,
    candidates: Iterable[CandidateLoad],
    terms: Terms | None = None,
) -> list[Value]:
    """Return what a prompt costs on each candidate. With `terms` there is one, which is all of them as columns: the terms know
    the blocks on slower tiers, and those that follow from others are filled in."""
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
    """Return what a prompt costs on each candidate, and fill the terms in: columns. Those that do not follow from others are
    given. Raise ValueError for an empty prompt. Candidates whose workers have no weight cost infinitely much."""
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
