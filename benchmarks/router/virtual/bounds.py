"""Bounds for any router: the hits of one shared cache, and a balance that only hindsight could reach.

A prompt is read by one engine, from its beginning to its end. A prompt that takes most of a window keeps an engine at full speed
for that long, while the mean of the fleet is lower: no router can split it.

    least    no placement without waiting prompts has a better balance: everything but the long prompts is divisible
    dealt    the requests of each window are known before, and dealt out, the longest prompts first, to the same engines

In both, the cached part of a prompt (`trace.found`) is found on every engine: as if all had one cache.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.router.virtual.fleet import WINDOW_S, Fleet, full_windows, percentile, spread, windows
from benchmarks.router.virtual.router import Router, workers
from benchmarks.router.virtual.trace import Request
from controller.router.selection.selector import Mode
from events.observations import WorkerJoined
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import StepPlan, Timing


def shortened(requests: Sequence[Request], found: Sequence[int]) -> list[Request]:
    """Return requests without the cached part of their prompts; no engine finds more of them."""
    return [
        replace(one, prompt=one.prompt - less, names=()) for one, less in zip(requests, found, strict=True)
    ]


class Ideal:
    """A fleet that knows future requests, and does not need to look up caches."""

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
        ratios: list[float] = []
        for window in full_windows(self._requests[-1].at_s):
            amounts = _levelled(lumps[window], water[window], self._workers)
            if total := sum(amounts):
                ratios += [amount * self._workers / total for amount in amounts]
        return percentile(sorted(ratios), 0.99)

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
