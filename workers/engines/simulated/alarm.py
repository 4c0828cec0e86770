"""A sub-millisecond timer. uvloop rounds timers to whole milliseconds, and a step of a small model takes three; on Linux this
uses a timerfd, which a loop watches as it watches a socket.
"""

import ctypes
import os
import sys
import time

_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("at", _Time))


class Alarm:
    """One timer: setting it again forgets the time before. Raises OSError where there is no timerfd."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("this system has no timerfd")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._set = False

    def set(self, at: float) -> None:
        """Let the file become readable at a monotonic time in seconds, or at once if it is over."""
        self._set = True
        self._arm(max(1, round(at * 1e9)))

    def cancel(self) -> None:
        """Forget the time."""
        self._set = False
        self._arm(0)

    def close(self) -> None:
        """Close the file, which no loop watches any more."""
        self._set = False
        os.close(self.file)

    def _arm(self, at_ns: int) -> None:
        setting = _Setting(_Time(0, 0), _Time(*divmod(at_ns, 1_000_000_000)))
        self._libc.timerfd_settime(self.file, _ABSOLUTE, ctypes.byref(setting), None)

    def expired(self) -> bool:
        """Return whether the time has come, once for each `set`; for the reader of the file."""
        try:
            os.read(self.file, 8)
        except BlockingIOError:  # it has been set again meanwhile
            return False
        expired, self._set = self._set, False
        return expired
