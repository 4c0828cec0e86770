"""Reports the fault changes of a worker's GPUs as facts, and calls back when a GPU fails."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from events.fact import Observation
from events.journal.port import JournalReports
from events.observations import DeviceFaulted, DeviceRecovered
from workers.devices.faults import FaultChange, OnFaultChange
from workers.devices.taxonomy import meaning


class ReportedDevices(Protocol):
    """The interface of devices that report their fault changes until they are stopped."""

    @property
    def stopped(self) -> bool: ...
    def begin(self, say: OnFaultChange, broke: Callable[[Exception], None]) -> None: ...


def fact(worker: str, instance: str, device: str, change: FaultChange) -> Observation:
    """Convert a fault change of `device` into a fact about the worker instance."""
    about = {"worker": worker, "instance": instance, "device": device}
    if change.over:
        return DeviceRecovered(**about, fault_class=change.fault_class, code=change.code)
    fault = {"fault_class": change.fault_class, "code": change.code}
    return DeviceFaulted(**about, **fault, fatal=change.fatal, weight=change.weight)


def report(
    watch: ReportedDevices,
    journal: JournalReports,
    worker: str,
    instance: str,
    *,
    doubt: Callable[[str], None],
    died: Callable[[str], None],
    broke: Callable[[Exception], None],
) -> None:
    """Write the fault changes of a worker's devices to the journal, and call back for fatal faults.

    `doubt` is called with the reason when a fatal fault begins, because GPU memory cannot be trusted from then on. It is called
    with "" when no fatal fault is active any more. `died` is called with the reason when a fatal fault begins during the watch.
    It is not called for a fault that existed before the watch, because a restarted worker would find that fault again and end
    again. `broke` is called with the error if the device watch itself fails.
    """
    standing: set[tuple[str, str]] = set()  # device and class of each active fatal fault

    def observe(device: str, change: FaultChange) -> None:
        journal.observe(fact(worker, instance, device, change))
        if change.over:
            standing.discard((device, change.fault_class))
            if not standing:
                doubt("")
        elif change.fatal:
            standing.add((device, change.fault_class))
            reason = f"GPU {device}: {meaning(change.fault_class, change.code)}"
            doubt(reason)
            if not change.found:
                died(reason)

    listen(watch, observe, broke)


def listen(
    watch: ReportedDevices, told: Callable[[str, FaultChange], None], broke: Callable[[Exception], None]
) -> None:
    """Start the device watch. Until it is stopped, call `told` with each fault change, on the caller's event loop.

    `broke` is called with the error if the watch fails.
    """
    loop = asyncio.get_running_loop()

    def unless_stopped(call: Callable[..., None], *arguments: object) -> None:
        if not watch.stopped:
            call(*arguments)

    def later(call: Callable[..., None], *arguments: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(unless_stopped, call, *arguments)

    watch.begin(partial(later, told), partial(later, broke))
