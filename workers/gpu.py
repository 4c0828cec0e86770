"""The device watch: which faults do this worker's GPUs have, and when are they over?

    open ── no driver ──▶ off, said once
      └─▶ find the worker's GPUs ──▶ (the worker has joined) ─┬─▶ the reader: everything but Xids, every second
                                                              └─▶ the ear: waits for Xids

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
from workers.devices.faults import Change, DeviceFaults, Reading
from workers.devices.memory import Memory
from workers.devices.nvml import NoDriver, Nvml
from workers.devices.throttle import ThrottlePolicy

Say = Callable[[str, Change], None]  # (the device's UUID, what changed); called in one of the watch's threads
DRIVER_S_MAX = 5.0  # how long the ear is waited for before the session with the driver may be ended

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
    for the watch that comes after this one.
    """

    def __init__(
        self,
        gpus: tuple[str, ...],
        policy: WatchPolicy | None = None,
        users: Callable[[], Collection[int]] = mapping.own_pids,
        memory: Memory | None = None,
    ) -> None:
        self.off = ""  # why nothing is watched
        self._told = gpus
        self._policy = policy or WatchPolicy()
        self._users = users
        self._memory = memory
        self._stood: dict[
            str, list[Change]
        ] = {}  # against GPUs that are not watched yet, when the last watch ended
        self._kept = True  # the memory has all that stands
        self._say: Say | None = None
        self._broke: Callable[[Exception], None] | None = None
        self._ready = threading.Event()
        self._begun = threading.Event()
        self._stopped = threading.Event()
        self._awake = threading.Event()  # a flag: the reader is wanted before its time
        self._reader = self._thread("device-watch", self._read)
        self._ear = self._thread("device-xids", self._listen)
        self._faults: dict[str, DeviceFaults] = {}  # of the worker's GPUs, by UUID
        self._absorbing = threading.Lock()  # both threads tell of the same GPUs
        self._nvml: Nvml | None = None
        self._may_hear = threading.Event()  # a flag: the session is open, and some of its GPUs can be heard
        self._hearing = threading.Lock()  # held while the ear is in the driver
        self._deafened = False  # it heard Xids, until the driver refused
        self._heard: frozenset[str] = frozenset()  # the GPUs whose Xids were asked for
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
        return tuple(self._faults)

    @property
    def hears(self) -> frozenset[str]:
        """The GPUs whose Xids it waits for: those that are there."""
        return self._heard

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
        self._say, self._broke = say, broke
        self._begun.set()

    def stop(self) -> None:
        """Watch no longer. The threads end within their next wait; nobody waits for them, because the driver may hang."""
        self._stopped.set()
        self._begun.set()
        self._awake.set()
        self._may_hear.set()

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
            nvml = self._nvml = self._open()
        finally:
            self._ready.set()
        if nvml is None:
            return
        self._begun.wait()
        self._ear.start()
        while not self._stopped.is_set():
            self._awake.clear()
            self._read_all(nvml)
            self._keep()
            self._awake.wait(self._policy.read_s)
        self._keep()
        if self._silenced():
            nvml.close()
            self._hearing.release()

    def _open(self) -> Nvml | None:
        """Open the driver and find the worker's GPUs; None if nothing can be watched."""
        if self._memory is not None:
            self._stood = self._memory.recall()
            self._kept = not self._stood
        try:
            nvml = Nvml()
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
        users = {d.uuid: nvml.pids(d.uuid) for d in nvml.devices if d.uuid not in self._faults}
        return mapping.used(users, self._users()) if any(users.values()) else ()

    def _add(self, nvml: Nvml, uuids: Collection[str]) -> bool:
        """Watch these GPUs too; False if the driver hangs."""
        if not self._silenced():
            return False
        try:
            with self._absorbing:
                for uuid in uuids:
                    faults = self._faults[uuid] = DeviceFaults(policy=self._policy.throttle)
                    faults.restore(self._stood.pop(uuid, ()), time.monotonic())
                for faults in self._faults.values():
                    faults.linked = len(self._faults) > 1
            self._listen_to(nvml, self.gpus)
        finally:
            self._hearing.release()
        return True

    def _report(self, nvml: Nvml) -> None:
        """Say once what is watched, and which GPUs of this host are not this worker's."""
        others = [device.uuid for device in nvml.devices if device.uuid not in self._faults]
        log.info("device_watch_on", gpus=list(self.gpus), unmapped=others, xids=self._may_hear.is_set())

    # --- the ear

    def _listen(self) -> None:
        """Wait for Xids, and say each the moment the driver tells it."""
        assert self._nvml is not None
        while True:
            self._may_hear.wait()
            if self._stopped.is_set():
                return
            with self._hearing:
                heard = self._hear(self._nvml) if self._may_hear.is_set() else None
            if heard is not None:
                uuid, code = heard
                for gpu in (uuid,) if uuid else self._heard:
                    self._take_xid(gpu, code)

    def _hear(self, nvml: Nvml) -> tuple[str, int] | None:
        try:
            return nvml.wait(self._policy.wait_ms)
        except NoDriver:  # with a GPU that is lost nothing can be heard of the others, either
            self._deafened = True
            if not self._stopped.is_set():
                self._may_hear.clear()
            self._awake.set()
            return None

    def _listen_to(self, nvml: Nvml, uuids: Collection[str]) -> None:
        """Ask for the Xids of these GPUs, while the ear is kept out."""
        self._heard = frozenset(uuids)
        if nvml.listen(uuids):
            self._deafened = False
            self._may_hear.set()

    def _silenced(self) -> bool:
        """Keep the ear out of the driver, and say whether it is: then `_hearing` is held."""
        self._may_hear.clear()
        silenced = self._hearing.acquire(timeout=DRIVER_S_MAX)
        if self._stopped.is_set():
            self._may_hear.set()  # so that it ends
        return silenced

    # --- the reader

    def _read_all(self, nvml: Nvml) -> None:
        looks = not self._faults or time.monotonic() - self._looked_at >= self._policy.look_s
        if not self._told and looks and (used := self._used(nvml)) and self._add(nvml, used):
            self._report(nvml)
        readings = {uuid: nvml.read(uuid) for uuid in self.gpus}
        there = frozenset(uuid for uuid, reading in readings.items() if not reading.lost)
        if there - self._heard:  # whoever is told that it is back may count on its being heard
            self._relisten(nvml, there)
        for uuid, reading in readings.items():
            peers = self._peers(nvml, uuid, readings) if reading.throttled else ()
            self._take_reading(uuid, reading, peers)
        if there != self._heard:
            self._relisten(nvml, there)
            self._reopened_at = time.monotonic()  # to reopen is to be deaf, and it is not back at once
        late = time.monotonic() - self._reopened_at >= self._policy.reopen_s
        if (self._deafened or len(there) < len(readings)) and late:
            self._reopened_at = time.monotonic()
            self._reopen(nvml)

    def _relisten(self, nvml: Nvml, there: frozenset[str]) -> None:
        """Go on hearing those GPUs that are there: the driver tells nothing to who waits for a lost one, too."""
        if self._silenced():
            try:
                self._listen_to(nvml, there)
            finally:
                self._hearing.release()

    def _reopen(self, nvml: Nvml) -> None:
        if not self._silenced():
            return  # the driver hangs; perhaps later
        try:
            nvml.reopen()
            self._listen_to(nvml, [uuid for uuid in self.gpus if not nvml.read(uuid).lost])
        finally:
            self._hearing.release()

    def _keep(self) -> None:
        """Write down what stands, if that has changed. Not in the ear: a disk may hang."""
        if self._memory is None or self._kept:
            return
        with self._absorbing:
            self._kept = True
            standing = {uuid: list(faults.standing.values()) for uuid, faults in self._faults.items()}
        self._memory.keep(self._stood | standing)

    def _peers(self, nvml: Nvml, uuid: str, readings: dict[str, Reading]) -> tuple[int, ...]:
        """Return the clocks of this host's other GPUs of the same model that work, and are not throttled themselves."""
        model = next((device.model for device in nvml.devices if device.uuid == uuid), "")
        others = [d.uuid for d in nvml.devices if d.model == model and d.uuid != uuid]
        beside = [readings[other] if other in readings else nvml.read(other) for other in others]
        return tuple(r.clock for r in beside if r.clock is not None and not r.throttled and not r.idle)

    # --- both

    def _take_xid(self, uuid: str, code: int) -> None:
        self._absorb(uuid, lambda faults: faults.xid(code, time.monotonic()))
        self._awake.set()  # what else the GPU says of it is wanted now

    def _take_reading(self, uuid: str, reading: Reading, peers: tuple[int, ...]) -> None:
        self._absorb(uuid, lambda faults: faults.read(reading, peers, time.monotonic()))

    def _absorb(self, uuid: str, absorb: Callable[[DeviceFaults], list[Change]]) -> None:
        """Say what a GPU's faults become by this, in the order in which the GPU showed it."""
        with self._absorbing:
            changes = absorb(self._faults[uuid]) if uuid in self._faults else []
            for change in changes:
                self._kept = False
                if self._say is not None:
                    self._say(uuid, change)
        for change in changes:
            meant = {"device": uuid, "fault": change.fault_class, "code": change.code}
            if change.over:
                log.info("device_recovered", **meant)
            else:
                log.warning("device_faulted", **meant)
