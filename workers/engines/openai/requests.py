"""Tracks the requests that the worker forwards to the upstream, and the progress of each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from events.wire import Chunk, Generate
from workers.engines.engine import CANARIES_MAX, Phase

JOINS_WITHIN_S = 0.25  # a request may join the step that began at most this long before it arrived


@dataclass(slots=True, eq=False)
class UpstreamRequest:
    """One request that is at the upstream, or waits here for a slot."""

    task: "asyncio.Task[None]"
    prompt_tokens: int
    arrived_at: float  # monotonic seconds
    length: int  # tokens so far, including the prompt
    movable: Generate | None  # the original request, if it can move to another server
    silent: bool = True  # no output yet
    generated: list[int] = field(default_factory=list)  # tokens generated so far, if the request can move
    canary: bool = False
    sent: bool = False  # otherwise the request waits here


class UpstreamRequests:
    """All requests of one worker for its upstream, by the worker's keys."""

    def __init__(self, most: int) -> None:
        """Accept at most `most` requests at once."""
        self._most = most
        self._by_key: dict[int, UpstreamRequest] = {}
        self.token_at = 0.0  # when a token of any stream last arrived; monotonic seconds
        # when the last token arrived, or an idle upstream got a request; monotonic seconds
        self._moved_at = 0.0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[UpstreamRequest]:
        return iter(self._by_key.values())

    def get(self, key: int) -> UpstreamRequest | None:
        """Return a request; None if there is none with this key."""
        return self._by_key.get(key)

    def overload(self, *, canary: bool) -> str | None:
        """Return the error if no more requests are accepted; None if there is room.

        Canaries do not count, and a few of them are always accepted, so that a full worker is checked, too.
        """
        canaries = self.canaries
        if len(self._by_key) - canaries < self._most or (canary and canaries < CANARIES_MAX):
            return None
        return f"overloaded: {len(self._by_key)} requests are with the upstream already"

    @property
    def canaries(self) -> int:
        """Number of canaries among the requests."""
        return sum(one.canary for one in self)

    @property
    def tokens(self) -> int:
        """The sum of the requests' tokens."""
        return sum(one.length for one in self)

    def begin(self, key: int, request: Generate, task: "asyncio.Task[None]", *, movable: bool) -> None:
        """Add a request that this task sends to the upstream."""
        now, length = time.monotonic(), len(request.tokens)
        if not self._by_key:
            self._moved_at = now
        kept = request if movable else None
        self._by_key[key] = UpstreamRequest(task, length, now, length, kept, canary=request.canary)

    @property
    def sent_now(self) -> int:
        """Number of requests sent to the upstream."""
        return sum(one.sent for one in self)

    def sent(self, key: int) -> None:
        """Record that a request is now sent to the upstream."""
        if one := self._by_key.get(key):
            one.arrived_at, one.sent = time.monotonic(), True

    def record(self, key: int, chunks: Sequence[Chunk]) -> bool:
        """Record output of the upstream; return whether there are chunks to deliver.

        Only tokens, text and an end reset the age of the step. SSE comments, empty events and partial lines yield no chunk and
        do not count: a proxy may send them while the engine hangs.
        """
        if chunks:
            self._moved_at = time.monotonic()
            if any(chunk.tokens or chunk.text for chunk in chunks):
                self.token_at = self._moved_at
        one = self._by_key.get(key)
        if one is None or not chunks:
            return False
        one.silent = False
        for chunk in chunks:
            one.length += len(chunk.tokens) or (1 if chunk.text else 0)
            if one.movable is not None:
                one.generated.extend(chunk.tokens)
        return True

    def end(self, key: int) -> None:
        """Drop a request. Unknown keys are ignored."""
        self._by_key.pop(key, None)

    def phase(self) -> Phase:
        """Return the current phase of the upstream, derived from its answers."""
        if not self._by_key:
            return Phase("idle", self._moved_at)
        # While tokens of any stream arrive, each step is observed: prompts that arrived after its start do not excuse a delay.
        there = [one for one in self if one.sent]
        silent = [one for one in there if one.silent]
        brings_tokens, joined = len(silent) < len(there), self._moved_at + JOINS_WITHIN_S
        waiting = sum(one.prompt_tokens for one in silent if one.arrived_at <= joined or not brings_tokens)
        return Phase("prefill" if waiting else "decode", self._moved_at, waiting)


class Places:
    """A limited number of request slots at the upstream; unlimited until `limit` is called. Other requests wait, by priority.

    Requests of equal priority are served first come, first served. A server's scheduler fixes its batch size at the start. The
    only way to reduce the batch is to send fewer requests.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._taken = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbered = 0

    def limit(self, most: int | None) -> None:
        """Set the number of slots; None: no limit. A request that has a slot keeps it."""
        self._limit = most
        self._admit_waiting()

    @contextlib.asynccontextmanager
    async def one(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a free slot and hold it. The lowest `priority` goes first."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if not self._waiting and self._fits():
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._numbered += 1
        heappush(self._waiting, place := (priority, self._numbered, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            else:
                self._waiting.remove(place)
                heapify(self._waiting)
            raise

    def _release(self) -> None:
        self._taken -= 1
        self._admit_waiting()

    def _fits(self) -> bool:
        return self._limit is None or self._taken < self._limit

    def _admit_waiting(self) -> None:
        while self._waiting and self._fits():
            _, _, turn = heappop(self._waiting)
            if not turn.done():
                self._taken += 1
                turn.set_result(None)
