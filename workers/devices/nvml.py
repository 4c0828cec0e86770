"""NVML, the driver's own interface, with every failing call a value: None where a device cannot say, `lost` where it is gone.

The module `pynvml` (nvidia-ml-py) is imported only where the driver's library is: it takes 4 MB and 20 ms.
"""

import ctypes
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from events.errors import HoldfastError
from workers.devices.faults import Reading

LIBRARY = "libnvidia-ml.so.1"
LOST = (1, 9, 15, 16, 28)  # uninitialised, driver not loaded, GPU is lost, reset required, GPU not found
TIMEOUT = 10
LINKS_MAX = 18  # NVLinks of one GPU (NVML_NVLINK_MAX_LINKS)
REPLAY, RECOVERY = 0, 1  # NVLink error counters


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
        self._handles, self._names, self._events = {}, {}, None
        try:
            self._api.nvmlInit()
        except self._api.NVMLError:
            return
        self._find()

    def close(self) -> None:
        """End the session."""
        if self._events is not None:
            self._or_none(self._api.nvmlEventSetFree, self._events)
            self._events = None
        self._or_none(self._api.nvmlShutdown)

    def listen(self, uuids: Collection[str]) -> bool:
        """Ask for the Xids of these devices; return whether any can be heard."""
        if self._events is not None:
            self._or_none(self._api.nvmlEventSetFree, self._events)
        self._events = self._or_none(self._api.nvmlEventSetCreate)
        if self._events is None:
            return False
        heard = False
        for uuid in uuids:
            try:
                self._api.nvmlDeviceRegisterEvents(
                    self._handles[uuid], self._api.nvmlEventTypeXidCriticalError, self._events
                )
                heard = True
            except (KeyError, self._api.NVMLError):
                continue
        return heard

    def wait(self, timeout_ms: int) -> tuple[str, int] | None:
        """Wait for an Xid; return its device and code, None after the time. Raise NoDriver if nothing can be waited for."""
        if self._events is None:
            raise NoDriver("no events here")
        try:
            data = self._api.nvmlEventSetWait(self._events, timeout_ms)
        except self._api.NVMLError as error:
            if error.value == TIMEOUT:
                return None
            raise NoDriver(f"no events: {error}") from error
        uuid = self._names.get(ctypes.cast(data.device, ctypes.c_void_p).value or 0)
        return (uuid, int(data.eventData)) if uuid is not None else None

    def read(self, uuid: str) -> Reading:
        """Look at a device."""
        handle = self._handles.get(uuid)
        if handle is None:
            return Reading(lost=True)
        try:
            return self._read(handle)
        except _Lost:
            return Reading(lost=True)

    def pids(self, uuid: str) -> frozenset[int]:
        """Return the processes that compute on a device."""
        handle = self._handles.get(uuid)
        found = self._or_none(self._api.nvmlDeviceGetComputeRunningProcesses, handle) if handle else None
        return frozenset(process.pid for process in found or ())

    def _read(self, handle: Any) -> Reading:
        n = self._api

        def ask(call: Callable[..., Any], *arguments: Any) -> Any:
            return self._ask(call, handle, *arguments)

        rows = ask(n.nvmlDeviceGetRemappedRows)
        links = self._links(handle)
        return Reading(
            ecc=ask(n.nvmlDeviceGetTotalEccErrors, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            recovery=self._recovery(handle),
            reasons=ask(n.nvmlDeviceGetCurrentClocksEventReasons),
            clock=ask(n.nvmlDeviceGetClockInfo, n.NVML_CLOCK_SM),
            clock_max=ask(n.nvmlDeviceGetMaxClockInfo, n.NVML_CLOCK_SM),
            temperature=ask(n.nvmlDeviceGetTemperature, n.NVML_TEMPERATURE_GPU),
            slowdown=ask(n.nvmlDeviceGetTemperatureThreshold, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            pcie_width=ask(n.nvmlDeviceGetCurrPcieLinkWidth),
            pcie_width_max=ask(n.nvmlDeviceGetMaxPcieLinkWidth),
            links=links,
            link_errors=self._link_errors(handle, links),
        )

    def _links(self, handle: Any) -> tuple[bool | None, ...]:
        links: list[bool | None] = []
        for link in range(LINKS_MAX):
            up = self._ask(self._api.nvmlDeviceGetNvLinkState, handle, link)
            if up is None and not any(links):
                break  # no NVLink at all, or none in use: one call says so
            links.append(None if up is None else bool(up))
        return tuple(links)

    def _link_errors(self, handle: Any, links: tuple[bool | None, ...]) -> int | None:
        counts = [
            self._ask(self._api.nvmlDeviceGetNvLinkErrorCounter, handle, link, counter)
            for link, up in enumerate(links)
            if up
            for counter in (REPLAY, RECOVERY)
        ]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _recovery(self, handle: Any) -> int | None:
        fields = self._ask(
            self._api.nvmlDeviceGetFieldValues, handle, [self._api.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        )
        return int(fields[0].value.uiVal) if fields is not None and fields[0].nvmlReturn == 0 else None

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a device says, None if it cannot say that. Raise _Lost if it does not answer at all."""
        try:
            return call(*arguments)
        except self._api.NVMLError as error:
            if error.value in LOST:
                raise _Lost from error
            return None

    def _or_none(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._api.NVMLError:
            return None
