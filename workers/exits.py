"""Exit codes of a worker process: 0 after an orderly shutdown, FAILED, USAGE or BROKE.

A worker that has joined and exits with 0 or FAILED has recorded its end on the journal (`WorkerLeft`). For every other exit
code, the worker's supervisor records the end.
"""

import os
import threading

FAILED = 1
"""The worker failed or could not start: its engine died, an essential task failed, or the fleet considered it dead."""
USAGE = 2
"""A usage error."""
BROKE = 70
"""The worker ended without recording its end on the journal: an unexpected error, or a cleanup that did not finish (EX_SOFTWARE
of sysexits.h)."""
KILLED = 137
"""An injected fault killed this worker, one of many in its process. The number is what a shell reports for a killed process."""
RENEWED = -1
"""Not an exit code: this instance of a worker has ended, and the same process starts the next one."""
LINGER_S = 0.5
"""Seconds that the event loop gets to end before the process is ended. In Python 3.11, the loop waits for a thread that hangs in
a call."""


def exit_within(seconds: float, code: int) -> threading.Timer:
    """Start a timer that ends the process with `code` after `seconds`, even if the event loop is blocked.

    Return the timer, so that the caller can cancel it.
    """
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return timer
