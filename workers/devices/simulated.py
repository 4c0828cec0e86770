"""The devices of a simulated group: one per rank, well until a rehearsal breaks one.

What is said of them is what the watch over real GPUs would say, by the same table: an Xid 48 of one rank's device is fatal,
and the worker, which is the whole group, goes with it; an NVLink's fault leaves the group without new requests.
"""

import time

from workers.devices.faults import DeviceFaults, FaultChange, Say

XIDS = {
    "xid": 48,
    "nvlink": 74,
}  # the faults that can be played, and the Xids that they are unless another one is named


class SimulatedDevices:
    """The devices of one worker's ranks. It stands in for a `DeviceWatch`, and is called on the worker's loop only."""

    off = ""
    named = False

    def __init__(self, worker: str, tp: int) -> None:
        self.gpus = tuple(f"SIM-{worker}-{rank}" for rank in range(tp))
        self.stopped = False
        self._say: Say | None = None
        self._faults = {gpu: DeviceFaults(linked=tp > 1) for gpu in self.gpus}

    def start(self, within_s: float) -> None:
        """There is no driver to open."""

    def begin(self, say: Say, broke: object = None) -> None:
        """Say from now on what is wrong."""
        self._say = say

    def stop(self) -> None:
        """Say no more."""
        self.stopped = True

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Break the device of one rank (`argument`: another Xid), or `heal` all; False if there is no such fault."""
        if fault == "heal":
            for gpu, faults in self._faults.items():
                self._tell(gpu, faults.repaired())
            return True
        if fault not in XIDS:
            return False
        gpu = self.gpus[rank]
        self._tell(gpu, self._faults[gpu].xid(int(argument) or XIDS[fault], time.monotonic()))
        return True

    def mend(self, fault: str, argument: float, rank: int) -> None:
        """Repair what this fault has done to the device of one rank."""
        gpu = self.gpus[rank]
        self._tell(gpu, self._faults[gpu].mended(int(argument) or XIDS[fault]))

    def _tell(self, gpu: str, changes: list[FaultChange]) -> None:
        for change in changes:
            if self._say is not None:
                self._say(gpu, change)
