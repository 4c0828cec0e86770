"""Computes the number of workers with which given traffic meets the latency objectives.

    reading   N workers read (prefill) prompts, each worker one prompt after another. A prompt waits longer than t seconds with
              the probability C(N, r) exp(-2 N (1 - r) t / ((1 + c2) s)), an approximation by Allen and Cunneen. The mean prefill
              time is s, in seconds. The share of time spent on prefill is r = (requests per second) * s / N. C is Erlang's C
              formula, and c2 is the squared coefficient of variation of the prompt lengths
    decoding  the number n of running sequences per worker follows from the length of answers (Little's law). A token takes
              tpot / (1 - r), because prefill delays steps. This time is raised by 1.7 of its standard deviations. The time
              varies for two reasons: n fluctuates, and the mean of r over ten seconds fluctuates. The sequences must fit into
              batches and KV caches at the 99th percentile of n, which is n + 2.33 sqrt(n / N)

The result is the smallest N for which reading and decoding meet the objectives.
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
    """The requests that arrived in a period, whether they were served or not."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    prompt_tokens_squared: float = 0.0  # sum over prompts
    output_tokens: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[tuple[int, int]]) -> "Traffic":
        """Return the traffic of requests, given as pairs of prompt tokens and answer tokens."""
        prompts = [float(prompt) for prompt, _ in requests]
        squared, output = sum(prompt * prompt for prompt in prompts), sum(answer for _, answer in requests)
        return cls(float(len(requests)), sum(prompts), squared, float(output))

    def plus(self, other: "Traffic") -> "Traffic":
        """Return the sum of this traffic and `other`."""
        return Traffic(*map(add, self, other))

    def times(self, factor: float) -> "Traffic":
        """Return this traffic with each number multiplied by `factor`."""
        return Traffic(*(each * factor for each in self))


@dataclass(frozen=True, slots=True)
class Minute:
    """The traffic, late answers and serving workers of one model in one minute."""

    traffic: Traffic
    late: float = 0.0  # answers found within this minute to be late
    workers: float = 0.0  # mean number of serving workers


Seen = Minute | None  # None: unknown


def known(minutes: Sequence[Seen]) -> list[Minute]:
    """Return the minutes that are not None."""
    return [minute for minute in minutes if minute is not None]


def total(minutes: Iterable[Minute]) -> Traffic:
    """Return the total traffic of these minutes."""
    return reduce(Traffic.plus, (minute.traffic for minute in minutes), Traffic())


def work(traffic: Traffic, profile: Profile) -> float:
    """Return the seconds for which the traffic occupies one worker.

    These are the seconds of prefill, plus, for each output token, the duration of a full batch's step divided by the batch size.
    """
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
        """Return the limit, in seconds, of the time to first token for a prompt with `reading_s` seconds of prefill."""
        return max(self.ttft_ms / 1000, 2 * reading_s)


@dataclass(frozen=True, slots=True)
class Sizing:
    """The number of workers needed, and the objective or limit that fewer workers would violate."""

    workers: int
    bound: str  # first_token, token_time, batch, kv; empty: no traffic


def size(traffic: Traffic, seconds: float, profile: Profile, objectives: Objectives) -> Sizing:
    """Return the number of workers that the traffic of `seconds` seconds needs, and the bound that requires them.

    A bound is an objective, or a limit of a worker: its batch size or its KV cache. The number is at most WORKERS_MAX. The TPOT
    objective is ignored if even a worker with a single request could not meet it.
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
    """Return the name of the first objective or limit that this number of workers violates; empty if there is none."""
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
    """Return the name of the first decoding bound that this number of workers violates; empty if there is none.

    A decoding bound is the objective for the time per token, or the limit of the batch size or of the KV cache.
    `reading` holds the mean and the standard deviation of the share of time that a worker spends on prefill.
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
    """Return the probability that a prompt waits longer than `may_wait_s` seconds for its prefill.

    `busy` is the share of time spent on prefill, `reading_s` the mean prefill time in seconds, and `varies` the squared
    coefficient of variation of the prompt lengths.
    """
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
    """Return how many workers one minute's traffic needs, as computed by `size`."""
    return size(traffic, BIN_S, profile, objectives).workers


def sustained_pressure(minutes: Sequence[Minute], profile: Profile, objectives: Objectives) -> float:
    """Return the highest pressure, between 0.5 (LEAST) and 1.5 (MOST), at which no more answers than allowed were late.

    The pressure of a minute is the number of workers that `needed` computes, divided by the number that served in that minute.
    """
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
    """Return the highest pressure above 1 that the workers have sustained; 1 if there is none.

    `seen` holds the pressure, the late answers and the requests of each minute. A pressure counts as sustained under two
    conditions. At least MINUTES_LEAST minutes had about this pressure. In these minutes, and in those with a higher pressure,
    only a small share of the answers was late.
    """
    upper = MOST
    while upper > 1.0:
        above = [(late, requests) for pressure, late, requests in seen if pressure > upper - BEYOND]
        near = sum(upper - BEYOND < pressure <= upper for pressure, _, _ in seen)
        allowed = objectives.missed * A_FEW * sum(requests for _, requests in above)
        few = sum(late for late, _ in above) <= allowed
        if near >= MINUTES_LEAST and few:
            return upper
        upper -= STEP
    return 1.0
