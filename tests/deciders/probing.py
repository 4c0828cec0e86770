"""The cost, frequency and detection time of canary probes. Pure arithmetic (N6–N9)."""

from datetime import timedelta
from math import inf


def checks_per_minute(interval: timedelta, workers: int = 1) -> float:
    """Return how many canaries are sent per minute: 2 per worker at 30 s (N6)."""
    return workers * 60 / interval.total_seconds() if interval > timedelta(0) else inf


def gpu_share(busy: timedelta, interval: timedelta) -> float:
    """Return the share of a worker's time that canaries take; `busy`: how long one occupies the engine (N7)."""
    return busy / interval if interval > timedelta(0) else inf


def slot_time(prompt: int, answer: int, *, prefill_tokens_per_s: float, tpot: timedelta) -> timedelta:
    """Return how long a canary occupies a batch slot: its prefill, and a step for each token of its answer (N7)."""
    return timedelta(seconds=prompt / prefill_tokens_per_s) + answer * tpot


def detection_after(
    interval: timedelta, failures_max: int = 3, *, confirmed: bool = False
) -> tuple[timedelta, timedelta]:
    """Return the shortest and longest time to UNHEALTHY from a fault that every canary sees (N8).

    A confirmed mismatch convicts with the first canary; doubt needs `failures_max` failures in a row.
    """
    later = 0 if confirmed else max(failures_max - 1, 0)
    return later * interval, (later + 1) * interval


def false_opens_per_day(
    failure_share: float, interval: timedelta, failures_max: int = 3, workers: int = 1
) -> float:
    """Return how often independent false failures reach `failures_max` in a row, per day (N9).

    A run begins with a failure after a success: (1 - p) * p ** n per check, for rare failures.
    """
    checks = timedelta(days=1) / interval
    return workers * checks * (1 - failure_share) * failure_share**failures_max
