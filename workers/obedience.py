"""What the controller asks of a worker: to drain, to come back, to play a fault.

Requests may be repeated and may be late: a drain that runs is not begun again, and one that was meant for an earlier life
of this worker is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import structlog

from events.errors import HoldfastError
from events.journal.port import Journal
from events.observations import DrainFinished
from workers.engines.engine import Engine
from workers.server import Server
from workers.shutdown import DRAINING, drain

if TYPE_CHECKING:
    from workers.devices.report import Devices

CONVICTED = "convicted"  # a doubt of `Trust`
DEVICE_FAULTS = ("xid", "nvlink")
OF_A_PROCESS = ("kill", "hang", "unhang")
Struck = tuple[str, int, int]  # a fault, where, and which of a device's
KILL_AFTER_S = 0.05  # whoever asked for it has said so by then: causes stand before their effects
DRAIN_S = 60.0  # where the request names no deadline

log = structlog.get_logger(__name__)


class BadRequest(HoldfastError):
    """A request to this worker makes no sense."""


class WrongInstance(HoldfastError):
    """This worker has another life now; the request was meant for an earlier one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where and as whom a worker serves."""

    name: str
    instance: str
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    nvlink_domain: str = ""
    rail: str = ""
    kv_transport: str = "sockets"
    grace_s: float = 60.0  # for a graceful shutdown, cleanup not included
    graceful_shutdown: bool = True  # such a shutdown waits for streams that decode, too
    migration_limit: int | None = None
    chaos: bool = True
    shares_process: bool = False  # with other workers: what ends this one must not end the process
    computes_on_gpus: bool = True  # itself, not only a server behind it: it ends with a GPU that dies


class Obedience:
    """Does what is asked, through the server and the engine."""

    def __init__(
        self,
        place: Place,
        engine: Engine,
        server: Server,
        journal: Journal,
        say_beat: Callable[[], Awaitable[None]],
        retire: Callable[[], None],
        stop: Callable[[], None],
        kill: Callable[[], None],
        devices: "Devices | None" = None,
    ) -> None:
        self._place = place
        self._engine = engine
        self._server = server
        self._journal = journal
        self._say_beat = say_beat
        self._retire = retire
        self._stop = stop
        self._kill = kill
        self.hung = False  # a rehearsal lets it say and obey nothing, like a process that was stopped
        self._devices = devices
        self._drain: asyncio.Task[None] | None = None
        self._heals: dict[Struck, asyncio.TimerHandle] = {}  # of faults with a duration
        self._swallows: set[str] = set()  # the faults for which the server swallows everything
        self._log = log.bind(worker=place.name, instance=place.instance)

    def stop(self) -> None:
        """Leave a drain to whoever ends the worker now."""
        if self._drain is not None:
            self._drain.cancel()
        self._heal_none()

    def _heal_none(self) -> None:
        for timer in self._heals.values():
            timer.cancel()
        self._heals.clear()

    def on_drain(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin to drain, or say how far it has got. Repeating the request changes nothing."""
        self._check_instance(body)
        if not self._server.draining:
            deadline_s = _number(body, "deadline_s", DRAIN_S)
            self._server.refuse(DRAINING)
            self._drain = asyncio.ensure_future(self._drain_until(deadline_s))
        return {"draining": True, "in_flight": self._server.in_flight}

    async def _drain_until(self, deadline_s: float) -> None:
        self._log.info("drain_began", deadline_s=deadline_s, in_flight=self._server.in_flight)
        await self._say_beat()
        drained = await drain(self._server, DRAINING, deadline_s)
        self._journal.observe(
            DrainFinished(worker=self._place.name, instance=self._place.instance, **asdict(drained))
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
        self._retire()
        return {"retired": True}

    def on_stop(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Shut down in good order, as at SIGTERM: an operator restarts this worker."""
        self._check_instance(body)
        self._stop()
        return {"stopping": True, "in_flight": self._server.in_flight}

    def on_distrust(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send no KV cache to anybody, and use none of what was computed before: the fleet has convicted this worker of
        wrong answers. Without a reason: it may again, for what it computes from now on."""
        self._check_instance(body)
        trust, reason = self._server.moves.trust, str(body.get("reason") or "")
        if bool(reason) is not (CONVICTED in trust.doubts):
            self._engine.trust(not reason)
        if reason:
            trust.lose(CONVICTED, f"the source is convicted: {reason}")
        else:
            trust.regain(CONVICTED)
        return {"convicted": CONVICTED in trust.doubts}

    def _check_instance(self, body: Mapping[str, Any]) -> None:
        wanted = body.get("instance")
        if wanted not in (None, self._place.instance):
            raise WrongInstance(f"{wanted} is gone; worker {self._place.name} is {self._place.instance} now")

    def on_chaos(self, subject: str, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play a fault until it is healed, or for `duration` seconds. One rank's failure is the whole group's.

        Each fault has its own duration, whatever else is played; the same one again takes the place of the first. `heal`
        ends all of them.
        What elsewhere is a signal to the process (`OF_A_PROCESS`) is obeyed by one that shares its process with others.
        """
        fault, argument = str(body.get("fault", "")), _number(body, "argument", 0.0)
        duration_s, rank = _number(body, "duration", 0.0), int(_number(body, "rank", 0.0))
        if not self._place.chaos:
            raise HoldfastError("this worker was told to refuse rehearsed faults (HOLDFAST_WORKER_CHAOS)")
        if self.hung and fault not in ("kill", "unhang"):
            return None
        ranks = self._engine.identity.tp * self._engine.identity.dp
        if rank >= ranks:
            raise BadRequest(f"rank = {rank}: {self._place.name} has the ranks 0 to {ranks - 1}")
        if not self._inject(fault, argument, rank):
            needs = ": it strikes a device of a simulated group (--tp 2)" if fault in DEVICE_FAULTS else ""
            raise HoldfastError(f"the {self._engine.identity.engine} engine cannot play {fault!r}{needs}")
        self._log.warning("chaos", fault=fault, argument=argument, rank=rank)
        self._time(fault, argument, rank, duration_s)
        return {"fault": fault, "argument": argument, "rank": rank}

    def _time(self, fault: str, argument: float, rank: int, duration_s: float) -> None:
        """See to the end of a fault that has just begun."""
        if fault == "heal":
            self._heal_none()
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
        if not self._place.shares_process:
            return False
        if fault == "kill":
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self._kill)
        else:
            self.hung = fault == "hang"
            self._swallow("hang", self.hung)
        return True


def _number(body: Mapping[str, Any], name: str, otherwise: float) -> float:
    """Return a number of a request's body. Raise BadRequest if it is none, or below zero."""
    value = body.get(name)
    if value is None:
        return otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise BadRequest(f"{name} = {value!r}: a number from 0 up is wanted")
    return float(value)
