"""Figures of a run: latencies, hits, balance."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.router.virtual.fleet import WINDOW_S, Outcome


def figures(outcome: Outcome, workers: int, until_s: float) -> dict[str, Any]:
    """Return the figures of a run on this number of workers, with requests arriving until `until_s`; times in seconds.

    `hit_rate`: prompt tokens that engines found cached. `balance`: the 99th percentile of a worker's computed tokens in 10 s
    over the mean of all in the same 10 s; `balance_kv`: the same for the KV blocks that its requests held. `hottest`: each
    worker's 99th percentile of the tokens that it computed in 10 s, the largest of them over their mean.
    """
    ttft = sorted(outcome.ttft.values())
    busy = sum(sum(window.values()) for window in outcome.busy.values())
    return {
        "requests": len(ttft),
        "refused": outcome.refused,
        "ttft_mean": mean(ttft),
        "ttft_p50": percentile(ttft, 0.5),
        "ttft_p99": percentile(ttft, 0.99),
        "itl_mean": mean(pauses(outcome)),
        "hit_rate": outcome.cached_tokens / max(1, outcome.prompt_tokens),
        "balance": spread(outcome.computed, workers, until_s),
        "balance_kv": spread(outcome.held, workers, until_s),
        "hottest": hottest(outcome.computed, workers, until_s),
        "completed_per_s": throughput(list(outcome.ended.values())),
        "utilisation": busy / workers / max(outcome.last_s, 1e-9),
        "preemptions": outcome.preemptions,
        "steps": outcome.steps,
        "virtual_s": outcome.last_s,
    }


def pauses(outcome: Outcome) -> list[float]:
    """Return each answer's mean time between tokens; answers of one token have none."""
    found = []
    for key, ended in outcome.ended.items():
        if (more := outcome.answers[key] - 1) > 0:
            found.append((ended - outcome.arrived[key] - outcome.ttft[key]) / more)
    return found


def spread(amounts: Mapping[int, Mapping[int, float]], workers: int, until_s: float) -> float:
    """Return the 99th percentile, over windows and workers, of a worker's share over the mean; nan in less than a window.
    The first window and those after the last arrival are not full, and are left out."""
    ratios: list[float] = []
    for window in full_windows(until_s):
        here = amounts.get(window, {})
        if total := sum(here.values()):
            ratios += [here.get(worker, 0.0) * workers / total for worker in range(workers)]
    return percentile(sorted(ratios), 0.99)


def hottest(amounts: Mapping[int, Mapping[int, float]], workers: int, until_s: float) -> float:
    """Return the largest of the workers' own 99th percentiles over the full windows, over their mean; nan if all were idle."""
    windows = [amounts.get(window, {}) for window in full_windows(until_s)]
    own = [percentile(sorted(here.get(worker, 0.0) for here in windows), 0.99) for worker in range(workers)]
    return max(own) / mean(own) if sum(own) else math.nan


def full_windows(until_s: float) -> range:
    """Return the windows with arrivals from beginning to end, except the first and the last of them."""
    return range(1, int(until_s / WINDOW_S) - 1)


def throughput(ends: list[float]) -> float:
    """Return the requests that end per second, in the middle 80 % of a run; nan if that takes no time."""
    if not ends:
        return math.nan
    ends.sort()
    first, last = ends[len(ends) // 10], ends[len(ends) * 9 // 10]
    return len(ends) * 0.8 / (last - first) if last > first else math.nan


def mean(values: Sequence[float]) -> float:
    """Return the mean; nan if there are no values."""
    return sum(values) / len(values) if values else math.nan


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values; nan if there are none."""
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else math.nan
