"""What does it cost to send a request to each of a few places?

The same costs as `score.score`'s, one after another: for a handful of places a dozen sums over columns take five times as
long as the same sums in plain numbers. More than a handful, blocks on slower tiers, prompts that shrink with time and a
credit that decays are the columns' affair.
"""

from dataclasses import dataclass
from math import inf

from controller.router.places import Question

FEW = 16


@dataclass(frozen=True, slots=True)
class FewScores:
    """The costs of all places, in their order, and how many of the prompt's blocks each has on its device."""

    costs: list[float]
    device: list[float]


def score_few(question: Question) -> FewScores | None:
    """Return what a request costs in each place; None: the columns must say it."""
    places, prompt, pricing = question.places, question.prompt, question.pricing
    found, size, blocks = prompt.matches, prompt.block_tokens, len(prompt.blocks)
    if len(places) > FEW or found.disk is not found.device or pricing.credit_decay or prompt.tokens < 1:
        return None
    loads = question.slots.each(places.holders, now=question.now)
    if loads is None:
        return None
    used, requests = question.slots.in_use(prompt.blocks) if blocks else ({}, {})
    extra = max(pricing.overlap_credit - 1.0, 0.0) if pricing.track_prefill else 0.0
    request = pricing.prefill_scale * pricing.request_tokens / size + pricing.request_weight
    recent = pricing.prefill_scale * pricing.recent_weight / size
    costs, device = [], []
    for place, (seat, holder, row, load) in enumerate(
        zip(places.seat, places.holders, places.rows.tolist(), loads, strict=True)
    ):
        cached, shared = found.device.get(holder, 0), used.get(row, 0)
        has = max(cached, shared * float(places.caching[place])) if shared else cached
        sharers = requests[row] if shared and shared >= cached else 0
        credit = (pricing.overlap_credit - extra + extra / (1.0 + sharers)) * has
        kept = (
            load.blocks + question.others_blocks(place) + (blocks - shared) if pricing.track_blocks else 0.0
        )
        if pricing.track_prefill:
            prefill = (load.prefill_tokens + prompt.tokens) / size
        else:
            prefill, kept = 0.0, max(kept - credit, 0.0)
        waiting = pricing.prefill_scale * max(prefill + extra * blocks - credit, 0.0)
        work = waiting + kept + request * load.requests + recent * load.lately
        costs.append(work / seat.weight if seat.weight > 0 else inf)
        device.append(float(has))
    return FewScores(costs, device)
