"""Predicts the time to move a request by sending its KV cache, or by computing the cache again.

    transfer    wait + concurrent transfers x (setup + latency + blocks x seconds per block on the slowest lane)
    re-prefill  wait + (tokens queued before the request + tokens of the request) / the target's prefill rate
    wait        time until a slot in the target's batch is free, plus one step of that batch

All times are in seconds. Tokens in the target's prefix cache are not counted. Only whole blocks are sent, and all shards
send in lockstep, so the slowest lane determines the time.

Both times grow linearly with the number of tokens, so usually one method is faster at every length. A 70B model at TP 8 has
40 KiB of KV cache per token and shard. At a prefill rate of 5,000 tokens/s, a transfer is faster over any link of more than
204.8 MB/s. Even over such a link, re-prefill is faster for short sequences: for fewer than about setup x prefill rate
tokens. The formula omits the quadratic part of attention, which would make re-prefill slower.
"""

from dataclasses import dataclass, field
from math import ceil, floor, inf, isfinite
from typing import Literal

from controller.migration.links import STRICT, Lane, LinkTable, above_zero, at_least_zero
from events.observations import Profile

Method = Literal["transfer", "reprefill"]
TOKENS_MAX = 10**9  # a crossover beyond this counts as none: no sequence is this long


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingPolicy:
    """The parameters of cost estimates and placements.

    `setup_s` covers the reservation, the connection and the sampling state, in seconds before a transfer's first byte.
    """

    links: LinkTable = field(default_factory=LinkTable)
    setup_s: float = 0.005  # seconds of a transfer before its first byte
    prefill_tokens_per_s: float = 5000.0  # prefill rate of a target that registers none (a 70B model at TP 8)
    max_migration_time_ms: float = 500.0  # if a transfer is predicted to take longer, re-prefill instead
    # concurrent transfers from one source; further streams wait, and continue decoding there
    transfers_at_once: int = 4
    on_drain: Literal["move", "finish"] = "move"  # what happens to the streams of a drained worker
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least_zero(setup_s=self.setup_s)
        above_zero(prefill_tokens_per_s=self.prefill_tokens_per_s)
        above_zero(max_migration_time_ms=self.max_migration_time_ms, transfers_at_once=self.transfers_at_once)
        if self.on_drain not in ("move", "finish"):
            raise ValueError(f"on_drain is {self.on_drain!r}: it must be move or finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The dimensions of a model's KV cache, which has two vectors (K and V) per token, layer and KV head."""

    layers: int
    kv_heads: int
    head_size: int
    bytes_per_element: int  # 2: fp16 and bf16, 1: fp8
    tp: int = 1

    def __post_init__(self) -> None:
        above_zero(layers=self.layers, kv_heads=self.kv_heads, head_size=self.head_size)
        above_zero(bytes_per_element=self.bytes_per_element, tp=self.tp)
        tp, heads = self.tp, self.kv_heads
        if heads % tp and tp % heads:
            raise ValueError(f"tp {tp} and {heads} KV heads: one must be a multiple of the other")

    @property
    def shard_bytes_per_token(self) -> int:
        """The bytes of one token's KV cache on one shard.

        With more shards than KV heads, several shards store the same head.
        """
        return 2 * self.layers * max(1, self.kv_heads // self.tp) * self.head_size * self.bytes_per_element

    def shard_bytes_per_block(self, block_tokens: int) -> int:
        """Return the bytes of one block of `block_tokens` tokens on one shard."""
        return self.shard_bytes_per_token * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationTarget:
    """The current state of a worker that could continue a request."""

    name: str
    profile: Profile
    free_blocks: int
    lanes: tuple[Lane, ...] = ()  # from the source's shards to its own; empty: a transfer is impossible
    queued_tokens: int = 0  # prompt tokens that wait to be computed there
    free_places: int = 10**9  # in its batch; many: unknown
    queue_s: float = 0.0  # wait for a place in its batch, by either method
    # Duration of a batch step: one step produces the first token, or must end before a prompt begins.
    step_s: float = 0.0
    transfers: int = 0  # other transfers in progress over the same link

    def __post_init__(self) -> None:
        above_zero(block_tokens=self.profile.block_tokens)
        at_least_zero(free_blocks=self.free_blocks, free_places=self.free_places)
        at_least_zero(queued_tokens=self.queued_tokens)
        at_least_zero(queue_s=self.queue_s, step_s=self.step_s, transfers=self.transfers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationCost:
    """The predicted costs of moving a request by a transfer and by re-prefill."""

    transfer_time_ms: float  # infinite if a transfer is impossible
    reprefill_time_ms: float
    recommended: Method
    total_bytes: int  # bytes of a transfer, over all shards
    # Length from which the other method is faster; None: the same one is at every length.
    crossover_tokens: int | None


def estimate(
    policy: MovingPolicy,
    kv: KvShape | None,
    target: MigrationTarget,
    tokens: int,
    *,
    cached_tokens: int = 0,
    at_once: int = 1,
) -> MigrationCost:
    """Return the predicted times of moving a request to `target`.

    Args:
        kv: None if the source is dead or convicted, because its cache is then never sent.
        tokens: length of the request's KV cache in tokens.
        cached_tokens: tokens at the start of the sequence that are in the target's prefix cache.
        at_once: number of transfers, including this one, that share the source's links.
    """
    at_least_zero(tokens=tokens, cached_tokens=cached_tokens)
    above_zero(at_once=at_once)
    prices = Prices.of(policy, kv, target)
    return prices.cost(tokens, cached_tokens, at_once + target.transfers, target.queued_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The parts of the predicted times of moving requests to one target.

    These are seconds per token, per block and per transfer. They are computed once per target, because `place` uses them up
    to a thousand times.
    """

    block_tokens: int
    block_bytes: int  # over all shards
    fixed_s: float  # fixed time of a transfer alone on its links; infinite: a transfer is impossible
    block_s: float
    token_s: float  # of prefill
    wait_s: float  # by either method
    transfer_s_max: float

    @classmethod
    def of(cls, policy: MovingPolicy, kv: KvShape | None, target: MigrationTarget) -> "Prices":
        """Return the parts of the predicted times for `target`.

        Raise ValueError if the target's number of lanes is neither 0 nor one per shard.
        """
        block_tokens = target.profile.block_tokens
        fixed_s, block_s, block_bytes = inf, 0.0, 0
        if kv is not None:
            shard_bytes = kv.shard_bytes_per_block(block_tokens)
            block_bytes = shard_bytes * kv.tp
            lanes = len(target.lanes)
            if lanes not in (0, kv.tp):
                raise ValueError(f"{target.name} has {lanes} lanes: it must be {kv.tp}, one per shard")
            if target.lanes:
                ways = [(policy.links.spec(lane.link), lane.sharers) for lane in set(target.lanes)]
                fixed_s = policy.setup_s + max(spec.latency_s for spec, _ in ways)
                block_s = max(spec.wire_s(shard_bytes * sharers) for spec, sharers in ways)
        rate = target.profile.prefill_tokens_per_s
        return cls(
            block_tokens=block_tokens,
            block_bytes=block_bytes,
            fixed_s=fixed_s,
            block_s=block_s,
            token_s=1 / (rate if rate > 0 and isfinite(rate) else policy.prefill_tokens_per_s),
            wait_s=target.queue_s + target.step_s,
            transfer_s_max=policy.max_migration_time_ms / 1000,
        )

    def missing(self, tokens: int, cached_tokens: int) -> int:
        """Return the number of tokens that the target has not cached. Only whole blocks count as cached."""
        return max(0, tokens - cached_tokens // self.block_tokens * self.block_tokens)

    def transfer_s(self, missing: int, at_once: int) -> float:
        """Return the seconds of a transfer of `missing` tokens, including the wait for a slot in the target's batch.

        `at_once` is the number of transfers, including this one, that share the links.
        """
        return self.wait_s + self.moving_s(missing, at_once)

    def moving_s(self, missing: int, at_once: int) -> float:
        """Return the seconds of a transfer of `missing` tokens, without the wait for a slot in the target's batch."""
        return at_once * (self.fixed_s + -(-missing // self.block_tokens) * self.block_s)

    def reprefill_s(self, missing: int, queued_tokens: int) -> float:
        """Return the seconds to prefill `missing` tokens after `queued_tokens` tokens of other requests.

        The wait for a slot in the target's batch is included.
        """
        return self.wait_s + (queued_tokens + missing) * self.token_s

    def recommended(self, missing: int, at_once: int, queued_tokens: int) -> Method:
        """Return the faster method. If a transfer would exceed its time limit, return re-prefill."""
        if self.moving_s(missing, at_once) > self.transfer_s_max:
            return "reprefill"
        faster = self.transfer_s(missing, at_once) < self.reprefill_s(missing, queued_tokens)
        return "transfer" if faster else "reprefill"

    def cost(self, tokens: int, cached_tokens: int, at_once: int, queued_tokens: int) -> MigrationCost:
        """Return both methods' predicted times, the recommended method, the bytes to send, and the crossover length.

        The crossover length is the number of tokens at which the faster method changes; None if that never happens.
        """
        missing = self.missing(tokens, cached_tokens)
        crossover = self._crossover(at_once, queued_tokens)
        return MigrationCost(
            transfer_time_ms=self.transfer_s(missing, at_once) * 1000,
            reprefill_time_ms=self.reprefill_s(missing, queued_tokens) * 1000,
            recommended=self.recommended(missing, at_once, queued_tokens),
            total_bytes=-(-missing // self.block_tokens) * self.block_bytes,
            crossover_tokens=None if crossover is None else tokens - missing + crossover,
        )

    def _crossover(self, at_once: int, queued_tokens: int) -> int | None:
        """Return the number of missing tokens at which the faster method changes; None if one method is always faster.

        The comparison starts at one token. The time of a re-prefill grows with each token, and the time of a transfer only
        with each block. So within a block, each further token slows only the re-prefill.
        """
        head_start = at_once * self.fixed_s - queued_tokens * self.token_s  # of re-prefill
        step = at_once * self.block_s
        gain = self.block_tokens * self.token_s - step  # of transfer, per block
        if not isfinite(head_start) or gain == 0:
            return None
        if gain > 0:  # the first block that wins with its first token; then back into the block before it
            block = max(0, floor((head_start + step - self.token_s) / gain) + 1)
            inside = floor((head_start + step * block) / self.token_s) + 1
            first = min(inside, block * self.block_tokens + 1)
        else:  # the first block that loses with its last token
            first = (max(1, ceil(head_start / gain)) - 1) * self.block_tokens + 1
        return first if 1 < first <= TOKENS_MAX else None
