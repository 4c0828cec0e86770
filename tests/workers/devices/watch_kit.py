"""Helpers of the device watch tests."""

from collections.abc import Callable

from workers.devices.faults import FaultChange, ThrottlePolicy
from workers.devices.watch import DeviceWatch, WatchPolicy

QUICK = WatchPolicy(wait_ms=5, read_s=0.01, reopen_s=0.02, look_s=0.02, throttle=ThrottlePolicy(hold_s=0.05))

Reports = list[tuple[str, FaultChange]]
Watching = Callable[..., tuple[DeviceWatch, Reports]]
