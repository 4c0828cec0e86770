"""What an operator can ask for: drain, resume, move, restart, status, and rehearsed faults. What is asked becomes
facts; deciding is not done here.

A request is checked against the fleet as we know it, so that a misspelt worker is refused at once and not ignored.
"""

import asyncio
import os
import platform
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.ports import StoreUnavailable
from controller.runtime.beats import Beats
from events import subjects
from events.decisions import HealthStatus
from events.errors import HoldfastError
from events.journal.port import Journal, JournalUnavailable
from events.nats.bus import Bus, NoAnswer
from events.observations import ChaosInjected, DrainRequested, MoveRequested, ResumeRequested
from events.process.presence import Presence

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "unhang": signal.SIGCONT}
ASK_S = 1.0
STALE_S = 3.0  # a load report older than this is no news

log = structlog.get_logger(__name__)


class UnknownWorker(HoldfastError):
    """There is no worker of that name; `holdfast status` lists them."""


class NotPossible(HoldfastError):
    """What was asked for cannot be done to this worker now."""


class ChaosRefused(HoldfastError):
    """Rehearsed faults are refused: this fleet was not started with --chaos."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSources:
    """Where the operations look up what an operator asks about: each is asked when it is needed."""

    fleet: Callable[[], Fleet]
    leader: Callable[[], str]  # source of the controller that holds the lease
    present: Callable[[], Sequence[Presence]]  # processes of this host
    projected: Callable[[], Awaitable[int | None]]  # how far the state store has got; None: there is none


class ControlOperations:
    """Implements `ports.Control`, and chaos."""

    def __init__(
        self,
        sources: FleetSources,
        journal: Journal,
        bus: Bus,
        beats: Beats,
        *,
        chaos: bool,
        send_signal: Callable[[int, int], None] = os.kill,
    ) -> None:
        self._sources = sources
        self._journal = journal
        self._bus = bus
        self._beats = beats
        self._chaos = chaos
        self._signal = send_signal

    async def drain(self, worker: str, deadline_s: float | None, by: str) -> str:
        """Wish a worker empty. Raise UnknownWorker or NotPossible."""
        known = self._living(worker)
        self._journal.observe(
            DrainRequested(worker=worker, instance=known.joined.instance, deadline_s=deadline_s, by=by)
        )
        await self._journal.flush(ASK_S)
        return f"{worker} is to drain" + ("" if deadline_s is None else f" within {deadline_s:g} s")

    async def resume(self, worker: str, by: str) -> str:
        """Wish a worker back. Raise UnknownWorker or NotPossible."""
        known = self._living(worker)
        if known.health.status is HealthStatus.HEALTHY and not (known.drain.active or known.drain.wanted):
            raise NotPossible(f"{worker} is healthy and does not drain: there is nothing to resume")
        self._journal.observe(ResumeRequested(worker=worker, instance=known.joined.instance, by=by))
        await self._journal.flush(ASK_S)
        return f"{worker} is to come back, after its next good canary"

    async def move(self, worker: str, to: str, by: str) -> str:
        """Wish a worker's running requests elsewhere. Raise UnknownWorker or NotPossible."""
        known = self._living(worker)
        fleet = self._sources.fleet().workers.values()
        others = [other for other in fleet if other is not known and other.routable and _alike(other, known)]
        if to == worker:
            raise NotPossible(f"{worker} has them already: name another worker")
        if to:
            self._living(to)
            others = [other for other in others if other.joined.worker == to]
        if not others:
            why = f"{to} cannot take them" if to else "no other worker can take them"
            raise NotPossible(f"{why}: it must serve the same model and revision, and take requests")
        self._journal.observe(MoveRequested(worker=worker, instance=known.joined.instance, to=to, by=by))
        await self._journal.flush(ASK_S)
        return f"what runs on {worker} is to move" + (f" to {to}" if to else "")

    async def restart(self, worker: str, by: str) -> str:
        """Tell a worker to shut down in good order. Raise UnknownWorker or NotPossible."""
        known = self._living(worker)
        await self._ask(worker, subjects.stop(worker), {"instance": known.joined.instance})
        log.info("restart_asked", worker=worker, by=by)
        return f"{worker} shuts down; its supervisor starts it again"

    async def chaos(
        self,
        worker: str,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None = None,
    ) -> str:
        """Break a worker on purpose, or heal it. Raise ChaosRefused, UnknownWorker or NotPossible."""
        if not self._chaos:
            raise ChaosRefused
        known = self._living(worker)
        struck = {"argument": argument, "rank": rank}
        detail = ", ".join(f"{name}={value:g}" for name, value in struck.items() if value is not None)
        said = ChaosInjected(worker=worker, instance=known.joined.instance, fault=fault, detail=detail, by=by)
        if fault in SIGNALS and not self._shares_process(known):
            self._check_process(known)
            self._journal.observe(said)  # the cause stands before its effects
            self._signal(known.joined.pid, SIGNALS[fault])
        else:
            body = {"fault": fault, **struck, "duration": duration_s}
            await self._ask(worker, subjects.chaos(worker), body)
            self._journal.observe(said)
        log.warning("chaos_injected", worker=worker, fault=fault, argument=argument, by=by)
        return f"{worker}: {fault}" + (f" ({detail})" if detail else "")

    async def _ask(self, worker: str, subject: str, body: dict[str, Any]) -> None:
        try:
            answer = await self._bus.request(subject, body, ASK_S)
        except NoAnswer as error:
            raise NotPossible(f"{worker} does not answer: {error}") from error
        if answer.get("error"):
            raise NotPossible(f"{worker} refuses: {answer['error']}")

    def _shares_process(self, worker: Worker) -> bool:
        """Whether its process has other workers too: a signal would strike them all, so it plays the fault itself."""
        host, pid = worker.joined.topology.host, worker.joined.pid
        return bool(host) and any(
            other is not worker and (other.joined.topology.host, other.joined.pid) == (host, pid)
            for other in self._sources.fleet().workers.values()
        )

    def _check_process(self, worker: Worker) -> None:
        """Raise NotPossible unless the worker's process is on this host and lives."""
        joined = worker.joined
        if joined.topology.host not in ("", platform.node()):
            raise NotPossible(
                f"{joined.worker} runs on {joined.topology.host}; signals reach only processes on {platform.node()}"
            )
        try:
            self._signal(joined.pid, 0)
        except OSError as error:
            raise NotPossible(f"process {joined.pid} of {joined.worker}: {error.strerror}") from error

    def _living(self, name: str) -> Worker:
        worker = self._sources.fleet().workers.get(name)
        if worker is None:
            raise UnknownWorker(f"{name!r}: {UnknownWorker.__doc__}")
        if not worker.alive:
            raise NotPossible(f"{name} is dead ({worker.health.reason}); only a new instance of it can live")
        return worker

    # --- status -------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return the fleet as it is. The keys are stable: `holdfast status -o json` prints them."""
        fleet = self._sources.fleet()
        last, position = await asyncio.gather(self._last_seq(), self._projected_or_none())
        lag = None if last is None or position is None else max(0, last - position)
        return {
            "workers": [self._worker(fleet.workers[name]) for name in sorted(fleet.workers)],
            "processes": [
                {"role": p.role, "name": p.name, "pid": p.pid, "url": p.url} for p in self._sources.present()
            ],
            "levels": _levels(fleet),
            "journal": {"last_seq": last},
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
            return await asyncio.wait_for(self._journal.last_seq(), ASK_S)
        except (JournalUnavailable, TimeoutError):
            return None

    async def _projected_or_none(self) -> int | None:
        try:
            return await asyncio.wait_for(self._sources.projected(), ASK_S)
        except (StoreUnavailable, TimeoutError):
            return None


def _levels(fleet: Fleet) -> dict[str, int]:
    """Return every model's degradation level; a model whose ladder is off is at level 0."""
    levels = {worker.joined.model: 0 for worker in fleet.workers.values() if worker.alive}
    levels |= {model: state.level for model, state in fleet.models.items()}
    return dict(sorted(levels.items()))


def _alike(one: Worker, other: Worker) -> bool:
    """Say whether a request of the one may go on at the other."""
    a, b = one.joined, other.joined
    return (a.model, a.revision, a.tokenizer) == (b.model, b.revision, b.tokenizer)


def _instant(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
