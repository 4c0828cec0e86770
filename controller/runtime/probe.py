"""Asks one worker one canary, as often as it takes to be sure. Everything about a single probe lives here.

The whole probe stands under one deadline, its confirmations included: a worker that freezes in mid-answer has
failed as surely as one that never answered. A wrong answer is asked again at once; a second wrong one
confirms it (N8). Other failures are not repeated: the next probe will.

A worker that says it is leaving, or that it is full until the deadline, has not failed: it is alive and has given no
wrong answer. Such a probe says nothing (`Asked.declined`); whoever is full is asked again within a second.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from controller.ports import Clock, Prober, WorkerUnreachable
from controller.runtime.goldens import Answer, Canary, Difference, read
from events import codec
from events.errors import HoldfastError
from events.wire import Chunk, Generate, Sampling

CHUNKS_MAX = 10_000  # of one answer
BUSY_WAIT_S = 0.2  # before an overloaded worker is asked again
LEAVING = ("engine_shutdown", "not_serving")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What asking once brought: an answer, or why there is none."""

    latency_ms: float
    answer: Answer | None = None
    failure: Literal["no_response", "timeout", "exception", "non_finite"] | None = None
    detail: str = ""
    declined: bool = False  # it would not answer: it is leaving, or full


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a probe found. `first` is what the first question brought; `worst` the difference that it is
    judged by."""

    first: Asked
    worst: Difference
    attempts: int
    confirmed: bool


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` for at most `seconds` of `clock`. Raise TimeoutError; nothing of it runs on afterwards."""
    doing = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(max(seconds, 0.0)))
    try:
        await asyncio.wait((doing, timer), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise TimeoutError
    finally:
        for task in (doing, timer):
            task.cancel()
        await asyncio.gather(doing, timer, return_exceptions=True)


def question(canary: Canary, *, top_k: int, ignore_eos: bool) -> Generate:
    """Return the request that asks a canary: greedy, past the prefix cache, nobody's."""
    id = codec.new_id()
    return Generate(
        stream=0,
        request=f"canary-{id}",
        tokens=list(canary.prompt),
        prompt_tokens=len(canary.prompt),
        sampling=Sampling(
            max_tokens=canary.max_tokens, temperature=0.0, ignore_eos=ignore_eos, logprobs=top_k
        ),
        canary=True,
        cache_salt=id,
        prompt_text=canary.text,
    )


async def ask(
    prober: Prober,
    clock: Clock,
    worker: str,
    request: Generate,
    deadline: float,
    expected: Sequence[int] = (),
) -> Asked:
    """Ask once, to the end of the answer, or to its first token that is not the expected one.

    `deadline` is an instant of the monotonic clock. What a wrong token is followed by tells nothing more, and the
    sooner a corrupt worker is found out the better.
    """
    began = clock.monotonic()
    try:
        asked = await within(
            clock, deadline - began, _whole(prober, clock, worker, request, expected, deadline)
        )
    except TimeoutError:
        asked = Asked(0.0, failure="timeout", detail="no whole answer in time")
    except WorkerUnreachable as error:
        asked = Asked(0.0, failure="no_response", detail=str(error))
    except HoldfastError as error:
        asked = Asked(0.0, failure="exception", detail=str(error))
    return replace(asked, latency_ms=(clock.monotonic() - began) * 1000)


async def _whole(
    prober: Prober,
    clock: Clock,
    worker: str,
    request: Generate,
    expected: Sequence[int],
    deadline: float,
) -> Asked:
    """Return the whole answer; a worker that is full is asked again, as long as the deadline leaves time for it."""
    while True:
        chunks: list[Chunk] = []
        position = 0
        stream = prober.ask(worker, request)
        async with _closing(stream):
            async for chunk in stream:
                chunks.append(chunk)
                if chunk.error or chunk.finish or len(chunks) > CHUNKS_MAX:
                    break
                due = expected[position : position + len(chunk.tokens)]
                if expected and tuple(chunk.tokens) != tuple(due):
                    return Asked(0.0, answer=read(chunks))
                position += len(chunk.tokens)
        error = chunks[-1].error if chunks else None
        if error is None or not error.startswith("overloaded"):
            return _heard(chunks, error)
        if clock.monotonic() + BUSY_WAIT_S >= deadline:
            return Asked(0.0, detail=error, declined=True)
        await clock.sleep(BUSY_WAIT_S)


@contextlib.asynccontextmanager
async def _closing(stream: AsyncIterator[Chunk]) -> AsyncIterator[None]:
    """Let the prober know at once when nobody reads on, if it wants to know."""
    try:
        yield
    finally:
        close: Callable[[], Awaitable[None]] | None = getattr(stream, "aclose", None)
        if close is not None:
            await close()


def _heard(chunks: list[Chunk], error: str | None) -> Asked:
    if not chunks:
        return Asked(0.0, failure="no_response", detail="the stream ended without a word")
    if error is not None:
        if error.startswith(LEAVING):
            return Asked(0.0, detail=error, declined=True)
        return Asked(
            0.0, failure="non_finite" if error.startswith("non_finite") else "exception", detail=error
        )
    if chunks[-1].finish is None:
        return Asked(0.0, failure="exception", detail="Stream ended before generation completed")
    answer = read(chunks)
    if not answer.tokens:
        return Asked(0.0, failure="no_response", detail="the answer is empty")
    return Asked(0.0, answer=answer)


async def probe(
    once: Callable[[bool], Awaitable[Asked]], judge: Callable[[Answer], Difference], retries: int
) -> Verdict:
    """Ask, and while the answer is wrong ask again, at most `retries` times or until a second wrong answer
    confirms.

    `once` asks one question; it is told whether this is a repetition. What is asked after the deadline fails
    at once, so that the deadline holds for the whole.
    """
    first = await once(False)
    if first.answer is None:
        return Verdict(first, Difference(None, None, first.detail), 1, False)
    found = judge(first.answer)
    attempts = 1
    while found.reason in ("token_mismatch", "logit_drift") and attempts <= retries:
        again = await once(True)
        attempts += 1
        if again.answer is not None and judge(again.answer).reason is not None:
            return Verdict(first, found, attempts, True)
        if again.failure == "non_finite":
            return Verdict(first, found, attempts, True)
    return Verdict(first, found, attempts, False)
