"""The number of workers that traffic needs for its answers to start and continue in time.

    reading   N workers read prompts, each one after another. A prompt waits longer than it may with the probability
              C(N, r) exp(-2 N (1 - r) t / ((1 + c2) s)): Erlang's C for r = rate * s / N, with the tail by Allen and Cunneen
              for prompts of different lengths (c2: their squared coefficient of variation)
    decoding  a step takes longer while prompts are read: tpot / (1 - r'), where r' is the 99th percentile of r over ten
              seconds. Sequences run for as long as their answers take (Little), and must fit into batches and KV caches,
              with some room for their fluctuation (2.33 times the square root: the 99th percentile)

The result is the smallest N for which both meet the objectives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import exp, hypot, inf, sqrt
from operator import add
from typing import NamedTuple

from controller.deciders.capacity import tpot_ms
from events.observations import Profile

BIN_S = 60.0


class Traffic(NamedTuple):
    """The requests that arrived within some time, served or not."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_squared: float = 0.0  # sum over prompts
    output_tokens: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[tuple[int, int]]) -> "Traffic":
        """Sum up requests, given as (prompt tokens, answer tokens)."""
        prompts = [float(prompt) for prompt, _ in requests]
        squared, output = sum(prompt * prompt for prompt in prompts), sum(answer for _, answer in requests)
        return cls(float(len(requests)), sum(prompts), squared, float(output))

    def plus(self, other: "Traffic") -> "Traffic":
        """Return the traffic of both."""
        return Traffic(*map(add, self, other))

    def times(self, factor: float) -> "Traffic":
        """Return the traffic scaled by `factor`."""
        return Traffic(*(each * factor for each in self))


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute of one model."""

    traffic: Traffic
    late: float = 0.0  # answers found within this minute to be late
    workers: float = 0.0  # mean number of serving workers


Seen = Minute | None  # None: unknown


def known(minutes: Sequence[Seen]) -> list[Minute]:
    """Return the known minutes."""
    return [minute for minute in minutes if minute is not None]


def total(minutes: Iterable[Minute]) -> Traffic:
    """Return the total traffic of these minutes."""
    return reduce(Traffic.plus, (minute.traffic for minute in minutes), Traffic())


def work(traffic: Traffic, profile: Profile) -> float:
    """Return the seconds of one worker that the traffic costs: reading the prompts, and each token's share of a full batch."""
    rate, batch = profile.prefill_tokens_per_s, max(1, profile.max_batch)
    reading = traffic.prompt_tokens / rate if rate > 0 else 0.0
    share_ms = tpot_ms(profile, batch) / batch
    return reading + (traffic.output_tokens * share_ms / 1000 if share_ms < 1e6 else 0.0)


WORKERS_MAX = 10_000
BUSY_MAX = 0.95  # largest share of a worker's time for reading; beyond it no queue is stable
ALONE_TIMES = 1.05  # times the time per token of a single request; a tighter objective cannot be met
STEADY_S = 10.0  # averaging time of the fluctuation of reading
ONE_OF_A_HUNDRED = 2.33  # standard deviations of the 99th percentile
OFTEN = 1.7  # the same for a mean over an answer's many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """The latency objectives of a model's answers."""

    ttft_ms: float = 500.0  # time to first token; for a long prompt twice its reading time, if that is more
    tpot_ms: float = 30.0  # time per further token
    missed: float = 0.01  # share of answers that may be late

    def ttft_of_s(self, reading_s: float) -> float:
        """Return the limit of the time to first token of a prompt with this reading time."""
        return max(self.ttft_ms / 1000, 2 * reading_s)


@dataclass(frozen=True, slots=True)
class Sizing:
    """The number of workers needed, and the bound that prevents fewer."""

    workers: int
    bound: str  # first_token, token_time, batch, kv; empty: no traffic


def size(traffic: Traffic, seconds: float, profile: Profile, objectives: Objectives) -> Sizing:
    """Return how many workers this traffic of `seconds` needs, at most WORKERS_MAX.

    A time per token that no worker could meet even alone is ignored.
    """
    if traffic.requests <= 0 or seconds <= 0:
        return Sizing(0, "")
    if tpot_ms(profile, 1) * ALONE_TIMES > objectives.tpot_ms:
        objectives = replace(objectives, tpot_ms=inf)
    enough = 1
    while enough < WORKERS_MAX and _too_few(enough, traffic, seconds, profile, objectives):
        enough *= 2
    least, most, bound = enough // 2, min(enough, WORKERS_MAX), ""  # least: too few
    while most - least > 1:
        middle = (least + most) // 2
        if _too_few(middle, traffic, seconds, profile, objectives):
            least = middle
        else:
            most = middle
    if most > 1:
        bound = _too_few(most - 1, traffic, seconds, profile, objectives)
    return Sizing(most, bound)


def _too_few(workers: int, traffic: Traffic, seconds: float, profile: Profile, objectives: Objectives) -> str:
    """Return the first bound that `workers` do not meet; empty if they meet all."""
    rate, requests_per_s = profile.prefill_tokens_per_s, traffic.requests / seconds
    mean = traffic.prompt_tokens / traffic.requests
    reading_s = mean / rate if rate > 0 else inf
    busy = requests_per_s * reading_s / max(workers, 1e-9)
    if workers < 1 or busy >= BUSY_MAX:
        return "first_token"
    varies = max(0.0, traffic.prompt_tokens_squared / traffic.requests / max(mean * mean, 1e-9) - 1)
    may_wait_s = objectives.ttft_ms / 1000 - min(reading_s, objectives.ttft_ms / 2000)
    if reading_s > 0 and _waits_longer(may_wait_s, workers, busy, reading_s, varies) > objectives.missed:
        return "first_token"
    squares = traffic.prompt_tokens_squared / traffic.requests / (rate * rate) if rate > 0 else 0.0
    comes_and_goes = sqrt(requests_per_s / workers * squares / STEADY_S)
    return _decoding(workers, traffic, requests_per_s, (busy, comes_and_goes), profile, objectives)


def _decoding(
    workers: int,
    traffic: Traffic,
    requests_per_s: float,
    reading: tuple[float, float],
    profile: Profile,
    objectives: Objectives,
) -> str:
    """Return the decoding bound that `workers` do not meet; empty if they meet all.

    `reading`: the share of its time that a worker reads, and its standard deviation.
    """
    prompt, answer = traffic.prompt_tokens / traffic.requests, traffic.output_tokens / traffic.requests
    fits = max(1.0, profile.kv_blocks * max(1, profile.block_tokens) / max(1.0, prompt + answer))
    busy, busy_off = reading
    per_worker = requests_per_s * answer / workers / 1000 / (1 - busy)
    running = 0.0
    for _ in range(30):  # Little's law, with steps that take longer the more are running
        running, before = per_worker * tpot_ms(profile, running), running
        if running > 2 * profile.max_batch or abs(running - before) < 0.01:
            break
    running_off = sqrt(running / workers)
    token_ms = tpot_ms(profile, running)
    slower = tpot_ms(profile, running + running_off) / token_ms - 1 if token_ms < inf else 0.0
    at_times = 1 + OFTEN * hypot(slower, busy_off / (1 - busy))
    if token_ms / (1 - busy) * at_times > objectives.tpot_ms:
        return "token_time"
    running_at_times = running + ONE_OF_A_HUNDRED * running_off
    if running_at_times > profile.max_batch:
        return "batch"
    return "kv" if running_at_times > fits else ""


def _waits_longer(may_wait_s: float, workers: int, busy: float, reading_s: float, varies: float) -> float:
    """Return the probability that a prompt waits longer than `may_wait_s` for workers that read nothing else."""
    offered = busy * workers
    blocked = 1.0  # Erlang's B, by its recursion
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1 - busy * (1 - blocked))
    return waits * exp(-2 * workers * (1 - busy) * may_wait_s / ((1 + varies) * reading_s))


MINUTES = 120  # number of recent minutes considered
STEP, WIDTH, LEAST, MOST = 0.05, 0.15, 0.5, 1.5  # step, window, minimum and maximum of pressures
A_FEW = 0.25  # share of the allowed late answers
BEYOND = 0.15  # how far beyond a sustained pressure to try
MINUTES_LEAST = 4  # minutes at a pressure beyond 1 before it is trusted


@lru_cache(maxsize=4096)
def needed(traffic: Traffic, profile: Profile, objectives: Objectives) -> int:
    """Return how many workers a minute's traffic needed according to the model."""
    return size(traffic, BIN_S, profile, objectives).workers


def sustained_pressure(minutes: Sequence[Minute], profile: Profile, objectives: Objectives) -> float:
    """Return the highest pressure at which no more answers than allowed were late: LEAST to MOST."""
    seen = [
        (needed(minute.traffic, profile, objectives) / minute.workers, minute.late, minute.traffic.requests)
        for minute in minutes[-MINUTES:]
        if minute.workers > 0 and minute.traffic.requests > 0
    ]
    if (borne := _borne_beyond(seen, objectives)) > 1.0:
        return borne
    upper = 1.0
    while upper > LEAST:
        near = [(late, requests) for pressure, late, requests in seen if upper - WIDTH < pressure <= upper]
        requests = sum(each for _, each in near)
        if sum(late for late, _ in near) <= objectives.missed * requests:
            return upper
        upper -= STEP
    return LEAST


def _borne_beyond(seen: Sequence[tuple[float, float, float]], objectives: Objectives) -> float:
    """Return the highest pressure beyond 1 that workers have sustained for some minutes; 1 if none."""
    upper = MOST
    while upper > 1.0:
        above = [(late, requests) for pressure, late, requests in seen if pressure > upper - BEYOND]
        near = sum(upper - BEYOND < pressure <= upper for pressure, _, _ in seen)
        few = sum(late for late, _ in above) <= objectives.missed * A_FEW * sum(
            requests for _, requests in above
        )
        if near >= MINUTES_LEAST and few:
            return upper
        upper -= STEP
    return 1.0
