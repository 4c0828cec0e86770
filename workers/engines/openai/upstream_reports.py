"""Reads two optional reports of an upstream: its load (`/metrics`) and its KV events.

Without metrics, the worker reports the load of its own requests only. Without KV events, the worker's registration states that
the worker announces none. At its start, the worker waits a few seconds for the first reports, because its registration contains
the upstream's block size. A failed subscription to KV events is retried in the background. When a retry succeeds, the worker ends
its instance and registers a new one.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from events.wire import Generate, Load
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

READ_S_MAX = 1.0  # for one read of the metrics
CONNECT_S_MAX = 5.0  # for the subscriptions to all KV event endpoints of the upstream
LARGE_CHARS = 256 * 1024  # of a page of metrics, which takes a few milliseconds to parse
LOOK_S = 0.02  # between two checks of a condition that another thread sets
STOP_S_MAX = 0.5
EVENTS_AGAIN_S_MAX = 900.0  # between two subscription attempts

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountTimes:
    """Intervals, waiting times and a maximum age for the reports of an upstream, in seconds."""

    every_s: float = EVERY_S  # between two reads of its metrics
    stale_s: float = STALE_S  # older metrics are ignored
    stored_s: float = 5.0  # for the first KV event, after the upstream has computed a prompt
    identity_s: float = 10.0  # between two reads of its identity
    key_s: float = 1.0  # between two reads of its API key's file
    # until a failed subscription to the upstream's KV events is retried; doubles after each retry
    events_again_s: float = 30.0


class UpstreamAccount:
    """Reads the metrics and the KV events of one upstream."""

    def __init__(
        self,
        upstream: Upstream,
        own: Callable[[], int],
        endpoints: Sequence[str] = (),
        replays: Sequence[str] = (),
        times: AccountTimes | None = None,
    ) -> None:
        """Prepare to read the reports of `upstream`. The reading begins with `start`.

        Args:
            upstream: the client of the server.
            own: returns the number of this worker's requests that are at the upstream.
            endpoints: ZeroMQ endpoints of the KV events, one per DP rank; empty: do not subscribe.
            replays: ZeroMQ endpoints that replay lost KV events, one per DP rank; empty: there are none.
            times: intervals and time limits.
        """
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
        if not self._endpoints:
            return
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

    async def stop(self) -> None:
        """Stop reading the metrics, and end the subscription to the KV events."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait((self._reading,), timeout=STOP_S_MAX)
        if self._events is not None:
            await asyncio.to_thread(self._events.stop)

    @property
    def dp(self) -> int:
        """Number of DP ranks that the worker distinguishes: the number of KV event endpoints, or 1 without KV events."""
        return len(self._endpoints) if self.announces else 1

    @property
    def block_tokens(self) -> int | None:
        """Tokens per block, from the upstream's KV events, or from its metrics at the start. None if neither reports it."""
        if self._events is not None and self.announces:
            return self._events.block_tokens
        return self._first.block_tokens if self._first is not None else None

    @property
    def kv_blocks(self) -> int | None:
        """Number of KV blocks of all the upstream's ranks, from its metrics at the start. None if not reported."""
        if self._first is None or self._first.kv_blocks is None:
            return None
        return self._first.kv_blocks * len(self._first.ranks)

    @property
    def counters(self) -> dict[str, int]:
        """Counts of the upstream's KV-event batches and of errors in them, by name; empty without a subscription."""
        return {} if self._events is None else self._events.counters

    def salted(self, request: Generate) -> None:
        """Record the prompt of a request that is being sent to the upstream with a cache salt.

        The record is needed because not every server version reports salts in its KV events.
        """
        if self._events is not None:
            self._events.salted(request)

    # --- load

    def load(self, own: Load, batch_max: int) -> Load:
        """Return the load of the whole upstream, or `own` if there are no recent metrics.

        `own` is the load of this worker's requests. `batch_max` is how many requests the upstream is assumed to run at once.
        """
        return self._load.combined(own, batch_max, asyncio.get_running_loop().time())

    def ranks(self, kv_blocks: int) -> list[Load]:
        """Return the load of each DP rank. `kv_blocks` is the number of blocks of all ranks together.

        The list is empty if there is one rank only, or if no recent metrics contain the load of each rank.
        """
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
        if (
            text is not None and len(text) > LARGE_CHARS
        ):  # would delay the streams of all upstreams of the process
            report = await asyncio.to_thread(read_metrics, text)
        else:
            report = None if text is None else read_metrics(text)
        self._load.take(report, self._own(), asyncio.get_running_loop().time())

    # --- KV events

    async def resubscribe(self, abilities: Abilities, on_subscribed: Callable[[str], None]) -> None:
        """Retry a subscription that failed at the start, until it succeeds. The wait doubles after each retry.

        After the success, call `on_subscribed` with "kv_events". The worker must then begin a new instance, because it has
        registered without KV events.
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
        """Try to subscribe to the KV events. Return the reason for a failure; empty if the subscription succeeded."""
        # imports pyzmq, so only where it is needed
        from workers.engines.openai.kv_events import UpstreamKvEvents

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
    """Wait until another thread's changes make `holds` return True, then return True.

    Return False if this takes longer than `within_s` seconds.
    """
    until = asyncio.get_running_loop().time() + within_s
    while not holds():
        if asyncio.get_running_loop().time() > until:
            return False
        await asyncio.sleep(LOOK_S)
    return True
