"""From the watch's changes to facts about a worker, and to its end where a device takes the engine along."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from events.fact import Observation
from events.journal.port import Journal
from events.observations import DeviceFaulted, DeviceRecovered
from workers.devices.faults import FaultChange, Say
from workers.devices.taxonomy import meaning


class ReportedDevices(Protocol):
    """Devices that tell what is wrong with them, until they are stopped."""

    @property
    def stopped(self) -> bool: ...
    def begin(self, say: Say, broke: Callable[[Exception], None] | None = None) -> None: ...


def fact(worker: str, instance: str, device: str, change: FaultChange) -> Observation:
    """Return a change as a fact about this worker."""
    if change.over:
        return DeviceRecovered(
            worker=worker, instance=instance, device=device, fault_class=change.fault_class, code=change.code
        )
    return DeviceFaulted(
        worker=worker,
        instance=instance,
        device=device,
        fault_class=change.fault_class,
        code=change.code,
        fatal=change.fatal,
        weight=change.weight,
    )


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
    """Let the watch say what it sees to the journal.

    `doubt` is told why what the GPUs hold cannot be trusted, and "" when it can again. `died` is told of one that has
    failed under the engine; one that had failed before is only reported: whoever starts again because of it meets it
    again. `broke` is told if the watch itself fails.
    """
    standing: set[tuple[str, str]] = set()  # fatal faults

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
    """Let the watch begin, and tell of each change in the loop that calls this, for as long as it is not stopped."""
    loop = asyncio.get_running_loop()

    def unless_stopped(call: Callable[..., None], *arguments: object) -> None:
        if not watch.stopped:
            call(*arguments)

    def later(call: Callable[..., None], *arguments: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(unless_stopped, call, *arguments)

    watch.begin(partial(later, told), partial(later, broke))
