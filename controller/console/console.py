"""Connects the data sources, the feed and the HTTP endpoints of one frontend's console."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from aiohttp import web

from controller.console.endpoints import ConsoleEndpoints, WorkerAct
from controller.console.feed import ConsoleFeed, Times
from controller.console.history import HistoryReader
from controller.console.memory import EndedIncident, FlowMemory
from controller.console.picture import FleetMoment, FleetPicture
from controller.console.rows import Sections
from controller.deciders.fleet import Fleet
from controller.ports import Clock
from events.errors import HoldfastError
from events.fact import Recorded

EARLIER_S = 1.5  # timeout in seconds of each query for events and incidents from before this frontend's start

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConsoleSources:
    """The functions from which the console gets its data, and the names of the frontend and its host."""

    name: str  # name of the frontend
    names: frozenset[str]  # host names under which the frontend's host is addressed
    fleet: Callable[[], Fleet]  # returns the current fold
    seq: Callable[[], int]  # returns the sequence number of the last folded event
    # returns the number of streams by worker, for each worker that is connected
    streams: Callable[[], Mapping[str, int]]
    fault: Callable[[], str]  # returns why the data may be outdated; empty if it is current
    # returns lines about the workers that now generate the answer of a request
    running: Callable[[str], Sequence[str]]
    # returns the latest events up to a sequence number
    earlier: Callable[[int], Awaitable[Sequence[Recorded]]]
    ended: Callable[[], Awaitable[Sequence[EndedIncident]]]  # returns the incidents that ended last


class Console:
    """The web console of one frontend. Collects the fleet's events, and serves the page and its data."""

    def __init__(
        self, sources: ConsoleSources, clock: Clock, history: HistoryReader, act: WorkerAct | None = None
    ) -> None:
        """Create the console. `act` carries out operators' actions on workers; None makes the console read-only."""
        self._sources, self._clock = sources, clock
        self._memory = FlowMemory()
        self._picture = FleetPicture(self._memory)
        self._first: int | None = None  # sequence number of the first event that this console received
        # last event: its time by the stream, and the arrival in clock seconds
        self._heard: tuple[datetime, float] | None = None
        self._loaded_earlier = False
        self._feed = ConsoleFeed(self._take, self._times, self._begin)
        self._endpoints = ConsoleEndpoints(
            self._feed, history, sources.running, sources.name, sources.names, act
        )

    async def run(self) -> None:
        """Send changes to the open pages until cancelled."""
        await self._feed.run()

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Add the next events of the journal. `fleet` is the fleet state after these events.

        An error is logged and never raised, because the caller also routes requests."""
        if not batch:
            return
        if self._first is None:
            self._first = batch[0].seq
        self._heard = batch[-1].at, self._clock.monotonic()
        try:
            self._memory.take(fleet, batch)
        except Exception:
            log.exception("console_failed")

    def before(self, other: Handler) -> Handler:
        """Return an HTTP handler that answers requests for the console and passes all other requests to `other`."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            ours = self._endpoints.serves(request.path)
            return await (self._endpoints.answer(request) if ours else other(request))

        return handle

    def _take(self) -> Sections:
        sources = self._sources
        return self._picture.taken(
            FleetMoment(sources.fleet(), sources.seq(), self._now(), sources.streams(), sources.fault())
        )

    def _times(self) -> Times:
        ours, streams = self._clock.now(), self._now()
        return {"at": round(1e3 * ours.timestamp()), "now": round(1e3 * streams.timestamp())}

    def _now(self) -> datetime:
        """Return the current time by the broker's clock, estimated from the time of the last event.

        Before the first event, the result is the time by this host's clock."""
        if self._heard is None:
            return self._clock.now()
        at, heard = self._heard
        return at + timedelta(seconds=self._clock.monotonic() - heard)

    async def _begin(self) -> None:
        """Load incidents and events from before this frontend's start. Further calls do nothing.

        If loading fails, the page shows only the incidents and events since the start."""
        if self._loaded_earlier:
            return
        self._loaded_earlier = True
        try:
            async with asyncio.timeout(EARLIER_S):
                self._memory.remember(*await self._sources.ended())
        except (HoldfastError, TimeoutError) as error:
            log.info("console_knows_no_earlier_incidents", why=str(error))
        try:
            async with asyncio.timeout(EARLIER_S):
                self._memory.precede(
                    await self._sources.earlier(
                        self._first - 1 if self._first is not None else self._sources.seq()
                    )
                )
        except (HoldfastError, TimeoutError) as error:
            log.info("console_knows_no_earlier_events", why=str(error))
