"""Tracks the requests that a worker forwards to its upstream, and limits how many it forwards at once."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from events.wire import Chunk, Generate
from workers.engines.engine import CANARIES_MAX, Phase

# a request may still join an upstream's step if it arrives within this time after the step's start
JOINS_WITHIN_S = 0.25


@dataclass(slots=True, eq=False)
class UpstreamRequest:
    """One request that the upstream serves, or that waits in this worker for a slot at the upstream."""

    task: "asyncio.Task[None]"
    prompt_tokens: int
    arrived_at: float  # monotonic seconds
    length: int  # number of tokens so far, including the prompt
    movable: Generate | None  # the original request; None if the request cannot move to another server
    silent: bool = True  # no output has arrived yet
    # tokens generated so far; empty if the request cannot move
    generated: list[int] = field(default_factory=list)
    canary: bool = False
    sent: bool = False  # sent to the upstream; False while the request waits for a slot
    # whether the upstream sends nothing before the whole response, so that silence says nothing about its engine
    whole: bool = False


class UpstreamRequests:
    """The requests of one worker for its upstream, by request key."""

    def __init__(self, most: int) -> None:
        """Accept at most `most` requests at once, not counting canaries."""
        self._most = most
        self._by_key: dict[int, UpstreamRequest] = {}
        self.token_at = 0.0  # time of the last token or text of any stream; monotonic seconds
        # time of the last output, or of the request that ended the upstream's idle time; monotonic seconds
        self._moved_at = 0.0

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: int) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[UpstreamRequest]:
        return iter(self._by_key.values())

    def get(self, key: int) -> UpstreamRequest | None:
        """Return the request with this key, or None if there is no such request."""
        return self._by_key.get(key)

    def overload(self, *, canary: bool) -> str | None:
        """Return the error for a new request, or None if the request can be accepted.

        Canaries do not count against the limit. Up to CANARIES_MAX (2) canaries are accepted even at the limit, so that a full
        worker is checked, too.
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
        """Number of tokens of all requests, prompts included."""
        return sum(one.length for one in self)

    def begin(self, key: int, request: Generate, task: "asyncio.Task[None]", *, movable: bool) -> None:
        """Add a request that `task` sends to the upstream. `movable` means that the request can move to another server."""
        now, length = time.monotonic(), request.prompt_tokens if request.proxied else len(request.tokens)
        if all(one.whole for one in self):
            self._moved_at = now
        kept = request if movable else None
        whole = request.proxied is not None and not request.proxied.streamed
        self._by_key[key] = UpstreamRequest(
            task, length, now, length, kept, canary=request.canary, whole=whole
        )

    @property
    def sent_now(self) -> int:
        """Number of requests that are at the upstream now. Requests that wait for a slot do not count."""
        return sum(one.sent for one in self)

    def sent(self, key: int) -> None:
        """Record that a request has got its slot and is sent to the upstream. Unknown keys are ignored."""
        if one := self._by_key.get(key):
            one.arrived_at, one.sent = time.monotonic(), True

    def record(self, key: int, chunks: Sequence[Chunk]) -> bool:
        """Record a request's output. Return False if there is nothing to deliver: no chunk, or an unknown key.

        A chunk contains tokens, text or the end of an answer. It therefore shows that the engine works, and `phase` counts the
        current step from this time. SSE comments, empty events and partial lines yield no chunk, because a proxy can send them
        while the engine hangs.
        """
        if chunks:
            self._moved_at = time.monotonic()
            if any(chunk.tokens or chunk.text or chunk.proxied is not None for chunk in chunks):
                self.token_at = self._moved_at
        one = self._by_key.get(key)
        if one is None or not chunks:
            return False
        one.silent = False
        for chunk in chunks:
            one.length += len(chunk.tokens) or (1 if chunk.text or chunk.proxied is not None else 0)
            if one.movable is not None:
                one.generated.extend(chunk.tokens)
        return True

    def end(self, key: int) -> None:
        """Drop a request. Unknown keys are ignored."""
        self._by_key.pop(key, None)

    def phase(self) -> Phase:
        """Return the current phase of the upstream, derived from the output that has arrived.

        The phase is idle if there are no requests, prefill if the upstream may still be computing a prompt, and otherwise decode.
        Requests with a response that arrives as a whole do not count.
        """
        if all(one.whole for one in self):
            return Phase("idle", self._moved_at)
        # If some streams have begun, their output shows when each step starts. A prompt that arrived more than JOINS_WITHIN_S
        # after the start of the current step is not part of that step, so the prompt must not count as prefill.
        there = [one for one in self if one.sent and not one.whole]
        silent = [one for one in there if one.silent]
        brings_tokens, joined = len(silent) < len(there), self._moved_at + JOINS_WITHIN_S
        waiting = sum(one.prompt_tokens for one in silent if one.arrived_at <= joined or not brings_tokens)
        return Phase("prefill" if waiting else "decode", self._moved_at, waiting)


class Places:
    """Limits how many requests are at the upstream at once. Requests without a slot wait, the lowest `priority` number first.

    Requests of equal priority get slots in the order of their arrival. There is no limit until `limit` is called. The limit is
    applied in the worker because a server's batch size cannot be changed after the server's start.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._taken = 0  # number of slots in use
        # a heap of (priority, arrival number, future)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbered = 0  # arrival number of the last request that had to wait

    def limit(self, most: int | None) -> None:
        """Set the number of slots. None removes the limit. A request that already has a slot keeps it."""
        self._limit = most
        self._admit_waiting()

    @contextlib.asynccontextmanager
    async def one(self, priority: int = 0) -> AsyncIterator[None]:
        """Wait for a free slot, and hold the slot inside the `async with` block. The lowest `priority` number goes first."""
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
