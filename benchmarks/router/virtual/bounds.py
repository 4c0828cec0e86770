"""What could the best of all routers do? Hits of one cache for all, and a balance that hindsight alone would reach.

A prompt is read by one engine, from its beginning to its end. One that takes most of a window keeps an engine at full speed
for so long, while the mean of the fleet is lower: no router can share it out.

    least    no placement does better that lets no prompt wait: all but the long prompts is water
    dealt    what comes in each window is known before, and dealt out, the longest prompts first, to the same engines

In both, what is found of a prompt (`trace.found`) is found on every engine: as if all had one cache.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.router.virtual.figures import full_windows, percentile, spread
from benchmarks.router.virtual.fleet import WINDOW_S, Fleet, windows
from benchmarks.router.virtual.router import Router, workers
from benchmarks.router.virtual.trace import Request
from controller.router.selection.selector import Mode
from events.observations import WorkerJoined
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import StepPlan, Timing


def shortened(requests: Sequence[Request], found: Sequence[int]) -> list[Request]:
    """Return requests without what is found of their prompts; nobody finds more of them."""
    return [
        replace(one, prompt=one.prompt - less, names=()) for one, less in zip(requests, found, strict=True)
    ]


class Ideal:
    """A fleet that knows what comes, and needs to look for nothing in caches."""

    def __init__(self, requests: Sequence[Request], shape: EngineShape, timing: Timing, workers: int) -> None:
        self._requests, self._workers = requests, workers
        self._shape, self._timing = shape, timing
        self._read = [dict(windows(one.at_s, one.at_s + self._reading_s(one.prompt))) for one in requests]
        """The windows in which each prompt is read, and how much of it in each, if it does not wait."""

    def _reading_s(self, prompt: int) -> float:
        """Return how long an engine reads a prompt beside requests that fill its cache: it is never slower."""
        size, blocks = self._shape.prefill_tokens_max, self._shape.kv_blocks
        chunks = [min(size, prompt - done) for done in range(0, prompt, size)]
        return sum(self._timing.step_s(StepPlan(one, 1, (one,), blocks, blocks)) for one in chunks)

    def least_balance(self) -> float:
        """Return a balance that no placement betters which lets no prompt wait.

        A prompt that is more than an equal share of what there is to do in a window has an engine of its own there. All else
        is water, and the same everywhere.
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
        """Return the balance of the same engines, where the prompts of each window are dealt out before they come."""
        router = Placed(workers(self._workers, self._timing.profile(self._shape)), dict(self._dealt()))
        outcome = Fleet(self._shape, self._timing, self._workers, [router]).run(self._requests)
        return spread(outcome.computed, self._workers, self._requests[-1].at_s)

    def _dealt(self) -> Iterator[tuple[int, int]]:
        """Yield who gets each request, by its key: of those that come in one window the longest first, each to the worker with
        the least to do as long as it is read."""
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
    """Return what each engine does: the longest prompts one each, as long as that is more than an equal share of the rest."""
    left, alone = sum(lumps) + water, list[float]()
    for lump in sorted(lumps, reverse=True)[: engines - 1]:
        if lump * (engines - len(alone)) <= left:
            break
        alone.append(lump)
        left -= lump
    return alone + [left / (engines - len(alone))] * (engines - len(alone))


class Placed(Router):
    """A router that is told before where each request goes, by its key."""

    def __init__(self, workers: Sequence[WorkerJoined], places: Mapping[int, int]) -> None:
        super().__init__(workers, Mode.RANDOM)
        self._places = places

    def route(self, request: Request, now: float) -> int:
        return self._places[request.key]

    def first(self, key: int, now: float) -> None:
        """It counts nothing."""

    def done(self, key: int, now: float, *, refused: bool = False) -> None:
        """It counts nothing."""
