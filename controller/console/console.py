"""The console, whole: what it is made of, what it does while somebody looks, and what it answers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import structlog
from aiohttp import web

from controller.console.actions import WorkerAct
from controller.console.endpoints import ConsoleEndpoints
from controller.console.feed import ConsoleFeed, Times
from controller.console.history import HistoryReader
from controller.console.memory import EndedIncident, FlowMemory
from controller.console.picture import FleetMoment, FleetPicture
from controller.console.sections import Sections
from controller.deciders.fleet import Fleet
from controller.ports import Clock
from events.errors import HoldfastError
from events.fact import Recorded

EARLIER_S = 1.5  # for what was before this frontend began, once

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConsoleSources:
    """Where the console has what it shows."""

    name: str  # of the frontend
    names: frozenset[str]  # of its host
    fleet: Callable[[], Fleet]
    seq: Callable[[], int]  # of the last event that the fleet is the fold of
    streams: Callable[[], Mapping[str, int]]  # by worker that this frontend reaches
    fault: Callable[[], str]  # why all of this may be old; empty: it is not
    running: Callable[[str], Sequence[str]]  # by which workers a request is answered here now, in words
    earlier: Callable[[int], Awaitable[Sequence[Recorded]]]  # the last events up to a sequence
    ended: Callable[[], Awaitable[Sequence[EndedIncident]]]  # the last incidents that are over


class Console:
    """One frontend's console."""

    def __init__(
        self, sources: ConsoleSources, clock: Clock, history: HistoryReader, act: WorkerAct | None = None
    ) -> None:
        """`act`: what does what is asked for; without it the console only shows."""
        self._sources, self._clock = sources, clock
        self._memory = FlowMemory()
        self._picture = FleetPicture(self._memory)
        self._first: int | None = None  # sequence of the first event that we were told of
        self._heard: tuple[datetime, float] | None = None  # the stream's time of the last one, and ours
        self._knows_earlier = False
        self._feed = ConsoleFeed(self._take, self._times, self._begin)
        self._endpoints = ConsoleEndpoints(
            self._feed, history, sources.running, sources.name, sources.names, act
        )

    async def run(self) -> None:
        """Keep pages up to date, for as long as somebody looks at one."""
        await self._feed.run()

    def absorb(self, fleet: Fleet, batch: Sequence[Recorded]) -> None:
        """Take in what the journal tells; `fleet`: as it is by then. Never raises: who tells us has requests to route."""
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
        """Return a handler that answers what is the console's, and leaves the rest to another one."""

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
        """Return the stream's time, as far as we can know it."""
        if self._heard is None:
            return self._clock.now()
        at, heard = self._heard
        return at + timedelta(seconds=self._clock.monotonic() - heard)

    async def _begin(self) -> None:
        """Learn, once, what was before this frontend began; without it the page begins with what has happened since."""
        if self._knows_earlier:
            return
        self._knows_earlier = True
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
