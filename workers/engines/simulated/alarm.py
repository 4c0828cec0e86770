"""Rings at a moment, to a fraction of a millisecond: uvloop's own timers know whole ones only, and a step of a small model takes
three. Linux has such timers as files (timerfd); elsewhere the loop's own must do.
"""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable

_ABSOLUTE = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class _Time(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("at", _Time))


class Alarm:
    """One alarm of one loop: setting it again forgets the moment before. Raise OSError where there are none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("this system has no timerfd")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop = loop
        self._then: Callable[[], None] | None = None
        loop.add_reader(self._file, self._ring)

    def set(self, at: float, then: Callable[[], None]) -> None:
        """Call `then` at a moment of the loop's time, or at once if it is over."""
        self._then = then
        self._arm(max(1, round(at * 1e9)))

    def cancel(self) -> None:
        """Forget the moment."""
        self._then = None
        self._arm(0)

    def close(self) -> None:
        """Let go of the file."""
        self._then = None
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _arm(self, at_ns: int) -> None:
        setting = _Setting(_Time(0, 0), _Time(*divmod(at_ns, 1_000_000_000)))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(setting), None)

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it has been set again meanwhile
            return
        if (then := self._then) is not None:
            self._then = None
            then()
