"""The device watch: which faults do this worker's GPUs have, and when are they over?

    open ── no driver ──▶ off, said once
      └─▶ find the worker's GPUs ──▶ (the worker has joined) ─┬─▶ the reader: everything but Xids, every second
                                                              └─▶ the listener: waits for Xids

Both are threads of their own: a call of the driver's may hang for seconds while a GPU dies, and the loop that serves
must not. Nor may an Xid wait for such a call: a driver that has just said one answers everything else slowly.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import structlog

from events.errors import HoldfastError
from workers.devices import mapping
from workers.devices.faults import DeviceReading, Say
from workers.devices.memory import Memory
from workers.devices.nvml import NoDriver, Nvml
from workers.devices.standing import StandingFaults
from workers.devices.throttle import ThrottlePolicy
from workers.devices.xids import XidListener

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How often to look."""

    wait_ms: int = 200  # for an Xid, at most: the watch can be stopped in between
    read_s: float = 1.0
    reopen_s: float = 10.0  # a lost GPU is looked for so often
    look_s: float = 10.0  # and so often GPUs on which the worker's processes have begun to compute
    throttle: ThrottlePolicy = field(default_factory=ThrottlePolicy)


class DeviceWatch:
    """Watches the GPUs of one worker, from `begin` on, until `stop`. `gpus`: as told; empty: those that `users` use.

    `users` returns the processes whose GPUs are meant: by default this one and all below it. `memory` keeps what stands
    for the watch that comes after this one. `driver` opens a session with the driver.
    """

    def __init__(
        self,
        gpus: tuple[str, ...],
        policy: WatchPolicy | None = None,
        users: Callable[[], Collection[int]] = mapping.own_pids,
        memory: Memory | None = None,
        driver: Callable[[], Nvml] = Nvml,
    ) -> None:
        self.off = ""  # why nothing is watched
        self._told = gpus
        self._policy = policy or WatchPolicy()
        self._users = users
        self._driver = driver
        self._broke: Callable[[Exception], None] | None = None
        self._ready = threading.Event()
        self._begun = threading.Event()
        self._stopped = threading.Event()
        self._awake = threading.Event()  # a flag: the reader is wanted before its time
        self._faults = StandingFaults(self._policy.throttle, memory)
        self._xids = XidListener(self._policy.wait_ms, self._stopped, self._take_xid, self._awake.set)
        self._reader = self._thread("device-watch", self._read)
        self._refused: HoldfastError | None = None
        self._reopened_at = 0.0
        self._looked_at = 0.0

    @property
    def named(self) -> bool:
        """Whether it was told which GPUs; otherwise they are found once something computes on them."""
        return bool(self._told)

    @property
    def stopped(self) -> bool:
        """Whether what it says does not matter any more."""
        return self._stopped.is_set()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the worker's GPUs, as far as they are known."""
        return self._faults.gpus

    @property
    def hears(self) -> frozenset[str]:
        """The GPUs whose Xids it waits for: those that are there."""
        return self._xids.gpus

    def start(self, within_s: float) -> None:
        """Open the driver and find the worker's GPUs; return when that is done, or after `within_s` seconds.

        Raise UnknownGpus if it was told of some that are not there.
        """
        self._reader.start()
        self._ready.wait(within_s)
        if self._refused is not None:
            raise self._refused

    def begin(self, say: Say, broke: Callable[[Exception], None] | None = None) -> None:
        """Say from now on what is wrong, beginning with what is wrong already. `broke` is told if the watch itself fails."""
        self._faults.begin(say)
        self._broke = broke
        self._begun.set()

    def stop(self) -> None:
        """Watch no longer. The threads end within their next wait; nobody waits for them, because the driver may hang."""
        self._stopped.set()
        self._begun.set()
        self._awake.set()
        self._xids.stop()

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Real devices break by themselves."""
        return False

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """Nothing was played."""

    def join(self, within_s: float) -> None:
        """Wait for the end of the threads."""
        self._reader.join(within_s)

    # --- the threads

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Do a thread's work. That it failed must be said: nobody would miss what it no longer says."""
        try:
            work()
        except Exception as error:
            self._begun.wait()
            if self._broke is not None and not self.stopped:
                self._broke(error)

    def _read(self) -> None:
        try:
            nvml = self._open()
        finally:
            self._ready.set()
        if nvml is None:
            return
        self._begun.wait()
        self._thread("device-xids", lambda: self._xids.run(nvml)).start()
        while not self._stopped.is_set():
            self._awake.clear()
            self._read_all(nvml)
            self._faults.keep()
            self._awake.wait(self._policy.read_s)
        self._faults.keep()
        with self._xids.kept_out() as out:
            if out:
                nvml.close()

    def _open(self) -> Nvml | None:
        """Open the driver and find the worker's GPUs; None if nothing can be watched."""
        self._faults.recall()
        try:
            nvml = self._driver()
            self._add(nvml, mapping.told(self._told, nvml.devices) if self._told else self._used(nvml))
        except NoDriver as reason:
            self.off = str(reason)
            log.log(logging.WARNING if self._told else logging.INFO, "device_watch_off", reason=self.off)
            return None
        except mapping.UnknownGpus as error:
            self._refused = error
            return None
        self._report(nvml)
        return nvml

    def _used(self, nvml: Nvml) -> tuple[str, ...]:
        """Return the GPUs, not watched yet, on which the worker's processes compute."""
        self._looked_at = time.monotonic()
        users = {d.uuid: nvml.pids(d.uuid) for d in nvml.devices if d.uuid not in self.gpus}
        return mapping.used(users, self._users()) if any(users.values()) else ()

    def _add(self, nvml: Nvml, uuids: Collection[str]) -> bool:
        """Watch these GPUs too; False if the driver hangs."""
        with self._xids.kept_out() as out:
            if out:
                self._faults.add(uuids)
                self._xids.ask(nvml, self.gpus)
        return out

    def _report(self, nvml: Nvml) -> None:
        """Say once what is watched, and which GPUs of this host are not this worker's."""
        others = [device.uuid for device in nvml.devices if device.uuid not in self.gpus]
        log.info("device_watch_on", gpus=list(self.gpus), unmapped=others, xids=self._xids.listens)

    def _take_xid(self, uuid: str, code: int) -> None:
        self._faults.take_xid(uuid, code)
        self._awake.set()  # what else the GPU says of it is wanted now

    # --- the reader

    def _read_all(self, nvml: Nvml) -> None:
        looks = not self.gpus or time.monotonic() - self._looked_at >= self._policy.look_s
        if not self._told and looks and (used := self._used(nvml)) and self._add(nvml, used):
            self._report(nvml)
        readings = {uuid: nvml.read(uuid) for uuid in self.gpus}
        there = frozenset(uuid for uuid, reading in readings.items() if not reading.lost)
        if there - self._xids.gpus:  # whoever is told that it is back may count on its being heard
            self._listen_again(nvml, there)
        for uuid, reading in readings.items():
            peers = _peers(nvml, uuid, readings) if reading.throttled else ()
            self._faults.take_reading(uuid, reading, peers)
        if there != self._xids.gpus:
            self._listen_again(nvml, there)
            self._reopened_at = time.monotonic()  # to reopen is to be deaf, and it is not back at once
        late = time.monotonic() - self._reopened_at >= self._policy.reopen_s
        if (self._xids.deafened or len(there) < len(readings)) and late:
            self._reopened_at = time.monotonic()
            self._reopen(nvml)

    def _listen_again(self, nvml: Nvml, there: frozenset[str]) -> None:
        """Go on hearing those GPUs that are there: the driver tells nothing to who waits for a lost one, too."""
        with self._xids.kept_out() as out:
            if out:
                self._xids.ask(nvml, there)

    def _reopen(self, nvml: Nvml) -> None:
        with self._xids.kept_out() as out:
            if out:  # else the driver hangs; perhaps later
                nvml.reopen()
                self._xids.ask(nvml, [uuid for uuid in self.gpus if not nvml.read(uuid).lost])


def _peers(nvml: Nvml, uuid: str, readings: dict[str, DeviceReading]) -> tuple[int, ...]:
    """Return the clocks of this host's other GPUs of the same model that work, and are not throttled themselves."""
    model = next((device.model for device in nvml.devices if device.uuid == uuid), "")
    others = [d.uuid for d in nvml.devices if d.model == model and d.uuid != uuid]
    beside = [readings[other] if other in readings else nvml.read(other) for other in others]
    return tuple(r.clock for r in beside if r.clock is not None and not r.throttled and not r.idle)
