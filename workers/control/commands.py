"""The commands that a worker obeys: drain, resume, batch limits, distrust, stop, retire, and rehearsed faults.

Requests may be repeated and may be late: a drain that runs is not begun again, and one that was meant for an earlier life
of this worker is refused. So is one to stop or to break that arrives only after its time, at a worker that had been hung:
its sender was told that it failed.
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
from workers.config.worker import WorkerConfig
from workers.control.membership import FleetBeats
from workers.engines.engine import Engine
from workers.falls import Killed, Retired
from workers.migration.trust import CONVICTED
from workers.server import WorkerServer
from workers.shutdown import DRAINING, WorkerEnd, drain

DEVICE_FAULTS = ("xid", "nvlink")
OF_A_PROCESS = ("kill", "hang", "unhang")
Struck = tuple[str, int, int]  # a fault, where, and which of a device's
KILL_AFTER_S = 0.05  # its cause is on the journal by then, before the effect
DRAIN_S = 60.0  # where the request names no deadline
LISTEN_RETRY_S = 0.2

log = structlog.get_logger(__name__)


class BadRequest(HoldfastError):
    """A request to this worker makes no sense."""


def number(body: Mapping[str, Any], name: str, otherwise: float) -> float:
    """Return a number of a request's body. Raise BadRequest if it is none, or below zero."""
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: a number from 0 up is wanted")
    return float(value)


def share(body: Mapping[str, Any], name: str) -> float:
    """Return a share of a request's body, above 0 and not above 1. Raise BadRequest if it is none."""
    value = number(body, name, 0.0)
    if not 0 < value <= 1:
        raise BadRequest(f"{name} = {body.get(name)!r}: a number above 0 and not above 1 is wanted")
    return value


class BreakableDevices(Protocol):
    """Devices whose faults can be played, where there are such."""

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Play a fault of one rank's device; False if that cannot be played."""
        ...

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """End a fault that was played."""


class RehearsedFaults:
    """The faults that one worker plays, through its engine, its server and its devices."""

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
        self.hung = False  # it says and obeys nothing, like a process that was stopped
        self._heals: dict[Struck, asyncio.TimerHandle] = {}  # of faults with a duration
        self._swallows: set[str] = set()  # the faults for which the server swallows everything
        self._log = log.bind(worker=config.name, instance=config.instance)

    def stop(self) -> None:
        """Let no duration end anything any more."""
        for timer in self._heals.values():
            timer.cancel()
        self._heals.clear()

    def play(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play a fault until it is healed, or for `duration` seconds. One rank's failure is the whole group's.

        Each fault has its own duration, whatever else is played; the same one again takes the place of the first. `heal`
        ends all of them.
        What elsewhere is a signal to the process (`OF_A_PROCESS`) is obeyed by one that shares its process with others.
        Return what is played; None from one that is hung. Raise BadRequest for a body that makes no sense, HoldfastError for
        a fault that cannot be played here.
        """
        fault, argument = str(body.get("fault", "")), number(body, "argument", 0.0)
        duration_s, rank = number(body, "duration", 0.0), int(number(body, "rank", 0.0))
        if not self._config.chaos:
            raise HoldfastError("this worker was told to refuse rehearsed faults (HOLDFAST_WORKER_CHAOS)")
        if self.hung and fault not in ("kill", "unhang", "heal"):
            return None
        ranks = self._engine.identity.tp * self._engine.identity.dp
        if rank >= ranks:
            raise BadRequest(f"rank = {rank}: {self._config.name} has the ranks 0 to {ranks - 1}")
        if not self._inject(fault, argument, rank):
            needs = ": it strikes a device of a simulated group (--tp 2)" if fault in DEVICE_FAULTS else ""
            raise HoldfastError(f"the {self._engine.identity.engine} engine cannot play {fault!r}{needs}")
        self._log.warning("chaos", fault=fault, argument=argument, rank=rank)
        self._time(fault, argument, rank, duration_s)
        return {"fault": fault, "argument": argument, "rank": rank}

    def _time(self, fault: str, argument: float, rank: int, duration_s: float) -> None:
        """See to the end of a fault that has just begun."""
        if fault == "heal":
            self.stop()
            return
        struck = self._struck(fault, argument, rank)
        if earlier := self._heals.pop(struck, None):
            earlier.cancel()
        if duration_s > 0 and fault != "unhang":
            loop = asyncio.get_running_loop()
            self._heals[struck] = loop.call_later(duration_s, self._mend, struck, fault, argument, rank)

    def _struck(self, fault: str, argument: float, rank: int) -> Struck:
        """Return what a fault strikes: a device, a rank, the ranks that compute together with it, or the whole worker."""
        if fault in DEVICE_FAULTS:
            return fault, rank, int(argument)
        if fault in ("unhang", "hang", "blackhole"):
            return "hang" if fault == "unhang" else fault, 0, 0
        return fault, rank if fault == "slow" else rank // self._engine.identity.tp, 0

    def _mend(self, struck: Struck, fault: str, argument: float, rank: int) -> None:
        """End one fault whose time is up. Others stay."""
        del self._heals[struck]
        if fault == "hang":
            self._signalled("unhang")
        elif fault == "blackhole":
            self._swallow(fault, False)
        elif fault in DEVICE_FAULTS and self._devices is not None:
            self._devices.mend(fault, argument, rank)
        else:
            self._engine.heal(fault, rank)

    def _swallow(self, fault: str, on: bool) -> None:
        """Let the server swallow everything for as long as one fault wants it."""
        (self._swallows.add if on else self._swallows.discard)(fault)
        self._server.blackhole(bool(self._swallows))

    def _inject(self, fault: str, argument: float, rank: int) -> bool:
        if fault in OF_A_PROCESS:
            return self._signalled(fault)
        if fault == "blackhole":
            self._swallow(fault, True)
            return True
        if fault == "heal":
            self._signalled("unhang")
            self._swallow("blackhole", False)
            self._engine.chaos(fault, argument)
            if self._devices is not None:
                self._devices.play(fault, argument, rank)
            return True
        if self._devices is not None and self._devices.play(fault, argument, rank):
            return True
        return self._engine.chaos(fault, argument, rank)

    def _signalled(self, fault: str) -> bool:
        """Do to this worker alone what a signal would do to its process; False if it has one of its own."""
        if not self._config.shares_process:
            return False
        if fault == "kill":
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self._end.fail, Killed())
        else:
            self.hung = fault == "hang"
            self._swallow("hang", self.hung)
        return True


class WrongInstance(HoldfastError):
    """This worker has another life now; the request was meant for an earlier one."""


class HeardTooLate(HoldfastError):
    """The command arrived after its deadline: its sender was told that it failed."""


class WorkerCommands:
    """Does what is asked, through the server and the engine."""

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
        """What is done at a request on each subject."""
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

    def heeds(self, subject: str) -> bool:
        """Whether a request on this subject is answered: one that is hung hears of nothing but faults, and of its death,
        which ends it as SIGKILL ends a process that is stopped."""
        name = self._config.name
        return not self._faults.hung or subject in (subjects.chaos(name), subjects.retire(name))

    async def check_time(self, until: str) -> None:
        """Raise HeardTooLate after `until`, an ISO instant by the clock that stamps the journal; JournalUnavailable if that
        cannot be asked."""
        if (await self._journal.end()).at > datetime.fromisoformat(until):
            raise HeardTooLate

    def stop(self) -> None:
        """Leave a drain to what ends the worker now."""
        if self._drain is not None:
            self._drain.cancel()
        self._faults.stop()

    def on_drain(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin to drain, or say how far it has got. Repeating the request changes nothing."""
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
        """Take requests again, unless the process is on its way out."""
        self._check_instance(body)
        if self._server.refusal is DRAINING:
            if self._drain is not None:
                self._drain.cancel()
            self._server.refuse(None)
            self._log.info("resumed")
        return {"draining": self._server.draining, "in_flight": self._server.in_flight}

    def on_retire(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """End this process: the fleet holds this instance for dead, and only a new one lives."""
        self._check_instance(body)
        self._end.fail(Retired())
        return {"retired": True}

    def on_stop(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shut down in good order, as at SIGTERM: an operator restarts this worker."""
        self._check_instance(body)
        self._end.told.set()
        return {"stopping": True, "in_flight": self._server.in_flight}

    def on_distrust(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send no KV cache anywhere, and use none of what was computed before: the fleet has convicted this worker of
        wrong answers. Without a reason: it may again, for what it computes from now on."""
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
        """Run no more than a share of the batch at once, as the model's degradation level has it; 1: all of it. What runs is not
        stopped. Raise BadRequest of a share that is none."""
        self._check_instance(body)
        wanted = share(body, "share")
        if wanted != self._beats.batch_share:
            self._engine.limit_batch(wanted)
            self._log.info("batch_limited", share=wanted)
        self._beats.batch_share = wanted
        return {"batch": wanted}

    def _check_instance(self, body: Mapping[str, Any]) -> None:
        wanted = body.get("instance")
        if wanted not in (None, self._config.instance):
            raise WrongInstance(
                f"{wanted} is gone; worker {self._config.name} is {self._config.instance} now"
            )

    def on_chaos(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play a fault, as `RehearsedFaults.play` says."""
        return self._faults.play(body)


class CommandListener:
    """One worker's subscription to all that is asked of it."""

    def __init__(self, config: WorkerConfig, bus: Bus | None, commands: WorkerCommands) -> None:
        """Hear nothing yet; without a bus, never."""
        self._config = config
        self._bus = bus
        self._commands = commands
        self._handlers = {**commands.by_subject, subjects.beat(config.name): self._on_beat}
        self._subscription: Subscription | None = None
        self._strangers: set[str] = set()
        self.foreign = 0  # messages on its subjects that are no control messages

    async def run(self) -> None:
        """Hear the controller's requests, now or as soon as there is a broker to hear them from. One subscription has them
        all: each costs a task and a queue, and a process may have a thousand workers."""
        while self._bus is not None and self._subscription is None:
            try:
                self._subscription = await self._bus.subscribe(subjects.live(self._config.name), self._heard)
            except DISCONNECTED:  # it is on its way out or back
                await asyncio.sleep(LISTEN_RETRY_S)

    async def close(self) -> None:
        """Hear no more."""
        if self._subscription is not None:
            await self._subscription.cancel()

    def _heard(self, subject: str, body: Mapping[str, Any]) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(subject)
        if handler is None or not self._commands.heeds(subject):
            return None
        if handler != self._on_beat and (why := foreign(subject.split(".")[1], self._config.name, body)):
            return self._ignore(subject, why)
        if "until" in body:
            return self._in_time(handler, subject, body)
        return handler(subject, body)

    def _ignore(self, subject: str, why: str) -> Answer:
        """Note a body that no controller has sent: an acknowledgement for another process, for one."""
        self.foreign += 1
        if self.foreign.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            log.error("foreign_control_message", subject=subject, why=why, times=self.foreign)
        return {"error": f"this is no control message: {why}"}

    async def _in_time(self, handler: Handler, subject: str, body: Mapping[str, Any]) -> Answer:
        """Do what may be done only soon. Raise HeardTooLate."""
        await self._commands.check_time(str(body["until"]))
        answer = handler(subject, body)
        return await answer if inspect.isawaitable(answer) else answer

    def _on_beat(self, subject: str, body: Mapping[str, Any]) -> None:
        """Notice another process under our name: the fleet believes the newer one, the operator should know."""
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
