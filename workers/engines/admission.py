"""How many requests may be inside an engine at once? N; Q more wait here, those that have begun elsewhere first; by priority.

    submit ──▶ fewer than N inside ──▶ engine ──▶ its last chunk, cancelled, moved away ──▶ the next that waits
         ├───▶ fewer than Q waiting ─▶ wait
         └───▶ else ─────────────────▶ overloaded

Exactly N + Q are taken, for any Q. Canaries are nobody's requests: they pass, and the engine bounds them itself. Requests
that come with their KV cache go into the engine or nowhere: they decode well where they are.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from events.wire import Chunk, Generate, Load
from workers.engines.engine import (
    Announce,
    Deliver,
    Engine,
    EngineIdentity,
    Import,
    unheard,
)
from workers.engines.wrapped import WrappedEngine
from workers.kv_transfer.messages import Buffer

AT_CAPACITY = "overloaded: Server overloaded: worker at capacity"


class RequestLimit:
    """Which requests are inside, and which wait. Pure: who is let in is for the caller to hand over."""

    def __init__(self, limit: int, queue: int) -> None:
        """At most `limit` inside, and `queue` more that wait; in the turn in which a place inside has become free, one more."""
        self.limit, self.queue = limit, queue
        self.refused = 0
        self.inside: set[int] = set()
        self._begun: dict[int, Generate] = {}  # they have said something elsewhere: they go first
        self._fresh: dict[int, Generate] = {}

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._begun) + len(self._fresh)

    def waiting_by_rank(self) -> dict[int, int]:
        """Return how many wait for each DP rank."""
        found: dict[int, int] = {}
        for request in (*self._begun.values(), *self._fresh.values()):
            found[request.rank] = found.get(request.rank, 0) + 1
        return found

    def enters(self, key: int) -> bool:
        """Take a request in that does not wait; False if there is no room."""
        free = len(self.inside) < self.limit and not self.waiting
        if free:
            self.inside.add(key)
        else:
            self.refused += 1
        return free

    def take(self, key: int, request: Generate) -> str:
        """Return what becomes of a request: `inside`, `waits`, or `refused`."""
        if len(self.inside) + self.waiting >= self.limit + self.queue:
            self.refused += 1
            return "refused"
        if len(self.inside) < self.limit and not self.waiting:
            self.inside.add(key)
            return "inside"
        (self._begun if len(request.tokens) > request.prompt_tokens else self._fresh)[key] = request
        return "waits"

    def forget(self, key: int) -> bool:
        """Forget a request that is over or cancelled. Return whether it waited; unknown keys are ignored."""
        self.inside.discard(key)
        return self._begun.pop(key, None) is not None or self._fresh.pop(key, None) is not None

    def next(self) -> tuple[int, Generate] | None:
        """Take the next one in that waits; None: nobody waits, or there is no room."""
        line = self._begun or self._fresh
        if not line or len(self.inside) >= self.limit:
            return None
        key = min(line, key=lambda one: line[one].priority)  # among equals the first
        self.inside.add(key)
        return key, line.pop(key)

    def clear(self) -> None:
        """Forget all."""
        self.inside.clear()
        self._begun.clear()
        self._fresh.clear()


class LimitedEngine(WrappedEngine):
    """An engine that is never given more requests than it may have at once."""

    def __init__(self, engine: Engine, limit: int, queue: int) -> None:
        super().__init__(engine)
        self.requests = RequestLimit(limit, queue)
        self._deliver: Deliver = _nowhere
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the loop's
        self._own: EngineIdentity | None = None
        self._seen: EngineIdentity | None = None  # of which that was made

    @property
    def identity(self) -> EngineIdentity:
        """What the engine is. It runs no more than it is given, and all may wait that it is not given."""
        inner = self._engine.identity
        if self._own is None or self._seen is not inner:
            most, wait = self.requests.limit, self.requests.queue
            batch = min(inner.profile.max_batch, most)
            profile = replace(inner.profile, max_batch=batch)
            self._seen, self._own = inner, replace(inner, profile=profile, waiting_max=most + wait - batch)
        return self._own

    async def start(self, deliver: Deliver, announce: Announce = unheard) -> None:
        """Start the engine. Raise EngineDead with the reason if it cannot."""
        self._deliver, self._loop, self._thread = deliver, asyncio.get_running_loop(), threading.get_ident()
        await self._engine.start(self._delivered, announce)

    def submit(self, key: int, request: Generate) -> None:
        """Give the engine a request, let it wait, or refuse it."""
        if request.canary:
            self._engine.submit(key, request)
            return
        match self.requests.take(key, request):
            case "inside":
                self._engine.submit(key, request)
            case "refused":
                self._deliver([(key, Chunk(request.stream, [], error=AT_CAPACITY))])

    def cancel(self, key: int) -> None:
        """Forget a request. Unknown keys are ignored."""
        if not self.requests.forget(key):
            self._engine.cancel(key)
        self._soon()

    def reserve(self, key: int, request: Generate, room_tokens: int) -> Import | str:
        """Take the blocks for a request that comes with its KV cache, or say why not."""
        if not self.requests.enters(key):
            return AT_CAPACITY
        room = self._engine.reserve(key, request, room_tokens)
        if isinstance(room, str):
            self._over([key])
            return room
        return _LimitedImport(room, lambda: self._over([key]))

    def load(self) -> Load:
        """Return the engine's load, and with it who waits here."""
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

    # --- what it says, and who goes in then

    def _delivered(self, out: list[tuple[int, Chunk]]) -> None:
        """Hand over what the engine says, from any thread."""
        self._deliver(out)
        ended = [key for key, chunk in out if chunk.finish or chunk.error]
        if not ended:
            return
        if threading.get_ident() == self._thread:
            self._over(ended)
        else:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
                self._loop.call_soon_threadsafe(self._over, ended)

    def _over(self, keys: list[int]) -> None:
        for key in keys:
            self.requests.forget(key)
        self._soon()

    def _soon(self) -> None:
        """Let in who waits, in the next turn: an engine may refuse a request within `submit`."""
        if self.requests.waiting and self._loop is not None:
            self._loop.call_soon(self._let_in)

    def _let_in(self) -> None:
        while (entered := self.requests.next()) is not None:
            self._engine.submit(*entered)


class _LimitedImport:
    """Room for a request that arrives: until it is aborted, or its stream is over, it is inside."""

    def __init__(self, room: Import, aborted: Callable[[], None]) -> None:
        self._room = room
        self._aborted = aborted
        self.cached_tokens = room.cached_tokens

    async def take(self, shard: int, first: int, data: Buffer) -> None:
        """Copy verified blocks. Raise MoveRefused."""
        await self._room.take(shard, first, data)

    async def commit(self, tokens: Sequence[int], computed: int) -> None:
        """Begin to decode. Raise MoveRefused."""
        await self._room.commit(tokens, computed)

    def abort(self) -> None:
        """Free everything."""
        self._room.abort()
        self._aborted()


def _nowhere(out: list[tuple[int, Chunk]]) -> None:
    """Where output goes before `start`."""
