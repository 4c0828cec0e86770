"""From the watch's changes to facts about a worker, and from settings to a watch."""

import asyncio
from typing import TYPE_CHECKING

from events.fact import Observation
from events.observations import DeviceFaulted, DeviceRecovered
from workers.devices.faults import Change

if TYPE_CHECKING:
    from events.journal.port import Journal
    from workers.gpu import DeviceWatch


def fact(worker: str, instance: str, device: str, change: Change) -> Observation:
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


def report(watch: "DeviceWatch", journal: "Journal", worker: str, instance: str) -> None:
    """Let the watch say what it sees to the journal, in the loop that calls this."""
    loop = asyncio.get_running_loop()

    def observe(device: str, change: Change) -> None:
        if not watch.stopped:
            journal.observe(fact(worker, instance, device, change))

    def say(device: str, change: Change) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(observe, device, change)

    watch.begin(say)
