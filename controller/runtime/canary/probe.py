"""One probe of one worker: sends a canary, and repeats the canary until the verdict is certain.

One deadline applies to the whole probe, including its repetitions. A worker that freezes during an answer has failed, like a
worker that never answers. A canary that waits in the worker's queue has not failed. So while the engine is known to make progress
on other requests (a long prompt, a full batch), the deadline moves, up to a bound.

After a wrong answer the canary is repeated at once. A second answer that is wrong beyond the tolerance confirms the fault. At a
near tie a correct engine can give either of two tokens. Without logprobs a near tie looks like a wrong answer. So without
logprobs, the fault is confirmed only if all of `blind_repeats` answers are wrong. After other failures the canary is not
repeated, because the next probe follows soon.

A worker has not failed if it answers that it is leaving, or if it is full until the deadline. Such a worker is alive, and has
given no wrong answer. The probe then has no outcome (`ProbeResult.declined`). A full worker is probed again within a second.
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

CHUNKS_MAX = 10_000  # per answer
LOOK_S = 0.1  # interval of the check whether a question waits for other requests
LATE_S = 0.02  # delay above which this process's event loop counts as lagging
BUSY_WAIT_S = 0.2  # wait before a canary is sent again to an overloaded worker
LEAVING = ("engine_shutdown", "not_serving")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one question: an answer, or the reason why there is none."""

    latency_ms: float
    answer: CanaryAnswer | None = None
    failure: Literal["no_response", "timeout", "exception", "non_finite"] | None = None
    detail: str = ""
    declined: bool = False  # whether the worker answered that it is leaving or full
    waited_ms: float = 0.0  # time before the answer began that the engine spent on other requests
    engine_went_on: bool = False  # after a timeout: whether the engine still served other requests


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a probe: how the first answer differs from the golden, and whether repetitions confirmed a fault."""

    first: ProbeResult  # the result of the first question
    worst: GoldenDifference  # the difference of the first answer from its golden, which decides the verdict
    attempts: int  # number of questions sent
    confirmed: bool  # whether repetitions have confirmed a wrong answer
    both_ways: bool = False  # without logprobs: a right answer followed a wrong one, as at a near tie


@dataclass(slots=True)
class Deadline:
    """The deadline of a probe, which moves, up to a bound, while the worker's engine makes progress on other requests."""

    clock: Clock
    at: float  # monotonic
    spare_s: float = 0.0  # seconds by which the deadline may still move
    moved_to: float = 0.0  # time before this is already excluded; concurrent questions share the deadline

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative once the deadline has passed."""
        return self.at - self.clock.monotonic()

    def allow(self, since: float) -> None:
        """Move the deadline later by the time from `since` until now.

        The questions of one probe share the deadline. If one question has already moved the deadline by a part of this time, that
        part is not added again. In total, the deadline moves by at most the initial `spare_s`."""
        now = self.clock.monotonic()
        more = min(self.spare_s, max(0.0, now - max(since, self.moved_to)))
        self.at, self.spare_s, self.moved_to = self.at + more, self.spare_s - more, now


@dataclass(slots=True)
class ProbeReader:
    """Tracks the progress of one question, and how long it waited for other requests."""

    worker: str
    prompt_tokens: int
    open: bool = False  # whether the question is open at the worker
    begun: bool = False  # whether the answer has begun
    waited_s: float = 0.0  # time before the answer began that the engine spent on other requests
    waits_since: float | None = None  # time of the last look, if the question then waited for other requests
    goes_on: bool = False  # whether the engine served other requests at the last look

    def look(self, prober: Prober, since: float, now: float) -> bool:
        """Return whether the engine works on requests that precede this question.

        If so, and if the answer has not begun, the time from `since` to `now` counts as waiting.
        """
        others = prober.others_work(self.worker, self.prompt_tokens, begun=self.begun) if self.open else ""
        self.goes_on, waits = bool(others), others == "before"
        if waits and not self.begun:
            self.waited_s += now - since
        self.waits_since = now if waits else None
        return waits

    def begin(self, now: float) -> None:
        """Record that the answer has begun, and end the wait for other requests."""
        if not self.begun and self.waits_since is not None:
            self.waited_s += now - self.waits_since
        self.begun = True


async def within(deadline: Deadline, work: Coroutine[Any, Any, T], look: Callable[[float, float], bool]) -> T:
    """Await `work` and return its result. Raise TimeoutError at the deadline. `work` is cancelled on every exit.

    `look` is called every LOOK_S. It returns whether the engine spent the time since the last call on other requests. Such time
    moves the deadline. A lag of this process's event loop moves the deadline too, because the loop reads no chunks during a lag.
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
    """Wait until `doing` is done, but at most `seconds`."""
    timer = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait((doing, timer), return_when=asyncio.FIRST_COMPLETED)
    finally:
        timer.cancel()
        await asyncio.gather(timer, return_exceptions=True)


def question(
    canary: Canary, sampling: Sampling, worker: Worker, *, rank: int = 0, marked: bool = True
) -> Generate:
    """Return the request that asks a canary's question.

    A `marked` request bypasses the prefix cache and is marked as a canary. An unmarked request has the form in which a frontend
    sends a user's request to this worker.
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
    """Return the sampling settings of a canary that is compared token by token: temperature 0, with `top_k` logprobs."""
    return Sampling(
        max_tokens=canary.max_tokens, temperature=0.0, ignore_eos=not canary.configured, logprobs=top_k
    )


async def ask(
    prober: Prober, worker: str, request: Generate, deadline: Deadline, expected: ExpectedAnswer | None = None
) -> ProbeResult:
    """Send one question, and read the answer to its end or until it differs from `expected`.

    Reading stops at the first difference so that a corrupt worker is detected as soon as possible. Errors and timeouts are
    returned as the result's `failure`, not raised.
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
    """Send the canary and return the complete answer, or the answer up to its first difference from `expected`.

    An overloaded worker is tried again until the deadline.
    """
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
    """Send a canary, and repeat it after a wrong answer until a second wrong answer confirms the first.

    `once` sends the canary once; its argument tells whether this is a repetition. After the probe's deadline `once` fails
    immediately, so one deadline covers all repetitions. `judge` compares an answer with its golden. The canary is repeated at
    most `retries` times. A wrong answer without logprobs is confirmed if all of `blind_repeats` answers are wrong.
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
    """Repeat a canary after a first wrong answer without logprobs.

    The fault is confirmed if all of `repeats` answers, including the first, are wrong.
    """
    for attempts in range(2, repeats + 1):
        again = await once(True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
        if again.answer is None:
            return Verdict(first, found, attempts, False)
        if judge(again.answer).reason is None:
            return Verdict(first, found, attempts, False, both_ways=True)
    return Verdict(first, found, repeats, True)
