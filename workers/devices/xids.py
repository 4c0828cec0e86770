"""Waits for Xids in a thread that leaves the driver while another thread needs exclusive access."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from workers.devices.nvml import NoDriver, Nvml

DRIVER_S_MAX = 5.0  # longest wait for that thread to leave the driver


class XidListener:
    """Waits for the Xids of some GPUs. Everything except `run` is called by the thread that reads the GPUs."""

    def __init__(
        self,
        wait_ms: int,
        stopped: threading.Event,
        told: Callable[[str, int], None],
        deaf: Callable[[], None],
    ) -> None:
        """Build a listener that ends within `wait_ms` once `stopped` is set.

        `told` is called with each Xid: the GPU's UUID ("" for all of them) and the number. `deaf` is called when the driver
        refuses further waits.
        """
        self._wait_ms = wait_ms
        self._stopped = stopped
        self._told = told
        self._deaf = deaf
        # a flag: the session is open, and Xids of some GPUs can be waited for
        self._may_wait = threading.Event()
        self._waiting = threading.Lock()  # held while the thread is inside the driver
        self.deafened = False  # the driver refused to wait any longer
        self.gpus: frozenset[str] = frozenset()  # GPUs subscribed to

    @property
    def listens(self) -> bool:
        """Whether it may wait for Xids."""
        return self._may_wait.is_set()

    def run(self, nvml: Nvml) -> None:
        """Wait for Xids, and report each one immediately."""
        while True:
            self._may_wait.wait()
            if self._stopped.is_set():
                return
            with self._waiting:
                xid = self._wait(nvml) if self._may_wait.is_set() else None
            if xid is not None:
                uuid, code = xid
                for gpu in (uuid,) if uuid else self.gpus:
                    self._told(gpu, code)

    def _wait(self, nvml: Nvml) -> tuple[str, int] | None:
        try:
            return nvml.wait(self._wait_ms)
        except NoDriver:  # with one lost GPU, the driver reports nothing about the others either
            self.deafened = True
            if not self._stopped.is_set():
                self._may_wait.clear()
            self._deaf()
            return None

    def ask(self, nvml: Nvml, uuids: Collection[str]) -> None:
        """Subscribe to the Xids of these GPUs. Call it only inside `kept_out`."""
        self.gpus = frozenset(uuids)
        if nvml.listen(uuids):
            self.deafened = False
            self._may_wait.set()

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[bool]:
        """Keep the thread out of the driver during the block; yield False if the driver hangs. `ask` ends the exclusion."""
        self._may_wait.clear()
        out = self._waiting.acquire(timeout=DRIVER_S_MAX)
        if self._stopped.is_set():
            self._may_wait.set()  # so that the thread ends
        try:
            yield out
        finally:
            if out:
                self._waiting.release()

    def stop(self) -> None:
        """Let the thread end, once `stopped` is set."""
        self._may_wait.set()
