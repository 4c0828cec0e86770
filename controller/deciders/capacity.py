"""Computes the request rate that a worker can carry within its model's SLO, from its registration.

Two bounds limit the rate, both in requests per second, and the smaller one applies.

KV memory limits the sequences that run at once. By Little's law (sequences in the system = arrival rate * time in the
system), rps_kv = sequences / (prefill time + output tokens * TPOT), where sequences is the number that fits into the KV cache.

Compute limits how much work a worker does: each request costs its prefill and its share of every decode step.

All KV blocks of a worker are counted, not only the free ones. If only free blocks were counted, capacity would fall as load
rises, and normal load would raise the degradation level.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf
from typing import Any

from controller.deciders.validation import STRICT, at_least
from events.observations import Profile

LATENCY_MAX = 2.0  # the largest factor by which a degradation level relaxes the latency SLOs
BATCH_MAX = 8192  # no engine runs more sequences at once; bounds the search below


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The SLO of one model.

    If `slo_throughput_rps` is None, the model is never degraded. None in another field means that this value has no limit.
    """

    slo_throughput_rps: float | None = None
    slo_ttft_ms: float | None = 500.0
    slo_tpot_ms: float | None = 30.0
    max_batch_size: int | None = 256
    mean_prompt_tokens: int = 1536  # with mean_output_tokens: an average sequence of 2,048 tokens
    mean_output_tokens: int = 512
    __pydantic_config__ = STRICT

    def __post_init__(self) -> None:
        at_least(0, slo_throughput_rps=self.slo_throughput_rps, slo_ttft_ms=self.slo_ttft_ms)
        at_least(0, slo_tpot_ms=self.slo_tpot_ms, max_batch_size=self.max_batch_size)
        at_least(0, mean_prompt_tokens=self.mean_prompt_tokens, mean_output_tokens=self.mean_output_tokens)


def slo_of(policy: Mapping[str, Any] | None, model: str) -> Slo:
    """Return the SLO of `model` from a policy in plain JSON values, as `PolicyAdopted` carries it.

    If the policy sets no SLO for this model or for all models (`*`), return the default SLO.
    """
    slos = ((policy or {}).get("degradation") or {}).get("slos") or {}
    stated = slos.get(model) or slos.get("*") or {}
    names = {one.name for one in fields(Slo)}
    return Slo(**{name: value for name, value in stated.items() if name in names})


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of one or several workers. All rates are in requests per second."""

    max_concurrent_sequences: float = 0.0
    rps_kv: float = 0.0  # bound by KV memory (Little's law)
    rps_compute: float = 0.0  # bound by prefill and decode time, and by the time to first token
    effective_capacity_rps: float = 0.0  # the smaller of the two


def tpot_ms(profile: Profile, running: float) -> float:
    """Return the milliseconds per output token while `running` sequences decode, by the profile's curve.

    The curve is linear between two points, constant below the first point, and proportional to `running` beyond the last one.
    Without a curve the result is infinite, and a worker that registers no speed therefore has no capacity.
    """
    if not profile.tpot_ms:
        return inf
    x0, y0 = profile.tpot_ms[0]
    if running <= x0:
        return y0
    for x1, y1 in profile.tpot_ms[1:]:
        if running <= x1:
            return y0 + (y1 - y0) * (running - x0) / (x1 - x0) if x1 > x0 else max(y0, y1)
        x0, y0 = x1, y1
    return y0 * running / x0 if x0 > 0 else y0


def attainable(slo: Slo, workers: Iterable[tuple[Profile, float]]) -> Slo:
    """Return `slo` without the latency limits that no worker could meet.

    A limit is removed if even an idle worker with a single request would exceed LATENCY_MAX times the limit.
    """
    distinct = {id(profile): profile for profile, _ in workers}.values()
    profiles = [one for one in distinct if one.tpot_ms and one.prefill_tokens_per_s > 0]
    if not profiles:
        return slo
    prefill_ms = min(1000 * slo.mean_prompt_tokens / one.prefill_tokens_per_s for one in profiles)
    if slo.slo_ttft_ms is not None and prefill_ms >= slo.slo_ttft_ms * LATENCY_MAX:
        slo = replace(slo, slo_ttft_ms=None)
    token_ms = min(tpot_ms(one, 1) for one in profiles)
    if slo.slo_tpot_ms is not None and token_ms > slo.slo_tpot_ms * LATENCY_MAX:
        slo = replace(slo, slo_tpot_ms=None)
    return slo


def fleet_capacity(
    workers: Iterable[tuple[Profile, float]], slo: Slo, *, latency: float = 1.0, batch: float = 1.0
) -> Capacity:
    """Return the combined capacity of workers, given as pairs of profile and routing weight.

    `latency` multiplies the latencies of the SLO, and `batch` multiplies the batch size. A degradation level sets both
    factors.
    """
    parts = [
        (worker_capacity(profile, slo, latency, batch), weight) for profile, weight in workers if weight > 0
    ]
    return Capacity(
        sum(c.max_concurrent_sequences * weight for c, weight in parts),
        sum(c.rps_kv * weight for c, weight in parts),
        sum(c.rps_compute * weight for c, weight in parts),
        sum(c.effective_capacity_rps * weight for c, weight in parts),
    )


def fleet_rps(
    model: str, workers: Sequence[tuple[Profile, float]], slo: Slo, latencies: tuple[float, ...]
) -> tuple[float, ...]:
    """Return, for each factor in `latencies`, the workers' combined capacity in requests per second.

    Each factor multiplies the SLO's latencies. Latency limits that no worker can meet are ignored.

    This function is called whenever the due decisions are computed, usually with unchanged inputs. The last result of each
    model is therefore cached. The cache compares the inputs instead of hashing them: hashing a thousand profiles takes a
    millisecond, comparing them almost no time.
    """
    inputs = (tuple(workers), slo, latencies)
    last = _LAST.get(model)
    if last is not None and last[0] == inputs:
        return last[1]
    within = attainable(slo, workers)
    capacities = (fleet_capacity(workers, within, latency=latency) for latency in latencies)
    rates = tuple(capacity.effective_capacity_rps for capacity in capacities)
    _LAST[model] = inputs, rates
    return rates


_LAST: dict[str, tuple[tuple[object, ...], tuple[float, ...]]] = {}  # by model: the inputs and their result


@lru_cache(maxsize=4096)
def worker_capacity(profile: Profile, slo: Slo, latency: float = 1.0, batch: float = 1.0) -> Capacity:
    """Return the capacity of one worker at full weight within `slo`.

    `latency` multiplies the latencies of the SLO, and `batch` multiplies the batch size.
    """
    tokens = max(1, slo.mean_prompt_tokens + slo.mean_output_tokens)
    sequences = max(0, profile.kv_blocks) * max(0, profile.block_tokens) // tokens
    running = _batch(profile, slo, latency, batch)
    if not sequences or not running or profile.prefill_tokens_per_s <= 0:
        return Capacity(sequences)
    prefill_s = slo.mean_prompt_tokens / profile.prefill_tokens_per_s
    decode_s = slo.mean_output_tokens * tpot_ms(profile, min(sequences, running)) / 1000
    rps_kv = sequences / max(prefill_s + decode_s, 1e-9)
    share_s = slo.mean_output_tokens * tpot_ms(profile, running) / 1000 / running
    rps_ttft = _rps_within_ttft(prefill_s, slo.slo_ttft_ms, latency)
    rps_compute = min(1 / max(prefill_s + share_s, 1e-9), rps_ttft)
    return Capacity(sequences, rps_kv, rps_compute, min(rps_kv, rps_compute))


def _batch(profile: Profile, slo: Slo, latency: float, batch: float) -> int:
    """Return the largest batch size at which the time per output token meets the SLO; 0 if no size does."""
    limit = min(profile.max_batch, BATCH_MAX, BATCH_MAX if slo.max_batch_size is None else slo.max_batch_size)
    largest = max(int(limit * batch), 1) if limit > 0 else 0
    within = inf if slo.slo_tpot_ms is None else slo.slo_tpot_ms * latency
    while largest and not tpot_ms(profile, largest) <= within:
        largest -= 1
    return 0 if tpot_ms(profile, max(largest, 1)) == inf else largest


def _rps_within_ttft(prefill_s: float, slo_ttft_ms: float | None, latency: float) -> float:
    """Return the highest arrival rate, in requests per second, at which the mean TTFT meets the SLO.

    The TTFT is the queueing delay plus `prefill_s`, the seconds of one prefill. Prefills form an M/D/1 queue, in which the
    mean delay is rho * s / (2 (1 - rho)) (Pollaczek-Khinchine), with s = `prefill_s` and rho = arrival rate * s. The code
    solves this for rho and returns rho / s. The result is infinite without a TTFT limit, and 0 if a prefill alone exceeds the
    limit.
    """
    if slo_ttft_ms is None or prefill_s <= 0:
        return inf
    slack = 2 * (slo_ttft_ms * latency / 1000 / prefill_s - 1)
    return slack / (slack + 1) / prefill_s if slack > 0 else 0.0
