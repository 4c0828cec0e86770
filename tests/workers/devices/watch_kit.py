"""Helpers of the device watch tests."""

import time
from collections.abc import Callable

from workers.devices.faults import FaultChange
from workers.devices.throttle import ThrottlePolicy
from workers.devices.watch import DeviceWatch, WatchPolicy

QUICK = WatchPolicy(wait_ms=5, read_s=0.01, reopen_s=0.02, look_s=0.02, throttle=ThrottlePolicy(hold_s=0.05))

Reports = list[tuple[str, FaultChange]]
Watching = Callable[..., tuple[DeviceWatch, Reports]]


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait until a condition holds that the watch's thread makes true."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
