"""What stands against the GPUs of one worker? Said as it changes, and kept for the watch that comes after this one."""

import threading
import time
from collections.abc import Callable, Collection

import structlog

from workers.devices.faults import DeviceFaults, DeviceReading, FaultChange, Say
from workers.devices.memory import Memory
from workers.devices.throttle import ThrottlePolicy

log = structlog.get_logger(__name__)


class StandingFaults:
    """The faults of the GPUs that are watched. For any thread: an Xid comes in one, readings in another."""

    def __init__(self, policy: ThrottlePolicy, memory: Memory | None) -> None:
        self._policy = policy
        self._memory = memory
        self._faults: dict[str, DeviceFaults] = {}  # by UUID
        self._lock = threading.Lock()
        self._say: Say | None = None
        self._before: dict[str, list[FaultChange]] = {}  # against GPUs that are not watched yet
        self._kept = True  # the memory has all that stands

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of those that are watched."""
        return tuple(self._faults)

    def recall(self) -> None:
        """Read what stood when the last watch ended."""
        if self._memory is not None:
            self._before = self._memory.recall()
            self._kept = not self._before

    def begin(self, say: Say) -> None:
        """Say from now on what changes."""
        self._say = say

    def add(self, uuids: Collection[str]) -> None:
        """Watch these GPUs too, with what stood against them."""
        with self._lock:
            for uuid in uuids:
                faults = self._faults[uuid] = DeviceFaults(policy=self._policy)
                faults.restore(self._before.pop(uuid, ()), time.monotonic())
            for faults in self._faults.values():
                faults.linked = len(self._faults) > 1

    def take_xid(self, uuid: str, code: int) -> None:
        """Take in an Xid of a GPU."""
        self._absorb(uuid, lambda faults: faults.xid(code, time.monotonic()))

    def take_reading(self, uuid: str, reading: DeviceReading, peers: tuple[int, ...]) -> None:
        """Take in a look at a GPU; `peers` are the clocks of those beside it, in MHz."""
        self._absorb(uuid, lambda faults: faults.read(reading, peers, time.monotonic()))

    def _absorb(self, uuid: str, absorb: Callable[[DeviceFaults], list[FaultChange]]) -> None:
        """Say what a GPU's faults become by this, in the order in which the GPU showed it."""
        with self._lock:
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

    def keep(self) -> None:
        """Write down what stands, if that has changed. A disk may hang."""
        if self._memory is None or self._kept:
            return
        with self._lock:
            self._kept = True
            standing = {uuid: list(faults.standing.values()) for uuid, faults in self._faults.items()}
        self._memory.keep(self._before | standing)
