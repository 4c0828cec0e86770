"""Clients of a virtual frontend: their requests, arrival times, and retries of rejected requests."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from math import inf
from random import Random
from time import perf_counter

from benchmarks.overload.world import VirtualFrontend
from benchmarks.router.virtual.fleet import percentiles
from benchmarks.rows import Row
from controller.frontend.admission.pool import ALONE_TIMES
from controller.frontend.openai.request_head import AdmissionHeaders, Head
from controller.trace.rows import BLOCK_TOKENS, TraceRow
from controller.trace.synthesis import tokens
from workers.engines.simulated.language import VOCABULARY

RETRIES_MAX = 2  # the default of OpenAI's client
RETRY_AFTER_MAX_S = 60.0
BACKOFF_S, BACKOFF_MAX_S = 0.5, 8.0
AGAIN = (408, 409, 429)
WARM_S = 5.0  # at the beginning, while the fleet fills: not counted
# share, deadline in seconds
TIERS = (("premium", 0.075, 1.0), ("standard", 0.6, 2.0), ("best_effort", 0.325, 4.0))
SHARES = [share for _, share, _ in TIERS]
CLIENTS = 16
VOCABULARY_USED = range(300, VOCABULARY)


@dataclass(frozen=True, slots=True)
class Coming:
    """A planned request: its arrival time, prompt, number of answer tokens, tier, client and deadline."""

    key: int
    at_s: float
    prompt: Sequence[int]
    answer: int
    tier: str
    client: str
    deadline_s: float

    def body(self, model: str) -> dict[str, object]:
        """Return the body of the API request."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.answer,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }


@dataclass(slots=True)
class Attempt:
    """One sending of a request, with its outcome. Durations are in seconds from the time of sending, `at_s`."""

    coming: Coming
    number: int  # 0: the first attempt
    at_s: float
    status: int = 0
    refused: str = ""  # reason of a rejection
    first_s: float | None = None  # time to the first token
    ended_s: float = 0.0
    # real seconds until a rejection without a wait in the queue, in the frontend or, with a real fleet, at the client
    took_s: float | None = None
    failed: bool = False  # the answer ended with an error

    @property
    def good(self) -> bool:
        """Whether the answer is complete, and its first token arrived within the deadline."""
        return not self.failed and self.first_s is not None and self.first_s <= self.coming.deadline_s


class OpenLoop:
    """Sends each request at its arrival time, even while earlier requests run, and records the attempts."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    async def run(self, coming: Iterable[Coming]) -> None:
        """Send all requests at their arrival times, and wait until all have ended."""
        now = asyncio.get_running_loop().time
        began = now()
        async with asyncio.TaskGroup() as sending:
            for one in coming:
                await asyncio.sleep(max(0.0, began + one.at_s - now()))
                sending.create_task(self.ask(one, began))

    async def ask(self, coming: Coming, began: float) -> None:
        """Send one request, and wait until it has ended. `began` is the loop's time at the start of `run`."""
        raise NotImplementedError

    def sends(self, coming: Coming, number: int, began: float) -> tuple[Attempt, float]:
        """Record an attempt that is sent now. Return the attempt and the loop's current time."""
        sent = asyncio.get_running_loop().time()
        attempt = Attempt(coming, number, sent - began)
        self.attempts.append(attempt)
        return attempt, sent


class _Client(asyncio.Transport):
    """The connection of a client that reads without delay. Records the arrival time of the first token."""

    first_at: float | None = None
    failed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.first_at is None:
            self.first_at = asyncio.get_running_loop().time()
        if b'data: {"error"' in data:
            self.failed = True

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.failed = True


class Clients(OpenLoop):
    """All clients of the virtual frontends. A client retries a rejected request up to `retries` times."""

    def __init__(self, frontends: Sequence[VirtualFrontend], retries: int = 0, seed: int = 1) -> None:
        super().__init__()
        self._frontends, self._retries, self._dice = frontends, retries, Random(seed)

    async def ask(self, coming: Coming, began: float) -> None:
        for number in range(self._retries + 1):
            wait_s = await self._attempt(coming, number, began)
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def _attempt(self, coming: Coming, number: int, began: float) -> float | None:
        """Send one attempt. Return the seconds until the client may retry it, or None if it must not be retried."""
        client, (attempt, sent) = _Client(), self.sends(coming, number, began)
        asked = AdmissionHeaders(header=coming.client, deadline_s=coming.deadline_s, retries=number)
        head = Head("completions", f"r{coming.key}", coming.tier, "", "", asked=asked)
        endpoints = self._frontends[coming.key % len(self._frontends)].endpoints
        body, real = json.dumps(coming.body("sim")).encode(), perf_counter()
        response = await endpoints.answer(head, body, client)
        attempt.ended_s = asyncio.get_running_loop().time() - sent
        if response is None:
            attempt.status = 200
            attempt.failed = client.failed
            attempt.first_s = None if client.first_at is None else client.first_at - sent
            return None
        attempt.status = response.status
        attempt.refused = response.headers.get("X-Holdfast-Refused", "")
        if attempt.ended_s == 0.0:
            attempt.took_s = perf_counter() - real
        again = response.status in AGAIN or response.status >= 500
        if not again or response.headers.get("x-should-retry") == "false":
            return None
        told_s = float(response.headers.get("retry-after-ms", "0")) / 1000
        if 0 < told_s <= RETRY_AFTER_MAX_S:
            return told_s
        return float(min(BACKOFF_MAX_S, BACKOFF_S * 2**number) * (1 - 0.25 * self._dice.random()))


def figures(attempts: Sequence[Attempt], seconds: float) -> Row:
    """Return the figures of the requests that arrive after WARM_S and before `seconds`.

    `goodput` is the number of requests per second that are answered completely, with the first token within the deadline.
    `admitted_p99` is the 99th percentile of the time to first token divided by the deadline, over answered requests.
    `refused_at_once` is the share of rejections that did not wait in the queue.
    """
    seen = [one for one in attempts if WARM_S <= one.coming.at_s < seconds]
    span = seconds - WARM_S
    answered = [one for one in seen if one.status == 200]
    waits = [inf if one.first_s is None else one.first_s / one.coming.deadline_s for one in answered]
    refused = [one for one in seen if one.status != 200]
    took = [one.took_s for one in refused if one.took_s is not None]
    first = [one for one in seen if one.number == 0]
    good = {one.coming.key for one in seen if one.good}
    premium = [one for one in first if one.coming.tier == "premium"]
    return {
        "offered": len(first) / span,
        "attempts": len(seen) / span,
        "goodput": len(good) / span,
        "answered": len(answered) / span,
        "failed": sum(one.failed for one in answered),
        **percentiles("admitted", waits),
        "premium_good": sum(one.coming.key in good for one in premium) / max(1, len(premium)),
        "refused_at_once": len(took) / max(1, len(refused)),
        **percentiles("refusal_ms", took, 1e3),
        "reasons": dict(Counter(f"{one.status} {one.refused}" for one in refused)),
    }


def recovery(attempts: Sequence[Attempt], fell_s: float) -> Row:
    """Return how many attempts since `fell_s` were rejected, and the seconds from `fell_s` to the last of these attempts."""
    late = [one.at_s for one in attempts if one.at_s >= fell_s and one.status != 200]
    return {"refusals": len(late), "last_refusal_s": max(late, default=fell_s) - fell_s}


class Arrivals:
    """Generates requests from a trace, with prompts scaled to another block size."""

    def __init__(self, rows: Sequence[TraceRow], block_tokens: int, reads_per_s: float) -> None:
        """Replace each block of the trace by `block_tokens` tokens. An idle worker prefills `reads_per_s` tokens per second."""
        self._rows, self._block_tokens, self._reads_per_s = rows, block_tokens, reads_per_s

    def request(self, number: int, at_s: float, deadline_s: float) -> Coming:
        """Return the request number `number` in the standard tier. After its last row, the trace is repeated."""
        row, size = self._rows[number % len(self._rows)], self._block_tokens
        length = max(1, row.input_length * size // BLOCK_TOKENS)
        prompt = tokens(row, size, VOCABULARY_USED)[:length] or [VOCABULARY_USED.start]
        return Coming(number, at_s, prompt, max(1, row.output_length), "standard", "c", deadline_s)

    def coming(self, rate: float, seconds: float, seed: int) -> Iterator[Coming]:
        """Yield requests with random tiers and clients, at `rate` per second for `seconds`.

        The arrivals are those of the trace, with the intervals scaled to `rate`.
        """
        dice, rows = Random(seed), self._rows
        span = rows[-1].timestamp / 1e3
        speed = rate / (len(rows) / span)
        for key in count():
            turn, place = divmod(key, len(rows))
            at = (rows[place].timestamp / 1e3 + turn * span) / speed
            if at >= seconds:
                return
            [(tier, _, deadline_s)] = dice.choices(TIERS, SHARES)
            one = self.request(key, at, deadline_s)
            deadline_s = max(deadline_s, ALONE_TIMES * len(one.prompt) / self._reads_per_s)
            yield replace(one, tier=tier, deadline_s=deadline_s, client=f"c{dice.randrange(CLIENTS)}")

    def falling(self, capacity: float, seconds: float, seed: int) -> Iterator[Coming]:
        """Yield requests at four times the capacity for `seconds`, then at half the capacity for the same time."""
        fallen = self.coming(capacity / 2, seconds, seed + 1)
        later = (replace(one, at_s=seconds + one.at_s) for one in fallen)
        for key, one in enumerate(chain(self.coming(4 * capacity, seconds, seed), later)):
            yield replace(one, key=key)
