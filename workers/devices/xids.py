"""Waiting for Xids in a thread of its own, and keeping that thread out of the driver while others need it alone."""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator

from workers.devices.nvml import NoDriver, Nvml

DRIVER_S_MAX = 5.0  # how long it is waited for before the session with the driver may be ended


class XidListener:
    """Waits for the Xids of some GPUs. All but `run` is for the thread that reads them."""

    def __init__(
        self,
        wait_ms: int,
        stopped: threading.Event,
        told: Callable[[str, int], None],
        deaf: Callable[[], None],
    ) -> None:
        """`told` is called with each Xid: the GPU's UUID, "" for all of them, and the number. `deaf` is called when the
        driver refuses to say any more. Once `stopped` is set it ends within `wait_ms`."""
        self._wait_ms = wait_ms
        self._stopped = stopped
        self._told = told
        self._deaf = deaf
        self._may_wait = (
            threading.Event()
        )  # a flag: the session is open, and Xids of some GPUs can be waited for
        self._waiting = threading.Lock()  # held while it is in the driver
        self.deafened = False  # it waited for Xids, until the driver refused
        self.gpus: frozenset[str] = frozenset()  # whose Xids were asked for

    @property
    def listens(self) -> bool:
        """Whether it may wait for Xids."""
        return self._may_wait.is_set()

    def run(self, nvml: Nvml) -> None:
        """Wait for Xids, and say each the moment the driver tells it."""
        while True:
            self._may_wait.wait()
            if self._stopped.is_set():
                return
            with self._waiting:
                heard = self._wait(nvml) if self._may_wait.is_set() else None
            if heard is not None:
                uuid, code = heard
                for gpu in (uuid,) if uuid else self.gpus:
                    self._told(gpu, code)

    def _wait(self, nvml: Nvml) -> tuple[str, int] | None:
        try:
            return nvml.wait(self._wait_ms)
        except NoDriver:  # with a GPU that is lost nothing can be heard of the others, either
            self.deafened = True
            if not self._stopped.is_set():
                self._may_wait.clear()
            self._deaf()
            return None

    def ask(self, nvml: Nvml, uuids: Collection[str]) -> None:
        """Ask for the Xids of these GPUs. Only while it is kept out."""
        self.gpus = frozenset(uuids)
        if nvml.listen(uuids):
            self.deafened = False
            self._may_wait.set()

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[bool]:
        """Keep it out of the driver meanwhile; False if the driver hangs, and it is not. `ask` lets it in again."""
        self._may_wait.clear()
        out = self._waiting.acquire(timeout=DRIVER_S_MAX)
        if self._stopped.is_set():
            self._may_wait.set()  # so that it ends
        try:
            yield out
        finally:
            if out:
                self._waiting.release()

    def stop(self) -> None:
        """Let it end, once `stopped` is set."""
        self._may_wait.set()
