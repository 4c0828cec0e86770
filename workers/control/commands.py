"""Carries out a worker's commands: drain, resume, batch, distrust, stop, retire and rehearsed faults.

Requests may be repeated and may be late. A running drain is not started again, and a request for an earlier instance of this
worker is refused. A command to stop or to inject a fault is also refused if a hung worker receives it after its deadline: its
sender has already received a timeout.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any, Protocol

import structlog

from events import subjects
from events.errors import HoldfastError
from events.intrusion.control_message import foreign
from events.journal.port import Journal
from events.nats.bus import Answer, Bus, Handler, Subscription
from events.nats.connection import DISCONNECTED
from events.observations import DrainFinished
from workers.config.settings import WorkerConfig
from workers.control.membership import FleetBeats
from workers.engines.engine import Engine
from workers.migration.trust import CONVICTED
from workers.server import WorkerServer
from workers.shutdown import DRAINING, Killed, Retired, WorkerEnd, drain

DEVICE_FAULTS = ("xid", "nvlink")
PROCESS_FAULTS = ("kill", "hang", "unhang")
FaultTarget = tuple[str, int, int]  # fault, rank or group, and the argument of a device fault (0 for others)
KILL_AFTER_S = 0.05  # delay before the kill, so that the journal records the cause before its effect
DRAIN_S = 60.0  # if the request has no deadline
LISTEN_RETRY_S = 0.2

log = structlog.get_logger(__name__)


class BadRequest(HoldfastError):
    """A request to this worker is malformed."""


def number(body: Mapping[str, Any], name: str, otherwise: float) -> float:
    """Return a number of a request's body. Raise BadRequest if it is not a finite number from 0 up."""
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: expected a finite number of at least 0")
    return float(value)


def share(body: Mapping[str, Any], name: str) -> float:
    """Return a share of a request's body, above 0 and at most 1. Raise BadRequest if it is none."""
    value = number(body, name, 0.0)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} = {body.get(name)!r}: expected a number above 0 and at most 1")
    return value


class BreakableDevices(Protocol):
    """Devices that can simulate faults."""

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Simulate a fault of one rank's device; return False if that is not possible."""
        ...

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """End a simulated fault."""


class RehearsedFaults:
    """Rehearses faults of one worker, through its engine, its server and its devices."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        server: WorkerServer,
        end: WorkerEnd,
        devices: BreakableDevices | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._server = server
        self._end = end
        self._devices = devices
        self.hung = False  # the worker sends and handles nothing, like a stopped process
        self._end_timers: dict[FaultTarget, asyncio.TimerHandle] = {}  # timers of faults with a duration
        self._blackhole_causes: set[str] = set()  # the faults for which the server drops all traffic
        self._log = log.bind(worker=config.name, instance=config.instance)

    def stop(self) -> None:
        """Cancel all timers that would end a fault."""
        for timer in self._end_timers.values():
            timer.cancel()
        self._end_timers.clear()

    def play(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Rehearse a fault until it is healed, or for `duration` seconds. A fault of one rank affects its whole group.

        Each fault has its own duration, whatever else is rehearsed; a repeated fault replaces the first. `heal` ends all of
        them.

        Faults that are otherwise a signal to the process (`PROCESS_FAULTS`) are rehearsed here only if the worker shares its
        process.

        Return the rehearsed faults; None if the worker is hung. Raise BadRequest for a malformed body, HoldfastError for a fault
        that cannot be rehearsed here.
        """
        fault, argument = str(body.get("fault", "")), number(body, "argument", 0.0)
        duration_s, rank = number(body, "duration", 0.0), int(number(body, "rank", 0.0))
        if not self._config.chaos:
            raise HoldfastError(
                "this worker is configured to refuse rehearsed faults (HOLDFAST_WORKER_CHAOS)"
            )
        if self.hung and fault not in ("kill", "unhang", "heal"):
            return None
        ranks = self._engine.identity.tp * self._engine.identity.dp
        if rank >= ranks:
            raise BadRequest(f"rank = {rank}: {self._config.name} has the ranks 0 to {ranks - 1}")
        if not self._inject(fault, argument, rank):
            hint = ": it needs the devices of a simulated group (--tp 2)" if fault in DEVICE_FAULTS else ""
            raise HoldfastError(f"the {self._engine.identity.engine} engine cannot rehearse {fault!r}{hint}")
        self._log.warning("chaos", fault=fault, argument=argument, rank=rank)
        self._schedule_end(fault, argument, rank, duration_s)
        return {"fault": fault, "argument": argument, "rank": rank}

    def _schedule_end(self, fault: str, argument: float, rank: int, duration_s: float) -> None:
        """Schedule the end of a fault that has just begun."""
        if fault == "heal":
            self.stop()
            return
        target = self._target(fault, argument, rank)
        if earlier := self._end_timers.pop(target, None):
            earlier.cancel()
        if duration_s > 0 and fault != "unhang":
            loop = asyncio.get_running_loop()
            self._end_timers[target] = loop.call_later(
                duration_s, self._end_fault, target, fault, argument, rank
            )

    def _target(self, fault: str, argument: float, rank: int) -> FaultTarget:
        """Return the target of a fault: a device, a rank, the ranks that compute together with it, or the whole worker."""
        if fault in DEVICE_FAULTS:
            return fault, rank, int(argument)
        if fault in ("unhang", "hang", "blackhole"):
            return "hang" if fault == "unhang" else fault, 0, 0
        return fault, rank if fault == "slow" else rank // self._engine.identity.tp, 0

    def _end_fault(self, target: FaultTarget, fault: str, argument: float, rank: int) -> None:
        """End one fault after its duration. Others stay."""
        del self._end_timers[target]
        if fault == "hang":
            self._simulate_signal("unhang")
        elif fault == "blackhole":
            self._blackhole(fault, False)
        elif fault in DEVICE_FAULTS and self._devices is not None:
            self._devices.mend(fault, argument, rank)
        else:
            self._engine.heal(fault, rank)

    def _blackhole(self, fault: str, on: bool) -> None:
        """Make the server drop all traffic as long as any fault requires it."""
        (self._blackhole_causes.add if on else self._blackhole_causes.discard)(fault)
        self._server.blackhole(bool(self._blackhole_causes))

    def _inject(self, fault: str, argument: float, rank: int) -> bool:
        if fault in PROCESS_FAULTS:
            return self._simulate_signal(fault)
        if fault == "blackhole":
            self._blackhole(fault, True)
            return True
        if fault == "heal":
            self._simulate_signal("unhang")
            self._blackhole("blackhole", False)
            self._engine.chaos(fault, argument)
            if self._devices is not None:
                self._devices.play(fault, argument, rank)
            return True
        if self._devices is not None and self._devices.play(fault, argument, rank):
            return True
        return self._engine.chaos(fault, argument, rank)

    def _simulate_signal(self, fault: str) -> bool:
        """Apply the effect of a signal to this worker alone; return False if the worker does not share its process."""
        if not self._config.shares_process:
            return False
        if fault == "kill":
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self._end.fail, Killed())
        else:
            self.hung = fault == "hang"
            self._blackhole("hang", self.hung)
        return True


class WrongInstance(HoldfastError):
    """The request was meant for an earlier life of this worker."""


class HeardTooLate(HoldfastError):
    """The command arrived after its deadline: its sender was told that it failed."""


class WorkerCommands:
    """Carries out the controller's commands, through the server and the engine."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        server: WorkerServer,
        journal: Journal,
        beats: FleetBeats,
        end: WorkerEnd,
        faults: RehearsedFaults,
    ) -> None:
        self._config = config
        self._engine = engine
        self._server = server
        self._journal = journal
        self._beats = beats
        self._end = end
        self._faults = faults
        self._drain: asyncio.Task[None] | None = None
        self._log = log.bind(worker=config.name, instance=config.instance)

    @property
    def by_subject(self) -> dict[str, Handler]:
        """The handler of each subject."""
        name = self._config.name
        return {
            subjects.drain(name): self.on_drain,
            subjects.resume(name): self.on_resume,
            subjects.chaos(name): self.on_chaos,
            subjects.retire(name): self.on_retire,
            subjects.stop(name): self.on_stop,
            subjects.distrust(name): self.on_distrust,
            subjects.batch(name): self.on_batch,
        }

    def handles(self, subject: str) -> bool:
        """Return whether a request on this subject is handled.

        A hung worker handles only faults, and the command to retire, which ends it as SIGKILL ends a stopped process.
        """
        name = self._config.name
        return not self._faults.hung or subject in (subjects.chaos(name), subjects.retire(name))

    async def check_time(self, until: str) -> None:
        """Raise HeardTooLate after `until`, an ISO timestamp by the clock that stamps the journal.

        Raise JournalUnavailable if that clock cannot be read.
        """
        if (await self._journal.end()).at > datetime.fromisoformat(until):
            raise HeardTooLate

    def stop(self) -> None:
        """Cancel a running drain and all fault timers: the worker is ending now."""
        if self._drain is not None:
            self._drain.cancel()
        self._faults.stop()

    def on_drain(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a drain, or return its progress. Repeating the request changes nothing."""
        self._check_instance(body)
        if not self._server.draining:
            deadline_s = number(body, "deadline_s", DRAIN_S)
            self._server.refuse(DRAINING)
            self._drain = asyncio.ensure_future(self._drain_until(deadline_s))
        return {"draining": True, "in_flight": self._server.in_flight}

    async def _drain_until(self, deadline_s: float) -> None:
        self._log.info("drain_began", deadline_s=deadline_s, in_flight=self._server.in_flight)
        await self._beats.beat()
        drained = await drain(self._server, DRAINING, deadline_s)
        self._journal.observe(
            DrainFinished(worker=self._config.name, instance=self._config.instance, **asdict(drained))
        )
        self._log.info("drain_finished", **asdict(drained))

    def on_resume(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept requests again, unless the process is shutting down."""
        self._check_instance(body)
        if self._server.refusal is DRAINING:
            if self._drain is not None:
                self._drain.cancel()
            self._server.refuse(None)
            self._log.info("resumed")
        return {"draining": self._server.draining, "in_flight": self._server.in_flight}

    def on_retire(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """End this process: the fleet considers this instance dead, and only a new one can rejoin."""
        self._check_instance(body)
        self._end.fail(Retired())
        return {"retired": True}

    def on_stop(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shut down gracefully, as on SIGTERM: an operator restarts this worker."""
        self._check_instance(body)
        self._end.stop_requested.set()
        return {"stopping": True, "in_flight": self._server.in_flight}

    def on_distrust(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stop shipping KV caches, and reuse no cached blocks: the fleet convicted this worker of wrong answers.

        Without a reason, trust the worker again: blocks computed from now on may be shipped and reused.
        """
        self._check_instance(body)
        trust, output = self._server.moves.trust, self._server.output
        reason = str(body.get("reason") or "")
        if bool(reason) is not (CONVICTED in trust.doubts):
            self._engine.trust(not reason)
        if reason:
            output.distrust(CONVICTED, f"the source is convicted: {reason}")
        else:
            trust.regain(CONVICTED)
        return {"convicted": CONVICTED in trust.doubts}

    def on_batch(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run at most a share of the batch at once, as set by the model's degradation level; 1: all of it.

        Running requests are not stopped. Raise BadRequest for an invalid share.
        """
        self._check_instance(body)
        batch_share = share(body, "share")
        if batch_share != self._beats.batch_share:
            self._engine.limit_batch(batch_share)
            self._log.info("batch_limited", share=batch_share)
        self._beats.batch_share = batch_share
        return {"batch": batch_share}

    def _check_instance(self, body: Mapping[str, Any]) -> None:
        instance = body.get("instance")
        if instance not in (None, self._config.instance):
            raise WrongInstance(
                f"{instance} is gone; worker {self._config.name} is {self._config.instance} now"
            )

    def on_chaos(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Rehearse a fault; see `RehearsedFaults.play`."""
        return self._faults.play(body)


class CommandListener:
    """One worker's subscription to all commands for it."""

    def __init__(self, config: WorkerConfig, bus: Bus | None, commands: WorkerCommands) -> None:
        """Build the listener; without a bus it never subscribes."""
        self._config = config
        self._bus = bus
        self._commands = commands
        self._handlers = {**commands.by_subject, subjects.beat(config.name): self._on_beat}
        self._subscription: Subscription | None = None
        self._strangers: set[str] = set()
        self.foreign = 0  # number of messages on its subjects that are not control messages

    async def run(self) -> None:
        """Subscribe to the controller's requests, as soon as the broker is connected.

        One subscription receives all of them: each costs a task and a queue, and a process may have a thousand workers.
        """
        while self._bus is not None and self._subscription is None:
            try:
                self._subscription = await self._bus.subscribe(
                    subjects.live(self._config.name), self._on_request
                )
            except DISCONNECTED:  # the broker is disconnected
                await asyncio.sleep(LISTEN_RETRY_S)

    async def close(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def _on_request(self, subject: str, body: Mapping[str, Any]) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(subject)
        if handler is None or not self._commands.handles(subject):
            return None
        if handler != self._on_beat and (why := foreign(subject.split(".")[1], self._config.name, body)):
            return self._ignore(subject, why)
        if "until" in body:
            return self._in_time(handler, subject, body)
        return handler(subject, body)

    def _ignore(self, subject: str, why: str) -> Answer:
        """Log a body that no controller sent, for example an acknowledgement for another process."""
        self.foreign += 1
        if self.foreign.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th ...
            log.error("foreign_control_message", subject=subject, why=why, times=self.foreign)
        return {"error": f"not a control message: {why}"}

    async def _in_time(self, handler: Handler, subject: str, body: Mapping[str, Any]) -> Answer:
        """Handle a request that has a deadline. Raise HeardTooLate."""
        await self._commands.check_time(str(body["until"]))
        answer = handler(subject, body)
        return await answer if inspect.isawaitable(answer) else answer

    def _on_beat(self, subject: str, body: Mapping[str, Any]) -> None:
        """Detect another process under this name: the fleet believes the newer one, and the operator should know."""
        other = str(body.get("instance"))
        if other != self._config.instance and other not in self._strangers:
            self._strangers.add(other)
            log.error(
                "name_taken",
                worker=self._config.name,
                instance=self._config.instance,
                other=other,
                advice="two live workers share this name; give each its own",
            )
