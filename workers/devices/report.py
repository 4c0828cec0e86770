"""Reports changes of the device watch as facts about a worker, and ends the worker with a lost GPU."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from events.fact import Observation
from events.journal.port import Journal
from events.observations import DeviceFaulted, DeviceRecovered
from workers.devices.faults import FaultChange, OnFaultChange
from workers.devices.taxonomy import meaning


class ReportedDevices(Protocol):
    """Devices that report changes of their faults until they are stopped."""

    @property
    def stopped(self) -> bool: ...
    def begin(self, say: OnFaultChange, broke: Callable[[Exception], None]) -> None: ...


def fact(worker: str, instance: str, device: str, change: FaultChange) -> Observation:
    """Convert a change into a fact about this worker."""
    about = {"worker": worker, "instance": instance, "device": device}
    if change.over:
        return DeviceRecovered(**about, fault_class=change.fault_class, code=change.code)
    fault = {"fault_class": change.fault_class, "code": change.code}
    return DeviceFaulted(**about, **fault, fatal=change.fatal, weight=change.weight)


def report(
    watch: ReportedDevices,
    journal: Journal,
    worker: str,
    instance: str,
    *,
    doubt: Callable[[str], None],
    died: Callable[[str], None],
    broke: Callable[[Exception], None],
) -> None:
    """Write the changes of a watch to the journal.

    `doubt` is called with the reason why the GPUs' contents cannot be trusted, and with "" when they can be trusted again.
    `died` is called for a device that has failed under the engine. A device that had failed before is only reported: a worker
    that restarts because of this fault would find it again. `broke` is called if the watch itself fails.
    """
    standing: set[tuple[str, str]] = set()  # active fatal faults

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
    """Start the watch, and call `told` with each change on the caller's event loop, until the watch is stopped."""
    loop = asyncio.get_running_loop()

    def unless_stopped(call: Callable[..., None], *arguments: object) -> None:
        if not watch.stopped:
            call(*arguments)

    def later(call: Callable[..., None], *arguments: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(unless_stopped, call, *arguments)

    watch.begin(partial(later, told), partial(later, broke))
