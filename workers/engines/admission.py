"""Engines that limit the requests of another: to a fixed number, or so that its steps stay fast."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
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
from workers.kv_transfer.messages import Buffer, Description

TOLERATED = 1.5
CUT, LEAST = 0.9, 0.25  # factor on the running requests; smallest share of the batch
GROWS = 1 / 32  # share of the batch, per increase
ADJUST_S = 0.25
STEPS_LEAST = 4
OUTLIER = 3.0  # times the target: longer steps count as this

AT_CAPACITY = "overloaded: Server overloaded: worker at capacity"


class WrappedEngine:
    """Forwards to another engine. All methods are called on the worker's loop; `deliver` may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # no wrapper changes these
        self.awaits, self.phase, self.check = engine.awaits, engine.phase, engine.check
        self.export, self.trust = engine.export, engine.trust
        self.chaos, self.heal = engine.chaos, engine.heal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)  # only some engines have these: stats, counters

    @property
    def identity(self) -> EngineIdentity:
        """The model and configuration that the engine serves."""
        return self._engine.identity

    @property
    def kv(self) -> tuple[Description, ...]:
        """The layout of its KV blocks."""
        return self._engine.kv

    @property
    def announces(self) -> bool:
        """Whether the engine announces every change of its prefix cache."""
        return self._engine.announces

    def submit(self, key: int, request: Generate) -> None:
        """Accept a request."""
        self._engine.submit(key, request)

    def cancel(self, key: int) -> None:
        """Cancel a request. Unknown keys are ignored."""
        self._engine.cancel(key)

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Reserve room for a request that arrives with its KV cache, or return why not."""
        return self._engine.reserve(key, request, room_tokens)

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once."""
        self._engine.limit_batch(share)

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank."""
        return self._engine.ranks()

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()


class RequestLimit:
    """Tracks which requests are inside the engine and which wait. Pure: the caller submits the admitted ones."""

    def __init__(self, limit: int, queue: int) -> None:
        """Admit at most `limit` requests, and queue at most `queue` more.

        In the turn of the loop in which a slot becomes free, one more may wait.
        """
        self.limit, self.queue = limit, queue
        self.refused = 0
        self.inside: set[int] = set()
        self._begun: dict[int, Generate] = {}  # waiting, already started on another worker: they go first
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
        """Admit a request that cannot wait; return False if there is no room."""
        free = len(self.inside) < self.limit and not self.waiting
        if free:
            self.inside.add(key)
        else:
            self.refused += 1
        return free

    def take(self, key: int, request: Generate) -> str:
        """Accept a request. Return `inside`, `waits` or `refused`."""
        if len(self.inside) + self.waiting >= self.limit + self.queue:
            self.refused += 1
            return "refused"
        if len(self.inside) < self.limit and not self.waiting:
            self.inside.add(key)
            return "inside"
        (self._begun if len(request.tokens) > request.prompt_tokens else self._fresh)[key] = request
        return "waits"

    def forget(self, key: int) -> bool:
        """Drop a finished or cancelled request. Return whether it was waiting; unknown keys are ignored."""
        self.inside.discard(key)
        return self._begun.pop(key, None) is not None or self._fresh.pop(key, None) is not None

    def next(self) -> tuple[int, Generate] | None:
        """Admit the next waiting request; None if none waits or there is no room."""
        line = self._begun or self._fresh
        if not line or len(self.inside) >= self.limit:
            return None
        key = min(line, key=lambda one: line[one].priority)  # ties: first come, first served
        self.inside.add(key)
        return key, line.pop(key)

    def clear(self) -> None:
        """Drop all requests."""
        self.inside.clear()
        self._begun.clear()
        self._fresh.clear()


class LimitedEngine(WrappedEngine):
    """Limits an engine to N requests at once, and queues up to Q more here.

        submit ──▶ fewer than N inside ──▶ engine ──▶ its last chunk, cancelled, moved away ──▶ the next that waits
             ├───▶ fewer than Q waiting ─▶ wait
             └───▶ else ─────────────────▶ overloaded

    Exactly N + Q requests are accepted, for any Q. Among waiting requests, those already started on another worker go first;
    then priority decides. Canaries do not count; the engine limits them itself. A request that arrives with its KV cache either
    enters the engine at once or is refused, because it can keep decoding at its source.
    """

    def __init__(self, engine: Engine, limit: int, queue: int) -> None:
        super().__init__(engine)
        self.requests = RequestLimit(limit, queue)
        self._deliver: Deliver = discard_output
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # thread id of the loop
        self._own: EngineIdentity | None = None
        self._seen: EngineIdentity | None = None  # the inner identity that `_own` was made from

    @property
    def identity(self) -> EngineIdentity:
        """The engine's identity. Its batch is at most the limit; all other accepted requests may wait."""
        inner = self._engine.identity
        if self._own is None or self._seen is not inner:
            most, wait = self.requests.limit, self.requests.queue
            batch = min(inner.profile.max_batch, most)
            profile = replace(inner.profile, max_batch=batch)
            self._seen, self._own = inner, replace(inner, profile=profile, waiting_max=most + wait - batch)
        return self._own

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine. Raise EngineDead with the reason if it cannot."""
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
        """Reserve room for a request that arrives with its KV cache, or return why not."""
        if not self.requests.enters(key):
            return AT_CAPACITY
        room = self._engine.reserve(key, request, room_tokens)
        if isinstance(room, str):
            self._ended([key])
            return room
        return _LimitedImport(room, lambda: self._ended([key]))

    def load(self) -> Load:
        """Return the engine's load, including the requests that wait here."""
        load, waiting = self._engine.load(), self.requests.waiting
        return msgspec.structs.replace(load, waiting=load.waiting + waiting) if waiting else load

    def ranks(self) -> list[Load]:
        """Return the load of each DP rank."""
        loads = self._engine.ranks()
        for rank, waiting in self.requests.waiting_by_rank().items() if loads else ():
            if rank < len(loads):
                loads[rank] = msgspec.structs.replace(loads[rank], waiting=loads[rank].waiting + waiting)
        return loads

    async def stop(self) -> None:
        """Stop the engine."""
        self.requests.clear()
        await self._engine.stop()

    # --- output, and admission of waiting requests

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Deliver the engine's output, from any thread."""
        self._deliver(out)
        ended = [key for key, chunk in out if chunk.finish or chunk.error]
        if not ended:
            return
        if threading.get_ident() == self._thread:
            self._ended(ended)
        else:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop has been closed in the meantime
                self._loop.call_soon_threadsafe(self._ended, ended)

    def _ended(self, keys: list[int]) -> None:
        for key in keys:
            self.requests.forget(key)
        self._schedule_admission()

    def _schedule_admission(self) -> None:
        """Admit waiting requests in the next turn of the loop: an engine may refuse a request within `submit`."""
        if self.requests.waiting and self._loop is not None:
            self._loop.call_soon(self._admit_waiting)

    def _admit_waiting(self) -> None:
        while (entered := self.requests.next()) is not None:
            self._engine.submit(*entered)


class _LimitedImport:
    """The reservation for an arriving request, which counts as inside until it is aborted or its stream ends."""

    def __init__(self, room: Import, aborted: Callable[[], None]) -> None:
        self._room = room
        self._aborted = aborted
        self.cached_tokens = room.cached_tokens

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified blocks. Raise MoveRefused."""
        await self._room.take(shard, first, data)

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Start to decode. Raise MoveRefused."""
        await self._room.commit(tokens, computed)

    def abort(self) -> None:
        """Free the reservation."""
        self._room.abort()
        self._aborted()


class BatchLimit:
    """The batch limit of one engine. Pure; `step` may be called from any thread."""

    def __init__(self, profile: Profile) -> None:
        self.most = self.limit = max(1, profile.max_batch)
        self.target_s = _full_step_s(profile) * TOLERATED
        self._lock = threading.Lock()
        self._sum_s, self._steps = 0.0, 0

    def step(self, took_s: float) -> None:
        """Record the duration of a step without prefill."""
        if 0.0 < self.target_s < inf and took_s > 0.0:
            with self._lock:
                self._sum_s += min(took_s, OUTLIER * self.target_s)
                self._steps += 1

    def adjust(self, running: int) -> bool:
        """Adjust the limit if enough steps were recorded since the last call. Return whether it changed."""
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
    """Limits how many requests an engine runs at once so that its steps stay fast (AIMD).

    The limit starts at the full batch. It drops while steps are late, and grows back step by step.

        target: 1.5 times the duration of a full-batch step, by the engine's profile
        every 0.25 s, if at least 4 steps were measured:
            their mean is above the target ──▶ limit to 0.9 times the running requests, at least a quarter of the batch
            the limit is reached           ──▶ raise it by 1/32 of the batch, at most to the batch

    Only steps without prefill are measured: they show how long decoding currently takes on this machine, which the duration of a
    whole request does not. Off by default; meant for engines in which all requests share each step.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._batch: BatchLimit | None = None  # set by `start`: the profile is known only then
        self._requested = 1.0
        self._deliver: Deliver = discard_output
        self._now: Callable[[], float] = float  # the loop's clock; may be called from any thread
        self._last_at: float | None = None  # end of the last step after which requests continued
        self._adjusted_at = -inf

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        """Start the engine and measure its steps."""
        self._deliver, self._now = deliver, asyncio.get_running_loop().time
        await self._engine.start(self._delivered, announce)
        self._batch = BatchLimit(self._engine.identity.profile)

    def limit_batch(self, share: float) -> None:
        """Run at most this share of the batch at once."""
        self._requested = share
        self._apply()

    def load(self) -> Load:
        """Return the engine's load with its current limit. Called with every beat; adjusts the limit."""
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
        """Deliver a step's output, from any thread, and record the duration of the step."""
        now, last, batch = self._now(), self._last_at, self._batch
        reads = self._engine.phase().prefill_tokens > 0 or any(c.cached_tokens is not None for _, c in out)
        continues = any(chunk.finish is None and chunk.error is None for _, chunk in out)
        self._last_at = now if continues else None
        if batch is not None and last is not None and not reads:
            batch.step(now - last)
        self._deliver(out)


def _full_step_s(profile: Profile) -> float:
    """Return the duration of a full-batch step by a profile, extrapolated in proportion; inf if the profile has none."""
    if not profile.tpot_ms:
        return inf
    batch, milliseconds = profile.tpot_ms[-1]
    return milliseconds / 1000 * max(1.0, profile.max_batch / max(1, batch))
