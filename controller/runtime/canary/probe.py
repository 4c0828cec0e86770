"""One probe of one worker: sends a canary, and repeats it until the verdict is certain.

The whole probe has one deadline, its confirmations included: a worker that freezes in mid-answer has failed like one that never
answered. Time in which its engine is known to make progress on other requests (a long prompt, a full batch) does not count, up to
a bound: a queued request has not failed.

After a wrong answer the canary is repeated at once; a second answer that is wrong beyond the tolerance confirms it (N8).
Without logprobs a near tie looks like a wrong answer, so all of `blind_repeats` answers must be wrong. Other failures are not
repeated; the next probe follows anyway.

A worker that answers that it is leaving, or full until the deadline, has not failed: it is alive and has given no wrong answer.
Such a probe has no outcome (`ProbeResult.declined`); a full worker is probed again within a second.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from controller.deciders.fleet import Worker
from controller.ports import Clock, Prober, WorkerUnreachable
from controller.runtime.canary.goldens import Canary, CanaryAnswer, ExpectedAnswer, GoldenDifference, read
from events import codec
from events.errors import HoldfastError
from events.wire import Chunk, Generate, Sampling, without_quotes

CHUNKS_MAX = 10_000  # of one answer
LOOK_S = 0.1  # interval of the check whether a question waits for other requests
LATE_S = 0.02  # delay above which our own loop lags
BUSY_WAIT_S = 0.2  # before a canary is sent again to an overloaded worker
LEAVING = ("engine_shutdown", "not_serving")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one question: an answer, or the reason why there is none."""

    latency_ms: float
    answer: CanaryAnswer | None = None
    failure: Literal["no_response", "timeout", "exception", "non_finite"] | None = None
    detail: str = ""
    declined: bool = False  # the worker is leaving, or full
    waited_ms: float = 0.0  # part before the answer that the engine spent on other requests
    engine_went_on: bool = False  # timeout: the engine served other requests until the end


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict of a probe. `first` is the result of the first question; `worst` is the difference that decides the verdict."""

    first: ProbeResult
    worst: GoldenDifference
    attempts: int
    confirmed: bool
    both_ways: bool = False  # without logprobs: a right answer followed a wrong one, as at a near tie


@dataclass(slots=True)
class Deadline:
    """The deadline of a probe. It moves while the worker's engine makes progress on other requests, up to a bound."""

    clock: Clock
    at: float  # monotonic
    spare_s: float = 0.0  # how far it may still move
    moved_to: float = 0.0  # time before this is already excluded: questions may run concurrently

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self.at - self.clock.monotonic()

    def allow(self, since: float) -> None:
        """Exclude the time from `since` until now."""
        now = self.clock.monotonic()
        more = min(self.spare_s, max(0.0, now - max(since, self.moved_to)))
        self.at, self.spare_s, self.moved_to = self.at + more, self.spare_s - more, now


@dataclass(slots=True)
class ProbeReader:
    """The progress of one question."""

    worker: str
    prompt_tokens: int
    open: bool = False  # it was sent to the worker
    begun: bool = False  # the answer has begun
    waited_s: float = 0.0  # time before the answer began that the engine spent on other requests
    waits_since: float | None = None  # as of the last look: start of its wait for other requests
    goes_on: bool = False  # as of the last look: the engine serves other requests

    def look(self, prober: Prober, since: float, now: float) -> bool:
        """Return whether the time since the last look was spent on other requests."""
        others = prober.others_work(self.worker, self.prompt_tokens, begun=self.begun) if self.open else ""
        self.goes_on, waits = bool(others), others == "before"
        if waits and not self.begun:
            self.waited_s += now - since
        self.waits_since = now if waits else None
        return waits

    def begin(self, now: float) -> None:
        """Mark the start of the answer."""
        if not self.begun and self.waits_since is not None:
            self.waited_s += now - self.waits_since
        self.begun = True


async def within(deadline: Deadline, work: Coroutine[Any, Any, T], look: Callable[[float, float], bool]) -> T:
    """Await `work` until the deadline. Raise TimeoutError; `work` is cancelled on every exit.

    Every LOOK_S, `look` reports whether the time since the last look was spent on other requests. The lag of our own loop, on
    an overloaded machine, does not count either: chunks that arrived meanwhile are not read yet.
    """
    clock = deadline.clock
    doing = asyncio.ensure_future(work)
    try:
        while not doing.done():
            if deadline.left_s <= 0:
                raise TimeoutError
            looked, wait_s = clock.monotonic(), min(deadline.left_s, LOOK_S)
            await _wait_briefly(doing, clock, wait_s)
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


async def _wait_briefly(doing: "asyncio.Future[T]", clock: Clock, seconds: float) -> None:
    """Wait until `doing` is done, at most `seconds`."""
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((doing, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        await asyncio.gather(timer, return_exceptions=True)


def question(
    canary: Canary, sampling: Sampling, worker: Worker, *, rank: int = 0, marked: bool = True
) -> Generate:
    """Return the request for a canary: it bypasses the prefix cache, and is marked as a canary.

    Not `marked`: it has the form in which a frontend sends a user's request to this worker.
    """
    id, text = codec.new_id(), canary.text if marked or worker.joined.engine == "openai" else ""
    return Generate(
        stream=0,
        request=f"canary-{id}" if marked else os.urandom(16).hex(),
        tokens=list(canary.prompt),
        prompt_tokens=len(canary.prompt),
        sampling=sampling,
        canary=marked,
        cache_salt=id if marked else "",
        prompt_text=text,
        rank=rank,
        cache_epoch=0 if marked else worker.cache_epoch,
    )


def greedy(canary: Canary, top_k: int) -> Sampling:
    """Return the sampling of a canary that is compared token by token."""
    return Sampling(
        max_tokens=canary.max_tokens, temperature=0.0, ignore_eos=not canary.configured, logprobs=top_k
    )


async def ask(
    prober: Prober, worker: str, request: Generate, deadline: Deadline, expected: ExpectedAnswer | None = None
) -> ProbeResult:
    """Send one question and read the answer to its end, or until it departs from the expected one.

    After a wrong token the rest would add no information, and a corrupt worker should be detected as soon as possible.
    """
    clock = deadline.clock
    began = clock.monotonic()
    reader = ProbeReader(worker, len(request.tokens))

    def look(since: float, now: float) -> bool:
        return reader.look(prober, since, now)

    try:
        asked = await within(deadline, _whole_answer(prober, reader, request, expected, deadline), look)
    except TimeoutError:
        asked = ProbeResult(
            0.0, failure="timeout", detail="no whole answer in time", engine_went_on=reader.goes_on
        )
    except WorkerUnreachable as error:
        asked = ProbeResult(0.0, failure="no_response", detail=str(error))
    except HoldfastError as error:
        asked = ProbeResult(0.0, failure="exception", detail=str(error))
    return replace(asked, latency_ms=(clock.monotonic() - began) * 1000, waited_ms=reader.waited_s * 1000)


async def _whole_answer(
    prober: Prober,
    reader: ProbeReader,
    request: Generate,
    expected: ExpectedAnswer | None,
    deadline: Deadline,
) -> ProbeResult:
    """Send the canary and return the whole answer. A full worker is retried as long as the deadline allows."""
    while True:
        chunks: list[Chunk] = []
        stream = prober.ask(reader.worker, request)
        reader.open = True
        async with contextlib.aclosing(stream):
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


def _result(chunks: list[Chunk], error: str | None) -> ProbeResult:
    if not chunks:
        return ProbeResult(0.0, failure="no_response", detail="the stream ended without a chunk")
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
    """Send a canary, and repeat it after a wrong answer: at most `retries` times, or until a second wrong answer confirms it.

    `once` sends it once; its argument is whether this is a repetition. After the deadline it fails at once, so the deadline
    covers all repetitions.
    """
    first = await once(False)
    if first.answer is None:
        return Verdict(first, GoldenDifference(None, None, first.detail), 1, False)
    found = judge(first.answer)
    if found.blind:
        return await _confirm_without_logprobs(once, judge, blind_repeats, first, found)
    attempts = 1
    while found.reason in ("token_mismatch", "logit_drift") and attempts <= retries:
        again = await once(True)
        attempts += 1
        if again.answer is not None and judge(again.answer).reason is not None:
            return Verdict(first, found, attempts, True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
    return Verdict(first, found, attempts, False)


async def _confirm_without_logprobs(
    once: Callable[[bool], Awaitable[ProbeResult]],
    judge: Callable[[CanaryAnswer], GoldenDifference],
    repeats: int,
    first: ProbeResult,
    found: GoldenDifference,
) -> Verdict:
    """Confirm a wrong answer without logprobs: all of `repeats` answers must be wrong."""
    for attempts in range(2, repeats + 1):
        again = await once(True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
        if again.answer is None:
            return Verdict(first, found, attempts, False)
        if judge(again.answer).reason is None:
            return Verdict(first, found, attempts, False, both_ways=True)
    return Verdict(first, found, repeats, True)
