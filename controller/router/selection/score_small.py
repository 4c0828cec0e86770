"""What does it cost to send a request to each of a few places?

The same costs as `score.score`'s, one after another: for a handful of candidates a dozen sums over columns take longer than the
same sums in plain numbers. A choice of eight takes 12 µs so, and 46 by columns (`python -m benchmarks choice`). More than a
handful, blocks on slower tiers, prompts that shrink with time and a credit that decays are the columns' affair.
"""

from math import inf

from controller.router.index.matches import Depths
from controller.router.selection.candidates import ScoringRequest


def score_few(request: ScoringRequest) -> tuple[list[float], list[float]] | None:
    """Return what a request costs at each candidate, in their order, and how many of the prompt's blocks each has on its device;
    None: the columns must say it."""
    candidates, prompt, pricing, slots = request.candidates, request.prompt, request.pricing, request.slots
    found, size, blocks = prompt.matches, prompt.block_tokens, len(prompt.blocks)
    if not candidates.few or found.disk is not found.device or pricing.credit_decay:
        return None
    if prompt.tokens < 1 or slots.paced:
        return None
    external_load, now, tokens = request.external_load, request.now, prompt.tokens
    used = slots.pieces(prompt.blocks) if blocks else ()
    cached_at = (found.device.named() if type(found.device) is Depths else found.device).get
    track_prefill, track_blocks = pricing.track_prefill, pricing.track_blocks
    extra = pricing.overlap_credit - 1.0 if track_prefill and pricing.overlap_credit > 1.0 else 0.0
    alone, copy, scale = pricing.overlap_credit - extra, extra * blocks, pricing.prefill_scale
    unshared = alone + extra
    per_request = scale * pricing.request_tokens / size + pricing.request_weight
    recent = scale * pricing.recent_weight / size
    costs: list[float] = []
    device: list[float] = []
    for endpoint, holder, work in candidates.few:
        has = cached_at(holder, 0)
        credit, shared, row = unshared * has, 0, work.row
        for depth, users in used:
            if row in users:
                shared, requests = depth, users[row]
        if shared:
            sharers = requests if shared >= has else 0
            if shared > has and endpoint.joined.kv_events:
                has = shared
            credit = (alone + extra / (1.0 + sharers)) * has
        kept = 0.0
        if track_blocks:
            kept = work.blocks
            if endpoint.ranks > 1:
                kept += request.external_at(len(costs))[1] / size
            elif external_load is not None and (load := external_load(endpoint.worker)) is not None:
                kept += load.active_tokens / size
            kept += blocks - shared
        if track_prefill:
            prefill = (work.reading_tokens + tokens) / size
        else:
            prefill, kept = 0.0, kept - credit if kept > credit else 0.0
        due = prefill + copy - credit
        waiting = scale * due if due > 0.0 else 0.0
        cost = waiting + kept + per_request * len(work.requests) + recent * work.recent_tokens_at(now)
        weight = endpoint.weight
        costs.append(cost / weight if weight > 0.0 else inf)
        device.append(has)
    return costs, device
