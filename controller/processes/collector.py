"""Memory of a process: garbage collection, and the return of freed memory to the system.

A full garbage collection over all live objects takes tens of milliseconds, during which no other code runs. So objects that are
alive at startup are frozen (excluded from garbage collection). Events, states and requests leave no reference cycles, so a
process needs full collections only rarely.
"""

import asyncio
import ctypes
import gc
from pathlib import Path

COLLECT_AT = (20_000, 20, 50)
COLLECT_HISTORY_AT = (500_000, 20, 50)  # for a process that reads a whole journal


def freeze_and_tune(collect_at: tuple[int, int, int] = COLLECT_AT) -> None:
    """Exclude all objects that are alive now from garbage collection, and set its thresholds (`gc.set_threshold`)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*collect_at)


GROWN_BYTES = 16 * 2**20  # growth above the minimum so far from which memory is returned
WORTH_BYTES = 4 * 2**20
PAUSE_S, PAUSE_S_MAX = 2.0, 30.0
_PAGE = 4096
_STATM = Path("/proc/self/statm")


class HeapTrim:
    """Decides when a process returns freed memory to the operating system.

    The allocator keeps the memory that threads have freed in per-thread arenas. For example, after tokenizing eight texts of 10
    MB, a frontend had 13.5 GB, of which it used 50 MB. So `malloc_trim` (glibc) is called while a process has much more memory
    than its minimum so far. The call runs in a thread and takes about 0.1 s per gigabyte. If a call frees little memory, the next
    calls are less frequent.
    """

    def __init__(self) -> None:
        # the minimum so far, and the resident bytes after the last trim
        self._least = self._left = self.resident()
        self._pause_s = PAUSE_S
        self._due = 0.0

    async def look(self, now: float) -> None:
        """Return freed memory to the system if the process has grown and enough time has passed since the last trim.

        Called every second.
        """
        has = self.resident()
        self._least = min(self._least, has)
        if has - self._left > GROWN_BYTES:
            self._pause_s, self._due = PAUSE_S, min(self._due, now + PAUSE_S)
        if now < self._due or has - self._least < GROWN_BYTES:
            return
        await asyncio.to_thread(self.trim)
        self._left = self.resident()
        worth = has - self._left > WORTH_BYTES
        self._pause_s = PAUSE_S if worth else min(2 * self._pause_s, PAUSE_S_MAX)
        self._due = now + self._pause_s

    def resident(self) -> int:
        """Return the number of resident bytes of this process, or 0 if the system does not report it."""
        try:
            return int(_STATM.read_bytes().split()[1]) * _PAGE
        except OSError:
            return 0

    def trim(self) -> None:
        """Make the C library's allocator return freed memory to the system. Do nothing if the library does not support this."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
