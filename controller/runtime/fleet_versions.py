"""Tracks which fact kinds and deciders version each process supports, and puts new ones in force.

    announced by every live process for `soak_s` seconds ──▶ put in force
    allowed by an operator ──▶ put in force at once

Processes announce what they support (`events.journal.kind_gate`). Processes of older releases announce nothing, and are found in
other ways. Workers are in the fleet state, and frontends send link reports. Other readers of the journal are known by the names
of their consumers on the stream. A process that is stopped or disconnected is not found. When it runs again, it stops reading at
the first fact of a kind that it does not support.
"""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from controller.deciders.fleet import DECIDERS_VERSION, OLDEST, Fleet, in_force
from controller.ports import Clock
from controller.runtime.beats import Beats
from controller.runtime.settings import VersionSettings
from controller.runtime.view import FleetSource
from events import subjects
from events.errors import HoldfastError
from events.json_types import Json
from events.nats.bus import Body, Bus
from events.versions import ANNOUNCES_NOTHING, InForce, Known, new_kinds


@dataclass(frozen=True, slots=True)
class KnownProcess:
    """One live process, with the fact kinds and the deciders version that it supports."""

    role: str
    name: str
    known: Known

    @property
    def announces(self) -> bool:
        """Whether the process announces what it supports."""
        return self.known is not ANNOUNCES_NOTHING

    def too_old_for(self, version: int) -> bool:
        """Whether the process does not support this version of the deciders.

        True if the process does not announce what it supports. A process that neither decides nor reads decisions announces
        version 0, and is never too old.
        """
        return not self.announces or 0 < self.known.deciders_version < version

    def holds_back(self, force: InForce) -> bool:
        """Whether `force` cannot take effect yet, because the process does not support all that `force` contains."""
        return not force.kinds <= self.known.kinds or self.too_old_for(force.deciders_version)


ANNOUNCED_S = 15.0  # maximum age of an announcement; by then three have been missed
LOOK_S = 2.0
LISTEN_S = 12.0  # time for which a leader must have listened to have received all announcements
PROCESSES_MAX = 10_000  # announcements kept
# consumer names of releases that do not announce themselves
OLD_READER = re.compile(r"r\d+-[0-9a-f]{12}").fullmatch

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Announcement:
    at: float
    source: str
    process: KnownProcess
    workers: tuple[str, ...]


@dataclass(eq=False)
class FleetVersions:
    """Receives announcements, and determines which fact kinds and deciders version can be put in force."""

    view: FleetSource
    beats: Beats
    bus: Bus
    consumer_names: Callable[[], Awaitable[list[str]]]  # the stream's consumers; raises JournalUnavailable
    clock: Clock
    settings: VersionSettings
    leading: Callable[[], bool]

    def __post_init__(self) -> None:
        self._announcements: dict[str, _Announcement] = {}  # by source
        self._old_readers: tuple[str, ...] | None = None  # None: not listed yet
        self._since: tuple[InForce, float] | None = None  # what every process supports, and since when
        self._listening_since: float | None = None
        # what an operator allowed, and the deadline
        self._allowed: tuple[InForce, datetime | None] | None = None
        self.wake: Callable[[], None] = lambda: None  # makes the deciders settle at once

    async def run(self) -> None:
        """Subscribe to announcements, and check the versions of all processes every LOOK_S seconds, until cancelled."""
        await self.bus.subscribe(subjects.KNOWN_ALL, self.on_known)
        while True:
            await self.look()
            await self.clock.sleep(LOOK_S)

    async def on_known(self, subject: str, body: Body) -> None:
        """Record one announcement. If this controller leads, send the kinds in force to the announcing process."""
        try:
            source, known = str(body["source"]), Known.of_body(body)
            workers = tuple(str(name) for name in body.get("workers", ()))
            left = bool(body.get("left", False))
        except (KeyError, TypeError, ValueError) as error:
            log.debug("announcement_refused", subject=subject, why=str(error))
            return
        role, _, rest = source.partition(":")
        name = rest.partition(":")[0]
        if subject != subjects.known(role, workers[0] if workers else name):
            log.debug("announcement_refused", subject=subject, why=f"it is about {source}")
            return
        if left or (source not in self._announcements and len(self._announcements) >= PROCESSES_MAX):
            self._announcements.pop(source, None)
            return
        process = KnownProcess(role, name, known)
        self._announcements[source] = _Announcement(self.clock.monotonic(), source, process, workers)
        if self.leading() and self.view.fleet.number:
            answer = subjects.command("kinds", workers[0] if workers else f"{role}-{name}")
            await self.bus.publish(answer, {"kinds": sorted(in_force(self.view.fleet).kinds)})

    async def look(self) -> None:
        """While leading, determine which kinds and deciders version every live process supports, and since when."""
        now = self.clock.monotonic()
        if not self.leading() or self.bus.since is None:
            self._listening_since = self._since = self._old_readers = None
            return
        self._listening_since = self._listening_since or now
        for source in [s for s, heard in self._announcements.items() if now - heard.at > ANNOUNCED_S]:
            del self._announcements[source]
        try:
            self._old_readers = tuple(sorted(filter(OLD_READER, await self.consumer_names())))
        except HoldfastError as error:
            self._old_readers = None
            log.debug("consumers_not_listed", why=str(error))
        can = self._common_knowledge()
        if can is None or can == self._in_force():
            self._since = None
        elif self._since is None or not (
            self._since[0].kinds <= can.kinds and self._since[0].deciders_version <= can.deciders_version
        ):
            self._since = (can, now)

    def next_in_force(self, fleet: Fleet) -> InForce | None:
        """Return the kinds and deciders version to put in force now; None if nothing changes."""
        if not self.leading() or not fleet.number:
            return None
        now = in_force(fleet)
        if self._allowed is not None:
            allowed, until = self._allowed
            if _exceeds(allowed, now) and (until is None or self.clock.now() < until):
                return allowed
            self._allowed = None
        if self._since is None or self.due_in_s() != 0:
            return None
        return self._since[0] if _exceeds(self._since[0], now) else None

    def allow(self, by: str, command: str, until: datetime | None) -> InForce | None:
        """Let all fact kinds and the deciders version of this release take effect, even if another process lacks them.

        Return what will be in force; None if all of it is in force already. After `until`, this call puts nothing in force.
        """
        everything = InForce.of(
            in_force(self.view.fleet).kinds | new_kinds(), DECIDERS_VERSION, by=by, command=command
        )
        if not _exceeds(everything, self._in_force()):
            return None
        self._allowed = (everything, until)
        self.wake()
        return everything

    def due_in_s(self) -> float | None:
        """Return the seconds until new kinds or a new deciders version are put in force; None if no change is pending."""
        if self._since is None:
            return None
        return max(0.0, self._since[1] + self.settings.soak_s - self.clock.monotonic())

    def processes(self) -> list[KnownProcess]:
        """Return every known live process. Processes that do not announce themselves come last."""
        heard = sorted((h.process for h in self._announcements.values()), key=lambda p: (p.role, p.name))
        workers = {name for h in self._announcements.values() for name in (*h.workers, h.process.name)}
        frontends = {p.name for p in heard if p.role == "frontend"}
        living = self.view.fleet.workers
        old = [
            KnownProcess("worker", name, ANNOUNCES_NOTHING)
            for name, worker in sorted(living.items())
            if worker.alive and name not in workers
        ]
        old += [
            KnownProcess("frontend", name, ANNOUNCES_NOTHING)
            for name, links in sorted(self.beats.frontends.items())
            if name not in frontends and self.clock.monotonic() - links.at <= ANNOUNCED_S
        ]
        readers = self._old_readers or ()
        return heard + old + [KnownProcess("reader", name, ANNOUNCES_NOTHING) for name in readers]

    def _in_force(self) -> InForce:
        return in_force(self.view.fleet)

    def _common_knowledge(self) -> InForce | None:
        """Return what could be in force: what is in force now, and what every live process supports.

        None while announcements may be missing."""
        heard_s = self.clock.monotonic() - (self._listening_since or self.clock.monotonic())
        if heard_s < LISTEN_S or self._old_readers is None or not self.view.fleet.number:
            return None
        kinds, version = new_kinds(), DECIDERS_VERSION
        for process in self.processes():
            kinds &= process.known.kinds
            if process.too_old_for(version):
                version = max(OLDEST, process.known.deciders_version)
        now = self._in_force()
        return InForce.of(now.kinds | kinds, max(now.deciders_version, version))

    def report(self) -> Json:
        """Return what `holdfast fleet versions` prints, as plain JSON values."""
        now, ours = self._in_force(), InForce.of(new_kinds(), DECIDERS_VERSION)
        held = {*(ours.kinds - now.kinds)}
        shown = [
            {
                "role": process.role,
                "name": process.name,
                "release": process.known.release or None,
                "deciders_version": process.known.deciders_version or None,
                "announces": process.announces,
                "lacks": sorted(ours.kinds - process.known.kinds),
            }
            for process in self.processes()
        ]
        due = self.due_in_s()
        return {
            "in_force": {"kinds": sorted(now.kinds), "deciders_version": now.deciders_version},
            "held_back": {
                "kinds": sorted(held),
                "deciders_version": DECIDERS_VERSION if now.deciders_version < DECIDERS_VERSION else None,
                "by": sorted({f"{p.role} {p.name}" for p in self.processes() if p.holds_back(ours)}),
            },
            "due_in_s": None if due is None else round(due, 1),
            "soak_s": self.settings.soak_s,
            "processes": shown,
        }


def _exceeds(wanted: InForce, now: InForce) -> bool:
    return not wanted.kinds <= now.kinds or wanted.deciders_version > now.deciders_version
