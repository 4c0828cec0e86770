"""The operator's commands: drain, resume, move, restart, status, goldens, and fault injection.

Commands become facts; the deciders decide on them. A command is checked against the fleet as this controller knows it, so that
a misspelt worker is refused at once.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.ports import NO_COMMAND, Command, GoldenWish, StoreUnavailable
from controller.runtime.beats import Beats
from controller.runtime.canary.golden_requests import GoldenRequests
from controller.runtime.command_answers import done
from controller.runtime.command_errors import NotPossible, Unanswered, UnknownWorker
from controller.runtime.fault_injection import Rehearsals, ask, shares_process
from controller.runtime.host_processes import HostProcesses
from events import subjects
from events.decisions import HealthStatus
from events.journal.port import Journal, JournalUnavailable
from events.nats.bus import Bus
from events.observations import Commanded, DrainRequested, MoveRequested, RestartRequested, ResumeRequested
from events.process.presence import Presence
from events.versions import InForce

FLUSH_S = 1.0
OBEYS_WITHIN_S = 2.0  # for a process to react to a shutdown command; its grace period may take longer
LOOK_S = 0.1
LINKED_S = 1.5  # frontends report their connected workers every second
STALE_S = 3.0  # maximum age of a load report

log = structlog.get_logger(__name__)


class Versions(Protocol):
    """The part of `FleetVersions` that the operations need."""

    def report(self) -> Mapping[str, Any]: ...
    def allow(self, by: str, command: str, until: datetime | None) -> InForce | None: ...


async def _empty() -> Mapping[str, Mapping[str, Any]]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSources:
    """Callables that return the current state of the fleet; each is called when needed."""

    fleet: Callable[[], Fleet]
    leader: Callable[[], str]  # source of the controller that holds the lease
    present: Callable[[], Sequence[Presence]]  # processes of this host
    projected: Callable[[], Awaitable[int | None]]  # position of the state store; None: there is none
    stored: Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]] = _empty  # sizes of journal and spools


class ControlOperations:
    """Implements `ports.Control`, and fault injection."""

    def __init__(
        self,
        sources: FleetSources,
        journal: Journal,
        bus: Bus,
        beats: Beats,
        *,
        chaos: bool,
        processes: HostProcesses | None = None,
        versions: Versions | None = None,
    ) -> None:
        self._versions = versions
        self._sources = sources
        self._journal = journal
        self._bus = bus
        self._beats = beats
        self._processes = processes or HostProcesses()
        self._goldens = GoldenRequests(sources.fleet, journal)
        self._rehearsals = Rehearsals(sources.fleet, journal, bus, self._processes, allowed=chaos)

    def close(self) -> None:
        """Resume the workers that are stopped for a limited time."""
        self._rehearsals.close()

    async def drain(
        self, worker: str, deadline_s: float | None, by: str, command: Command = NO_COMMAND
    ) -> str:
        """Request a drain. Raise UnknownWorker, or NotPossible if the worker's instance is dead: it has no requests to finish."""
        instance = self._living(worker).joined.instance
        return await self._record(
            DrainRequested(
                worker=worker, instance=instance, deadline_s=deadline_s, by=by,
                command=command.id, until=command.deadline,
            )
        )  # fmt: skip

    async def resume(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Request a return to service; of a dead worker, restart it. Raise UnknownWorker or NotPossible."""
        known = self._known(worker)
        if not known.alive:
            return await self.restart(worker, by, command)
        if known.health.status is HealthStatus.HEALTHY and not (known.drain.active or known.drain.wanted):
            raise NotPossible(f"{worker} is healthy and does not drain: there is nothing to resume")
        instance = known.joined.instance
        return await self._record(
            ResumeRequested(
                worker=worker, instance=instance, by=by, command=command.id, until=command.deadline
            )
        )

    async def move(self, worker: str, to: str, by: str, command: Command = NO_COMMAND) -> str:
        """Request that a worker's running requests move elsewhere. Raise UnknownWorker or NotPossible."""
        known = self._living(worker)
        fleet = self._sources.fleet().workers.values()
        others = [
            other for other in fleet if other is not known and other.routable and _similar(other, known)
        ]
        if to == worker:
            raise NotPossible(f"{worker} already runs them: name another worker")
        if to:
            self._known(to)
            others = [other for other in others if other.joined.worker == to]
        if not others:
            why = f"{to} cannot accept them" if to else "no other worker can accept them"
            raise NotPossible(f"{why}: it must serve the same model and revision, and accept requests")
        instance = known.joined.instance
        return await self._record(
            MoveRequested(
                worker=worker, instance=instance, to=to, by=by, command=command.id, until=command.deadline
            )
        )

    async def restart(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Command a worker to shut down gracefully; if it does not answer or its instance is dead, end its process.

        Raise UnknownWorker or NotPossible."""
        known = self._known(worker)
        instance = known.joined.instance
        said = await self._record(
            RestartRequested(
                worker=worker, instance=instance, by=by, command=command.id, until=command.deadline
            )
        )
        if not known.alive:
            return await self._end(known)
        try:
            await self._stop(known)
        except Unanswered:
            return await self._end(known)
        return said

    async def versions(self) -> dict[str, Any]:
        """Return the kinds and versions that each process knows, and those in force."""
        return dict(self._versions.report()) if self._versions is not None else {}

    async def allow(self, by: str, command: Command = NO_COMMAND) -> str:
        """Put everything that this release knows in force. Raise NotPossible if it is in force already."""
        force = self._versions.allow(by, command.id, command.deadline) if self._versions is not None else None
        if force is None:
            raise NotPossible("nothing to allow: everything that the leading controller knows is in force")
        return (
            f"deciders version {force.deciders_version} and {len(force.kinds)} new kinds will be put in force"
        )

    async def golden(self, wish: GoldenWish, by: str, command: Command = NO_COMMAND) -> str:
        """Request that goldens be approved, retired or recorded again. Raise UnknownWorker or NotPossible."""
        return done(await self._goldens.request(wish, by, command))

    async def _record(self, fact: Commanded) -> str:
        self._journal.observe(fact)
        await self._journal.flush(FLUSH_S)
        return done(fact)

    async def chaos(
        self,
        worker: str,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None = None,
        command: Command = NO_COMMAND,
    ) -> str:
        """Inject a fault into a worker, or heal it. Raise ChaosRefused, UnknownWorker or NotPossible."""
        known = self._known(worker)
        return await self._rehearsals.play(known, fault, argument, duration_s, by, rank, command.id)

    async def _stop(self, known: Worker) -> None:
        name = known.joined.worker
        await ask(self._bus, self._journal, name, subjects.stop(name), {"instance": known.joined.instance})

    async def _end(self, known: Worker) -> str:
        """End a worker that cannot shut down gracefully. Return a sentence that states how it ends.

        Raise NotPossible if the worker is alive and out of reach.
        """
        name, shared = known.joined.worker, shares_process(self._sources.fleet(), known)
        if (
            not known.alive
            and not self._processes.live(known)
            and (not shared or self._processes.here(known))
        ):
            return self._describe_dead(known)
        if shared:  # a signal would end the other workers of the process too
            body = {"instance": known.joined.instance}
            await ask(self._bus, self._journal, name, subjects.retire(name), body)
            return f"{name} ends; its next instance takes its place"
        why = "did not answer" if known.alive else f"is dead ({known.health.reason})"
        try:
            self._processes.send(known, signal.SIGTERM)
        except NotPossible:
            if self._processes.live(known) or not self._processes.here(known):
                raise
            return f"{name} {why}: its process has ended; its supervisor starts it again"
        with contextlib.suppress(NotPossible):  # the process has ended meanwhile
            self._processes.send(known, signal.SIGCONT)  # a stopped process must continue before it can end
            if not await self._reacts(known):
                self._processes.send(known, signal.SIGKILL)
                return f"{name} {why}: its process is killed; its supervisor starts it again"
        return f"{name} {why}: its process ends; its supervisor starts it again"

    async def _reacts(self, known: Worker) -> bool:
        """Return whether a process that was signalled to end has ended in time or is responsive: it accepts a shutdown command,
        or a frontend is connected to it (then only its broker connection is broken)."""
        loop, life = asyncio.get_running_loop(), (known.joined.worker, known.joined.instance)
        until = loop.time() + OBEYS_WITHIN_S
        while loop.time() < until:
            await asyncio.sleep(LOOK_S)
            if not self._processes.live(known):
                return True
            if known.alive:
                with contextlib.suppress(Unanswered):
                    await self._stop(known)
                    return True
        return known.alive and self._beats.linked(*life, LINKED_S)

    def _living(self, name: str) -> Worker:
        known = self._known(name)
        if not known.alive:
            raise NotPossible(self._describe_dead(known))
        return known

    def _known(self, name: str) -> Worker:
        worker = self._sources.fleet().workers.get(name)
        if worker is None:
            raise UnknownWorker(f"{name!r}: {UnknownWorker.__doc__}")
        return worker

    def _describe_dead(self, known: Worker) -> str:
        """Describe the state of a worker with a dead instance."""
        name, reason = known.joined.worker, known.health.reason
        return f"{name} is dead ({reason}) and has no requests; {self._processes.next_life(known)}"

    # --- status -------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the fleet's status. The keys are stable: `holdfast status -o json` prints them."""
        fleet = self._sources.fleet()
        last, position, stored = await asyncio.gather(
            self._last_seq(), self._projected_or_none(), self._sources.stored()
        )
        lag = None if last is None or position is None else max(0, last - position)
        return {
            "workers": [self._worker(fleet.workers[name]) for name in sorted(fleet.workers)],
            "awaited": [
                {
                    "id": one.worker,
                    "model": one.model or None,
                    "reason": one.reason,
                    "since": _instant(one.since),
                }
                for one in fleet.waiting
            ],
            "processes": [
                {"role": p.role, "name": p.name, "pid": p.pid, "url": p.url}
                | ({"console": p.console} if p.console else {})
                for p in self._sources.present()
            ],
            "levels": _levels(fleet),
            "journal": {"last_seq": last, **stored.get("journal", {})},
            "spool": dict(stored.get("spool", {})),
            "projector": {"position": position, "lag": lag},
            "leader": self._sources.leader() or None,
        }

    def _worker(self, worker: Worker) -> dict[str, Any]:
        joined, last = worker.joined, worker.last_canary
        beat = self._beats.fresh(joined.worker, joined.instance, STALE_S)
        return {
            "id": joined.worker,
            "instance": joined.instance,
            "pid": joined.pid,
            "engine": joined.engine,
            "model": joined.model,
            "health": worker.health.status.value,
            "breaker": worker.breaker.position,
            "weight": worker.weight,
            "reasons": list(worker.reasons),
            "held": worker.health.held,
            "spare": worker.spare.kept,
            "place": worker.spare.place or None,
            "lingers": not worker.alive and self._processes.live(worker),
            "in_flight": beat.in_flight if beat is not None and worker.alive else None,
            "last_canary": None
            if last is None
            else {
                "outcome": last.outcome,
                "reason": last.reason or None,
                "canary": last.canary,
                "latency_ms": last.latency_ms,
                "at": _instant(last.at),
            },
        }

    async def _last_seq(self) -> int | None:
        try:
            return await asyncio.wait_for(self._journal.last_seq(), FLUSH_S)
        except (JournalUnavailable, TimeoutError):
            return None

    async def _projected_or_none(self) -> int | None:
        try:
            return await asyncio.wait_for(self._sources.projected(), FLUSH_S)
        except (StoreUnavailable, TimeoutError):
            return None


def _levels(fleet: Fleet) -> dict[str, int]:
    """Return every model's degradation level; a model without degradation is at level 0."""
    levels = {worker.joined.model: 0 for worker in fleet.workers.values() if worker.alive}
    levels |= {model: state.level for model, state in fleet.models.items()}
    return dict(sorted(levels.items()))


def _similar(one: Worker, other: Worker) -> bool:
    """Return whether a request of one worker can continue on the other."""
    a, b = one.joined, other.joined
    return (a.model, a.revision, a.tokenizer) == (b.model, b.revision, b.tokenizer)


def _instant(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
