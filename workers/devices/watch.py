"""The device watch, which detects when faults of a worker's GPUs begin and end.

    open ── no driver ──▶ off, logged once
      └─▶ find the worker's GPUs ──▶ (the worker has joined) ─┬─▶ the reader: everything except Xids, every second
                                                              └─▶ the listener: waits for Xids

The reader and the listener run in threads. While a GPU fails, a driver call can hang for seconds, and would block the event
loop that serves requests. The threads are separate, because a driver that has just reported an Xid answers all other calls
slowly. In one thread, the slow calls of the reader would delay further Xids.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import structlog

from events.errors import HoldfastError
from events.subjects import token
from workers.devices import mapping
from workers.devices.faults import DeviceFaults, DeviceReading, FaultChange, OnFaultChange, ThrottlePolicy
from workers.devices.nvml import NoDriver, Nvml

DRIVER_S_MAX = 5.0  # longest wait for the listener thread to return from the driver

log = structlog.get_logger(__name__)


class Memory:
    """Stores the active faults of one device watch in a file on the GPUs' host. Without active faults, the file does not exist.

    A GPU can be reset only while no process uses it. The watch that has reported a fault therefore ends before the reset. The
    next watch reads the stored fault, and reports its end.
    """

    def __init__(self, data: Path, name: str) -> None:
        self._path = data / "devices" / f"{token(name)}.json"

    def recall(self) -> dict[str, list[FaultChange]]:
        """Return the stored faults by device. An unreadable file counts as empty."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, list[FaultChange]])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("device_memory_unreadable", path=str(self._path), error=str(error))
            return {}

    def keep(self, standing: Mapping[str, Iterable[FaultChange]]) -> None:
        """Store the active faults, by device.

        If the file cannot be written, log a warning. The next watch then lacks the faults.
        """
        faults = {device: found for device, changes in standing.items() if (found := list(changes))}
        try:
            if not faults:
                self._path.unlink(missing_ok=True)
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._path.with_suffix(".tmp")
            fresh.write_bytes(msgspec.json.encode(faults))
            fresh.replace(self._path)  # atomic replacement
        except OSError as error:
            log.warning("device_memory_unwritable", path=str(self._path), error=str(error))


class StandingFaults:
    """Tracks the active faults of the watched GPUs and reports their changes.

    It is thread-safe, because Xids arrive in one thread and readings in another.
    """

    def __init__(self, policy: ThrottlePolicy, memory: Memory | None) -> None:
        self._policy = policy
        self._memory = memory
        self._faults: dict[str, DeviceFaults] = {}  # by UUID
        self._lock = threading.Lock()
        self._say: OnFaultChange | None = None
        self._restored: dict[str, list[FaultChange]] = {}  # stored faults of GPUs that are not watched yet
        self._stored = True  # whether the stored faults are up to date

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the watched GPUs."""
        return tuple(self._faults)

    def recall(self) -> None:
        """Load the stored faults, which were active when the previous device watch ended."""
        if self._memory is not None:
            self._restored = self._memory.recall()
            self._stored = not self._restored

    def begin(self, say: OnFaultChange) -> None:
        """Report every later fault change to `say`."""
        self._say = say

    def add(self, uuids: Collection[str]) -> None:
        """Add GPUs to the watch, each with the faults that are stored for it."""
        with self._lock:
            for uuid in uuids:
                faults = self._faults[uuid] = DeviceFaults(policy=self._policy)
                faults.restore(self._restored.pop(uuid, ()), time.monotonic())
            for faults in self._faults.values():
                faults.linked = len(self._faults) > 1

    def take_xid(self, uuid: str, code: int) -> None:
        """Apply an Xid of a GPU and report the fault changes."""
        self._absorb(uuid, lambda faults: faults.xid(code, time.monotonic()))

    def take_reading(self, uuid: str, reading: DeviceReading, peers: tuple[int, ...]) -> None:
        """Apply a reading of a GPU and report the fault changes. `peers` are the clocks of comparable GPUs, in MHz."""
        self._absorb(uuid, lambda faults: faults.read(reading, peers, time.monotonic()))

    def _absorb(self, uuid: str, absorb: Callable[[DeviceFaults], list[FaultChange]]) -> None:
        """Call `absorb` on the faults of a GPU, and report and log the changes that it returns. Ignore an unwatched GPU.

        The lock is held while changes are reported, so that they arrive in the order of their detection.
        """
        with self._lock:
            changes = absorb(self._faults[uuid]) if uuid in self._faults else []
            for change in changes:
                self._stored = False
                if self._say is not None:
                    self._say(uuid, change)
        for change in changes:
            fields = {"device": uuid, "fault": change.fault_class, "code": change.code}
            if change.over:
                log.info("device_recovered", **fields)
            else:
                log.warning("device_faulted", **fields)

    def keep(self) -> None:
        """Store the active faults if they have changed. The call may block as long as the disk does."""
        if self._memory is None or self._stored:
            return
        with self._lock:
            self._stored = True
            standing = {uuid: list(faults.standing.values()) for uuid, faults in self._faults.items()}
        self._memory.keep(self._restored | standing)


@dataclass(eq=False)
class XidListener:
    """Waits for Xids in its own thread, and can pause so that the reader thread has exclusive access to the driver.

    The listener thread runs `run`. The reader thread calls all other methods except `stop`.
    """

    wait_ms: int  # the thread ends within this time once `stopped` is set
    stopped: threading.Event
    told: Callable[[str, int], None]  # called with the GPU's UUID and the number of each Xid
    deaf: Callable[[], None]  # called when the driver refuses further waits
    # set while the listener thread may wait in the driver for Xids
    may_wait: threading.Event = field(default_factory=threading.Event)
    # held while the thread is inside the driver
    _waiting: threading.Lock = field(default_factory=threading.Lock)
    deafened: bool = False  # whether the driver has refused to wait for Xids since the last subscription
    gpus: frozenset[str] = frozenset()  # UUIDs of the GPUs that the listener has subscribed to

    def run(self, nvml: Nvml) -> None:
        """Wait for Xids and report each one immediately, until `stopped` is set.

        If the driver does not identify the GPU of an Xid, report the Xid for every GPU of the subscription.
        """
        while True:
            self.may_wait.wait()
            if self.stopped.is_set():
                return
            with self._waiting:
                xid = self._wait(nvml) if self.may_wait.is_set() else None
            if xid is not None:
                uuid, code = xid
                for gpu in (uuid,) if uuid else self.gpus:
                    self.told(gpu, code)

    def _wait(self, nvml: Nvml) -> tuple[str, int] | None:
        try:
            return nvml.wait(self.wait_ms)
        except NoDriver:  # if one GPU is lost, the driver reports no Xids of the other GPUs either
            self.deafened = True
            if not self.stopped.is_set():
                self.may_wait.clear()
            self.deaf()
            return None

    def ask(self, nvml: Nvml, uuids: Collection[str]) -> None:
        """Replace the current Xid subscription by a subscription to these GPUs. Call this method only inside `kept_out`."""
        self.gpus = frozenset(uuids)
        if nvml.listen(uuids):
            self.deafened = False
            self.may_wait.set()

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[bool]:
        """Keep the listener thread out of the driver until the next `ask`. Yield True once the thread has left the driver.

        If the driver hangs, yield False. The listener thread is then still inside the driver, and the caller must not call the
        driver.
        """
        self.may_wait.clear()
        out = self._waiting.acquire(timeout=DRIVER_S_MAX)
        if self.stopped.is_set():
            self.may_wait.set()  # so that the thread ends
        try:
            yield out
        finally:
            if out:
                self._waiting.release()

    def stop(self) -> None:
        """Wake the listener thread so that it ends. The caller must have set `stopped` before."""
        self.may_wait.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPolicy:
    """Intervals and thresholds of the device watch."""

    wait_ms: int = 200  # maximum wait for an Xid inside the driver, and so for the watch to stop
    read_s: float = 1.0  # interval between readings
    reopen_s: float = 10.0  # interval between searches for a lost GPU
    look_s: float = 10.0  # interval between searches for GPUs that the worker's processes have begun to use
    throttle: ThrottlePolicy = field(default_factory=ThrottlePolicy)


class DeviceWatch:
    """Watches the GPUs of one worker, from `begin` until `stop`.

    `gpus` names the configured GPUs. If `gpus` is empty, the watch finds the GPUs on which certain processes compute. `users`
    returns the pids of these processes; the default is this process and its descendants. `memory` stores active faults for the
    next watch. `driver` opens a session with the NVIDIA driver.
    """

    def __init__(
        self,
        gpus: tuple[str, ...],
        policy: WatchPolicy | None = None,
        users: Callable[[], Collection[int]] = mapping.own_pids,
        memory: Memory | None = None,
        driver: Callable[[], Nvml] = Nvml,
    ) -> None:
        self.off = ""  # the reason why nothing is watched; empty while GPUs can be watched
        self._configured = gpus
        self._policy = policy or WatchPolicy()
        self._users = users
        self._driver = driver
        self._broke: Callable[[Exception], None] | None = None
        self._ready = threading.Event()
        self._begun = threading.Event()
        self._stopped = threading.Event()
        # set when the reader must read now instead of after its interval
        self._wake_reader = threading.Event()
        self._faults = StandingFaults(self._policy.throttle, memory)
        self.xids = XidListener(self._policy.wait_ms, self._stopped, self._take_xid, self._wake_reader.set)
        self.reader = self._thread("device-watch", self._read)
        self._start_error: HoldfastError | None = None
        self._reopened_at = 0.0
        self._searched_at = 0.0

    @property
    def named(self) -> bool:
        """Whether the worker's GPUs are configured. If not, a GPU is found once a process of the worker computes on it."""
        return bool(self._configured)

    @property
    def stopped(self) -> bool:
        """Whether `stop` has been called. Fault changes after `stop` are not reported."""
        return self._stopped.is_set()

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the worker's GPUs that the watch has found so far."""
        return self._faults.gpus

    def start(self, within_s: float) -> None:
        """Start the reader thread, which opens the driver and finds the worker's GPUs.

        Wait at most `within_s` seconds until the GPUs are found. Raise UnknownGpus if a configured GPU does not exist.
        """
        self.reader.start()
        self._ready.wait(within_s)
        if self._start_error is not None:
            raise self._start_error

    def begin(self, say: OnFaultChange, broke: Callable[[Exception], None] | None = None) -> None:
        """Start to read the GPUs, and report each fault change to `say`. Faults that are active already are reported first.

        `broke` is called with the error if the watch itself fails.
        """
        self._faults.begin(say)
        self._broke = broke
        self._begun.set()

    def stop(self) -> None:
        """Stop watching. The threads end after their current wait, and are not joined because the driver may hang."""
        self._stopped.set()
        self._begun.set()
        self._wake_reader.set()
        self.xids.stop()

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Return False, because faults cannot be injected into real devices."""
        return False

    def repair(self, fault: str, argument: float, rank: int) -> None:
        """Do nothing, because no fault can have been injected."""

    # --- the threads

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=self._run_guarded, args=(work,), name=name, daemon=True)

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run `work` in the current thread. If it fails, pass the error to the `broke` function that `begin` received.

        If `broke` were not called, the thread would end unnoticed, and faults would no longer be reported.
        """
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
        self._thread("device-xids", lambda: self.xids.run(nvml)).start()
        while not self._stopped.is_set():
            self._wake_reader.clear()
            self._read_all(nvml)
            self._faults.keep()
            self._wake_reader.wait(self._policy.read_s)
        self._faults.keep()
        with self.xids.kept_out() as out:
            if out:
                nvml.close()

    def _open(self) -> Nvml | None:
        """Open the driver and find the worker's GPUs; return None without a driver or if a configured GPU does not exist."""
        self._faults.recall()
        try:
            nvml = self._driver()
            self._add(
                nvml,
                mapping.find_uuids(self._configured, nvml.devices) if self._configured else self._used(nvml),
            )
        except NoDriver as reason:
            self.off = str(reason)
            log.log(
                logging.WARNING if self._configured else logging.INFO, "device_watch_off", reason=self.off
            )
            return None
        except mapping.UnknownGpus as error:
            self._start_error = error
            return None
        self._report(nvml)
        return nvml

    def _used(self, nvml: Nvml) -> tuple[str, ...]:
        """Return the UUIDs of the GPUs on which the worker's processes compute and which are not watched yet."""
        self._searched_at = time.monotonic()
        users = {d.uuid: nvml.pids(d.uuid) for d in nvml.devices if d.uuid not in self.gpus}
        return mapping.used(users, self._users()) if any(users.values()) else ()

    def _add(self, nvml: Nvml, uuids: Collection[str]) -> bool:
        """Add these GPUs to the watch and subscribe to their Xids. If the driver hangs, do nothing and return False."""
        with self.xids.kept_out() as out:
            if out:
                self._faults.add(uuids)
                self.xids.ask(nvml, self.gpus)
        return out

    def _report(self, nvml: Nvml) -> None:
        """Log which GPUs are watched, and which GPUs of this host do not belong to this worker."""
        others = [device.uuid for device in nvml.devices if device.uuid not in self.gpus]
        log.info("device_watch_on", gpus=list(self.gpus), unmapped=others, xids=self.xids.may_wait.is_set())

    def _take_xid(self, uuid: str, code: int) -> None:
        self._faults.take_xid(uuid, code)
        self._wake_reader.set()  # a fault often shows in other values of the GPU too

    # --- the reader

    def _read_all(self, nvml: Nvml) -> None:
        self._search(nvml)
        readings = {uuid: nvml.read(uuid) for uuid in self.gpus}
        present = frozenset(uuid for uuid, reading in readings.items() if not reading.lost)
        if present - self.xids.gpus:  # subscribe to a returned GPU before it is reported as recovered
            self._resubscribe(nvml, present)
        for uuid, reading in readings.items():
            peers = _peers(nvml, uuid, readings) if reading.throttled else ()
            self._faults.take_reading(uuid, reading, peers)
        if present != self.xids.gpus:
            self._resubscribe(nvml, present)
            # delays the next reopening, which loses Xids, until the GPU may be back
            self._reopened_at = time.monotonic()
        reopen_due = time.monotonic() - self._reopened_at >= self._policy.reopen_s
        if (self.xids.deafened or len(present) < len(readings)) and reopen_due:
            self._reopened_at = time.monotonic()
            self._reopen(nvml)

    def _search(self, nvml: Nvml) -> None:
        """Add the GPUs that the worker's processes have begun to use, unless the worker's GPUs are configured."""
        due = not self.gpus or time.monotonic() - self._searched_at >= self._policy.look_s
        if not self._configured and due and (used := self._used(nvml)) and self._add(nvml, used):
            self._report(nvml)

    def _resubscribe(self, nvml: Nvml, present: frozenset[str]) -> None:
        """Subscribe to the Xids of `present`, the GPUs that are not lost.

        If the subscription included a lost GPU, the driver would report no Xids at all.
        """
        with self.xids.kept_out() as out:
            if out:
                self.xids.ask(nvml, present)

    def _reopen(self, nvml: Nvml) -> None:
        with self.xids.kept_out() as out:
            if out:  # if the driver hangs, a later reading tries again
                nvml.reopen()
                self.xids.ask(nvml, [uuid for uuid in self.gpus if not nvml.read(uuid).lost])


def _peers(nvml: Nvml, uuid: str, readings: dict[str, DeviceReading]) -> tuple[int, ...]:
    """Return the clocks in MHz of this host's other GPUs of the same model that are busy and not throttled."""
    model = next((device.model for device in nvml.devices if device.uuid == uuid), "")
    others = [d.uuid for d in nvml.devices if d.model == model and d.uuid != uuid]
    peers = [readings[other] if other in readings else nvml.read(other) for other in others]
    return tuple(r.clock for r in peers if r.clock is not None and not r.throttled and not r.idle)
