"""Wrappers that limit how many requests an engine accepts or runs at once.

`LimitedEngine` enforces a fixed number of requests. `AdaptiveEngine` lowers the batch size while the engine's steps are slow.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import msgspec

from events.observations import Profile
from events.wire import Chunk, Generate, Load
from workers.engines.engine import (
    Announce,
    Deliver,
    Engine,
    EngineIdentity,
    Import,
    discard_events,
    discard_output,
)
from workers.kv_transfer.messages import Description

TOLERATED = 1.5  # target duration of a step, as a multiple of the profile's full-batch step
# a cut limits the batch to CUT × running requests, but to no less than LEAST × full batch
CUT, LEAST = 0.9, 0.25
GROWS = 1 / 32  # share of the full batch by which one increase raises the limit
ADJUST_S = 0.25  # seconds between two adjustments of the limit
STEPS_LEAST = 4  # measured steps that an adjustment needs
OUTLIER = 3.0  # a step longer than OUTLIER × target counts as OUTLIER × target

AT_CAPACITY = "overloaded: Server overloaded: worker at capacity"


class WrappedEngine:
    """Base of the wrappers. Every method forwards to the wrapped engine, unless a subclass overrides the method."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # no wrapper overrides these methods
        self.awaits, self.phase, self.check = engine.awaits, engine.phase, engine.check
        self.export, self.trust = engine.export, engine.trust
        self.chaos, self.heal = engine.chaos, engine.heal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # attributes that only some engines have: stats, counters

    @property
    def identity(self) -> EngineIdentity:
        """The model and configuration that the engine serves."""
        return self._engine.identity

    @property
    def kv(self) -> tuple[Description, ...]:
        """The layout of the engine's KV blocks; empty if requests cannot move with their KV cache."""
        return self._engine.kv

    @property
    def announces(self) -> bool:
        """Whether the engine reports every change of its prefix cache by KV events."""
        return self._engine.announces


class RequestLimit:
    """Tracks which requests are in an engine, and which wait for a free slot.

    This class submits no request itself. Its caller submits the admitted requests to the engine.
    """

    def __init__(self, limit: int, queue: int) -> None:
        """Admit at most `limit` requests, and queue at most `queue` more.

        When a request leaves the engine, a waiting request gets the free slot in the next event loop iteration. Until then, up
        to `queue` + 1 requests wait, because the sum of admitted and waiting requests is limited to `limit` + `queue`.
        """
        self.limit, self.queue = limit, queue
        self.refused = 0
        self.inside: set[int] = set()
        # Both hold waiting requests. Those in `_begun` already have tokens from another worker, and are admitted first.
        self._begun: dict[int, Generate] = {}
        self._fresh: dict[int, Generate] = {}

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._begun) + len(self._fresh)

    def waiting_by_rank(self) -> dict[int, int]:
        """Return the number of waiting requests per DP rank."""
        found: dict[int, int] = {}
        for request in (*self._begun.values(), *self._fresh.values()):
            found[request.rank] = found.get(request.rank, 0) + 1
        return found

    def enters(self, key: int) -> bool:
        """Admit a request that must enter the engine at once or not at all. Return whether it was admitted.

        The request is refused, and the refusal counted, if no slot is free or if other requests wait.
        """
        free = len(self.inside) < self.limit and not self.waiting
        if free:
            self.inside.add(key)
        else:
            self.refused += 1
        return free

    def take(self, key: int, request: Generate) -> str:
        """Admit, queue or refuse a request.

        Return `inside` if the caller must submit the request to the engine now. Return `waits` if the request is queued, and
        `refused` if the queue is full.
        """
        if len(self.inside) + self.waiting >= self.limit + self.queue:
            self.refused += 1
            return "refused"
        if len(self.inside) < self.limit and not self.waiting:
            self.inside.add(key)
            return "inside"
        (self._begun if len(request.tokens) > request.prompt_tokens else self._fresh)[key] = request
        return "waits"

    def forget(self, key: int) -> bool:
        """Drop a finished or cancelled request. Return True if the request was waiting. Unknown keys are ignored."""
        self.inside.discard(key)
        return self._begun.pop(key, None) is not None or self._fresh.pop(key, None) is not None

    def next(self) -> tuple[int, Generate] | None:
        """Admit the next waiting request and return it with its key. Return None if no request waits or no slot is free."""
        line = self._begun or self._fresh
        if not line or len(self.inside) >= self.limit:
            return None
        key = min(line, key=lambda one: line[one].priority)  # ties: first come, first served
        self.inside.add(key)
        return key, line.pop(key)

    def clear(self) -> None:
        """Forget all requests, admitted and waiting."""
        self.inside.clear()
        self._begun.clear()
        self._fresh.clear()


class LimitedEngine(WrappedEngine):
    """Limits an engine to N requests at once, and queues up to Q more requests in front of it.

        submit ──▶ fewer than N inside ──▶ engine ──▶ finished, cancelled or moved away ──▶ the next waiting request enters
             ├───▶ fewer than Q waiting ─▶ queue
             └───▶ both full ────────────▶ refused as overloaded

    A request is inside while the engine has it. At most N + Q requests are accepted in total. Waiting requests that already have
    tokens from another worker are admitted before new requests. Within each of these groups, the most urgent request goes first.
    Canaries bypass both limits, because the engine limits canaries itself. A request that arrives with its KV cache never waits.
    If the engine cannot take such a request at once, the request is refused and continues to decode on the worker that sent it.
    """

    def __init__(self, engine: Engine, limit: int, queue: int) -> None:
        super().__init__(engine)
        self.limit_batch = engine.limit_batch
        self.requests = RequestLimit(limit, queue)
        self._deliver: Deliver = discard_output
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # id of the event loop's thread

    @property
    def identity(self) -> EngineIdentity:
        """The identity of the wrapped engine, with two values replaced.

        The profile's `max_batch` is at most this wrapper's limit of requests. `waiting_max` is the number of requests that may
        wait while `max_batch` requests run.
        """
        inner, requests = self._engine.identity, self.requests
        batch = min(inner.profile.max_batch, requests.limit)
        waiting_max = requests.limit + requests.queue - batch
        return replace(inner, profile=replace(inner.profile, max_batch=batch), waiting_max=waiting_max)

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine. Raise EngineDead with the reason if the engine cannot start."""
        self._deliver, self._loop, self._thread = deliver, asyncio.get_running_loop(), threading.get_ident()
        await self._engine.start(self._delivered, announce)

    def submit(self, key: int, request: Generate) -> None:
        """Submit a request to the engine, queue it, or refuse it."""
        if request.canary:
            self._engine.submit(key, request)
            return
        match self.requests.take(key, request):
            case "inside":
                self._engine.submit(key, request)
            case "refused":
                self._deliver([(key, Chunk(request.stream, [], error=AT_CAPACITY))])

    def cancel(self, key: int) -> None:
        """Cancel a request. Unknown keys are ignored."""
        if not self.requests.forget(key):
            self._engine.cancel(key)
        self._schedule_admission()

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Reserve KV blocks for a request that arrives with its KV cache, or return the reason for a refusal.

        `room_tokens` is the largest number of tokens that the request can have when it arrives.
        """
        if not self.requests.enters(key):
            return AT_CAPACITY
        room = self._engine.reserve(key, request, room_tokens)
        if isinstance(room, str):
            self._ended([key])
        return room

    def load(self) -> Load:
        """Return the engine's load. Requests in this wrapper's queue count as waiting."""
        load, waiting = self._engine.load(), self.requests.waiting
        return msgspec.structs.replace(load, waiting=load.waiting + waiting) if waiting else load

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank, or an empty list if the engine has only one rank.

        Requests in this wrapper's queue count as waiting.
        """
        loads = self._engine.ranks()
        for rank, waiting in self.requests.waiting_by_rank().items() if loads else ():
            if rank < len(loads):
                loads[rank] = msgspec.structs.replace(loads[rank], waiting=loads[rank].waiting + waiting)
        return loads

    async def stop(self) -> None:
        """Stop the engine and forget all waiting requests."""
        self.requests.clear()
        await self._engine.stop()

    # --- output, and admission of waiting requests

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Deliver the engine's output, and free the slots of the requests that have ended. Called from any thread."""
        self._deliver(out)
        ended = [key for key, chunk in out if chunk.finish or chunk.error]
        if not ended:
            return
        if threading.get_ident() == self._thread:
            self._ended(ended)
        else:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the event loop has been closed in the meantime
                self._loop.call_soon_threadsafe(self._ended, ended)

    def _ended(self, keys: list[int]) -> None:
        for key in keys:
            self.requests.forget(key)
        self._schedule_admission()

    def _schedule_admission(self) -> None:
        """Schedule the admission of waiting requests for the next event loop iteration.

        Admission at once could recurse, because an engine may refuse a request within `submit`.
        """
        if self.requests.waiting and self._loop is not None:
            self._loop.call_soon(self._admit_waiting)

    def _admit_waiting(self) -> None:
        while (entered := self.requests.next()) is not None:
            self._engine.submit(*entered)


class BatchLimit:
    """Computes the batch limit of one engine from the durations of its steps. `step` may be called from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.most = self.limit = max(1, profile.max_batch)
        self.target_s = _full_step_s(profile) * TOLERATED
        self._lock = threading.Lock()
        self._sum_s, self._steps = 0.0, 0

    def step(self, took_s: float) -> None:
        """Record the duration, in seconds, of a step without prefill."""
        if 0.0 < self.target_s < inf and took_s > 0.0:
            with self._lock:
                self._sum_s += min(took_s, OUTLIER * self.target_s)
                self._steps += 1

    def adjust(self, running: int) -> bool:
        """Lower or raise the limit if at least 4 steps were recorded since the last adjustment.

        Return whether the limit has changed. `running` is the number of requests that the engine runs now.
        """
        with self._lock:
            if self._steps < STEPS_LEAST:
                return False
            mean_s = self._sum_s / self._steps
            self._sum_s, self._steps = 0.0, 0
        before = self.limit
        if mean_s > self.target_s:
            cut = int(min(self.limit, max(1, running)) * CUT)
            self.limit = min(self.limit, max(cut, int(self.most * LEAST), 1))
        elif running >= self.limit:
            self.limit = min(self.most, self.limit + max(1, int(self.most * GROWS)))
        return self.limit != before


class AdaptiveEngine(WrappedEngine):
    """Limits how many requests an engine runs at once so that its steps stay fast.

    The limit starts at the full batch size. While steps are slow, the limit is reduced by a factor. Later, it is raised again in
    constant increments (AIMD: additive increase, multiplicative decrease).

        target: 1.5 times the duration of a full-batch step, by the engine's profile
        every 0.25 s, if at least 4 steps were measured:
            their mean is above the target                    ──▶ limit = 0.9 × running requests, at least a quarter of the batch
            their mean is not, and all allowed slots are used ──▶ limit + 1/32 of the batch, at most the full batch

    Only steps without prefill are measured. Their durations, unlike those of whole requests, show how long decoding currently
    takes on this machine. The limit is off by default. It is meant for engines in which all requests share each step.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.submit, self.cancel, self.reserve = engine.submit, engine.cancel, engine.reserve
        self.ranks, self.stop = engine.ranks, engine.stop
        self._batch: BatchLimit | None = None  # set by `start`, because the profile is not known earlier
        self._requested = 1.0  # the share that the worker has set by `limit_batch`
        self._deliver: Deliver = discard_output
        self._now: Callable[[], float] = float  # the event loop's clock; may be called from any thread
        self._last_at: float | None = None  # end of the previous step; None if no request continued after it
        self._adjusted_at = -inf

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine and begin to measure its steps. Raise EngineDead with the reason if the engine cannot start."""
        self._deliver, self._now = deliver, asyncio.get_running_loop().time
        await self._engine.start(self._delivered, announce)
        self._batch = BatchLimit(self._engine.identity.profile)

    def limit_batch(self, share: float) -> None:
        """Limit the running batch to `share` of its full size, or to the limit from the measured steps if that is lower."""
        self._requested = share
        self._apply()

    def load(self) -> Load:
        """Return the engine's load with the current batch limit.

        The worker calls this for each heartbeat. The call also adjusts the limit, at most every 0.25 s.
        """
        load, batch = self._engine.load(), self._batch
        if batch is None:
            return load
        now = self._now()
        if now - self._adjusted_at >= ADJUST_S:
            self._adjusted_at = now
            if batch.adjust(load.running):
                self._apply()
        return msgspec.structs.replace(load, batch=batch.limit)

    def _apply(self) -> None:
        batch = self._batch
        own = 1.0 if batch is None else batch.limit / batch.most
        self._engine.limit_batch(min(self._requested, own))

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Record the duration of a step and deliver the step's output. Called from any thread."""
        now, last, batch = self._now(), self._last_at, self._batch
        reads = self._engine.phase().prefill_tokens > 0 or any(c.cached_tokens is not None for _, c in out)
        continues = any(chunk.finish is None and chunk.error is None for _, chunk in out)
        self._last_at = now if continues else None
        if batch is not None and last is not None and not reads:
            batch.step(now - last)
        self._deliver(out)


def _full_step_s(profile: Profile) -> float:
    """Return how long a decode step with a full batch takes by this profile, in seconds; inf without step times.

    If no full batch was measured, the step time of the largest measured batch is scaled up in proportion to the batch size.
    """
    if not profile.tpot_ms:
        return inf
    batch, milliseconds = profile.tpot_ms[-1]
    return milliseconds / 1000 * max(1.0, profile.max_batch / max(1, batch))
