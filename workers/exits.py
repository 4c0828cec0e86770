"""How a worker's process ends: 0 in good order, FELL, USAGE, or BROKE.

A worker that had joined and ends with 0 or FELL has said so itself (`WorkerLeft`); of every other end its supervisor tells.
"""

import os
import threading

FELL = 1
"""It could not go on, or not begin: its engine died, a task that it cannot do without failed, the fleet held it for dead."""
USAGE = 2
"""A mistake of the user."""
BROKE = 70
"""It ended without having said so: an error that nobody foresaw, or a cleanup that did not end (EX_SOFTWARE of sysexits.h)."""
KILLED = 137
"""Of one of many workers in a process, which a rehearsal has killed: as a shell says it of a process."""
RENEWED = -1
"""No exit code: this life of a worker is over, and the same process begins the next one."""
LINGER_S = 0.5
"""For the end of an event loop, which in Python 3.11 would wait for a thread that hangs in a call."""


def exit_within(seconds: float, code: int) -> threading.Timer:
    """End the process with `code` by then, whatever holds it up; return what can be cancelled."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer
