"""What goes wrong with one worker's devices. Each kind of fault is one method, and ends by itself."""

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from controller.simulator.world.kernel import SECOND, Kernel, coin, seconds_drawn
from controller.simulator.world.machines import Machine
from events.observations import DeviceFaulted, DeviceRecovered

Strike: TypeAlias = Callable[[Machine], None]


class SimulatedDeviceFaults:
    """The faults of GPUs, as the device watch of a worker's process reports them."""

    def __init__(self, kernel: Kernel, chance: Random) -> None:
        self._kernel = kernel
        self._chance = chance
        self.kinds: dict[str, Strike] = {
            "device": self._device,
            "throttle": self._throttle,
            "nvlink": self._nvlink,
        }

    def _device(self, machine: Machine) -> None:
        if not machine.up or machine.condition.device:
            return
        fatal = self._chance.random() < 0.7
        machine.condition.device = "xid"
        machine.say(DeviceFaulted, device="gpu0", fault_class="xid", code="79", fatal=fatal)
        if fatal and coin(self._chance):  # its own process computes there: it goes with the device
            machine.fall()
        self._kernel.after(seconds_drawn(self._chance, 30, 400), self.repair, machine)

    def repair(self, machine: Machine) -> None:
        """The device watch of whichever process is up says that the device is well."""
        if not machine.condition.device:
            return
        if not machine.up:
            self._kernel.after(10 * SECOND, self.repair, machine)
            return
        machine.condition.device = ""
        machine.say(DeviceRecovered, device="gpu0", fault_class="xid", code="79")

    def _throttle(self, machine: Machine) -> None:
        """Its clocks fall, a little more or less in a few steps, and rise again."""
        weights = self._chance.sample((0.8, 0.6, 0.5, 0.3, 0.1), k=self._chance.randrange(1, 4))
        self._limit(machine, "throttle", weights)

    def _nvlink(self, machine: Machine) -> None:
        """A link of a worker of several devices is down: it gets nothing new."""
        self._limit(machine, "nvlink_down", [0.0])

    def _limit(self, machine: Machine, fault_class: str, weights: Sequence[float]) -> None:
        if not machine.up or machine.condition.hung or fault_class in machine.condition.limits:
            return
        machine.limit(fault_class, weights[0])
        at = 0
        for weight in (*weights[1:], None):
            at += seconds_drawn(self._chance, 10, 200)
            self._kernel.after(at, self._relimit, machine, fault_class, weight)

    def _relimit(self, machine: Machine, fault_class: str, weight: float | None) -> None:
        """Another step, unless all is well again by now. A process that hangs notices it afterwards."""
        if fault_class not in machine.condition.limits:
            return
        if machine.condition.hung:
            self._kernel.after(5 * SECOND, self._relimit, machine, fault_class, weight)
            return
        machine.limit(fault_class, weight)
