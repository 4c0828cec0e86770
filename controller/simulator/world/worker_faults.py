"""Faults of one worker's process, engine and connections.

Each entry of `WorkerFaults.kinds` injects one kind of fault, which ends after a random time.
"""

from collections.abc import Callable, Sequence
from random import Random

from controller.simulator.world.kernel import MS, SECOND, coin, seconds_drawn
from controller.simulator.world.machines import CANARIES, Condition, Machine
from controller.simulator.world.prober import PROBER
from controller.simulator.world.world import SimulatedWorld
from events.observations import DeviceFaulted, DeviceRecovered, EngineFaulted

WELL = Condition()


class WorkerFaults:
    """Injects faults into single workers."""

    def __init__(self, world: SimulatedWorld, chance: Random) -> None:
        self._world, self._kernel, self._chance = world, world.kernel, chance
        self.kinds: dict[str, Callable[[Machine], None]] = {
            "crash": self._crash,
            "stop": Machine.stop,
            "hang": self._hang,
            "error": self._error,
            "corrupt": self._corrupt,
            "slow": lambda machine: self._degrade(machine, "slow", (2.0, 3.5, 10.0), 400),
            "flaky": lambda machine: self._degrade(machine, "flaky", (0.1, 0.4, 0.8), 300),
            "cut": self.cut,
            "dark": self._dark,
            "twice": Machine.announce_again,
            "device": self._device,
            "throttle": self._throttle,
            # An NVLink of a multi-GPU worker is down: the worker gets no new requests.
            "nvlink": lambda machine: self._limit(machine, "nvlink_down", [0.0]),
        }

    def _crash(self, machine: Machine) -> None:
        supervisor = self._world.supervisor
        machine.crash()
        supervisor.soon(machine)

    def _hang(self, machine: Machine) -> None:
        machine.condition.hung = True
        self._kernel.after(500 * MS, self._world.stalled, machine)
        machine.later(seconds_drawn(self._chance, 2, 90), self._unhang, machine)

    def _unhang(self, machine: Machine) -> None:
        machine.condition.hung = False
        machine.outbox.send()

    def _error(self, machine: Machine) -> None:
        machine.condition.erring = True
        if machine.up and self._chance.random() < 0.3:
            machine.observe(EngineFaulted, reason="CUDA error", fatal=coin(self._chance))
        machine.later(seconds_drawn(self._chance, 10, 200), self._over, machine, "erring")

    def _corrupt(self, machine: Machine) -> None:
        visible = frozenset(i for i in range(CANARIES) if self._chance.random() < 0.5)
        visible = visible or frozenset({self._chance.randrange(CANARIES)})
        machine.corrupt(visible, in_hardware=coin(self._chance))
        self._kernel.after(seconds_drawn(self._chance, 60, 1200), machine.heal_corruption)

    def corrupt_from_start(self, machine: Machine) -> None:
        """Make a worker give wrong answers before any golden is agreed."""
        self._world.note(f"corrupt from the start: {machine.name}")
        machine.corrupt(frozenset(range(self._chance.randrange(1, CANARIES + 1))), in_hardware=True)
        self._kernel.after(seconds_drawn(self._chance, 60, 1800), machine.heal_corruption)

    def _degrade(self, machine: Machine, what: str, values: tuple[float, ...], longest: int) -> None:
        """Set one field of a worker's condition to a random value, for at most `longest` seconds."""
        setattr(machine.condition, what, self._chance.choice(values))
        self._kernel.after(seconds_drawn(self._chance, 20, longest), self._over, machine, what)

    def cut(self, machine: Machine) -> None:
        """Disconnect a worker from the broker for a random time."""
        machine.condition.cut = True
        if machine.up:
            machine.outbox.reachable = False
        self._kernel.after(seconds_drawn(self._chance, 2, 60), self._uncut, machine)

    def _uncut(self, machine: Machine) -> None:
        machine.condition.cut = False
        if machine.up:
            machine.outbox.reachable = True
            machine.outbox.send()
            if coin(self._chance):
                machine.announce_again()

    def _dark(self, machine: Machine) -> None:
        peers = [f.name for f in self._world.frontends] + [PROBER]
        machine.condition.dark = frozenset(p for p in peers if self._chance.random() < 0.6)
        self._kernel.after(500 * MS, self._world.stalled, machine)
        self._kernel.after(seconds_drawn(self._chance, 5, 120), self._over, machine, "dark")

    def _device(self, machine: Machine) -> None:
        if not machine.up or machine.condition.device:
            return
        fatal = self._chance.random() < 0.7
        machine.condition.device = "xid"
        machine.observe(DeviceFaulted, device="gpu0", fault_class="xid", code="79", fatal=fatal)
        if fatal and coin(self._chance):  # the worker's process runs on the device and fails with it
            machine.shut_down()
        self._kernel.after(seconds_drawn(self._chance, 30, 400), self.repair, machine)

    def repair(self, machine: Machine) -> None:
        """End a device fault, and report the recovery from the running process. If none runs, try again later."""
        if not machine.condition.device:
            return
        if not machine.up:
            self._kernel.after(10 * SECOND, self.repair, machine)
            return
        machine.condition.device = ""
        machine.observe(DeviceRecovered, device="gpu0", fault_class="xid", code="79")

    def _throttle(self, machine: Machine) -> None:
        """Throttle a worker's device in one to three random steps, and then end the limit."""
        weights = self._chance.sample((0.8, 0.6, 0.5, 0.3, 0.1), k=self._chance.randrange(1, 4))
        self._limit(machine, "throttle", weights)

    def _limit(self, machine: Machine, fault_class: str, weights: Sequence[float]) -> None:
        if not machine.up or machine.condition.hung or fault_class in machine.condition.limits:
            return
        machine.limit(fault_class, weights[0])
        at = 0
        for weight in (*weights[1:], None):
            at += seconds_drawn(self._chance, 10, 200)
            self._kernel.after(at, self._relimit, machine, fault_class, weight)

    def _relimit(self, machine: Machine, fault_class: str, weight: float | None) -> None:
        """Apply the next limit of a device fault, unless the fault has ended meanwhile.

        If the process hangs, the limit is applied when the process responds again.
        """
        if fault_class not in machine.condition.limits:
            return
        if machine.condition.hung:
            self._kernel.after(5 * SECOND, self._relimit, machine, fault_class, weight)
            return
        machine.limit(fault_class, weight)

    def _over(self, machine: Machine, what: str) -> None:
        """Reset one field of a worker's condition to its value without a fault."""
        setattr(machine.condition, what, getattr(WELL, what))
