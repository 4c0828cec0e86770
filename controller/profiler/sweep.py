"""The sweep of `holdfast profile`: which prompts and batches are measured, and how.

    prefill   one prompt at a time, of each length: its time to the first token, the median of a few
    decode    a batch of answers at once behind prompts of one length: the time between two tokens
    beside    a short prompt while one answer is generated: the gap between that answer's tokens in which it is computed

Every prefill prompt differs from its first token on, so that no prefix cache helps. The batches of a context have the same
prompts, which are computed once before they are requested together. With a prefix cache they then start at the same time;
without one they start one after another. Only the time in which all of them are answered counts. A batch is left out, together
with larger ones, if the engine runs only a part of it at once or has no room for it.

Each round measures every point of all three kinds once. So a temporary load on the machine spoils one measurement of many
points, and never all measurements of one point.
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
LONGER = 4  # times as many tokens if the answers overlapped too briefly
TOKENS_MAX = 2048
ROW = 4  # events measured together
BURSTS = 0.25  # below this share of the mean, the median only measures events within a burst
APART_S = 0.0005  # maximum time between events of one step


class NotTogether(TargetRefused):
    """The engine does not run this many answers at once, or the timing of its tokens is not visible."""


OnMeasurement = Callable[[str], None]
"""Called before each measurement, with its description."""


class Measuring:
    """One sweep over one target, and its results. `skipped` lists what was left out, and why."""

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
        self._serial = False  # the engine runs one request at a time
        self._together: dict[int, list[list[int]]] = {context: [] for context in sweep.contexts}  # prompts

    @property
    def prefill(self) -> list[PrefillPoint]:
        """The measured prefill points."""
        return [_prefill_point(length, streams) for length, streams in self._alone.items()]

    async def run(self) -> None:
        """Measure all points, `repeats` times. Raise CannotMeasure."""
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
    """Wait until all streams have ended. Raise the error of the first stream in the list that failed."""
    for end in await asyncio.gather(*(stream.whole() for stream in streams), return_exceptions=True):
        if end is not None:
            raise end


def point(streams: Sequence[ProfiledStream], asked: int, tokens: int) -> DecodePoint:
    """Return the decode point of a batch of complete answers. Raise NotTogether.

    The time is the median over a few consecutive steps, which a delayed step hardly changes; if tokens arrive in bursts, it is
    the mean.
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
    """Return the typical time between two events. Raise NotTogether if all events came at the same time."""
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
    """Return the step in which a prompt was computed while `answer` ran; None if the answer had ended by then."""
    at, said = prompt.event_times[0], answer.event_times
    gaps = np.diff(said) * 1e3
    if len(gaps) < 3 or not said[0] < at <= said[-1] + APART_S:
        return None
    place = max(0, int(np.argmin(np.abs(np.array(said) - at))) - 1)
    return BesidePoint(prompt.prompt_tokens or length, float(gaps[place]), float(np.median(gaps)))
