"""Measures an engine's prefill and decode times for `holdfast profile`.

There are three kinds of measurements:

    prefill   one prompt at a time, of each length: the time to the first token
    decode    a batch of answers at once, after prompts of one length: the time between two tokens
    beside    a short prompt while one answer is generated: the duration of the answer's decode step that also computes the prompt

Prefill prompts differ from their first token on, so that no prefix cache helps. All batches of one context length use the same
prompts. Each prompt of a batch is first sent alone, and then all are sent at once. An engine with a prefix cache then has all
prompts cached, so all answers start at the same time. Without a prefix cache the answers start one after another, and only the
time in which all of them are being generated counts. If the engine refuses a batch, or runs only a part of it at once, this batch
and all larger ones are left out.

Each round measures every point once. So a temporary load on the machine affects one measurement of many points, and never all
measurements of one point.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from controller.profiler.flags import BESIDE, Sweep
from controller.profiler.profile_arrays import BesidePoint, DecodePoint, PrefillPoint
from controller.profiler.target import CannotMeasure, ProfiledEngine, ProfiledStream, TargetRefused

TOKEN_IDS = (10, 1000)  # valid in any vocabulary
WARM_UPS = 2
TOGETHER_MIN = 0.5  # share of the requested tokens that must arrive while the whole batch is running
LONGER = 4  # factor on the requested tokens, if the answers overlapped too briefly
TOKENS_MAX = 2048
ROW = 4  # number of consecutive gaps between events that are measured together
BURSTS = 0.25  # if the median is below this share of the mean, tokens arrive in bursts
APART_S = 0.0005  # maximum time between events of one engine step


class NotTogether(TargetRefused):
    """The engine does not run this many answers at once, or the timing of its tokens is not visible."""


OnMeasurement = Callable[[str], None]
"""A callback that gets the description of each measurement before the measurement begins."""


class Measuring:
    """Measures all points of one sweep on one engine, and holds the results.

    `skipped` lists the points that were left out, with the reasons."""

    def __init__(
        self, target: ProfiledEngine, sweep: Sweep, report: OnMeasurement, seed: int | None = None
    ) -> None:
        self.decode: list[DecodePoint] = []
        self.beside: list[BesidePoint] = []
        self.skipped: list[str] = []
        self._target = target
        self._sweep = sweep
        self._report = report
        self._random = random.Random(seed)
        self._alone: dict[int, list[ProfiledStream]] = {length: [] for length in sweep.lengths}
        self._batches = {context: list(sweep.batches) for context in sweep.contexts}
        self._serial = False  # whether the engine refuses a second request beside a running one
        # by context length: the prompts of its batches
        self._together: dict[int, list[list[int]]] = {context: [] for context in sweep.contexts}

    @property
    def prefill(self) -> list[PrefillPoint]:
        """One point per prompt length, with the median of the measured times."""
        return [_prefill_point(length, streams) for length, streams in self._alone.items()]

    async def run(self) -> None:
        """Measure all points of the sweep, `Sweep.repeats` times. Raise CannotMeasure if the engine fails or stops answering."""
        for _ in range(WARM_UPS):
            await self._target.ask(self._prompt(min(self._sweep.lengths, default=1)), 1).whole()
        for _ in range(self._sweep.repeats):
            await self._measure_prompts()
            await self._measure_batches()
            for _ in range(BESIDE):
                await self._measure_beside()

    async def _measure_prompts(self) -> None:
        for length in list(self._alone):
            self._report(f"a prompt of {length} tokens")
            stream = self._target.ask(self._prompt(length), 1)
            try:
                await stream.whole()
            except TargetRefused as reason:
                self.skipped.append(f"prompts of {length} tokens: {reason}")
                self._alone = {one: self._alone[one] for one in self._alone if one < length}
                break
            self._alone[length].append(stream)

    async def _measure_batches(self) -> None:
        for context, sizes in self._batches.items():
            for place, batch in enumerate(sizes):
                try:
                    self._report(f"{batch} at once, {context} tokens each")
                    self.decode.append(await self._batch(batch, context))
                except TargetRefused as reason:
                    self.skipped.append(f"{batch} at once, {context} tokens each: {reason}")
                    del sizes[place:]
                    break

    async def _measure_beside(self) -> None:
        length, context = min(self._alone, default=0), min(self._batches, default=0)
        if not length or not context or self._serial:
            return
        self._report(f"a prompt of {length} tokens beside an answer")
        answer = self._target.ask(self._prompt(context), self._sweep.tokens)
        await answer.begins()
        prompt = self._target.ask(self._prompt(length), 1)
        try:
            await _whole(answer, prompt)
        except TargetRefused as reason:
            self._serial = True
            self.skipped.append(f"a prompt of {length} tokens beside an answer: {reason}")
            return
        if (found := beside_point(answer, prompt, length)) is not None:
            self.beside.append(found)

    async def _batch(self, batch: int, context: int) -> DecodePoint:
        known = self._together[context]
        known += [self._prompt(context) for _ in range(batch - len(known))]
        prompts = known[:batch]
        for prompt in prompts:
            await self._target.ask(prompt, 1).whole()
        try:
            return await self._at_once(prompts, context, self._sweep.tokens)
        except NotTogether:
            room = self._target.context_tokens
            longer = min(
                self._sweep.tokens * LONGER, TOKENS_MAX, (room or TOKENS_MAX + context) - context - 1
            )
            if longer <= self._sweep.tokens:
                raise
            return await self._at_once(prompts, context, longer)

    async def _at_once(self, prompts: Sequence[list[int]], context: int, tokens: int) -> DecodePoint:
        streams = [self._target.ask(prompt, tokens) for prompt in prompts]
        await _whole(*streams)
        if short := [stream for stream in streams if stream.tokens < tokens]:
            raise CannotMeasure(
                f"an answer ended after {short[0].tokens} of {tokens} tokens: the engine does not obey ignore_eos"
            )
        return point(streams, context, self._sweep.tokens)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(*TOKEN_IDS) for _ in range(length)]


async def _whole(*streams: ProfiledStream) -> None:
    """Wait until all streams have ended. If any has failed, raise the error of the first failed one in `streams`."""
    for end in await asyncio.gather(*(stream.whole() for stream in streams), return_exceptions=True):
        if end is not None:
            raise end


def point(streams: Sequence[ProfiledStream], asked: int, tokens: int) -> DecodePoint:
    """Return the decode point of a batch of complete answers, each of at least `tokens` tokens.

    `asked` is the context length as listed in the sweep. The time between tokens is the median, because a single delayed step
    hardly changes a median. If tokens arrive in bursts, the time is the mean. Raise NotTogether if the answers overlapped too
    briefly.
    """
    begin = max(stream.event_times[0] for stream in streams)
    end = min(stream.event_times[-1] for stream in streams)
    itl, contexts = [], []
    for stream in streams:
        per_event = stream.tokens / len(stream.event_times)
        within = np.array([at for at in stream.event_times if begin <= at <= end])
        steps = (len(within) - 1) * per_event
        if steps < tokens * TOGETHER_MIN:
            raise NotTogether("the engine does not run this many requests at once for long enough")
        before = sum(at < begin for at in stream.event_times) * per_event
        itl.append(_step_s(within) / per_event * 1e3)
        contexts.append((stream.prompt_tokens or asked) + before + steps / 2)
    return DecodePoint(len(streams), asked, float(np.mean(contexts)), float(np.mean(itl)))


def _step_s(at: npt.NDArray[np.float64]) -> float:
    """Return the typical number of seconds between an event and the next one. `at` holds the events' times.

    This is the median, or the mean if events arrive in bursts. Raise NotTogether if all times are equal.
    """
    row = min(ROW, len(at) - 1)
    usual, mean = float(np.median(at[row:] - at[:-row])) / row, (at[-1] - at[0]) / (len(at) - 1)
    if not mean:
        raise NotTogether(
            "all tokens of an answer arrive at once: the server does not stream, or takes no time"
        )
    return usual if usual > mean * BURSTS else float(mean)


def _prefill_point(length: int, streams: Sequence[ProfiledStream]) -> PrefillPoint:
    tokens = round(float(np.median([stream.prompt_tokens or length for stream in streams])))
    return PrefillPoint(tokens, float(np.median([stream.ttft_ms for stream in streams])))


def beside_point(answer: ProfiledStream, prompt: ProfiledStream, length: int) -> BesidePoint | None:
    """Return the duration of the decode step of `answer` that also computed a prompt of `length` tokens.

    Return None if the prompt was not computed while `answer` was generated, or if `answer` has too few tokens.
    """
    at, said = prompt.event_times[0], answer.event_times
    gaps = np.diff(said) * 1e3
    if len(gaps) < 3 or not said[0] < at <= said[-1] + APART_S:
        return None
    place = max(0, int(np.argmin(np.abs(np.array(said) - at))) - 1)
    return BesidePoint(prompt.prompt_tokens or length, float(gaps[place]), float(np.median(gaps)))
