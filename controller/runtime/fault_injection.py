"""Fault injection on a worker in any state.

Process faults are signals if the process has one worker; all others are commands, by which the worker simulates the fault.
    hang for 5 s:  SIGSTOP ──── 5 s, or heal, unhang, the end of this controller ────▶ SIGCONT

A stopped process cannot resume itself, so this controller resumes it. If the controller is killed meanwhile, the timer is lost:
the process stays stopped until the fleet declares it dead and its supervisor ends it.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import structlog

from controller.deciders.fleet import Fleet, Worker
from controller.runtime.command_answers import done
from controller.runtime.command_errors import ChaosRefused, NotPossible, Unanswered
from controller.runtime.host_processes import HostProcesses
from events import subjects
from events.intrusion.control_message import control
from events.journal.port import Journal, JournalUnavailable
from events.nats.bus import Bus, NoAnswer
from events.observations import ChaosInjected

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "unhang": signal.SIGCONT}
ASK_S = 1.0
ON_THE_DEAD = (*SIGNALS, "heal")  # faults that apply to the process of a dead instance
WAKES_WITHIN_S = 2.0  # time that a resumed process needs to receive commands again

log = structlog.get_logger(__name__)


async def ask(bus: Bus, journal: Journal, worker: str, subject: str, body: dict[str, Any]) -> None:
    """Send a worker a command that it must carry out soon: if it receives the command late, because it hung, it refuses.

    Raise NotPossible if it refuses, Unanswered if it does not answer."""
    try:
        until = (await journal.end()).at + timedelta(seconds=ASK_S)
        said = {**body, "until": until.isoformat()}
        message = control(subject.split(".")[1], worker, str(body["instance"]), journal.source, said)
        answer = await bus.request(subject, message, ASK_S)
    except JournalUnavailable as error:
        raise NotPossible(f"no deadline can be given to {worker}: {error}") from error
    except NoAnswer as error:
        raise Unanswered(f"{worker} does not answer: {error}") from error
    if answer.get("error"):
        raise NotPossible(f"{worker} refuses: {answer['error']}")


def shares_process(fleet: Fleet, worker: Worker) -> bool:
    """Return whether a worker's process runs other workers too: a signal would hit all, so the worker simulates the fault."""
    name, host, pid = worker.joined.worker, worker.joined.topology.host, worker.joined.pid
    others = (other.joined for other in fleet.workers.values())
    return bool(host) and any(
        (other.topology.host, other.pid) == (host, pid) and other.worker != name for other in others
    )


class Rehearsals:
    """Injects faults into workers, and heals them."""

    def __init__(
        self,
        fleet: Callable[[], Fleet],
        journal: Journal,
        bus: Bus,
        processes: HostProcesses,
        *,
        allowed: bool,
    ) -> None:
        self._fleet = fleet
        self._journal = journal
        self._bus = bus
        self._processes = processes
        self._allowed = allowed
        self._stopped: dict[str, tuple[asyncio.TimerHandle, Worker]] = {}  # stopped by us, for a limited time

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
        """Inject a fault into a worker, or heal it; return what was done. Raise ChaosRefused or NotPossible."""
        if not self._allowed:
            raise ChaosRefused
        name, shared = worker.joined.worker, shares_process(self._fleet(), worker)
        if not worker.alive and not shared and (fault not in ON_THE_DEAD or not self._processes.live(worker)):
            reason, next_life = worker.health.reason, self._processes.next_life(worker)
            raise NotPossible(f"{name} is dead ({reason}): no fault was injected; {next_life}")
        struck = {"argument": argument, "rank": rank}
        detail = ", ".join(f"{key}={value:g}" for key, value in struck.items() if value is not None)
        said = ChaosInjected(
            worker=name, instance=worker.joined.instance, fault=fault, detail=detail, by=by, duration_s=duration_s,
            command=command,
        )  # fmt: skip
        if fault in SIGNALS and not shared:
            self._processes.send(worker, 0)
            self._journal.observe(said)  # the cause is recorded before its effects
            self._signal(worker, fault, duration_s)
        else:
            body = {"instance": worker.joined.instance, "fault": fault, **struck, "duration": duration_s}
            await self._command_worker(worker, body)
            self._journal.observe(said)
        log.warning("chaos_injected", worker=name, fault=fault, argument=argument, by=by)
        return done(said)

    def close(self) -> None:
        """Resume all workers that are stopped for a limited time: no other process would resume them."""
        for _, worker in list(self._stopped.values()):
            self._resume(worker)

    async def _command_worker(self, worker: Worker, body: dict[str, Any]) -> None:
        """Command a worker to simulate a fault or to heal; resume it first if it is stopped. Raise NotPossible."""
        woken = body["fault"] == "heal" and self._resume(worker)
        if woken and not worker.alive:
            return  # the actuator commands it to end, and its successor is healthy
        loop, name = asyncio.get_running_loop(), worker.joined.worker
        until = loop.time() + (WAKES_WITHIN_S if woken else 0.0)
        while True:
            try:
                return await ask(self._bus, self._journal, name, subjects.chaos(name), body)
            except Unanswered:
                if loop.time() >= until:
                    raise
            await asyncio.sleep(ASK_S / 4)

    def _signal(self, worker: Worker, fault: str, duration_s: float | None) -> None:
        """Send the signal that causes this fault. Raise NotPossible."""
        name = worker.joined.worker
        self._forget(name)
        self._processes.send(worker, SIGNALS[fault])
        if fault == "hang" and duration_s:
            timer = asyncio.get_running_loop().call_later(duration_s, partial(self._resume, worker))
            self._stopped[name] = timer, worker

    def _resume(self, worker: Worker) -> bool:
        """Resume a process that may be stopped; return whether a signal could be sent to it."""
        self._forget(worker.joined.worker)
        if shares_process(self._fleet(), worker):
            return False
        with contextlib.suppress(NotPossible):  # the process has ended meanwhile, or is on another host
            self._processes.send(worker, signal.SIGCONT)
            return True
        return False

    def _forget(self, name: str) -> None:
        if known := self._stopped.pop(name, None):
            known[0].cancel()
