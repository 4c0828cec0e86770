"""Which workers have so much to do that new requests should not go there? Dynamo's thresholds (seed 003), pure.

    a rank is busy      KV blocks in use > active_decode_blocks x all its blocks: by the worker's report, or by our own count
                        or prompt tokens still to be read > active_prefill_tokens
                        or more of them than active_prefill_tokens_frac x the tokens of one of its steps
    a worker is busy    all its DP ranks are (N25): a rank of which nobody knows anything is free

All comparisons are strict. A bound that cannot be reckoned (a rank that does not say how many blocks it has, an engine that does
not say how many tokens it takes a step) is no bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor

from controller.deciders.thresholds import BusyThresholds


@dataclass(frozen=True, slots=True)
class RankLoadSeen:
    """What is known of one DP rank's load. Blocks and tokens."""

    kv_used: int = 0  # by its own report
    kv_total: int = 0  # 0: it does not say
    decode_blocks: float = 0.0  # in use by requests of ours, by our own count
    prefill_tokens: float = 0.0  # of theirs, still to be read
    step_tokens: int | None = None  # that a step of its engine takes at most; None: it does not say


def rank_is_busy(thresholds: BusyThresholds, rank: RankLoadSeen) -> bool:
    """Say whether a rank is over any threshold."""
    share, tokens, frac = (
        thresholds.active_decode_blocks,
        thresholds.active_prefill_tokens,
        thresholds.active_prefill_tokens_frac,
    )
    if (
        share is not None
        and rank.kv_total > 0
        and max(rank.kv_used, rank.decode_blocks) > share * rank.kv_total
    ):
        return True
    if tokens is not None and rank.prefill_tokens > tokens:
        return True
    return (
        frac is not None
        and rank.step_tokens is not None
        and rank.prefill_tokens > floor(frac * rank.step_tokens)
    )


def worker_is_busy(thresholds: BusyThresholds, ranks: Iterable[RankLoadSeen | None]) -> bool:
    """Say whether all of a worker's ranks are busy, of which there is at least one; None: nothing is known of it."""
    some = False
    for rank in ranks:
        if rank is None or not rank_is_busy(thresholds, rank):
            return False
        some = True
    return some
