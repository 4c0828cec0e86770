"""Clients of a virtual frontend: their requests, arrival times, and retries of rejected requests."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from time import perf_counter
from typing import Any

from benchmarks.overload.world import VirtualFrontend
from controller.frontend.openai.request_head import AdmissionHeaders, Head

RETRIES_MAX = 2  # the default of OpenAI's client
RETRY_AFTER_MAX_S = 60.0
BACKOFF_S, BACKOFF_MAX_S = 0.5, 8.0
AGAIN = (408, 409, 429)


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

    def body(self, model: str) -> dict[str, Any]:
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


async def arrive(coming: Iterable[Coming], ask: Callable[[Coming, float], Coroutine[Any, Any, None]]) -> None:
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
