"""The console of one frontend: connects its data sources, feed and endpoints."""

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

EARLIER_S = 1.5  # timeout of each query for the time before this frontend's start; made once

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConsoleSources:
    """The data sources of the console."""

    name: str  # name of the frontend
    names: frozenset[str]  # names of its host
    fleet: Callable[[], Fleet]
    seq: Callable[[], int]  # sequence of the last folded event
    streams: Callable[[], Mapping[str, int]]  # streams by worker, for workers that this frontend reaches
    fault: Callable[[], str]  # why the data may be outdated; empty if it is current
    running: Callable[[str], Sequence[str]]  # lines about workers that are generating a request's answer now
    earlier: Callable[[int], Awaitable[Sequence[Recorded]]]  # the latest events up to a sequence
    ended: Callable[[], Awaitable[Sequence[EndedIncident]]]  # the incidents that ended last


class Console:
    """One frontend's console."""

    def __init__(
        self, sources: ConsoleSources, clock: Clock, history: HistoryReader, act: WorkerAct | None = None
    ) -> None:
        """`act` carries out operator actions; without it the console is read-only."""
        self._sources, self._clock = sources, clock
        self._memory = FlowMemory()
        self._picture = FleetPicture(self._memory)
        self._first: int | None = None  # sequence of the first event that this console received
        self._heard: tuple[datetime, float] | None = None  # of the last event: stream time, own clock
        self._loaded_earlier = False
        self._feed = ConsoleFeed(self._take, self._times, self._begin)
        self._endpoints = ConsoleEndpoints(
            self._feed, history, sources.running, sources.name, sources.names, act
        )

    async def run(self) -> None:
        """Keep open pages up to date."""
        await self._feed.run()

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Add events; `fleet` is the fold after them. Never raises, because the caller routes requests."""
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
        """Return a handler that answers the console's paths and passes other requests to `other`."""

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
        """Return the stream's time, as far as it is known."""
        if self._heard is None:
            return self._clock.now()
        at, heard = self._heard
        return at + timedelta(seconds=self._clock.monotonic() - heard)

    async def _begin(self) -> None:
        """Load, once, incidents and events from before this frontend's start. If that fails, the page shows only later ones."""
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
