"""Simulates the GPUs of a simulated worker, one for each rank, with faults that a rehearsal injects.

The simulated GPUs report the same fault changes as real ones, by the same table of Xids. For example, an Xid 48 of one rank's
GPU is fatal and ends the worker with all its ranks. After an NVLink fault the worker gets no new requests.
"""

import time

from workers.devices.faults import DeviceFaults, FaultChange, OnFaultChange

# the faults that can be injected, each with the Xid that it causes by default
XIDS = {"xid": 48, "nvlink": 74}


class SimulatedDevices:
    """The simulated GPUs of one worker, used in place of a `DeviceWatch`. Call the methods only on the worker's event loop."""

    off = ""
    named = False

    def __init__(self, worker: str, tp: int) -> None:
        self.gpus = tuple(f"SIM-{worker}-{rank}" for rank in range(tp))
        self.stopped = False
        self._say: OnFaultChange | None = None
        self._faults = {gpu: DeviceFaults(linked=tp > 1) for gpu in self.gpus}

    def start(self, within_s: float) -> None:
        """Do nothing, because there is no driver to open."""

    def begin(self, say: OnFaultChange, broke: object = None) -> None:
        """Report every later fault change to `say`."""
        self._say = say

    def stop(self) -> None:
        """Record that the devices are stopped, so that `report.listen` drops their later changes."""
        self.stopped = True

    def play(self, fault: str, argument: float, rank: int) -> bool:
        """Inject a fault into one rank's device, or end all faults if `fault` is "heal". Return False for an unknown fault.

        `argument` is the Xid to report; 0 selects the default Xid of the fault.
        """
        if fault == "heal":
            for gpu, faults in self._faults.items():
                self._report(gpu, faults.repaired())
            return True
        if fault not in XIDS:
            return False
        gpu = self.gpus[rank]
        self._report(gpu, self._faults[gpu].xid(int(argument) or XIDS[fault], time.monotonic()))
        return True

    def repair(self, fault: str, argument: float, rank: int) -> None:
        """End the fault of one rank's device that `play` injected with the same arguments."""
        gpu = self.gpus[rank]
        self._report(gpu, self._faults[gpu].repair_xid(int(argument) or XIDS[fault]))

    def _report(self, gpu: str, changes: list[FaultChange]) -> None:
        for change in changes:
            if self._say is not None:
                self._say(gpu, change)
