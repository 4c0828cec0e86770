"""The request rate that a worker can carry within its model's SLO. Pure functions of its registration.

Little's law ties the sequences that fit into the KV cache to the requests that can arrive: L = lambda W, so
rps_kv = sequences / E[residence] with E[residence] = TTFT + output tokens * TPOT. Compute is a second bound: each request
costs its prefill and its share of every decode step. The smaller bound applies. Both are in requests per second.

Total blocks are counted, never free ones. With free blocks capacity would fall as load rises, and the degradation ladder
would degrade a fleet for being used.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf
from operator import mul
from typing import Any

from controller.deciders.validation import STRICT, at_least
from events.observations import Profile

LATENCY_MAX = 2.0  # the largest factor by which a degradation level relaxes the latency SLOs
BATCH_MAX = 8192  # no engine runs more sequences at once; bounds the search below


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The SLO of one model. Without `slo_throughput_rps` its degradation ladder is off; None elsewhere means unbounded."""

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
    """Return a model's SLO from a policy in its journal form (`PolicyAdopted`); the default SLO if the policy sets none."""
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
    """Return milliseconds per output token with `running` sequences: linear between the curve's points.

    Before the first point it is flat; beyond the last it grows in proportion. Without a curve it is infinite: a worker that
    does not register its speed carries nothing.
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
    """Return `slo` without the latencies that no worker could meet with a single request, even at the relaxed SLOs."""
    distinct = {id(profile): profile for profile, _ in workers}.values()
    profiles = [one for one in distinct if one.tpot_ms and one.prefill_tokens_per_s > 0]
    if not profiles:
        return slo
    prefill_ms = min(1000 * slo.mean_prompt_tokens / one.prefill_tokens_per_s for one in profiles)
    if slo.slo_ttft_ms is not None and prefill_ms >= slo.slo_ttft_ms * LATENCY_MAX:
        slo = replace(slo, slo_ttft_ms=None)
    if (
        slo.slo_tpot_ms is not None
        and min(tpot_ms(one, 1) for one in profiles) > slo.slo_tpot_ms * LATENCY_MAX
    ):
        slo = replace(slo, slo_tpot_ms=None)
    return slo


def fleet_capacity(
    workers: Iterable[tuple[Profile, float]], slo: Slo, *, latency: float = 1.0, batch: float = 1.0
) -> Capacity:
    """Return the combined capacity of workers with these profiles and routing weights.

    `latency` relaxes the latency SLOs, `batch` scales the batch: the knobs of a degradation level.
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
    """Return `fleet_capacity(…).effective_capacity_rps` for each of `latencies`, without SLOs that no worker can meet.

    This is called at every settle, usually with the same inputs, so the last result for each model is cached. Comparing a
    thousand profiles with themselves costs next to nothing; hashing them costs a millisecond.
    """
    inputs = (tuple(workers), slo, latencies)
    last = _LAST.get(model)
    if last is not None and last[0] == inputs:
        return last[1]
    within = attainable(slo, workers)
    carrying = [share for share in workers if share[1] > 0]
    profiles, weights = [one for one, _ in carrying], [weight for _, weight in carrying]
    ids = [*map(id, profiles)]
    distinct = dict(zip(ids, profiles, strict=True))
    carried = []
    for latency in latencies:
        each = {
            key: worker_capacity(one, within, latency).effective_capacity_rps for key, one in distinct.items()
        }
        carried.append(sum(map(mul, map(each.__getitem__, ids), weights)))
    _LAST[model] = inputs, tuple(carried)
    return _LAST[model][1]


_LAST: dict[str, tuple[tuple[object, ...], tuple[float, ...]]] = {}  # by model: the inputs and their result


@lru_cache(maxsize=4096)
def worker_capacity(profile: Profile, slo: Slo, latency: float = 1.0, batch: float = 1.0) -> Capacity:
    """Return the capacity of one worker at full weight within `slo`, with the SLO's latencies multiplied by `latency`."""
    tokens = max(1, slo.mean_prompt_tokens + slo.mean_output_tokens)
    sequences = max(0, profile.kv_blocks) * max(0, profile.block_tokens) // tokens
    running = _batch(profile, slo, latency, batch)
    if not sequences or not running or profile.prefill_tokens_per_s <= 0:
        return Capacity(sequences)
    prefill_s = slo.mean_prompt_tokens / profile.prefill_tokens_per_s
    decode_s = slo.mean_output_tokens * tpot_ms(profile, min(sequences, running)) / 1000
    rps_kv = sequences / max(prefill_s + decode_s, 1e-9)
    share_s = slo.mean_output_tokens * tpot_ms(profile, running) / 1000 / running
    rps_compute = min(
        1 / max(prefill_s + share_s, 1e-9), _rps_within_ttft(prefill_s, slo.slo_ttft_ms, latency)
    )
    return Capacity(sequences, rps_kv, rps_compute, min(rps_kv, rps_compute))


def _batch(profile: Profile, slo: Slo, latency: float, batch: float) -> int:
    """Return the largest batch with a time per output token within the SLO."""
    limit = min(profile.max_batch, BATCH_MAX, BATCH_MAX if slo.max_batch_size is None else slo.max_batch_size)
    largest = max(int(limit * batch), 1) if limit > 0 else 0
    within = inf if slo.slo_tpot_ms is None else slo.slo_tpot_ms * latency
    while largest and not tpot_ms(profile, largest) <= within:
        largest -= 1
    return 0 if tpot_ms(profile, max(largest, 1)) == inf else largest


def _rps_within_ttft(prefill_s: float, slo_ttft_ms: float | None, latency: float) -> float:
    """Return the highest arrival rate at which mean wait plus prefill stays within the SLO.

    Prefills queue behind one another. For an M/D/1 queue the mean wait is rho * s / (2 (1 - rho)) (Pollaczek-Khinchine),
    which is solved for rho here.
    """
    if slo_ttft_ms is None or prefill_s <= 0:
        return inf
    slack = 2 * (slo_ttft_ms * latency / 1000 / prefill_s - 1)
    return slack / (slack + 1) / prefill_s if slack > 0 else 0.0
