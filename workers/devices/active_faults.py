"""The active faults of one worker's GPUs, reported as they change and stored for the next watch."""

import threading
import time
from collections.abc import Callable, Collection

import structlog

from workers.devices.fault_store import Memory
from workers.devices.faults import DeviceFaults, DeviceReading, FaultChange, OnFaultChange
from workers.devices.throttle import ThrottlePolicy

log = structlog.get_logger(__name__)


class StandingFaults:
    """The faults of the watched GPUs. Thread-safe: Xids arrive in one thread, readings in another."""

    def __init__(self, policy: ThrottlePolicy, memory: Memory | None) -> None:
        self._policy = policy
        self._memory = memory
        self._faults: dict[str, DeviceFaults] = {}  # by UUID
        self._lock = threading.Lock()
        self._say: OnFaultChange | None = None
        self._restored: dict[str, list[FaultChange]] = {}  # faults of GPUs that are not watched yet
        self._stored = True  # the stored faults are up to date

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the watched GPUs."""
        return tuple(self._faults)

    def recall(self) -> None:
        """Load the stored faults, which were active when the last watch ended."""
        if self._memory is not None:
            self._restored = self._memory.recall()
            self._stored = not self._restored

    def begin(self, say: OnFaultChange) -> None:
        """Report changes from now on."""
        self._say = say

    def add(self, uuids: Collection[str]) -> None:
        """Watch these GPUs too, starting with their stored faults."""
        with self._lock:
            for uuid in uuids:
                faults = self._faults[uuid] = DeviceFaults(policy=self._policy)
                faults.restore(self._restored.pop(uuid, ()), time.monotonic())
            for faults in self._faults.values():
                faults.linked = len(self._faults) > 1

    def take_xid(self, uuid: str, code: int) -> None:
        """Apply an Xid of a GPU."""
        self._absorb(uuid, lambda faults: faults.xid(code, time.monotonic()))

    def take_reading(self, uuid: str, reading: DeviceReading, peers: tuple[int, ...]) -> None:
        """Apply a reading of a GPU; `peers` are the clocks of its peers, in MHz."""
        self._absorb(uuid, lambda faults: faults.read(reading, peers, time.monotonic()))

    def _absorb(self, uuid: str, absorb: Callable[[DeviceFaults], list[FaultChange]]) -> None:
        """Apply a reading or an Xid to a GPU, and report the changes in the order of their detection."""
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
        """Store the active faults if they have changed. The disk may hang."""
        if self._memory is None or self._stored:
            return
        with self._lock:
            self._stored = True
            standing = {uuid: list(faults.standing.values()) for uuid, faults in self._faults.items()}
        self._memory.keep(self._restored | standing)
