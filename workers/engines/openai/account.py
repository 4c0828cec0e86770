"""What an upstream says of itself beside its answers: its load (`/metrics`), and what its prefix cache stores and removes.

Neither is needed to serve. Where it says nothing, the worker goes by what it knows itself, and the fleet is told that it
announces no KV events. A start waits a few seconds for both, because the size of a block goes into the registration. A
subscription that fails then is repeated in the background, and once it succeeds the worker registers anew.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from events.wire import Load
from workers.engines.engine import Announce, unheard
from workers.engines.openai.abilities import Abilities
from workers.engines.openai.upstream import Upstream
from workers.engines.openai.upstream_metrics import (
    EVERY_S,
    STALE_S,
    UpstreamLoad,
    UpstreamReport,
    rank_loads,
    read_metrics,
)

READ_S_MAX = 1.0
CONNECT_S_MAX = 5.0  # until all of its KV event endpoints take us
LOOK_S = 0.02
STOP_S_MAX = 0.5
EVENTS_AGAIN_S_MAX = 900.0  # between two tries to hear its KV events

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountTimes:
    """How often an upstream is asked, and how long it is waited for, in seconds."""

    every_s: float = EVERY_S  # its metrics are read so often
    stale_s: float = STALE_S  # what they said longer ago counts no more
    stored_s: float = 5.0  # until it says what it has stored of a prompt
    identity_s: float = 10.0  # its identity is read so often
    key_s: float = 1.0  # the file of its API key is read so often
    events_again_s: float = (
        30.0  # until a failed subscription to its KV events is repeated; doubles each time
    )


class KvEventFeed(Protocol):
    """What hears an upstream's KV events: `kv_events.UpstreamKvEvents`, which needs pyzmq."""

    @property
    def connected(self) -> bool: ...
    @property
    def block_tokens(self) -> int | None: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def salted(self, tokens: Sequence[int]) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


class UpstreamAccount:
    """One upstream's own account of itself."""

    def __init__(
        self,
        upstream: Upstream,
        own: Callable[[], int],
        endpoints: Sequence[str] = (),
        replays: Sequence[str] = (),
        times: AccountTimes | None = None,
    ) -> None:
        """Take where it publishes and replays KV events. `own`: how many requests of ours are there."""
        self._upstream = upstream
        self._own = own
        self._endpoints = endpoints
        self._replays = replays
        self._times = times or AccountTimes()
        self._load = UpstreamLoad(self._times.stale_s)
        self._first: UpstreamReport | None = None
        self._events: KvEventFeed | None = None
        self._announces = False
        self._reading: asyncio.Task[None] | None = None

    async def start(self, abilities: Abilities, announce: Announce) -> None:
        """Hear what it says at once, and go on listening."""
        await self._read()
        self._first = self._load.said
        self._reading = asyncio.ensure_future(self._read_on())
        if self._endpoints:
            await self._listen(abilities, announce)

    async def stop(self) -> None:
        """Listen no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,), timeout=STOP_S_MAX)
        if self._events is not None:
            await asyncio.to_thread(self._events.stop)

    @property
    def announces(self) -> bool:
        """Whether its KV events are heard."""
        return self._announces

    @property
    def dp(self) -> int:
        """How many DP ranks are told apart: those whose KV events are heard."""
        return len(self._endpoints) if self.announces else 1

    @property
    def block_tokens(self) -> int | None:
        """How many tokens a block has: by its events, or else by its metrics."""
        if self._events is not None and self._announces:
            return self._events.block_tokens
        return self._first.block_tokens if self._first is not None else None

    @property
    def kv_blocks(self) -> int | None:
        """How many blocks it has, on all ranks."""
        if self._first is None or self._first.kv_blocks is None:
            return None
        return self._first.kv_blocks * len(self._first.ranks)

    @property
    def counters(self) -> dict[str, int]:
        """What was heard of its KV events, and what was wrong with them; nothing where nobody listens."""
        return {} if self._events is None else self._events.counters

    def salted(self, tokens: Sequence[int]) -> None:
        """Take in that a salted prompt is on its way there: not every version tells with its KV events that it is one."""
        if self._events is not None:
            self._events.salted(tokens)

    # --- its load

    def load(self, own: Load, batch_max: int) -> Load:
        """Return its load, from what it says and from what we have sent."""
        return self._load.combined(own, batch_max, asyncio.get_running_loop().time())

    def ranks(self, kv_blocks: int) -> list[Load]:
        """Return the load of each DP rank, where there are several and it says so."""
        said = self._load.fresh(asyncio.get_running_loop().time())
        if self.dp == 1 or said is None or len(said.ranks) != self.dp:
            return []
        return rank_loads(said, kv_blocks // self.dp)

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(self._times.every_s)
            await self._read()

    async def _read(self) -> None:
        text = await self._upstream.metrics(READ_S_MAX)
        said = None if text is None else read_metrics(text)
        self._load.take(said, self._own(), asyncio.get_running_loop().time())

    # --- its KV events

    async def _listen(self, abilities: Abilities, announce: Announce) -> None:
        trouble = await self._try_to_hear(abilities, announce)
        self._announces = not trouble
        if trouble:
            log.error(
                "upstream_kv_events_missing",
                endpoints=list(self._endpoints),
                reason=trouble,
                advice="has it --kv-events-config (vLLM), and prefix caching?",
                again_s=self._times.events_again_s,
            )

    async def listen_again(self, abilities: Abilities, heard: Callable[[str], None]) -> None:
        """Repeat a subscription that failed at the start, each time after twice as long. `heard` is told once when the events are
        heard: the worker has registered that there are none, and begins a new life."""
        wait_s = self._times.events_again_s
        while self._endpoints and not self._announces:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, EVENTS_AGAIN_S_MAX)
            if not await self._try_to_hear(abilities, unheard):
                log.info("upstream_kv_events_heard", endpoints=list(self._endpoints))
                heard("kv_events")
                return

    async def _try_to_hear(self, abilities: Abilities, announce: Announce) -> str:
        """Subscribe; return why nothing is heard, empty if it is."""
        from workers.engines.openai.kv_events import UpstreamKvEvents  # pyzmq, only where it is asked for

        self._events = events = UpstreamKvEvents(self._endpoints, self._replays, announce)
        events.start()
        if not await _soon(lambda: events.connected, CONNECT_S_MAX):
            trouble = "nobody takes a subscription"
        else:
            await self._upstream.store_something(abilities)
            if await _soon(lambda: events.block_tokens is not None, self._times.stored_s):
                return ""
            trouble = "it says nothing of a prompt that it has computed"
        await asyncio.to_thread(events.stop)
        return trouble


async def _soon(holds: Callable[[], bool], within_s: float) -> bool:
    """Wait until something of another thread holds; False if it does not in time."""
    until = asyncio.get_running_loop().time() + within_s
    while not holds():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(LOOK_S)
    return True
