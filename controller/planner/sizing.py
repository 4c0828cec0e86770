"""How many workers does this traffic need, if each answer is to begin and go on in time? Functions of what a worker can do.

    reading   N workers read prompts, one after the other each. A prompt waits longer than it may with the probability
              C(N, r) exp(-2 N (1 - r) t / ((1 + c2) s)): Erlang's C for r = rate * s / N, and the tail of Allen and Cunneen for
              prompts whose lengths differ (c2: their squared coefficient of variation)
    decoding  a step takes longer while prompts are read: tpot / (1 - r'), where r' is what r is at one moment of a hundred over
              ten seconds. Sequences are running for as long as their answers
              take (Little), and no more than fit into batches and KV caches; a little more for their fluctuation (2.33 times
              its root: one moment of a hundred)

The least N for which both keep the objectives is what is needed.
"""

from dataclasses import dataclass, replace
from math import exp, hypot, inf, sqrt

from controller.deciders.capacity import tpot_ms
from controller.planner.traffic import Traffic
from events.observations import Profile

WORKERS_MAX = 10_000
BUSY_MAX = 0.95  # of a worker's time for reading: beyond it no queue is steady
ALONE_TIMES = 1.05  # of the time per token that a single request has: what is nearer cannot be kept
STEADY_S = 10.0  # over which what is read comes and goes
ONE_OF_A_HUNDRED = 2.33  # standard deviations
OFTEN = 1.7  # the same, for what is the mean over an answer's many tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What each answer of a model is to keep."""

    ttft_ms: float = (
        500.0  # to its first token; for a long prompt twice as long as reading it takes, if that is more
    )
    tpot_ms: float = 30.0  # for each of the others
    missed: float = 0.01  # so many answers may be late

    def ttft_of_s(self, reading_s: float) -> float:
        """Return until when the first token of a prompt is to come that takes so long to be read."""
        return max(self.ttft_ms / 1000, 2 * reading_s)


@dataclass(frozen=True, slots=True)
class Sizing:
    """How many workers are needed, and why not fewer."""

    workers: int
    bound: str  # first_token, token_time, batch, kv; nothing: there is no traffic


def size(traffic: Traffic, seconds: float, profile: Profile, objectives: Objectives) -> Sizing:
    """Return how many workers this traffic of so many seconds needs: WORKERS_MAX at most. A time per token that no worker could
    keep even alone bounds nothing."""
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
    """Return which bound so many workers do not keep; empty: they keep all."""
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
    """`reading`: the share of its time that a worker reads, and its standard deviation."""
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
    """Return the probability that a prompt waits longer than that for a worker that reads nothing else."""
    offered = busy * workers
    blocked = 1.0  # Erlang's B, by its recursion
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    waits = blocked / (1 - busy * (1 - blocked))
    return waits * exp(-2 * workers * (1 - busy) * may_wait_s / ((1 + varies) * reading_s))
