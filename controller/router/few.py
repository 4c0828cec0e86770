"""What does it cost to send a request to each of a few places?

The same costs as `score.score`'s, one after another: for a handful of places a dozen sums over columns take five times as
long as the same sums in plain numbers. More than a handful, blocks on slower tiers, prompts that shrink with time and a
credit that decays are the columns' affair.
"""

from math import inf

from controller.router.kv_matches import Depths
from controller.router.places import Question


def score_few(question: Question) -> tuple[list[float], list[float]] | None:
    """Return what a request costs in each place, in their order, and how many of the prompt's blocks each has on its device;
    None: the columns must say it."""
    places, prompt, pricing, slots = question.places, question.prompt, question.pricing, question.slots
    found, size, blocks = prompt.matches, prompt.block_tokens, len(prompt.blocks)
    if not places.few or found.disk is not found.device or pricing.credit_decay:
        return None
    if prompt.tokens < 1 or slots.paced:
        return None
    others, now, tokens = question.others, question.now, prompt.tokens
    used = slots.pieces(prompt.blocks) if blocks else ()
    cached_at = (found.device.named() if type(found.device) is Depths else found.device).get
    track_prefill, track_blocks = pricing.track_prefill, pricing.track_blocks
    extra = pricing.overlap_credit - 1.0 if track_prefill and pricing.overlap_credit > 1.0 else 0.0
    alone, copy, scale = pricing.overlap_credit - extra, extra * blocks, pricing.prefill_scale
    unshared = alone + extra
    request = scale * pricing.request_tokens / size + pricing.request_weight
    recent = scale * pricing.recent_weight / size
    costs: list[float] = []
    device: list[float] = []
    for seat, holder, work in places.few:
        has = cached_at(holder, 0)
        credit, shared, row = unshared * has, 0, work.row
        for depth, users in used:
            if row in users:
                shared, requests = depth, users[row]
        if shared:
            sharers = requests if shared >= has else 0
            if shared > has and seat.joined.kv_events:
                has = shared
            credit = (alone + extra / (1.0 + sharers)) * has
        kept = 0.0
        if track_blocks:
            kept = work.blocks
            if seat.ranks > 1:
                kept += question.others_at(len(costs))[1] / size
            elif others is not None and (load := others(seat.worker)) is not None:
                kept += load.active_tokens / size
            kept += blocks - shared
        if track_prefill:
            prefill = (work.reading_tokens + tokens) / size
        else:
            prefill, kept = 0.0, kept - credit if kept > credit else 0.0
        due = prefill + copy - credit
        waiting = scale * due if due > 0.0 else 0.0
        cost = waiting + kept + request * len(work.requests) + recent * work.lately_at(now)
        weight = seat.weight
        costs.append(cost / weight if weight > 0.0 else inf)
        device.append(has)
    return costs, device
