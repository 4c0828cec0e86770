"""Asks one worker one canary, as often as it takes to be sure. Everything about a single probe lives here.

The whole probe stands under one deadline, its confirmations included: a worker that freezes in mid-answer has failed as
surely as one that never answered. Only time in which its engine is known to get on with others' work (a long prompt, a
full batch) does not count, up to a bound: who waits in a queue has not failed. A wrong answer is asked again at once; a
second one that is wrong beyond the tolerance confirms it (N8). Without logprobs a near tie looks like a wrong answer, so all of
`blind_repeats` answers must be wrong. Other failures are not repeated: the next probe will.

A worker that says it is leaving, or that it is full until the deadline, has not failed: it is alive and has given no
wrong answer. Such a probe says nothing (`ProbeResult.declined`); whoever is full is asked again within a second.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from controller.deciders.fleet import Worker
from controller.ports import Clock, Prober, WorkerUnreachable
from controller.runtime.canary.goldens import Canary, CanaryAnswer, ExpectedAnswer, GoldenDifference, read
from events import codec
from events.errors import HoldfastError
from events.wire import Chunk, Generate, Sampling, without_quotes

CHUNKS_MAX = 10_000  # of one answer
LOOK_S = 0.1  # how often it is asked whether a question waits for others' work
LATE_S = 0.02  # after which it is our own loop's lag
BUSY_WAIT_S = 0.2  # before an overloaded worker is asked again
LEAVING = ("engine_shutdown", "not_serving")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What asking once brought: an answer, or why there is none."""

    latency_ms: float
    answer: CanaryAnswer | None = None
    failure: Literal["no_response", "timeout", "exception", "non_finite"] | None = None
    detail: str = ""
    declined: bool = False  # it would not answer: it is leaving, or full
    waited_ms: float = 0.0  # of the latency: before the answer began, for others' work
    engine_went_on: bool = False  # timeout: the engine answered other requests until the end


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found. `first` is what the first question brought; `worst` the difference that it is
    judged by."""

    first: ProbeResult
    worst: GoldenDifference
    attempts: int
    confirmed: bool
    both_ways: bool = False  # without logprobs: a right answer followed a wrong one, as at a near tie


@dataclass(slots=True)
class Deadline:
    """When a probe must be over. It moves while the worker's engine gets on with others' work, up to a bound."""

    clock: Clock
    at: float  # monotonic
    spare_s: float = 0.0  # how far it may still move
    moved_to: float = 0.0  # time before this has been allowed for: questions may be asked side by side

    @property
    def left_s(self) -> float:
        """Seconds until then; below 0 when it is over."""
        return self.at - self.clock.monotonic()

    def allow(self, since: float) -> None:
        """Do not count the time from `since` until now."""
        now = self.clock.monotonic()
        more = min(self.spare_s, max(0.0, now - max(since, self.moved_to)))
        self.at, self.spare_s, self.moved_to = self.at + more, self.spare_s - more, now


@dataclass(slots=True)
class ProbeReader:
    """How far one question has come."""

    worker: str
    prompt_tokens: int
    open: bool = False  # it is with the worker
    begun: bool = False  # the answer has
    waited_s: float = 0.0  # before that, for others' work
    waits_since: float | None = None  # for others' work, by the last look
    goes_on: bool = False  # the engine answers other requests, by the last look

    def look(self, prober: Prober, since: float, now: float) -> bool:
        """Say whether the time since the last look went to others' work."""
        others = prober.others_work(self.worker, self.prompt_tokens, begun=self.begun) if self.open else ""
        self.goes_on, waits = bool(others), others == "before"
        if waits and not self.begun:
            self.waited_s += now - since
        self.waits_since = now if waits else None
        return waits

    def begin(self, now: float) -> None:
        """The answer begins."""
        if not self.begun and self.waits_since is not None:
            self.waited_s += now - self.waits_since
        self.begun = True


async def within(deadline: Deadline, work: Coroutine[Any, Any, T], look: Callable[[float, float], bool]) -> T:
    """Await `work` until the deadline. Raise TimeoutError; nothing of it runs on afterwards.

    Every LOOK_S it is asked whether the time from the last look until now went to others' work. Time by which we come too
    late ourselves, on a machine that has too much to do, does not count either: what has been said meanwhile is not read yet.
    """
    clock = deadline.clock
    doing = asyncio.ensure_future(work)
    try:
        while not doing.done():
            if deadline.left_s <= 0:
                raise TimeoutError
            looked, wait_s = clock.monotonic(), min(deadline.left_s, LOOK_S)
            await _either(doing, clock, wait_s)
            now = clock.monotonic()
            if doing.done():
                break
            if look(looked, now):
                deadline.allow(looked)
            elif (late_s := now - looked - wait_s) > LATE_S:
                deadline.allow(now - late_s)
        return doing.result()
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _either(doing: "asyncio.Future[T]", clock: Clock, seconds: float) -> None:
    """Wait until it is done, or for so many seconds."""
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((doing, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        await asyncio.gather(timer, return_exceptions=True)


def question(canary: Canary, sampling: Sampling, *, rank: int = 0) -> Generate:
    """Return the request that asks a canary: past the prefix cache, and no user's."""
    id = codec.new_id()
    return Generate(
        stream=0,
        request=f"canary-{id}",
        tokens=list(canary.prompt),
        prompt_tokens=len(canary.prompt),
        sampling=sampling,
        canary=True,
        cache_salt=id,
        prompt_text=canary.text,
        rank=rank,
    )


def unmarked_question(canary: Canary, sampling: Sampling, worker: Worker, *, rank: int = 0) -> Generate:
    """Return the request that asks a question as a frontend would ask this worker on behalf of a user."""
    return Generate(
        stream=0,
        request=os.urandom(16).hex(),
        tokens=list(canary.prompt),
        prompt_tokens=len(canary.prompt),
        sampling=sampling,
        prompt_text=canary.text if worker.joined.engine == "openai" else "",
        rank=rank,
        cache_epoch=worker.cache_epoch,
    )


def greedy(canary: Canary, top_k: int) -> Sampling:
    """Return how a canary is asked whose answer is compared token by token."""
    return Sampling(
        max_tokens=canary.max_tokens, temperature=0.0, ignore_eos=not canary.configured, logprobs=top_k
    )


async def ask(
    prober: Prober, worker: str, request: Generate, deadline: Deadline, expected: ExpectedAnswer | None = None
) -> ProbeResult:
    """Ask once, to the end of the answer, or until it departs from the expected one.

    What follows then tells nothing more, and the sooner a corrupt worker is found out the better.
    """
    clock = deadline.clock
    began = clock.monotonic()
    reader = ProbeReader(worker, len(request.tokens))

    def look(since: float, now: float) -> bool:
        return reader.look(prober, since, now)

    try:
        asked = await within(deadline, _whole(prober, reader, request, expected, deadline), look)
    except TimeoutError:
        asked = ProbeResult(
            0.0, failure="timeout", detail="no whole answer in time", engine_went_on=reader.goes_on
        )
    except WorkerUnreachable as error:
        asked = ProbeResult(0.0, failure="no_response", detail=str(error))
    except HoldfastError as error:
        asked = ProbeResult(0.0, failure="exception", detail=str(error))
    return replace(asked, latency_ms=(clock.monotonic() - began) * 1000, waited_ms=reader.waited_s * 1000)


async def _whole(
    prober: Prober,
    reader: ProbeReader,
    request: Generate,
    expected: ExpectedAnswer | None,
    deadline: Deadline,
) -> ProbeResult:
    """Return the whole answer; a worker that is full is asked again, as long as the deadline leaves time for it."""
    while True:
        chunks: list[Chunk] = []
        stream = prober.ask(reader.worker, request)
        reader.open = True
        async with _closing(stream):
            async for chunk in stream:
                chunks.append(chunk)
                if not chunk.error:
                    reader.begin(deadline.clock.monotonic())
                if chunk.error or chunk.finish or len(chunks) > CHUNKS_MAX:
                    break
                if expected is not None and expected.departs(chunk):
                    return ProbeResult(0.0, answer=replace(read(chunks), cut=True))
        reader.open = False
        error = without_quotes(chunks[-1].error) if chunks and chunks[-1].error else None
        if error is None or not error.startswith("overloaded"):
            return _result(chunks, error)
        if deadline.left_s <= BUSY_WAIT_S:
            return ProbeResult(0.0, detail=error, declined=True)
        await deadline.clock.sleep(BUSY_WAIT_S)


@contextlib.asynccontextmanager
async def _closing(stream: AsyncIterator[Chunk]) -> AsyncIterator[None]:
    """Let the prober know at once when nobody reads on, if it wants to know."""
    try:
        yield
    finally:
        close: Callable[[], Awaitable[None]] | None = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _result(chunks: list[Chunk], error: str | None) -> ProbeResult:
    if not chunks:
        return ProbeResult(0.0, failure="no_response", detail="the stream ended without a word")
    if error is not None:
        if error.startswith(LEAVING):
            return ProbeResult(0.0, detail=error, declined=True)
        return ProbeResult(
            0.0, failure="non_finite" if error.startswith("non_finite") else "exception", detail=error
        )
    if chunks[-1].finish is None:
        return ProbeResult(0.0, failure="exception", detail="Stream ended before generation completed")
    answer = read(chunks)
    if not answer.tokens:
        return ProbeResult(0.0, failure="no_response", detail="the answer is empty")
    return ProbeResult(0.0, answer=answer)


async def ask_until_sure(
    once: Callable[[bool], Awaitable[ProbeResult]],
    judge: Callable[[CanaryAnswer], GoldenDifference],
    retries: int,
    blind_repeats: int,
) -> Verdict:
    """Ask, and while the answer is wrong ask again, at most `retries` times or until a second wrong answer
    confirms.

    `once` asks one question; it is told whether this is a repetition. What is asked after the deadline fails
    at once, so that the deadline holds for the whole.
    """
    first = await once(False)
    if first.answer is None:
        return Verdict(first, GoldenDifference(None, None, first.detail), 1, False)
    found = judge(first.answer)
    if found.blind:
        return await _ask_blindly(once, judge, blind_repeats, first, found)
    attempts = 1
    while found.reason in ("token_mismatch", "logit_drift") and attempts <= retries:
        again = await once(True)
        attempts += 1
        if again.answer is not None and judge(again.answer).reason is not None:
            return Verdict(first, found, attempts, True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
    return Verdict(first, found, attempts, False)


async def _ask_blindly(
    once: Callable[[bool], Awaitable[ProbeResult]],
    judge: Callable[[CanaryAnswer], GoldenDifference],
    repeats: int,
    first: ProbeResult,
    found: GoldenDifference,
) -> Verdict:
    """Confirm a wrong answer that came without logprobs: all of `repeats` answers must be wrong."""
    for attempts in range(2, repeats + 1):
        again = await once(True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
        if again.answer is None:
            return Verdict(first, found, attempts, False)
        if judge(again.answer).reason is None:
            return Verdict(first, found, attempts, False, both_ways=True)
    return Verdict(first, found, repeats, True)
