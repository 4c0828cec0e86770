"""Which rehearsed faults does a worker play, and until when?"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import structlog

from events.errors import HoldfastError
from workers.config.worker import WorkerConfig
from workers.control.body import BadRequest, number
from workers.engines.engine import Engine
from workers.server import WorkerServer

DEVICE_FAULTS = ("xid", "nvlink")
OF_A_PROCESS = ("kill", "hang", "unhang")
Struck = tuple[str, int, int]  # a fault, where, and which of a device's
KILL_AFTER_S = 0.05  # whoever asked for it has said so by then: causes stand before their effects

log = structlog.get_logger(__name__)


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
        kill: Callable[[], None],
        devices: BreakableDevices | None = None,
    ) -> None:
        """`kill` ends a worker that shares its process with others, without a word."""
        self._config = config
        self._engine = engine
        self._server = server
        self._kill = kill
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
            asyncio.get_running_loop().call_later(KILL_AFTER_S, self._kill)
        else:
            self.hung = fault == "hang"
            self._swallow("hang", self.hung)
        return True
