"""The devices of a simulated group: one per rank, without faults until a rehearsal injects one.

They report the same facts as the watch of real GPUs, from the same table. An Xid 48 of one rank's device is fatal and ends the
worker, which is the whole group. After an NVLink fault the group gets no new requests.
"""

import time

from workers.devices.faults import DeviceFaults, FaultChange, OnFaultChange

XIDS = {
    "xid": 48,
    "nvlink": 74,
}  # the faults that can be injected, and their Xids unless another one is given


class SimulatedDevices:
    """The devices of one worker's ranks. Replaces a `DeviceWatch`; called on the worker's loop only."""

    off = ""
    named = False

    def __init__(self, worker: str, tp: int) -> None:
        self.gpus = tuple(f"SIM-{worker}-{rank}" for rank in range(tp))
        self.stopped = False
        self._say: OnFaultChange | None = None
        self._faults = {gpu: DeviceFaults(linked=tp > 1) for gpu in self.gpus}

    def start(self, within_s: float) -> None:
        """Do nothing: there is no driver to open."""

    def begin(self, say: OnFaultChange, broke: object = None) -> None:
        """Report faults from now on."""
        self._say = say

    def stop(self) -> None:
        """Stop reporting."""
        self.stopped = True

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Inject a fault into one rank's device (`argument`: another Xid), or `heal` all; return False for an unknown fault."""
        if fault == "heal":
            for gpu, faults in self._faults.items():
                self._report(gpu, faults.repaired())
            return True
        if fault not in XIDS:
            return False
        gpu = self.gpus[rank]
        self._report(gpu, self._faults[gpu].xid(int(argument) or XIDS[fault], time.monotonic()))
        return True

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """Repair the effect of this fault on one rank's device."""
        gpu = self.gpus[rank]
        self._report(gpu, self._faults[gpu].mended(int(argument) or XIDS[fault]))

    def _report(self, gpu: str, changes: list[FaultChange]) -> None:
        for change in changes:
            if self._say is not None:
                self._say(gpu, change)
