"""NVML, the driver's own interface, with every failing call a value: None where a device cannot say, `lost` where it is gone.

The module `pynvml` (nvidia-ml-py) is imported only where the driver's library is: it takes 4 MB and 20 ms. Drivers and
its versions differ in what they have: what is asked for is named, and what is not there is as what a device cannot say.
"""

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from events.errors import HoldfastError
from workers.devices.faults import DeviceReading

LIBRARY = "libnvidia-ml.so.1"
LOST = (1, 9, 15, 16, 28)  # uninitialised, driver not loaded, GPU is lost, reset required, GPU not found
MUTE = (
    10,
    11,
    17,
    999,
)  # timeout, interrupts, operating system, unknown: some drivers say no more of a GPU that is gone
TIMEOUT = 10
MISSED_MAX = 64  # Xids kept until somebody waits again
REPLAY, RECOVERY = 0, 1  # NVLink error counters
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
WIDE = (2, 3)  # types of a field's value: unsigned long, unsigned long long
LINK_ERRORS = ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS")
"""Of NVLink 5 (Blackwell), which has no replay and recovery counters."""


class NoDriver(HoldfastError):
    """There is no NVIDIA driver here, or it cannot be used: devices are not watched."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of this host."""

    index: int
    uuid: str
    model: str


class _Lost(Exception):
    """The device does not answer any more."""


class Nvml:
    """One session with the driver. Used by one thread. Raise NoDriver if there is none."""

    def __init__(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoDriver(f"no NVIDIA driver here: {LIBRARY} cannot be loaded") from error
        import pynvml

        self._api: Any = pynvml
        self._handles: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by the handle's address, as events name their device
        self._events: Any = None
        self._missed: deque[tuple[str, int]] = deque()  # Xids that came while nobody waited
        self._mute = False  # a question of this reading met an error that says nothing
        self.devices: tuple[Device, ...] = ()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriver(f"the NVIDIA driver cannot be used: {error}") from error
        self._find()

    def _find(self) -> None:
        """Take what devices there are. One that does not even say its name is not listed."""
        found = []
        for index in range(self._or_none(self._api.nvmlDeviceGetCount) or 0):
            handle = self._or_none(self._api.nvmlDeviceGetHandleByIndex, index)
            uuid = handle and self._or_none(self._api.nvmlDeviceGetUUID, handle)
            if not uuid:
                continue
            self._handles[uuid] = handle
            self._names[ctypes.cast(handle, ctypes.c_void_p).value or 0] = uuid
            found.append(Device(index, uuid, self._or_none(self._api.nvmlDeviceGetName, handle) or ""))
        known = {device.uuid for device in found}
        self.devices = (*found, *(device for device in self.devices if device.uuid not in known))

    def reopen(self) -> None:
        """Begin anew with the driver: a GPU that was reset, or whose driver was loaded again, is found only so."""
        self.close()
        self._handles, self._names = {}, {}
        try:
            self._api.nvmlInit()
        except self._api.NVMLError:
            return
        self._find()

    def close(self) -> None:
        """End the session."""
        self._end_events()
        self._or_none(self._api.nvmlShutdown)

    def listen(self, uuids: Collection[str]) -> bool:
        """Ask for the Xids of these devices, and of no others; return whether there is anything to wait for."""
        events = self._or_none(self._api.nvmlEventSetCreate)
        heard = [uuid for uuid in uuids if events is not None and self._register(uuid, events)]
        self._end_events()
        self._events = events
        if not heard:
            self._end_events()
        return bool(heard or self._missed)

    def _register(self, uuid: str, events: Any) -> bool:
        try:
            xids = self._api.nvmlEventTypeXidCriticalError
            self._api.nvmlDeviceRegisterEvents(self._handles[uuid], xids, events)
        except (KeyError, self._api.NVMLError):
            return False
        return True

    def _end_events(self) -> None:
        """Wait for Xids no longer, after those that have come are taken."""
        if self._events is None:
            return
        with contextlib.suppress(NoDriver):
            while len(self._missed) < MISSED_MAX and (xid := self._next(0)) is not None:
                self._missed.append(xid)
        self._or_none(self._api.nvmlEventSetFree, self._events)
        self._events = None

    def wait(self, timeout_ms: int) -> tuple[str, int] | None:
        """Wait for an Xid; return its device ("": one of those that are listened to, nobody knows which) and its code, None
        after the time. Raise NoDriver if nothing can be waited for, as it is with a lost GPU among them."""
        if self._missed:
            return self._missed.popleft()
        if self._events is None:
            raise NoDriver("no events here")
        return self._next(timeout_ms)

    def _next(self, timeout_ms: int) -> tuple[str, int] | None:
        try:
            data = self._api.nvmlEventSetWait(self._events, timeout_ms)
        except self._api.NVMLError as error:
            if error.value == TIMEOUT:
                return None
            raise NoDriver(f"no events: {error}") from error
        uuid = self._names.get(ctypes.cast(data.device, ctypes.c_void_p).value or 0)
        return uuid or self._or_none(self._api.nvmlDeviceGetUUID, data.device) or "", int(data.eventData)

    def read(self, uuid: str) -> DeviceReading:
        """Look at a device."""
        handle = self._handles.get(uuid)
        if handle is None:
            return DeviceReading(lost=True)
        try:
            return self._read(handle)
        except _Lost:
            return DeviceReading(lost=True)

    def pids(self, uuid: str) -> frozenset[int]:
        """Return the processes that compute on a device."""
        handle = self._handles.get(uuid)
        try:
            found = self._ask(PROCESSES, handle) if handle else None
        except _Lost:
            found = None
        return frozenset(process.pid for process in found or ())

    def _read(self, handle: Any) -> DeviceReading:
        n = self._api
        self._mute = False

        def ask(name: str | tuple[str, ...], *arguments: Any) -> Any:
            return self._ask((name,) if isinstance(name, str) else name, handle, *arguments)

        reasons = ask(REASONS)
        clock = ask("nvmlDeviceGetClockInfo", n.NVML_CLOCK_SM)
        temperature = ask(TEMPERATURE, n.NVML_TEMPERATURE_GPU)
        if self._mute and (reasons, clock, temperature) == (None, None, None):
            raise _Lost  # what never changes the driver may still know by heart
        rows = ask("nvmlDeviceGetRemappedRows")
        links = self._links(handle)
        return DeviceReading(
            ecc=ask("nvmlDeviceGetTotalEccErrors", n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            recovery=self._field(handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
            reasons=reasons,
            clock=clock,
            clock_max=ask("nvmlDeviceGetMaxClockInfo", n.NVML_CLOCK_SM),
            temperature=temperature,
            slowdown=ask("nvmlDeviceGetTemperatureThreshold", n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            margin=ask("nvmlDeviceGetMarginTemperature"),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=ask("nvmlDeviceGetMaxPcieLinkWidth"),
            links=links,
            link_errors=tuple(self._link_errors(handle, link, up) for link, up in enumerate(links)),
        )

    def _links(self, handle: Any) -> tuple[bool | None, ...]:
        links: list[bool | None] = []
        for link in range(self._api.NVML_NVLINK_MAX_LINKS):
            up = self._ask(("nvmlDeviceGetNvLinkState",), handle, link)
            if up is None and not any(links):
                break  # no NVLink at all, or none in use: one call says so
            links.append(None if up is None else bool(up))
        return tuple(links)

    def _link_errors(self, handle: Any, link: int, up: bool | None) -> int | None:
        """Return how many errors a link has counted so far."""
        if not up:
            return None
        counts = [
            self._ask(("nvmlDeviceGetNvLinkErrorCounter",), handle, link, counter)
            for counter in (REPLAY, RECOVERY)
        ]
        if counts == [None, None]:
            counts = [self._field(handle, name, link) for name in LINK_ERRORS]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _field(self, handle: Any, name: str, scope: int = 0) -> int | None:
        """Return a field's value, None where the device, the driver or `pynvml` does not know it."""
        field = getattr(self._api, name, None)
        values = field and self._ask(("nvmlDeviceGetFieldValues",), handle, [(field, scope)])
        if not values or values[0].nvmlReturn != 0:
            return None
        value = values[0].value
        return int(value.ullVal if values[0].valueType in WIDE else value.uiVal)

    def _ask(self, names: tuple[str, ...], *arguments: Any) -> Any:
        """Return what a device says to the first of these questions that is known here, None if it cannot say that.

        Raise _Lost if it does not answer at all.
        """
        for name in names:
            call = getattr(self._api, name, None)
            if call is None:
                continue
            try:
                return call(*arguments)
            except self._api.NVMLError as error:
                if error.value in LOST:
                    raise _Lost from error
                self._mute = self._mute or error.value in MUTE
        return None

    def _or_none(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._api.NVMLError:
            return None
