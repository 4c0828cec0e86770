"""Clients of a virtual frontend: their requests, arrival times, and retries of rejected requests."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from random import Random
from time import perf_counter

import msgspec

from benchmarks.overload.world import VirtualFrontend
from benchmarks.router.virtual.fleet import percentile
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
CLIENTS = 16
VOCABULARY_USED = range(300, VOCABULARY)


@dataclass(frozen=True, slots=True)
class Coming:
    """One request before its arrival."""

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
    """The outcome of one attempt. Seconds, from when it was sent."""

    coming: Coming
    number: int  # 0: the first attempt
    at_s: float
    status: int = 0
    refused: str = ""  # the reason of its rejection
    first_s: float | None = None  # until its first token
    ended_s: float = 0.0
    at_once: bool = False  # it was rejected without waiting in the queue
    took_s: float = 0.0  # real time of such a rejection: in the frontend, or until the client had it
    note: str = ""  # the text of the rejection
    failed: bool = False  # it ended with an error after its first token

    @property
    def good(self) -> bool:
        """Whether it was answered completely, and in time."""
        return not self.failed and self.first_s is not None and self.first_s <= self.coming.deadline_s


async def arrive(
    coming: Iterable[Coming], ask: Callable[[Coming, float], Coroutine[object, object, None]]
) -> None:
    """Start each request at its time, and wait until the last one has ended."""
    loop, asked = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    began = loop.time()
    for one in coming:
        await asyncio.sleep(max(0.0, began + one.at_s - loop.time()))
        task = asyncio.create_task(ask(one, began))
        asked.add(task)
        task.add_done_callback(asked.discard)
    await asyncio.gather(*asked)


class _Client(asyncio.Transport):
    """A client that reads at once, and records the time of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.first_at: float | None = None
        self.failed = False

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


@dataclass
class Clients:
    """All clients, and the outcomes of their requests."""

    frontends: Sequence[VirtualFrontend]
    retries: int = 0
    seed: int = 1
    attempts: list[Attempt] = field(default_factory=list)

    async def run(self, coming: Iterable[Coming]) -> None:
        """Send all requests at their times, and wait until the last one has ended."""
        await arrive(coming, partial(self._ask, dice=Random(self.seed)))

    async def _ask(self, coming: Coming, began: float, *, dice: Random) -> None:
        frontend = self.frontends[coming.key % len(self.frontends)]
        body = json.dumps(coming.body("sim")).encode()
        for number in range(self.retries + 1):
            wait_s = await self._attempt(frontend, coming, body, number, began, dice)
            if wait_s is None:
                return
            await asyncio.sleep(wait_s)

    async def _attempt(
        self, frontend: VirtualFrontend, coming: Coming, body: bytes, number: int, began: float, dice: Random
    ) -> float | None:
        """Send one attempt. Return the seconds until a retry, if attempts are left; None: no retry."""
        loop, client = asyncio.get_running_loop(), _Client()
        sent = loop.time()
        attempt = Attempt(coming, number, sent - began)
        self.attempts.append(attempt)
        asked = AdmissionHeaders(header=coming.client, deadline_s=coming.deadline_s, retries=number)
        head = Head("completions", f"r{coming.key}", coming.tier, "", "", asked=asked)
        real = perf_counter()
        response = await frontend.endpoints.answer(head, body, client)
        attempt.ended_s = loop.time() - sent
        if response is None:
            attempt.status = 200
            attempt.failed = client.failed
            attempt.first_s = None if client.first_at is None else client.first_at - sent
            return None
        attempt.status = response.status
        attempt.refused = response.headers.get("X-Holdfast-Refused", "")
        if isinstance(response.body, bytes):
            attempt.note = json.loads(response.body)["error"]["message"]
        if attempt.ended_s == 0.0:
            attempt.at_once, attempt.took_s = True, perf_counter() - real
        again = response.status in AGAIN or response.status >= 500
        if not again or response.headers.get("x-should-retry") == "false":
            return None
        told_s = float(response.headers.get("retry-after-ms", "0")) / 1000
        if 0 < told_s <= RETRY_AFTER_MAX_S:
            return told_s
        return float(min(BACKOFF_MAX_S, BACKOFF_S * 2**number) * (1 - 0.25 * dice.random()))


def figures(attempts: Sequence[Attempt], seconds: float) -> Row:
    """Return the figures of the requests that arrived in full seconds after the warm-up.

    `goodput`: answers within their deadline, per second. `admitted_p99`: the 99th percentile of the time to the first token of
    answered requests, divided by the deadline. `refused_at_once`: the share of rejections that took computing time only.
    """
    seen = [one for one in attempts if WARM_S <= one.coming.at_s < seconds]
    span = seconds - WARM_S
    answered = [one for one in seen if one.status == 200]
    first = [one for one in seen if one.number == 0]
    good = {one.coming.key for one in seen if one.good}
    premium = [one for one in first if one.coming.tier == "premium"]
    return {
        "offered": len(first) / span,
        "attempts": len(seen) / span,
        "goodput": len(good) / span,
        "answered": len(answered) / span,
        **_answers(answered),
        "premium_good": sum(one.coming.key in good for one in premium) / max(1, len(premium)),
        **_refusals([one for one in seen if one.status != 200]),
    }


def _answers(answered: Sequence[Attempt]) -> Row:
    ratios = sorted(inf if one.first_s is None else one.first_s / one.coming.deadline_s for one in answered)
    late = {f"admitted_p{100 * share:.0f}": percentile(ratios, share) for share in (0.5, 0.99)}
    return {"failed": sum(one.failed for one in answered), **late}


def _refusals(refused: Sequence[Attempt]) -> Row:
    took = sorted(one.took_s for one in refused if one.at_once)
    return {
        "refused_at_once": len(took) / max(1, len(refused)),
        **{f"refusal_ms_p{100 * share:.0f}": percentile(took, share) * 1e3 for share in (0.5, 0.99)},
        "reasons": dict(Counter(f"{one.status} {one.refused}" for one in refused)),
    }


def recovery(attempts: Sequence[Attempt], fell_s: float) -> Row:
    """Return the number of rejections after the load fell, and the time of the last one after that."""
    late = [one.at_s for one in attempts if one.at_s >= fell_s and one.status != 200]
    return {"refusals": len(late), "last_refusal_s": max(late, default=fell_s) - fell_s}


class Arrivals:
    """The requests of one trace, with prompts of another size."""

    def __init__(self, rows: Sequence[TraceRow], block_tokens: int, reads_per_s: float) -> None:
        """`block_tokens`: tokens in place of each block's; `reads_per_s`: prompt tokens per second of an idle worker."""
        self.rows = [_scaled(row, block_tokens) for row in rows]
        self._block_tokens, self._reads_per_s = block_tokens, reads_per_s

    def prompt(self, number: int) -> Sequence[int]:
        """Return the prompt of a row; after the last row it starts again at the first."""
        row = self.rows[number % len(self.rows)]
        return tokens(row, self._block_tokens, VOCABULARY_USED) or [VOCABULARY_USED.start]

    def answer(self, number: int) -> int:
        """Return the number of tokens of its answer."""
        return max(1, self.rows[number % len(self.rows)].output_length)

    def coming(self, rate: float, seconds: float, seed: int, since_s: float = 0.0) -> Iterator[Coming]:
        """Yield requests at `rate` per second for `seconds`."""
        dice, rows = Random(seed), self.rows
        span = rows[-1].timestamp / 1e3
        speed = rate / (len(rows) / span)
        for key in itertools.count():
            turn, place = divmod(key, len(rows))
            at = (rows[place].timestamp / 1e3 + turn * span) / speed
            if at >= seconds:
                return
            tier, deadline_s = _tier(dice.random())
            prompt = self.prompt(key)
            deadline_s = max(deadline_s, ALONE_TIMES * len(prompt) / self._reads_per_s)
            client = f"c{dice.randrange(CLIENTS)}"
            yield Coming(key, since_s + at, prompt, self.answer(key), tier, client, deadline_s)


def both(first: Iterator[Coming], then: Iterator[Coming]) -> Iterator[Coming]:
    """Yield the requests of `first`, then those of `then`."""
    count = 0
    for one in first:
        count = one.key + 1
        yield one
    for one in then:
        yield replace(one, key=count + one.key)


def _tier(draw: float) -> tuple[str, float]:
    """Return a tier and its deadline, for a number from 0 to 1."""
    for name, share, deadline_s in TIERS:
        if draw < share:
            return name, deadline_s
        draw -= share
    return TIERS[-1][0], TIERS[-1][2]


def _scaled(row: TraceRow, block_tokens: int) -> TraceRow:
    """Return a request with blocks of another size: the same number of blocks, with the same hashes."""
    length = max(1, row.input_length * block_tokens // BLOCK_TOKENS)
    return msgspec.structs.replace(row, input_length=length)
