"""Reads an upstream's reports: its load (`/metrics`) and its KV events.

A worker can serve without them. Without metrics, the worker reports the load of its own requests. Without KV events, its
registration states that it announces none. A start waits a few seconds for the first reports, because the registration contains
the block size. A failed subscription is retried in the background; once it succeeds, the worker registers a new instance.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from events.wire import Load
from workers.engines.engine import Announce, discard_events
from workers.engines.openai.capabilities import Abilities
from workers.engines.openai.upstream import Upstream
from workers.engines.openai.upstream_metrics import (
    EVERY_S,
    STALE_S,
    UpstreamLoad,
    UpstreamReport,
    rank_loads,
    read_metrics,
)

if TYPE_CHECKING:
    from workers.engines.openai.kv_events import UpstreamKvEvents  # needs pyzmq

READ_S_MAX = 1.0
CONNECT_S_MAX = 5.0  # for subscriptions to all KV event endpoints of the upstream
LOOK_S = 0.02
STOP_S_MAX = 0.5
EVENTS_AGAIN_S_MAX = 900.0  # between two subscription attempts

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountTimes:
    """How often an upstream is polled, and how long to wait for it, in seconds."""

    every_s: float = EVERY_S  # between two reads of its metrics
    stale_s: float = STALE_S  # older metrics are ignored
    stored_s: float = 5.0  # for the KV events of a prompt that the upstream has computed
    identity_s: float = 10.0  # between two reads of its identity
    key_s: float = 1.0  # between two reads of its API key's file
    # until a failed subscription to the upstream's KV events is retried; doubles each time
    events_again_s: float = 30.0


class UpstreamAccount:
    """Reads one upstream's metrics and KV events."""

    def __init__(
        self,
        upstream: Upstream,
        own: Callable[[], int],
        endpoints: Sequence[str] = (),
        replays: Sequence[str] = (),
        times: AccountTimes | None = None,
    ) -> None:
        """Use these endpoints for KV events and replays. `own` returns this worker's number of requests at the upstream."""
        self._upstream = upstream
        self._own = own
        self._endpoints = endpoints
        self._replays = replays
        self._times = times or AccountTimes()
        self._load = UpstreamLoad(self._times.stale_s)
        self._first: UpstreamReport | None = None
        self._events: UpstreamKvEvents | None = None
        self.announces = False  # whether the upstream's KV events are received
        self._reading: asyncio.Task[None] | None = None

    async def start(self, abilities: Abilities, announce: Announce) -> None:
        """Read the metrics, subscribe to the KV events, and keep both up to date."""
        await self._read()
        self._first = self._load.report
        self._reading = asyncio.ensure_future(self._read_repeatedly())
        if self._endpoints:
            await self._subscribe(abilities, announce)

    async def stop(self) -> None:
        """Stop reading and unsubscribe."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,), timeout=STOP_S_MAX)
        if self._events is not None:
            await asyncio.to_thread(self._events.stop)

    @property
    def dp(self) -> int:
        """Number of DP ranks that are distinguished: those with received KV events."""
        return len(self._endpoints) if self.announces else 1

    @property
    def block_tokens(self) -> int | None:
        """Tokens per block, from the upstream's KV events, otherwise from its metrics."""
        if self._events is not None and self.announces:
            return self._events.block_tokens
        return self._first.block_tokens if self._first is not None else None

    @property
    def kv_blocks(self) -> int | None:
        """Number of the upstream's blocks, on all ranks."""
        if self._first is None or self._first.kv_blocks is None:
            return None
        return self._first.kv_blocks * len(self._first.ranks)

    @property
    def counters(self) -> dict[str, int]:
        """Counts of the upstream's KV events and of errors in them; empty without a subscription."""
        return {} if self._events is None else self._events.counters

    def salted(self, tokens: Sequence[int]) -> None:
        """Record a salted prompt that is being sent: not every server version reports salts in its KV events."""
        if self._events is not None:
            self._events.salted(tokens)

    # --- load

    def load(self, own: Load, batch_max: int) -> Load:
        """Return the upstream's load, from its metrics and from the requests sent to it."""
        return self._load.combined(own, batch_max, asyncio.get_running_loop().time())

    def ranks(self, kv_blocks: int) -> list[Load]:
        """Return the load of each DP rank, if there are several and the metrics contain it."""
        report = self._load.fresh(asyncio.get_running_loop().time())
        if self.dp == 1 or report is None or len(report.ranks) != self.dp:
            return []
        return rank_loads(report, kv_blocks // self.dp)

    async def _read_repeatedly(self) -> None:
        while True:
            await asyncio.sleep(self._times.every_s)
            await self._read()

    async def _read(self) -> None:
        text = await self._upstream.metrics(READ_S_MAX)
        report = None if text is None else read_metrics(text)
        self._load.take(report, self._own(), asyncio.get_running_loop().time())

    # --- KV events

    async def _subscribe(self, abilities: Abilities, announce: Announce) -> None:
        trouble = await self._try_to_subscribe(abilities, announce)
        self.announces = not trouble
        if trouble:
            log.error(
                "upstream_kv_events_missing",
                endpoints=list(self._endpoints),
                reason=trouble,
                advice="enable --kv-events-config (vLLM) and prefix caching",
                again_s=self._times.events_again_s,
            )

    async def resubscribe(self, abilities: Abilities, on_subscribed: Callable[[str], None]) -> None:
        """Retry a subscription that failed at the start; the wait doubles each time.

        `on_subscribed` is called once it succeeds: the worker has registered without KV events, so it begins a new instance.
        """
        wait_s = self._times.events_again_s
        while self._endpoints and not self.announces:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, EVENTS_AGAIN_S_MAX)
            if not await self._try_to_subscribe(abilities, discard_events):
                log.info("upstream_kv_events_heard", endpoints=list(self._endpoints))
                on_subscribed("kv_events")
                return

    async def _try_to_subscribe(self, abilities: Abilities, announce: Announce) -> str:
        """Try to subscribe; return the reason for a failure, empty if it succeeded."""
        from workers.engines.openai.kv_events import UpstreamKvEvents  # pyzmq, only where it is needed

        self._events = events = UpstreamKvEvents(self._endpoints, self._replays, announce)
        events.start()
        if not await _wait_until(lambda: events.connected, CONNECT_S_MAX):
            trouble = "not every endpoint has accepted the subscription"
        else:
            await self._upstream.store_something(abilities)
            if await _wait_until(lambda: events.block_tokens is not None, self._times.stored_s):
                return ""
            trouble = "no event reports a prompt that it has computed"
        await asyncio.to_thread(events.stop)
        return trouble


async def _wait_until(holds: Callable[[], bool], within_s: float) -> bool:
    """Wait until a condition set by another thread holds; return False if it does not in time."""
    until = asyncio.get_running_loop().time() + within_s
    while not holds():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(LOOK_S)
    return True
