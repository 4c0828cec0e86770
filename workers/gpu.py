"""The device watch: which faults do this worker's GPUs have, and when are they over?

    open ── no driver ──▶ off, said once
      └─▶ find the worker's GPUs ──▶ (the worker has joined) ──▶ wait for Xids ⇄ read everything else every second

It runs in a thread of its own: a call of the driver's may hang for seconds while a GPU dies, and the loop that serves
must not. An Xid is said the moment the driver tells it; it never waits for a reading of the same round.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from events.errors import HoldfastError
from workers.devices import mapping
from workers.devices.faults import Change, DeviceFaults, Reading
from workers.devices.nvml import NoDriver, Nvml
from workers.devices.throttle import ThrottlePolicy

Say = Callable[[str, Change], None]  # (the device's UUID, what changed); called in the watch's thread

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """How often to look."""

    wait_ms: int = 200  # for an Xid, at most: the watch can be stopped in between
    read_s: float = 1.0
    reopen_s: float = 10.0  # a lost GPU is looked for so often
    throttle: ThrottlePolicy = field(default_factory=ThrottlePolicy)


class DeviceWatch:
    """Watches the GPUs of one worker, from `begin` on, until `stop`. `gpus`: as told; empty: those its processes use."""

    def __init__(self, gpus: tuple[str, ...], policy: WatchPolicy | None = None) -> None:
        self._told = gpus
        self._policy = policy or WatchPolicy()
        self._say: Say | None = None
        self._ready = threading.Event()
        self._begun = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-watch", daemon=True)
        self._faults: dict[str, DeviceFaults] = {}  # of the worker's GPUs, by UUID
        self._nvml: Nvml | None = None
        self._hears = False
        self._deafened = False  # it heard Xids, until the driver refused
        self._refused: HoldfastError | None = None
        self._reopened_at = 0.0

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

    def start(self, within_s: float) -> None:
        """Open the driver and find the worker's GPUs; return when that is done, or after `within_s` seconds.

        Raise UnknownGpus if it was told of some that are not there.
        """
        self._thread.start()
        self._ready.wait(within_s)
        if self._refused is not None:
            raise self._refused

    def begin(self, say: Say) -> None:
        """Say from now on what is wrong, beginning with what is wrong already."""
        self._say = say
        self._begun.set()

    def stop(self) -> None:
        """Watch no longer. The thread ends within its next wait; nobody waits for it, because the driver may hang."""
        self._stopped.set()
        self._begun.set()

    def join(self, within_s: float) -> None:
        """Wait for the end of the thread."""
        self._thread.join(within_s)

    # --- the thread

    def _run(self) -> None:
        try:
            self._nvml = Nvml()
            self._map(self._nvml)
            self._report(self._nvml)
        except NoDriver as reason:
            log.log(logging.WARNING if self._told else logging.INFO, "device_watch_off", reason=str(reason))
            return
        except mapping.UnknownGpus as error:
            self._refused = error
            return
        finally:
            self._ready.set()
        self._begun.wait()
        read_at = time.monotonic()
        while not self._stopped.is_set():
            self._hear(self._nvml, max(0.0, read_at - time.monotonic()))
            if time.monotonic() >= read_at:
                read_at = time.monotonic() + self._policy.read_s
                self._read_all(self._nvml)
        self._nvml.close()

    def _map(self, nvml: Nvml) -> None:
        """Find the worker's GPUs. Those that its processes use may come later, when a model is loaded on them."""
        if self._told:
            found = mapping.told(self._told, nvml.devices) if not self._faults else self.gpus
        else:
            users = {device.uuid: nvml.pids(device.uuid) for device in nvml.devices}
            found = (
                *self._faults,
                *(u for u in mapping.used(users, mapping.own_pids()) if u not in self._faults),
            )
        for uuid in found:
            self._faults.setdefault(uuid, DeviceFaults(policy=self._policy.throttle))
        for faults in self._faults.values():
            faults.linked = len(self._faults) > 1
        self._hears = nvml.listen(self.gpus) if found else False

    def _report(self, nvml: Nvml) -> None:
        """Say once what is watched, and which GPUs of this host are not this worker's."""
        others = [device.uuid for device in nvml.devices if device.uuid not in self._faults]
        log.info("device_watch_on", gpus=list(self.gpus), unmapped=others, xids=self._hears)

    def _hear(self, nvml: Nvml, at_most_s: float) -> None:
        """Wait for an Xid."""
        wait_s = min(at_most_s, self._policy.wait_ms / 1000)
        if not self._hears:
            self._stopped.wait(wait_s)
            return
        try:
            heard = nvml.wait(int(wait_s * 1000))
        except NoDriver:
            self._hears, self._deafened = False, True
            return
        if heard is not None and heard[0] in self._faults:
            self._tell(heard[0], self._faults[heard[0]].xid(heard[1], time.monotonic()))

    def _read_all(self, nvml: Nvml) -> None:
        if not self._told and not self._faults:
            self._map(nvml)
            if self._faults:
                self._report(nvml)
        readings = {uuid: nvml.read(uuid) for uuid in self.gpus}
        for uuid, reading in readings.items():
            peers = self._peers(nvml, uuid, readings) if reading.throttled else ()
            self._tell(uuid, self._faults[uuid].read(reading, peers, time.monotonic()))
        lost = any(reading.lost for reading in readings.values())
        if (lost or self._deafened) and time.monotonic() - self._reopened_at >= self._policy.reopen_s:
            self._reopened_at = time.monotonic()
            nvml.reopen()
            self._hears, self._deafened = nvml.listen(self.gpus), False

    def _peers(self, nvml: Nvml, uuid: str, readings: dict[str, Reading]) -> tuple[int, ...]:
        """Return the clocks of this host's other GPUs of the same model that work, and are not throttled themselves."""
        model = next((device.model for device in nvml.devices if device.uuid == uuid), "")
        others = [d.uuid for d in nvml.devices if d.model == model and d.uuid != uuid]
        beside = [readings[other] if other in readings else nvml.read(other) for other in others]
        return tuple(r.clock for r in beside if r.clock is not None and not r.throttled and not r.idle)

    def _tell(self, uuid: str, changes: list[Change]) -> None:
        for change in changes:
            meant = {"device": uuid, "fault": change.fault_class, "code": change.code}
            log.warning("device_recovered" if change.over else "device_faulted", **meant)
            if self._say is not None:
                self._say(uuid, change)
