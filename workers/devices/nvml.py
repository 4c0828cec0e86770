"""Reads GPUs through NVML, the management library of the NVIDIA driver.

A failed read raises no error. A value is None if the device does not report it, and a reading is `lost` if the device does not
answer at all.

The module `pynvml` (nvidia-ml-py) is imported only if the driver's library is present, because the import takes 4 MB and 20 ms.
Drivers and versions of `pynvml` differ in the calls that they support. Calls are therefore looked up by name, and a missing
call counts as a value that the device does not report.
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
# timeout, interrupts, operating system, unknown; some drivers report only these errors for a lost GPU
UNSPECIFIC_ERRORS = (10, 11, 17, 999)
TIMEOUT = 10
PENDING_XIDS_MAX = 64  # number of Xids kept until the next wait
REPLAY, RECOVERY = 0, 1  # NVLink error counters
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
TEMPERATURE = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
PROCESSES = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
WIDE_TYPES = (2, 3)  # types of a field's value: unsigned long, unsigned long long
LINK_ERRORS = ("NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", "NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS")
"""Counters of NVLink 5 (Blackwell), which has no replay and recovery counters."""


class NoDriver(HoldfastError):
    """This host has no usable NVIDIA driver: devices are not watched."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU of this host."""

    index: int
    uuid: str
    model: str


class _Lost(Exception):
    """The device does not answer any more."""


class Nvml:
    """One session with the NVIDIA driver, for use by one thread at a time. Raise NoDriver if no driver can be used."""

    def __init__(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise NoDriver(f"no NVIDIA driver on this host: cannot load {LIBRARY}") from error
        import pynvml

        self._api: Any = pynvml
        self._handles: dict[str, object] = {}
        self._names: dict[int, str] = {}  # by handle address, which is how events identify their device
        self._events: object = None
        # Xids that arrived while no call waited for them
        self._pending_xids: deque[tuple[str, int]] = deque()
        # whether a call of the current reading failed with one of UNSPECIFIC_ERRORS
        self._unspecific_error = False
        self.devices: tuple[Device, ...] = ()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NoDriver(f"cannot use the NVIDIA driver: {error}") from error
        self._find()

    def _find(self) -> None:
        """Add the devices of this host to `devices`, except those without a readable UUID. Devices found before stay listed."""
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
        """Close the session and open a new one, which also finds GPUs after a reset or after a reload of the driver."""
        self.close()
        self._handles, self._names = {}, {}
        try:
            self._api.nvmlInit()
        except self._api.NVMLError:
            return
        self._find()

    def close(self) -> None:
        """End the session with the driver."""
        self._end_events()
        self._or_none(self._api.nvmlShutdown)

    def listen(self, uuids: Collection[str]) -> bool:
        """Replace the current Xid subscription by a subscription to the devices `uuids`.

        Return False if `wait` cannot return an Xid: no device supports the subscription, and no earlier Xid is left.
        """
        events = self._or_none(self._api.nvmlEventSetCreate)
        registered = [uuid for uuid in uuids if events is not None and self._register(uuid, events)]
        self._end_events()
        self._events = events
        if not registered:
            self._end_events()
        return bool(registered or self._pending_xids)

    def _register(self, uuid: str, events: object) -> bool:
        try:
            xids = self._api.nvmlEventTypeXidCriticalError
            self._api.nvmlDeviceRegisterEvents(self._handles[uuid], xids, events)
        except (KeyError, self._api.NVMLError):
            return False
        return True

    def _end_events(self) -> None:
        """End the subscription to Xids. Xids that have arrived are kept for the next `wait`."""
        if self._events is None:
            return
        with contextlib.suppress(NoDriver):
            while len(self._pending_xids) < PENDING_XIDS_MAX and (xid := self._next(0)) is not None:
                self._pending_xids.append(xid)
        self._or_none(self._api.nvmlEventSetFree, self._events)
        self._events = None

    def wait(self, timeout_ms: int) -> tuple[str, int] | None:
        """Wait for an Xid and return its device's UUID and its code; None if none arrives within `timeout_ms`.

        The UUID is "" if the driver does not identify the device. Raise NoDriver if waiting is impossible, for example because
        one of the devices is lost.
        """
        if self._pending_xids:
            return self._pending_xids.popleft()
        if self._events is None:
            raise NoDriver("no subscription to events")
        return self._next(timeout_ms)

    def _next(self, timeout_ms: int) -> tuple[str, int] | None:
        try:
            data = self._api.nvmlEventSetWait(self._events, timeout_ms)
        except self._api.NVMLError as error:
            if error.value == TIMEOUT:
                return None
            raise NoDriver(f"cannot wait for events: {error}") from error
        uuid = self._names.get(ctypes.cast(data.device, ctypes.c_void_p).value or 0)
        return uuid or self._or_none(self._api.nvmlDeviceGetUUID, data.device) or "", int(data.eventData)

    def read(self, uuid: str) -> DeviceReading:
        """Return the current values of a device. The reading is `lost` if the device does not answer."""
        handle = self._handles.get(uuid)
        if handle is None:
            return DeviceReading(lost=True)
        try:
            return self._read(handle)
        except _Lost:
            return DeviceReading(lost=True)

    def pids(self, uuid: str) -> frozenset[int]:
        """Return the pids of the processes that compute on a device; empty if unknown."""
        handle = self._handles.get(uuid)
        try:
            found = self._call(PROCESSES, handle) if handle else None
        except _Lost:
            found = None
        return frozenset(process.pid for process in found or ())

    def _read(self, handle: object) -> DeviceReading:
        n = self._api
        self._unspecific_error = False

        def call(name: str | tuple[str, ...], *arguments: object) -> Any:
            return self._call((name,) if isinstance(name, str) else name, handle, *arguments)

        reasons = call(REASONS)
        clock = call("nvmlDeviceGetClockInfo", n.NVML_CLOCK_SM)
        temperature = call(TEMPERATURE, n.NVML_TEMPERATURE_GPU)
        if self._unspecific_error and (reasons, clock, temperature) == (None, None, None):
            raise _Lost  # the driver may still return cached constants
        rows = call("nvmlDeviceGetRemappedRows")
        links = self._links(handle)
        return DeviceReading(
            ecc=call(
                "nvmlDeviceGetTotalEccErrors", n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC
            ),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            recovery=self._field(handle, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
            reasons=reasons,
            clock=clock,
            clock_max=call("nvmlDeviceGetMaxClockInfo", n.NVML_CLOCK_SM),
            temperature=temperature,
            slowdown=call("nvmlDeviceGetTemperatureThreshold", n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            margin=call("nvmlDeviceGetMarginTemperature"),
            pcie_width=call("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=call("nvmlDeviceGetMaxPcieLinkWidth"),
            links=links,
            link_errors=tuple(self._link_errors(handle, link, up) for link, up in enumerate(links)),
        )

    def _links(self, handle: object) -> tuple[bool | None, ...]:
        links: list[bool | None] = []
        for link in range(self._api.NVML_NVLINK_MAX_LINKS):
            up = self._call(("nvmlDeviceGetNvLinkState",), handle, link)
            if up is None and not any(links):
                break  # the device has no NVLink in use, so the other links need no call
            links.append(None if up is None else bool(up))
        return tuple(links)

    def _link_errors(self, handle: object, link: int, up: bool | None) -> int | None:
        """Return the number of errors that an NVLink has counted so far; None if the link is down or reports no error counts."""
        if not up:
            return None
        counts = [
            self._call(("nvmlDeviceGetNvLinkErrorCounter",), handle, link, counter)
            for counter in (REPLAY, RECOVERY)
        ]
        if counts == [None, None]:
            counts = [self._field(handle, name, link) for name in LINK_ERRORS]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _field(self, handle: object, name: str, scope: int = 0) -> int | None:
        """Return the value of the NVML field `name`; None if the device, the driver or `pynvml` does not support the field."""
        field = getattr(self._api, name, None)
        values = field and self._call(("nvmlDeviceGetFieldValues",), handle, [(field, scope)])
        if not values or values[0].nvmlReturn != 0:
            return None
        value = values[0].value
        return int(value.ullVal if values[0].valueType in WIDE_TYPES else value.uiVal)

    def _call(self, names: tuple[str, ...], *arguments: object) -> Any:
        """Return the result of the first call in `names` that succeeds; None if none does.

        Raise _Lost if an error shows that the device does not answer at all.
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
                self._unspecific_error = self._unspecific_error or error.value in UNSPECIFIC_ERRORS
        return None

    def _or_none(self, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            return call(*arguments)
        except self._api.NVMLError:
            return None
