"""The operator's commands: drain, resume, move, restart, status, goldens, and fault injection.

A command is first checked against the fleet state that this controller has folded, so that a misspelt worker name is rejected at
once. The command is then recorded as a fact on the journal, and the deciders decide what follows from it.
"""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from functools import partial

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.ports import NO_COMMAND, Command, GoldenWish, StoreUnavailable
from controller.runtime.beats import Beats
from controller.runtime.canary.golden_requests import request_goldens
from controller.runtime.command_answers import ChaosRefused, NotPossible, Unanswered, UnknownWorker, done
from controller.runtime.fleet_versions import FleetVersions
from controller.runtime.host_processes import HostProcesses
from events import subjects
from events.decisions import HealthStatus
from events.intrusion.control_message import control
from events.journal.port import Journal, JournalUnavailable
from events.json_types import Json
from events.nats.bus import Bus, NoAnswer
from events.observations import (
    ChaosInjected,
    Commanded,
    DrainRequested,
    MoveRequested,
    RestartRequested,
    ResumeRequested,
)
from events.process.presence import Presence
from events.subjects import Verb

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "unhang": signal.SIGCONT}
ASK_S = 1.0
ON_THE_DEAD = (*SIGNALS, "heal")  # faults that can also be applied to the process of a dead instance
WAKES_WITHIN_S = 2.0  # time within which a resumed process receives commands again

log = structlog.get_logger(__name__)


async def ask(bus: Bus, journal: Journal, worker: str, verb: Verb, body: Mapping[str, object]) -> None:
    """Send a worker a command that expires after ASK_S. A worker that hangs for longer refuses the command later.

    Raise NotPossible if the worker refuses or the journal does not answer. Raise Unanswered if the worker does not answer.
    """
    try:
        until = (await journal.end()).at + timedelta(seconds=ASK_S)
        said = {**body, "until": until.isoformat()}
        message = control(verb, worker, str(body["instance"]), journal.source, said)
        answer = await bus.request(subjects.command(verb, worker), message, ASK_S)
    except JournalUnavailable as error:
        raise NotPossible(f"no deadline can be given to {worker}: {error}") from error
    except NoAnswer as error:
        raise Unanswered(f"{worker} does not answer: {error}") from error
    if answer.get("error"):
        raise NotPossible(f"{worker} refuses: {answer['error']}")


def shares_process(fleet: Fleet, worker: Worker) -> bool:
    """Return whether a worker's process also runs other workers.

    If so, the worker simulates a fault itself, because a signal would affect the other workers too.
    """
    name, host, pid = worker.joined.worker, worker.joined.topology.host, worker.joined.pid
    others = (other.joined for other in fleet.workers.values() if other.joined.worker != name)
    return bool(host) and any((other.topology.host, other.pid) == (host, pid) for other in others)


@dataclass(eq=False)
class Rehearsals:
    """Injects faults into workers, and heals them.

    The faults "kill", "hang" and "unhang" are signals if the process has only one worker. In all other cases, a fault is a
    command, and the worker simulates the fault. For example, `hang` for 5 s as signals:

        SIGSTOP ──── 5 s, or heal, unhang, the end of this controller ────▶ SIGCONT

    A stopped process cannot resume itself, so this controller resumes it. If this controller is killed before it has
    resumed the process, the process stays stopped. The fleet then declares the worker dead, and the supervisor ends the process.
    """

    fleet: Callable[[], Fleet]
    journal: Journal
    bus: Bus
    processes: HostProcesses
    _: KW_ONLY
    allowed: bool

    def __post_init__(self) -> None:
        # by worker: the timer of a process that this controller has stopped for a limited time
        self._stopped: dict[str, tuple[asyncio.TimerHandle, Worker]] = {}

    async def play(
        self,
        worker: Worker,
        fault: str,
        argument: float | None,
        duration_s: float | None,
        by: str,
        rank: int | None = None,
        command: str = "",
    ) -> str:
        """Inject a fault into a worker, or heal the worker, and return a sentence that states what was done.

        `argument` is the fault's number, for example how many times slower steps become. `rank` is the rank in which the fault
        occurs. Raise ChaosRefused if fault injection is off, and NotPossible if the fault cannot be injected now.
        """
        if not self.allowed:
            raise ChaosRefused
        name, shared = worker.joined.worker, shares_process(self.fleet(), worker)
        if not worker.alive and not shared and (fault not in ON_THE_DEAD or not self.processes.live(worker)):
            reason, next_life = worker.health.reason, self.processes.next_life(worker)
            raise NotPossible(f"{name} is dead ({reason}): no fault was injected; {next_life}")
        struck = {"argument": argument, "rank": rank}
        detail = ", ".join(f"{key}={value:g}" for key, value in struck.items() if value is not None)
        said = ChaosInjected(
            worker=name, instance=worker.joined.instance, fault=fault, detail=detail, by=by, duration_s=duration_s,
            command=command,
        )  # fmt: skip
        if fault in SIGNALS and not shared:
            self.processes.send(worker, 0)
            self.journal.observe(said)  # the cause is recorded before its effects
            self._signal(worker, fault, duration_s)
        else:
            body = {"instance": worker.joined.instance, "fault": fault, **struck, "duration": duration_s}
            await self._command_worker(worker, body)
            self.journal.observe(said)
        log.warning("chaos_injected", worker=name, fault=fault, argument=argument, by=by)
        return done(said)

    def close(self) -> None:
        """Resume all workers that are stopped for a limited time, because no other process would resume them."""
        for _, worker in list(self._stopped.values()):
            self._resume(worker)

    async def _command_worker(self, worker: Worker, body: Mapping[str, object]) -> None:
        """Command a worker to simulate a fault or to heal. Before a heal, resume the worker's process.

        Raise NotPossible if the worker refuses or does not answer.
        """
        woken = body["fault"] == "heal" and self._resume(worker)
        if woken and not worker.alive:
            return  # the actuator ends the resumed process of a dead instance, and its successor is healthy
        loop, name = asyncio.get_running_loop(), worker.joined.worker
        until = loop.time() + (WAKES_WITHIN_S if woken else 0.0)
        while True:
            try:
                return await ask(self.bus, self.journal, name, "chaos", body)
            except Unanswered:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(ASK_S / 4)

    def _signal(self, worker: Worker, fault: str, duration_s: float | None) -> None:
        """Send the signal that causes this fault. For a hang with a duration, schedule the signal that ends it.

        Raise NotPossible if the signal cannot be sent.
        """
        name = worker.joined.worker
        self._forget(name)
        self.processes.send(worker, SIGNALS[fault])
        if fault == "hang" and duration_s:
            timer = asyncio.get_running_loop().call_later(duration_s, partial(self._resume, worker))
            self._stopped[name] = timer, worker

    def _resume(self, worker: Worker) -> bool:
        """Resume a worker's process with SIGCONT, in case it is stopped. Return whether the signal could be sent.

        No signal is sent to a process that runs several workers.
        """
        self._forget(worker.joined.worker)
        if shares_process(self.fleet(), worker):
            return False
        with contextlib.suppress(NotPossible):  # the process has ended meanwhile, or is on another host
            self.processes.send(worker, signal.SIGCONT)
            return True
        return False

    def _forget(self, name: str) -> None:
        if known := self._stopped.pop(name, None):
            known[0].cancel()


FLUSH_S = 1.0
OBEYS_WITHIN_S = 2.0  # time within which a process must react to a shutdown command or SIGTERM
LOOK_S = 0.1
LINKED_S = 1.5  # maximum age of a frontend's link report; one is sent every second
STALE_S = 3.0  # maximum age of a heartbeat that `status` uses


@dataclass(eq=False)
class ControlOperations:
    """Implements the operator's commands (`ports.Control`), including fault injection."""

    fleet: Callable[[], Fleet]
    leader: Callable[[], str]  # source of the controller that holds the lease
    present: Callable[[], Sequence[Presence]]  # processes of this host
    projected: Callable[[], Awaitable[int | None]]  # position of the state store; None: there is none
    stored: Callable[[], Awaitable[Mapping[str, Mapping[str, object]]]]  # sizes of journal and spools
    journal: Journal
    bus: Bus
    beats: Beats
    _: KW_ONLY
    injects_faults: bool
    processes: HostProcesses = field(default_factory=HostProcesses)
    fleet_versions: FleetVersions | None = None

    def __post_init__(self) -> None:
        self._rehearsals = Rehearsals(
            self.fleet, self.journal, self.bus, self.processes, allowed=self.injects_faults
        )

    def close(self) -> None:
        """Resume the workers that are stopped for a limited time."""
        self._rehearsals.close()

    async def drain(
        self, worker: str, deadline_s: float | None, by: str, command: Command = NO_COMMAND
    ) -> str:
        """Request a drain of a worker, and return a sentence that confirms the request.

        Raise UnknownWorker if the worker does not exist. Raise NotPossible if its instance is dead and so has no requests to
        finish.
        """
        return await self._record(DrainRequested, self._living(worker), by, command, deadline_s=deadline_s)

    async def resume(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Request a worker's return to service, or restart the worker if its instance is dead.

        Raise UnknownWorker if the worker does not exist. Raise NotPossible if it is healthy and does not drain.
        """
        known = self._known(worker)
        if not known.alive:
            return await self.restart(worker, by, command)
        if known.health.status is HealthStatus.HEALTHY and not (known.drain.active or known.drain.wanted):
            raise NotPossible(f"{worker} is healthy and does not drain: there is nothing to resume")
        return await self._record(ResumeRequested, known, by, command)

    async def move(self, worker: str, to: str, by: str, command: Command = NO_COMMAND) -> str:
        """Request that a worker's running requests move to the worker `to`, or to any worker if `to` is empty.

        Raise UnknownWorker if a named worker does not exist. Raise NotPossible if no other worker can accept the requests.
        """
        known = self._living(worker)
        workers = self.fleet().workers.values()
        others = [one for one in workers if one is not known and one.routable and _similar(one, known)]
        if to == worker:
            raise NotPossible(f"{worker} already runs them: name another worker")
        if to:
            self._known(to)
            others = [other for other in others if other.joined.worker == to]
        if not others:
            why = f"{to} cannot accept them" if to else "no other worker can accept them"
            raise NotPossible(f"{why}: it must serve the same model and revision, and accept requests")
        return await self._record(MoveRequested, known, by, command, to=to)

    async def restart(self, worker: str, by: str, command: Command = NO_COMMAND) -> str:
        """Command a worker to shut down gracefully. If it does not answer, or if its instance is dead, end its process.

        Raise UnknownWorker if the worker does not exist. Raise NotPossible if it cannot be reached.
        """
        known = self._known(worker)
        said = await self._record(RestartRequested, known, by, command)
        with contextlib.suppress(Unanswered):
            if known.alive:
                await self._stop(known)
                return said
        return await self._end(known)

    async def versions(self) -> Json:
        """Return the fact kinds and the deciders version in force, and those that each process supports, as plain JSON."""
        return self.fleet_versions.report() if self.fleet_versions is not None else {}

    async def allow(self, by: str, command: Command = NO_COMMAND) -> str:
        """Let all fact kinds and the deciders version of this release take effect.

        Raise NotPossible if all of them are in force already.
        """
        force = (
            self.fleet_versions.allow(by, command.id, command.deadline)
            if self.fleet_versions is not None
            else None
        )
        if force is None:
            raise NotPossible("nothing to allow: everything that the leading controller knows is in force")
        return (
            f"deciders version {force.deciders_version} and {len(force.kinds)} new kinds will be put in force"
        )

    async def golden(self, wish: GoldenWish, by: str, command: Command = NO_COMMAND) -> str:
        """Request that goldens be approved, retired or recorded again. The errors are those of `request_goldens`."""
        return done(await request_goldens(self.fleet(), self.journal, wish, by, command))

    async def _record(
        self, kind: Callable[..., Commanded], known: Worker, by: str, command: Command, **also: object
    ) -> str:
        joined, until = known.joined, command.deadline
        fact = kind(
            worker=joined.worker, instance=joined.instance, by=by, command=command.id, until=until, **also
        )
        self.journal.observe(fact)
        await self.journal.flush(FLUSH_S)
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
        """Inject a fault into a worker, or heal the worker.

        Raise UnknownWorker if the worker does not exist. The other errors are those of `Rehearsals.play`.
        """
        known = self._known(worker)
        return await self._rehearsals.play(known, fault, argument, duration_s, by, rank, command.id)

    async def _stop(self, known: Worker) -> None:
        name = known.joined.worker
        await ask(self.bus, self.journal, name, "stop", {"instance": known.joined.instance})

    async def _end(self, known: Worker) -> str:
        """End a worker that cannot shut down gracefully, and return a sentence that states how the worker ends.

        Raise NotPossible if no signal and no command can reach the worker.
        """
        name, shared = known.joined.worker, shares_process(self.fleet(), known)
        unseen = shared and not self.processes.here(known)
        if not known.alive and not self.processes.live(known) and not unseen:
            return self._describe_dead(known)
        if shared:  # a signal would also end the other workers of the process
            body = {"instance": known.joined.instance}
            await ask(self.bus, self.journal, name, "retire", body)
            return f"{name} ends; its next instance takes its place"
        why = "did not answer" if known.alive else f"is dead ({known.health.reason})"
        try:
            self.processes.send(known, signal.SIGTERM)
        except NotPossible:
            if self.processes.live(known) or not self.processes.here(known):
                raise
            return f"{name} {why}: its process has ended; its supervisor starts it again"
        with contextlib.suppress(NotPossible):  # the process has ended meanwhile
            self.processes.send(known, signal.SIGCONT)  # a stopped process must continue before it can end
            if not await self._reacts(known):
                self.processes.send(known, signal.SIGKILL)
                return f"{name} {why}: its process is killed; its supervisor starts it again"
        return f"{name} {why}: its process ends; its supervisor starts it again"

    async def _reacts(self, known: Worker) -> bool:
        """Return whether a worker's process ends within OBEYS_WITHIN_S after a SIGTERM, or is responsive.

        A process is responsive if it accepts a shutdown command, or if a frontend is connected to the worker. If only a
        frontend is connected, the worker's broker connection is broken.
        """
        loop, life = asyncio.get_running_loop(), (known.joined.worker, known.joined.instance)
        until = loop.time() + OBEYS_WITHIN_S
        while loop.time() < until:
            await asyncio.sleep(LOOK_S)
            if not self.processes.live(known):
                return True
            if known.alive:
                with contextlib.suppress(Unanswered):
                    await self._stop(known)
                    return True
        return known.alive and self.beats.linked(*life, LINKED_S)

    def _living(self, name: str) -> Worker:
        known = self._known(name)
        if not known.alive:
            raise NotPossible(self._describe_dead(known))
        return known

    def _known(self, name: str) -> Worker:
        worker = self.fleet().workers.get(name)
        if worker is None:
            raise UnknownWorker(f"{name!r}: {UnknownWorker.__doc__}")
        return worker

    def _describe_dead(self, known: Worker) -> str:
        """Return a sentence for an error message: why a worker is dead, and how it can run again."""
        name, reason = known.joined.worker, known.health.reason
        return f"{name} is dead ({reason}) and has no requests; {self.processes.next_life(known)}"

    def _lingers(self, worker: Worker) -> bool:
        """Return whether the process of a dead worker still runs. The process of other workers may survive one that has left."""
        left = worker.health.exit.left and shares_process(self.fleet(), worker)
        return not worker.alive and not left and self.processes.live(worker)

    # --- status -------------------------------------------------------------------------------------------

    async def status(self) -> Json:
        """Return the fleet's status. The keys are stable: `holdfast status -o json` prints them."""
        fleet = self.fleet()
        last, position, stored = await asyncio.gather(
            self._last_seq(), self._projected_or_none(), self.stored()
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
                for p in self.present()
            ],
            "levels": _levels(fleet),
            "journal": {"last_seq": last, **stored.get("journal", {})},
            "spool": dict(stored.get("spool", {})),
            "projector": {"position": position, "lag": lag},
            "leader": self.leader() or None,
        }

    def _worker(self, worker: Worker) -> Json:
        joined, last = worker.joined, worker.last_canary
        beat = self.beats.fresh(joined.worker, joined.instance, STALE_S)
        canary = last and {
            "outcome": last.outcome, "reason": last.reason or None, "canary": last.canary,
            "latency_ms": last.latency_ms, "at": _instant(last.at),
        }  # fmt: skip
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
            "lingers": self._lingers(worker),
            "in_flight": beat.in_flight if beat is not None and worker.alive else None,
            "last_canary": canary,
            "adapters": list(joined.adapters),
        }

    async def _last_seq(self) -> int | None:
        try:
            return await asyncio.wait_for(self.journal.last_seq(), FLUSH_S)
        except (JournalUnavailable, TimeoutError):
            return None

    async def _projected_or_none(self) -> int | None:
        try:
            return await asyncio.wait_for(self.projected(), FLUSH_S)
        except (StoreUnavailable, TimeoutError):
            return None


def _levels(fleet: Fleet) -> dict[str, int]:
    """Return each model's degradation level. The level is 0 if the model is not degraded."""
    levels = {worker.joined.model: 0 for worker in fleet.workers.values() if worker.alive}
    levels |= {model: state.level for model, state in fleet.models.items()}
    return dict(sorted(levels.items()))


def _similar(one: Worker, other: Worker) -> bool:
    """Return whether a request can move between these workers: they have the same model, revision and tokenizer."""
    a, b = one.joined, other.joined
    return (a.model, a.revision, a.tokenizer) == (b.model, b.revision, b.tokenizer)


def _instant(at: datetime) -> str:
    return at.isoformat(timespec="milliseconds")
