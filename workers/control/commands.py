"""A worker's commands: drain, resume, batch, distrust, stop, retire and rehearsed faults.

Requests may be repeated and may be late. A running drain is not started again, and a request for an earlier instance of this
worker is refused. A command to stop or to inject a fault is also refused if a hung worker receives it after its deadline: its
sender has already received a timeout.
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
from events.journal.port import Journal
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
FaultTarget = tuple[str, int, int]  # fault, rank or group, and the argument of a device fault (0 for others)
KILL_AFTER_S = 0.05  # delay before the kill, so that the journal records the cause before its effect
DRAIN_S = 60.0  # if the request has no deadline

log = structlog.get_logger(__name__)


class BadRequest(HoldfastError):
    """A request to this worker is malformed."""


def number(body: Body, name: str, otherwise: float) -> float:
    """Return a number of a request's body. Raise BadRequest if it is not a finite number from 0 up."""
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: expected a finite number of at least 0")
    return float(value)


def share(body: Body, name: str) -> float:
    """Return a share of a request's body, above 0 and at most 1. Raise BadRequest if it is none."""
    value = number(body, name, 0.0)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} = {body.get(name)!r}: expected a number above 0 and at most 1")
    return value


class Devices(Protocol):
    """The devices of one worker and their faults: a `DeviceWatch`, or `SimulatedDevices`.

    Declared here with untyped reported values, so that a single simulated rank avoids the imports.
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
        """Simulate a fault of one rank's device; return False if that is not possible."""
        ...

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """End a simulated fault."""


@dataclass(eq=False)
class RehearsedFaults:
    """Rehearses faults of one worker, through its engine, its server and its devices."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    end: WorkerEnd
    devices: Devices | None
    hung: bool = False  # the worker sends and handles nothing, like a stopped process
    _end_timers: dict[FaultTarget, asyncio.TimerHandle] = field(
        default_factory=dict
    )  # of faults with a duration
    _blackhole_causes: set[str] = field(
        default_factory=set
    )  # the faults for which the server drops all traffic

    def stop(self) -> None:
        """Cancel all timers that would end a fault."""
        for timer in self._end_timers.values():
            timer.cancel()
        self._end_timers.clear()

    def play(self, body: Body) -> Body | None:
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
        return fault, rank if fault == "slow" else rank // self.engine.identity.tp, 0

    def _end_fault(self, target: FaultTarget, fault: str, argument: float, rank: int) -> None:
        """End one fault after its duration. Others stay."""
        del self._end_timers[target]
        if fault == "hang":
            self._simulate_signal("unhang")
        elif fault == "blackhole":
            self._blackhole(fault, False)
        elif fault in DEVICE_FAULTS and self.devices is not None:
            self.devices.mend(fault, argument, rank)
        else:
            self.engine.heal(fault, rank)

    def _blackhole(self, fault: str, on: bool) -> None:
        """Make the server drop all traffic as long as any fault requires it."""
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
        """Apply the effect of a signal to this worker alone; return False if the worker does not share its process."""
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
    """Subscribes to the controller's commands for one worker, and carries them out, through the server and the engine."""

    config: WorkerConfig
    engine: Engine
    server: WorkerServer
    journal: Journal
    bus: Bus | None  # without a bus there are no commands
    beats: FleetBeats
    end: WorkerEnd
    faults: RehearsedFaults
    foreign: int = 0  # number of messages on its subjects that are not control messages
    _drain: asyncio.Task[None] | None = None
    _subscription: Subscription | None = None
    _strangers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        name = self.config.name
        self._handlers = {
            subjects.drain(name): self.on_drain,
            subjects.resume(name): self.on_resume,
            subjects.chaos(name): self.faults.play,
            subjects.retire(name): self.on_retire,
            subjects.stop(name): self.on_stop,
            subjects.distrust(name): self.on_distrust,
            subjects.batch(name): self.on_batch,
            subjects.beat(name): self._on_beat,
        }
        self._while_hung = (subjects.chaos(name), subjects.retire(name))
        self._log = log.bind(worker=name, instance=self.config.instance)

    async def run(self) -> None:
        """Subscribe to the controller's requests, as soon as the broker is connected.

        One subscription receives all of them: each costs a task and a queue, and a process may have a thousand workers.
        """
        if self.bus is not None:
            subject = subjects.live(self.config.name)
            self._subscription = await when_connected(partial(self.bus.subscribe, subject, self._on_request))

    async def close(self) -> None:
        """Unsubscribe."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def _on_request(self, subject: str, body: Body) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(subject)
        # a hung worker handles only faults, and the command to retire, which ends it as SIGKILL ends a stopped process
        if handler is None or (self.faults.hung and subject not in self._while_hung):
            return None
        if handler != self._on_beat and (why := foreign(subject.split(".")[1], self.config.name, body)):
            return self._ignore(subject, why)
        return self._in_time(handler, body) if "until" in body else handler(body)

    def _ignore(self, subject: str, why: str) -> Answer:
        """Log a body that no controller sent, for example an acknowledgement for another process."""
        self.foreign += 1
        if self.foreign.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th ...
            log.error("foreign_control_message", subject=subject, why=why, times=self.foreign)
        return {"error": f"not a control message: {why}"}

    async def _in_time(self, handler: Callable[[Body], Answer], body: Body) -> Answer:
        """Handle a request with a deadline, an ISO timestamp by the clock that stamps the journal.

        Raise HeardTooLate after the deadline, and JournalUnavailable if that clock cannot be read.
        """
        if (await self.journal.end()).at > datetime.fromisoformat(str(body["until"])):
            raise HeardTooLate
        return handler(body)

    def stop(self) -> None:
        """Cancel a running drain and all fault timers: the worker is ending now."""
        if self._drain is not None:
            self._drain.cancel()
        self.faults.stop()

    def on_drain(self, body: Body) -> Body:
        """Start a drain, or return its progress. Repeating the request changes nothing."""
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
        """Accept requests again, unless the process is shutting down."""
        self._check_instance(body)
        if self.server.drain.refusal is DRAINING:
            if self._drain is not None:
                self._drain.cancel()
            self.server.refuse(None)
            self._log.info("resumed")
        return {"draining": self.server.drain.draining, "in_flight": self.server.in_flight}

    def on_retire(self, body: Body) -> Body:
        """End this process: the fleet considers this instance dead, and only a new one can rejoin."""
        self._check_instance(body)
        self.end.fail(Retired())
        return {"retired": True}

    def on_stop(self, body: Body) -> Body:
        """Shut down gracefully, as on SIGTERM: an operator restarts this worker."""
        self._check_instance(body)
        self.end.stop_requested.set()
        return {"stopping": True, "in_flight": self.server.in_flight}

    def on_distrust(self, body: Body) -> Body:
        """Stop shipping KV caches, and reuse no cached blocks: the fleet convicted this worker of wrong answers.

        Without a reason, trust the worker again: blocks computed from now on may be shipped and reused.
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
        """Run at most a share of the batch at once, as set by the model's degradation level; 1: all of it.

        Running requests are not stopped. Raise BadRequest for an invalid share.
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
        """Detect another process under this name: the fleet believes the newer one, and the operator should know."""
        other = str(body.get("instance"))
        if other != self.config.instance and other not in self._strangers:
            self._strangers.add(other)
            advice = "two live workers share this name; give each its own"
            self._log.error("name_taken", other=other, advice=advice)
