"""Discrete-event simulation of a fleet: arrivals, ends of steps, and routers' events.

    arrival ── a router chooses ──▶ engine: plan, equal steps ahead ── their end ──▶ first tokens, ends, KV events
                                       ▲                                              routers receive them, events later
                                       └── a request that arrives meanwhile ends the leap with the running step

An engine's equal steps are simulated at once (a leap), so that a long answer costs a few events. Time is a float of seconds;
nothing reads a clock or draws random numbers except from a seed: the same call gives the same figures.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from typing import Any

from benchmarks.router.virtual.mute_scheduler import MuteScheduler
from benchmarks.router.virtual.router import Router, workers
from benchmarks.router.virtual.trace import Request
from controller.router.selection.selector import Mode
from events.kv import KvEvent
from events.observations import WorkerJoined
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import StepPlan, Timing

WINDOW_S = 10.0
EVENTS_LATE_S = 0.002  # about the delay of a KV event from an engine's step to a frontend's index

Amounts = defaultdict[int, defaultdict[int, float]]  # by window and worker


def _amounts() -> Amounts:
    return defaultdict(lambda: defaultdict(float))


@dataclass(slots=True)
class Outcome:
    """The outcome of the requests, and the work of the engines."""

    arrived: dict[int, float] = field(default_factory=dict)
    ttft: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)  # tokens
    worker: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    busy: Amounts = field(default_factory=_amounts)  # seconds that an engine was in a step
    computed: Amounts = field(default_factory=_amounts)  # tokens that were computed, of prompts and answers
    held: Amounts = field(default_factory=_amounts)  # KV blocks that requests held, in block-seconds
    preemptions: int = 0
    last_s: float = 0.0


@dataclass(slots=True, eq=False)
class Engine:
    """A scheduler, and its current leap: `ahead` equal steps, each `step_s` long."""

    number: int
    scheduler: MuteScheduler
    plan: StepPlan = field(default_factory=StepPlan)
    since: float = 0.0
    step_s: float = 0.0
    ahead: int = 0  # 0: it is idle
    ends_at: float = 0.0  # an end in the calendar for another time is void


class Fleet:
    """Equal engines, and the frontends' routers in front of them. KV events arrive late; requests and tokens do not."""

    def __init__(self, shape: EngineShape, timing: Timing, count: int, routers: Sequence[Router]) -> None:
        self.engines = [Engine(number, MuteScheduler(shape)) for number in range(count)]
        self._timing = timing
        self._routers = routers
        self._calendar: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self.outcome = Outcome()

    def run(self, requests: Iterable[Request], until_s: float = float("inf")) -> Outcome:
        """Run requests, one router after another receiving one, until all have ended, or until `until_s`.

        All requests arrive before `until_s`.
        """
        for request in requests:
            self._advance(request.at_s)
            self.arrive(request)
        self._advance(until_s)
        self.outcome.preemptions = sum(engine.scheduler.preemptions for engine in self.engines)
        return self.outcome

    def _advance(self, until_s: float) -> None:
        """Let everything happen that is due before `until_s`."""
        calendar = self._calendar
        while calendar and calendar[0][0] < until_s:
            now, _, act = heappop(calendar)
            act(now)

    def _router_of(self, key: int) -> Router:
        return self._routers[key % len(self._routers)]

    def arrive(self, request: Request) -> None:
        """Route a request, and submit it to its engine."""
        now, outcome = request.at_s, self.outcome
        router = self._router_of(request.key)
        number = router.route(request, now)
        engine = self.engines[number]
        outcome.arrived[request.key] = now
        outcome.worker[request.key] = number
        if engine.ahead > 1 and (passed := int((now - engine.since) / engine.step_s)):
            self._pass(engine, min(passed, engine.ahead - 1))
        if engine.scheduler.submit_silent(request.key, request.prompt, request.answer, request.names):
            outcome.refused += 1
            router.done(request.key, now, refused=True)
            return
        outcome.prompt_tokens += request.prompt
        outcome.answers[request.key] = request.answer
        if not engine.ahead:
            self._leap(engine, now)
        elif engine.ahead > 1:  # it is admitted when the current step ends
            engine.ahead = 1
            self._schedule(engine)

    def _pass(self, engine: Engine, steps: int) -> None:
        """Account for the first steps of the leap, in which nothing happened."""
        self._count(engine, steps)
        engine.scheduler.skip(steps)
        engine.since += steps * engine.step_s
        engine.ahead -= steps

    def _leap(self, engine: Engine, now: float) -> None:
        """Begin the next equal steps."""
        engine.plan = plan = engine.scheduler.plan()
        if plan.idle:
            engine.ahead = 0
            return
        engine.since, engine.step_s = now, self._timing.step_s(plan)
        engine.ahead = engine.scheduler.steady() + 1
        self._schedule(engine)

    def _schedule(self, engine: Engine) -> None:
        engine.ends_at = engine.since + engine.ahead * engine.step_s
        self._send(partial(self._end, engine), engine.ends_at)

    def _end(self, engine: Engine, now: float) -> None:
        if engine.ahead and now == engine.ends_at:
            self.land(engine, now)

    def land(self, engine: Engine, now: float) -> None:
        """End a leap: the last of its steps is the one in which something happens."""
        scheduler, outcome = engine.scheduler, self.outcome
        if engine.ahead > 1:
            self._pass(engine, engine.ahead - 1)
        self._count(engine, 1)
        outcome.last_s = now
        for key, chunk in scheduler.step():
            router = self._router_of(key)
            if chunk.cached_tokens is not None:
                outcome.ttft[key] = now - outcome.arrived[key]
                outcome.cached_tokens += chunk.cached_tokens
                router.first(key, now)
            if chunk.finish is not None:
                outcome.ended[key] = now
                router.done(key, now)
        if events := scheduler.take_events():
            self._send(partial(self._heard, engine.number, events), now + EVENTS_LATE_S)
        self._leap(engine, now)

    def _heard(self, worker: int, events: list[KvEvent], now: float) -> None:
        for router in self._routers:
            router.heard(worker, events)

    def _send(self, act: Callable[[float], None], at_s: float) -> None:
        heappush(self._calendar, (at_s, next(self._numbers), act))

    def _count(self, engine: Engine, steps: int) -> None:
        """Record what the first steps of the leap compute."""
        outcome, number = self.outcome, engine.number
        lasted = steps * engine.step_s
        outcome.steps += steps
        tokens = engine.plan.prefill_tokens + engine.plan.decodes * steps
        for window, share in windows(engine.since, engine.since + lasted):
            outcome.computed[window][number] += tokens * share
            outcome.busy[window][number] += lasted * share
            outcome.held[window][number] += engine.plan.active_blocks * lasted * share


def windows(since: float, until: float) -> Iterator[tuple[int, float]]:
    """Yield the windows that overlap a stretch of time, and the length of each overlap."""
    length = until - since
    for window in itertools.count(int(since / WINDOW_S)):
        end = min(until, (window + 1) * WINDOW_S)
        yield window, (end - since) / length
        if end == until:
            return
        since = end


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
        **percentiles("ttft", ttft),
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
    return [
        (ended - outcome.arrived[key] - outcome.ttft[key]) / (outcome.answers[key] - 1)
        for key, ended in outcome.ended.items()
        if outcome.answers[key] > 1
    ]


def spread(amounts: Mapping[int, Mapping[int, float]], workers: int, until_s: float) -> float:
    """Return the 99th percentile, over windows and workers, of a worker's share over the mean; nan in less than a window.
    The first window and those after the last arrival are not full, and are left out."""
    return _spread(_by_window(amounts, workers, until_s))


def _spread(windows: Iterable[Sequence[float]]) -> float:
    """Return the 99th percentile of a worker's share over the mean. Each window has an amount of each worker."""
    ratios = [one * len(here) / total for here in windows if (total := sum(here)) for one in here]
    return percentile(sorted(ratios), 0.99)


def _by_window(amounts: Mapping[int, Mapping[int, float]], workers: int, until_s: float) -> list[list[float]]:
    """Return the amount of each worker in each full window."""
    windows = [amounts.get(window, {}) for window in full_windows(until_s)]
    return [[here.get(worker, 0.0) for worker in range(workers)] for here in windows]


def hottest(amounts: Mapping[int, Mapping[int, float]], workers: int, until_s: float) -> float:
    """Return the largest of the workers' own 99th percentiles over the full windows, over their mean; nan if all were idle."""
    own = [percentile(sorted(one), 0.99) for one in zip(*_by_window(amounts, workers, until_s), strict=True)]
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


def percentiles(name: str, values: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """Return the median and the 99th percentile times `scale`, as `NAME_p50` and `NAME_p99`; nan if there are no values."""
    ordered = sorted(values)
    return {f"{name}_p{100 * share:.0f}": percentile(ordered, share) * scale for share in (0.5, 0.99)}


def shortened(requests: Sequence[Request], found: Sequence[int]) -> list[Request]:
    """Return requests without the cached part of their prompts; no engine finds more of them."""
    return [
        replace(one, prompt=one.prompt - less, names=()) for one, less in zip(requests, found, strict=True)
    ]


class Ideal:
    """A fleet that knows future requests, and does not need to look up caches: bounds that only hindsight could reach.

    A prompt is read by one engine, from its beginning to its end. A prompt that takes most of a window keeps an engine at full
    speed for that long, while the mean of the fleet is lower: no router can split it.

        least    no placement without waiting prompts has a better balance: everything but the long prompts is divisible
        dealt    the requests of each window are known before, and dealt out, the longest prompts first, to the same engines

    In both, the cached part of a prompt (`trace.found`) is found on every engine: as if all had one cache.
    """

    def __init__(self, requests: Sequence[Request], shape: EngineShape, timing: Timing, workers: int) -> None:
        self._requests, self._workers = requests, workers
        self._shape, self._timing = shape, timing
        self._read = [dict(windows(one.at_s, one.at_s + self._reading_s(one.prompt))) for one in requests]
        """The windows in which each prompt is read, and how much of it in each, if it does not wait."""

    def _reading_s(self, prompt: int) -> float:
        """Return the time of reading a prompt beside requests that fill its cache: an engine is never slower."""
        size, blocks = self._shape.prefill_tokens_max, self._shape.kv_blocks
        chunks = [min(size, prompt - done) for done in range(0, prompt, size)]
        return sum(self._timing.step_s(StepPlan(one, 1, (one,), blocks, blocks)) for one in chunks)

    def least_balance(self) -> float:
        """Return a balance that no placement without waiting prompts can improve.

        A prompt that is more than an equal share of a window's work has its own engine there. All other work
        is divisible, and the same everywhere.
        """
        water: dict[int, float] = defaultdict(float)
        lumps: dict[int, list[float]] = defaultdict(list)
        for request, shares in zip(self._requests, self._read, strict=True):
            for window, share in shares.items():
                lumps[window].append(request.prompt * share)
            water[max(shares)] += request.answer - 1
        full = full_windows(self._requests[-1].at_s)
        return _spread(_levelled(lumps[window], water[window], self._workers) for window in full)

    def dealt_balance(self) -> float:
        """Return the balance of the same engines, with the prompts of each window dealt out in advance."""
        router = Placed(workers(self._workers, self._timing.profile(self._shape)), dict(self._dealt()))
        outcome = Fleet(self._shape, self._timing, self._workers, [router]).run(self._requests)
        return spread(outcome.computed, self._workers, self._requests[-1].at_s)

    def _dealt(self) -> Iterator[tuple[int, int]]:
        """Yield the worker of each request, by its key: the requests of one window longest first, each to the worker with
        the least work while it is read."""
        amounts: dict[int, list[float]] = defaultdict(lambda: [0.0] * self._workers)
        coming = zip(self._requests, self._read, strict=True)
        for request, shares in sorted(coming, key=lambda one: (int(one[0].at_s / WINDOW_S), -one[0].prompt)):
            busy = [0.0] * self._workers
            for window, share in shares.items():
                busy = [had + share * more for had, more in zip(busy, amounts[window], strict=True)]
            place = busy.index(min(busy))
            for window, share in shares.items():
                amounts[window][place] += request.prompt * share
            yield request.key, place


def _levelled(lumps: Sequence[float], water: float, engines: int) -> list[float]:
    """Return each engine's work: the longest prompts one each, as long as that is more than an equal share of the rest."""
    left, alone = sum(lumps) + water, list[float]()
    for lump in sorted(lumps, reverse=True)[: engines - 1]:
        if lump * (engines - len(alone)) <= left:
            break
        alone.append(lump)
        left -= lump
    return alone + [left / (engines - len(alone))] * (engines - len(alone))


class Placed(Router):
    """A router with predetermined destinations of requests, by key."""

    def __init__(self, workers: Sequence[WorkerJoined], places: Mapping[int, int]) -> None:
        super().__init__(workers, Mode.RANDOM)
        self._places = places

    def route(self, request: Request, now: float) -> int:
        return self._places[request.key]

    def first(self, key: int, now: float) -> None:
        """Count nothing."""

    def done(self, key: int, now: float, *, refused: bool = False) -> None:
        """Count nothing."""
