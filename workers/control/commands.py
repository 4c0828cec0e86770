"""Carries out the controller's commands: drain, resume, batch, distrust, stop, retire, faults.

A command can arrive more than once, and late. A second drain command does not restart a running drain. A command for an earlier
instance of this worker is refused. A command with a deadline (stop, fault injection) is refused after that deadline, because
its sender has already been told that it failed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import structlog

from events import subjects
from events.errors import HoldfastError
from events.intrusion.control_message import foreign
from events.journal.port import JournalReports
from events.nats.bus import Answer, Body, Bus, Subscription
from events.nats.connection import when_connected
from events.observations import DrainFinished
from workers.config.settings import WorkerConfig
from workers.control.membership import FleetBeats
from workers.engines.engine import Engine
from workers.migration.trust import CONVICTED
from workers.server import WorkerServer
from workers.shutdown import DRAINING, Killed, Retired, WorkerEnd, drain

DEVICE_FAULTS = ("xid", "nvlink")
PROCESS_FAULTS = ("kill", "hang", "unhang")
# name of the fault, number of the rank or group, argument of a device fault (or 0)
FaultTarget = tuple[str, int, int]
KILL_AFTER_S = 0.05  # delay before the kill, so that the journal records the cause before its effect
DRAIN_S = 60.0  # deadline of a drain in seconds, if the command contains none

log = structlog.get_logger(__name__)


class BadRequest(HoldfastError):
    """A request to this worker is malformed."""


def number(body: Body, name: str, otherwise: float) -> float:
    """Return the number in the field `name` of a command's body, or `otherwise` if the body lacks the field.

    Raise BadRequest if the value is not a finite number of at least 0.
    """
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: expected a finite number of at least 0")
    return float(value)


def share(body: Body, name: str) -> float:
    """Return the fraction in the field `name` of a command's body.

    Raise BadRequest if the field is not a number above 0 and at most 1.
    """
    value = number(body, name, 0.0)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} = {body.get(name)!r}: expected a number above 0 and at most 1")
    return value


class Devices(Protocol):
    """The interface of a worker's GPUs and their faults, which `DeviceWatch` and `SimulatedDevices` implement.

    The fault changes that `begin` reports have the type Any here. Their real type is in the modules of `devices`, which a
    worker without devices must not import.
    """

    @property
    def named(self) -> bool: ...
    @property
    def stopped(self) -> bool: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    def start(self, within_s: float) -> None: ...
    def begin(self, say: Callable[[str, Any], None], broke: Callable[[Exception], None]) -> None: ...
    def stop(self) -> None: ...

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Inject a fault into one rank's device; return False if these devices do not support the fault."""

    def repair(self, fault: str, argument: float, rank: int) -> None:
        """End a fault that `play` has injected."""


@dataclass(eq=False)
class RehearsedFaults:
    """Injects faults for rehearsals into one worker's engine, server and devices, and ends them."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    end: WorkerEnd
    devices: Devices | None
    hung: bool = False  # whether the worker sends and handles nothing, like a process after SIGSTOP
    # timers that end the faults with a duration
    _end_timers: dict[FaultTarget, asyncio.TimerHandle] = field(default_factory=dict)
    # the faults for which the server drops all traffic
    _blackhole_causes: set[str] = field(default_factory=set)

    def stop(self) -> None:
        """Cancel the timers that would end faults. The faults themselves stay active."""
        for timer in self._end_timers.values():
            timer.cancel()
        self._end_timers.clear()

    def play(self, body: Body) -> Body | None:
        """Inject the fault that a command describes.

        The fault lasts for the command's `duration` in seconds, or until a `heal` command, which ends all faults. If a fault is
        repeated, its new duration replaces the old one. A fault of one rank also affects the ranks that compute together with
        it.

        PROCESS_FAULTS (kill, hang, unhang) are usually injected by signals to the process. A signal to a process with several
        workers would hit all of them. In such a process, this method imitates the signal's effect on this worker alone.

        Return the fault, its argument and its rank, or None if the worker is hung and does not answer. Raise BadRequest for a
        malformed body, and HoldfastError for a fault that this worker does not support or allow.
        """
        fault, argument = str(body.get("fault", "")), number(body, "argument", 0.0)
        duration_s, rank = number(body, "duration", 0.0), int(number(body, "rank", 0.0))
        if not self.config.chaos:
            raise HoldfastError(
                "this worker is configured to refuse rehearsed faults (HOLDFAST_WORKER_CHAOS)"
            )
        if self.hung and fault not in ("kill", "unhang", "heal"):
            return None
        ranks = self.engine.identity.tp * self.engine.identity.dp
        if rank >= ranks:
            raise BadRequest(f"rank = {rank}: {self.config.name} has the ranks 0 to {ranks - 1}")
        if not self._inject(fault, argument, rank):
            hint = ": it needs the devices of a simulated group (--tp 2)" if fault in DEVICE_FAULTS else ""
            raise HoldfastError(f"the {self.engine.identity.engine} engine cannot rehearse {fault!r}{hint}")
        about = {"worker": self.config.name, "instance": self.config.instance}
        log.warning("chaos", **about, fault=fault, argument=argument, rank=rank)
        self._schedule_end(fault, argument, rank, duration_s)
        return {"fault": fault, "argument": argument, "rank": rank}

    def _schedule_end(self, fault: str, argument: float, rank: int, duration_s: float) -> None:
        """Start the timer that ends a fault after `duration_s` seconds; 0 starts no timer.

        If `fault` is "heal", start no timer and cancel the timers of all faults.
        """
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
        """Return a key made of a fault and the part of the worker that it hits.

        Of two faults with equal keys, the later one replaces the earlier one.

        A fault hits a device, a rank, a group of ranks that compute together, or the whole worker, depending on its kind.
        """
        if fault in DEVICE_FAULTS:
            return fault, rank, int(argument)
        if fault in ("unhang", "hang", "blackhole"):
            return "hang" if fault == "unhang" else fault, 0, 0
        return fault, rank if fault == "slow" else rank // self.engine.identity.tp, 0

    def _end_fault(self, target: FaultTarget, fault: str, argument: float, rank: int) -> None:
        """End one fault because its duration has passed, and leave other faults active."""
        del self._end_timers[target]
        if fault == "hang":
            self._simulate_signal("unhang")
        elif fault == "blackhole":
            self._blackhole(fault, False)
        elif fault in DEVICE_FAULTS and self.devices is not None:
            self.devices.repair(fault, argument, rank)
        else:
            self.engine.heal(fault, rank)

    def _blackhole(self, fault: str, on: bool) -> None:
        """Record whether `fault` currently requires that the server drops all traffic (a blackhole).

        The server drops all traffic while at least one fault requires it.
        """
        (self._blackhole_causes.add if on else self._blackhole_causes.discard)(fault)
        connections = self.server.connections
        connections.blackhole(bool(self._blackhole_causes))

    def _inject(self, fault: str, argument: float, rank: int) -> bool:
        if fault in PROCESS_FAULTS:
            return self._simulate_signal(fault)
        if fault == "blackhole":
            self._blackhole(fault, True)
            return True
        if fault == "heal":
            self._simulate_signal("unhang")
            self._blackhole("blackhole", False)
            self.engine.chaos(fault, argument)
            if self.devices is not None:
                self.devices.play(fault, argument, rank)
            return True
        if self.devices is not None and self.devices.play(fault, argument, rank):
            return True
        return self.engine.chaos(fault, argument, rank)

    def _simulate_signal(self, fault: str) -> bool:
        """Imitate the effect of SIGKILL, SIGSTOP or SIGCONT on this worker, without affecting other workers of the process.

        If the worker does not share its process, do nothing and return False. A real signal must be sent in that case.
        """
        if not self.config.shares_process:
            return False
        if fault == "kill":
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self.end.fail, Killed())
        else:
            self.hung = fault == "hang"
            self._blackhole("hang", self.hung)
        return True


class WrongInstance(HoldfastError):
    """The request was meant for an earlier life of this worker."""


class HeardTooLate(HoldfastError):
    """The command arrived after its deadline: its sender was told that it failed."""


@dataclass(eq=False)
class WorkerCommands:
    """Receives the controller's commands for one worker and applies them to the worker's server and engine."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    journal: JournalReports
    bus: Bus | None  # None: no commands are received
    beats: FleetBeats
    end: WorkerEnd
    faults: RehearsedFaults
    foreign: int = 0  # number of messages on the worker's subjects that are not control messages
    _drain: asyncio.Task[None] | None = None
    _subscription: Subscription | None = None
    _strangers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        name = self.config.name
        self._handlers = {
            subjects.command("drain", name): self.on_drain,
            subjects.command("resume", name): self.on_resume,
            subjects.command("chaos", name): self.faults.play,
            subjects.command("retire", name): self.on_retire,
            subjects.command("stop", name): self.on_stop,
            subjects.command("distrust", name): self.on_distrust,
            subjects.command("batch", name): self.on_batch,
            subjects.beat(name): self._on_beat,
        }
        self._while_hung = (subjects.command("chaos", name), subjects.command("retire", name))
        self._log = log.bind(worker=name, instance=self.config.instance)

    async def run(self) -> None:
        """Subscribe to the controller's commands as soon as the broker is connected.

        A single subscription receives all commands, because each subscription costs a task and a queue, and a process may run
        a thousand workers.
        """
        if self.bus is not None:
            subject = subjects.live(self.config.name)
            self._subscription = await when_connected(partial(self.bus.subscribe, subject, self._on_request))

    async def close(self) -> None:
        """End the subscription to commands."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def _on_request(self, subject: str, body: Body) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(subject)
        # a hung worker handles only fault commands and the retire command, as SIGCONT and SIGKILL reach a stopped process
        if handler is None or (self.faults.hung and subject not in self._while_hung):
            return None
        if handler != self._on_beat and (why := foreign(subject.split(".")[1], self.config.name, body)):
            return self._ignore(subject, why)
        return self._in_time(handler, body) if "until" in body else handler(body)

    def _ignore(self, subject: str, why: str) -> Answer:
        """Return an error for a message that is not from a controller, such as an acknowledgement sent to this worker's subject.

        Of these messages, the 1st, 2nd, 4th, 8th and so on are logged.
        """
        self.foreign += 1
        if self.foreign.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th ...
            log.error("foreign_control_message", subject=subject, why=why, times=self.foreign)
        return {"error": f"not a control message: {why}"}

    async def _in_time(self, handler: Callable[[Body], Answer], body: Body) -> Answer:
        """Handle a command that has a deadline: `until` in its body, an ISO timestamp by the journal's clock.

        Raise HeardTooLate after the deadline, and JournalUnavailable if the journal's clock cannot be read.
        """
        if (await self.journal.end()).at > datetime.fromisoformat(str(body["until"])):
            raise HeardTooLate
        return handler(body)

    def stop(self) -> None:
        """Cancel a running drain and all fault timers, because the worker is ending."""
        if self._drain is not None:
            self._drain.cancel()
        self.faults.stop()

    def on_drain(self, body: Body) -> Body:
        """Start a drain unless the worker is already draining. The answer contains the number of users' open streams."""
        self._check_instance(body)
        if not self.server.drain.draining:
            deadline_s = number(body, "deadline_s", DRAIN_S)
            self.server.refuse(DRAINING)
            self._drain = asyncio.ensure_future(self._drain_until(deadline_s))
        return {"draining": True, "in_flight": self.server.in_flight}

    async def _drain_until(self, deadline_s: float) -> None:
        self._log.info("drain_began", deadline_s=deadline_s, in_flight=self.server.in_flight)
        await self.beats.beat()
        drained = await drain(self.server, DRAINING, deadline_s)
        self.journal.observe(
            DrainFinished(worker=self.config.name, instance=self.config.instance, **asdict(drained))
        )
        self._log.info("drain_finished", **asdict(drained))

    def on_resume(self, body: Body) -> Body:
        """Cancel a drain, so that the worker accepts requests again. A shutdown is not cancelled."""
        self._check_instance(body)
        if self.server.drain.refusal is DRAINING:
            if self._drain is not None:
                self._drain.cancel()
            self.server.refuse(None)
            self._log.info("resumed")
        return {"draining": self.server.drain.draining, "in_flight": self.server.in_flight}

    def on_retire(self, body: Body) -> Body:
        """End this worker, because the fleet considers this instance dead and only a new instance can rejoin."""
        self._check_instance(body)
        self.end.fail(Retired())
        return {"retired": True}

    def on_stop(self, body: Body) -> Body:
        """Shut down gracefully, as on SIGTERM, because an operator restarts this worker."""
        self._check_instance(body)
        self.end.stop_requested.set()
        return {"stopping": True, "in_flight": self.server.in_flight}

    def on_distrust(self, body: Body) -> Body:
        """Stop shipping KV caches and reusing cached blocks, because the fleet has detected wrong answers of this worker.

        If the body has no `reason`, the worker is trusted again, and blocks that it computes afterwards may be shipped and
        reused.
        """
        self._check_instance(body)
        trust, output = self.server.moves.trust, self.server.output
        reason = str(body.get("reason") or "")
        if bool(reason) is not (CONVICTED in trust.doubts):
            self.engine.trust(not reason)
        if reason:
            output.distrust(CONVICTED, f"the source is convicted: {reason}")
        else:
            trust.regain(CONVICTED)
        return {"convicted": CONVICTED in trust.doubts}

    def on_batch(self, body: Body) -> Body:
        """Limit the engine's batch to a fraction of its maximum size: the field `share` of the command's body.

        The controller requests this when the model is degraded. A fraction of 1 removes the limit. Requests that run already are
        not stopped. Raise BadRequest for an invalid fraction.
        """
        self._check_instance(body)
        batch_share = share(body, "share")
        if batch_share != self.beats.batch_share:
            self.engine.limit_batch(batch_share)
            self._log.info("batch_limited", share=batch_share)
        self.beats.batch_share = batch_share
        return {"batch": batch_share}

    def _check_instance(self, body: Body) -> None:
        instance = body.get("instance")
        if instance not in (None, self.config.instance):
            raise WrongInstance(
                f"{instance} is gone; worker {self.config.name} is {self.config.instance} now"
            )

    def _on_beat(self, body: Body) -> None:
        """Log an error, once per instance, if another instance sends heartbeats with this worker's name.

        The fleet accepts only the newer of two workers with one name, so the operator has to rename one of them.
        """
        other = str(body.get("instance"))
        if other != self.config.instance and other not in self._strangers:
            self._strangers.add(other)
            advice = "two live workers share this name; give each its own"
            self._log.error("name_taken", other=other, advice=advice)
