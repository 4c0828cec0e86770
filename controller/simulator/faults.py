"""What goes wrong, and when. Each kind of fault is one method; a scenario says how often each strikes.

Every fault ends by itself, and `heal` ends them all: from then on nothing goes wrong any more.
"""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from controller.simulator.kernel import MINUTE, MS, SECOND
from controller.simulator.machines import CANARIES, Condition, Machine
from controller.simulator.prober import PROBER
from events.observations import DeviceFaulted, DeviceRecovered, EngineFaulted

if TYPE_CHECKING:
    from controller.simulator.controllers import Controller
    from controller.simulator.simulation import Simulation

HOUR = 60 * MINUTE


class Faults:
    """The injector. `note` writes each fault into the history."""

    def __init__(self, simulation: "Simulation", chance: Random, note: Callable[[str], None]) -> None:
        self.over = False
        self.struck: dict[str, int] = {}
        self._world = simulation
        self._chance = chance
        self._note = note

    def begin(self) -> None:
        """Let every kind strike for the first time at its own moment."""
        scenario = self._world.scenario
        for kind, per_hour in scenario.worker_faults.items():
            self._plan(kind, per_hour * scenario.workers)
        for kind, per_hour in scenario.fleet_faults.items():
            self._plan(kind, per_hour)

    def _plan(self, kind: str, per_hour: float) -> None:
        gap = int(self._chance.expovariate(per_hour / HOUR))
        self._world.kernel.after(gap, self._strike, kind, per_hour)

    def _strike(self, kind: str, per_hour: float) -> None:
        if self.over:
            return
        self._plan(kind, per_hour)
        self.struck[kind] = self.struck.get(kind, 0) + 1
        if kind in self._world.scenario.worker_faults:
            machine = self._machine()
            if not machine.life:
                return  # it has not been started yet
            self._note(f"{kind} {machine.name}")
            getattr(self, f"_{kind}")(machine)
        else:
            self._note(kind)
            getattr(self, f"_{kind}")()

    # --- of one worker ------------------------------------------------------------------------------------------

    def _crash(self, machine: Machine) -> None:
        machine.crash()
        self._world.supervisor.soon(machine)

    def _stop(self, machine: Machine) -> None:
        machine.stop()

    def _hang(self, machine: Machine) -> None:
        machine.condition.hung = True
        self._world.kernel.after(500 * MS, self._world.stalled, machine)
        self._later(machine, self._unhang, self._seconds(2, 90))

    def _unhang(self, machine: Machine) -> None:
        machine.condition.hung = False
        machine.outbox.retry()

    def _error(self, machine: Machine) -> None:
        machine.condition.erring = True
        if machine.up and self._chance.random() < 0.3:
            machine.outbox.observe(
                EngineFaulted(
                    worker=machine.name, instance=machine.instance, reason="CUDA error", fatal=self._coin()
                )
            )
        self._later(machine, self._unerr, self._seconds(10, 200))

    def _unerr(self, machine: Machine) -> None:
        machine.condition.erring = False

    def _corrupt(self, machine: Machine) -> None:
        visible = frozenset(i for i in range(CANARIES) if self._chance.random() < 0.5)
        visible = visible or frozenset({self._chance.randrange(CANARIES)})
        machine.corrupt(visible, in_hardware=self._coin())
        self._world.kernel.after(self._seconds(60, 1200), machine.heal_corruption)

    def corrupt_from_start(self, machine: Machine) -> None:
        """A worker is wrong before anybody knows what is right."""
        self._note(f"corrupt from the start: {machine.name}")
        machine.corrupt(frozenset(range(self._chance.randrange(1, CANARIES + 1))), in_hardware=True)
        self._world.kernel.after(self._seconds(60, 1800), machine.heal_corruption)

    def _slow(self, machine: Machine) -> None:
        machine.condition.slow = self._chance.choice((2.0, 3.5, 10.0))
        self._world.kernel.after(self._seconds(20, 400), self._unslow, machine)

    def _unslow(self, machine: Machine) -> None:
        machine.condition.slow = 1.0

    def _flaky(self, machine: Machine) -> None:
        machine.condition.flaky = self._chance.choice((0.1, 0.4, 0.8))
        self._world.kernel.after(self._seconds(20, 300), self._unflaky, machine)

    def _unflaky(self, machine: Machine) -> None:
        machine.condition.flaky = 0.0

    def _device(self, machine: Machine) -> None:
        if not machine.up or machine.condition.device:
            return
        fatal = self._chance.random() < 0.7
        machine.condition.device = "xid"
        machine.outbox.observe(
            DeviceFaulted(
                worker=machine.name,
                instance=machine.instance,
                device="gpu0",
                fault_class="xid",
                code="79",
                fatal=fatal,
            )
        )
        self._world.kernel.after(self._seconds(30, 400), self._repair, machine)

    def _repair(self, machine: Machine) -> None:
        """The device watch of whichever process is up says that the device is well."""
        if not machine.condition.device:
            return
        if not machine.up:
            self._world.kernel.after(10 * SECOND, self._repair, machine)
            return
        machine.condition.device = ""
        machine.outbox.observe(
            DeviceRecovered(
                worker=machine.name, instance=machine.instance, device="gpu0", fault_class="xid", code="79"
            )
        )

    def _cut(self, machine: Machine) -> None:
        machine.condition.cut = True
        if machine.up:
            machine.outbox.reachable = False
        self._world.kernel.after(self._seconds(2, 60), self._uncut, machine)

    def _uncut(self, machine: Machine) -> None:
        machine.condition.cut = False
        if machine.up:
            machine.outbox.reachable = True
            machine.outbox.retry()
            if self._coin():
                machine.announce_again()

    def _dark(self, machine: Machine) -> None:
        peers = [f.name for f in self._world.frontends] + [PROBER]
        machine.condition.dark = frozenset(p for p in peers if self._chance.random() < 0.6)
        self._world.kernel.after(500 * MS, self._world.stalled, machine)
        self._world.kernel.after(self._seconds(5, 120), self._light, machine)

    def _light(self, machine: Machine) -> None:
        machine.condition.dark = frozenset()

    def _twice(self, machine: Machine) -> None:
        machine.announce_again()

    # --- of the fleet -------------------------------------------------------------------------------------------

    def _broker(self) -> None:
        """It goes away; sometimes it stores for a while before, and nobody hears that it did."""
        broker, kernel = self._world.broker, self._world.kernel
        if not broker.up or broker.mute:
            return
        broker.mute = self._coin()
        kernel.after(self._seconds(1, 10) if broker.mute else 0, self._broker_gone)

    def _broker_gone(self) -> None:
        if not self.over:
            self._world.broker.go_down()
            lasts = self._seconds(2, 90) if self._chance.random() < 0.7 else self._seconds(125, 240)
            self._world.kernel.after(lasts, self._broker_back)

    def _broker_back(self) -> None:
        self._world.broker.come_up()
        for machine in self._world.machines.values():
            if self._chance.random() < 0.2 and not machine.condition.cut:
                machine.announce_again()

    def _lossy(self) -> None:
        network = self._world.broker.network
        network.loss = self._chance.choice((0.01, 0.05, 0.2))
        network.slow = self._chance.choice((0.0, 0.05, 0.3))
        self._world.kernel.after(self._seconds(20, 240), self._clear)

    def _clear(self) -> None:
        self._world.broker.network.loss = self._world.broker.network.slow = 0.0

    def _deaf(self) -> None:
        """Most workers lose the broker at once: a switch, not the workers."""
        for machine in self._world.machines.values():
            if machine.life and self._chance.random() < 0.8:
                self._cut(machine)

    def _controller_crash(self) -> None:
        controller = self._chance.choice(self._world.controllers)
        controller.crash()
        self._world.kernel.after(self._seconds(1, 60), controller.start)

    def _controller_pause(self) -> None:
        self._leader().pause(self._seconds(1, 30))

    def _zombie(self) -> None:
        self._leader().hold_append = True

    def _prober_stall(self) -> None:
        controller = self._leader()
        if controller.up:
            prober = controller.prober
            prober.stalled = True
            self._world.kernel.after(self._seconds(20, 180), prober.go_on)

    def _frontend_crash(self) -> None:
        frontend = self._chance.choice(self._world.frontends)
        frontend.crash()
        self._world.kernel.after(self._seconds(1, 30), frontend.start)

    def _frontend_lag(self) -> None:
        frontend = self._chance.choice(self._world.frontends)
        if frontend.up:
            frontend.slow_down(self._seconds(1, 20))
            self._world.kernel.after(self._seconds(20, 120), self._catch_up, frontend.name)

    def _catch_up(self, name: str) -> None:
        for frontend in self._world.frontends:
            if frontend.name == name and frontend.up:
                frontend.slow_down(0)

    def _projector_crash(self) -> None:
        self._world.projector.crash()
        self._world.kernel.after(self._seconds(1, 120), self._world.projector.start)

    def _upgrade(self) -> None:
        """A new engine version, one worker after another."""
        machines = list(self._world.machines.values())
        version = 1 + max(machine.next_version for machine in machines)
        for i, machine in enumerate(machines):
            machine.next_version = version
            self._world.kernel.after(i * 30 * SECOND, self._renew, machine)

    def _renew(self, machine: Machine) -> None:
        if not self.over:
            machine.stop()

    def _drain(self) -> None:
        self._world.operators.drain(self._machine())

    def _together(self) -> None:
        """Several workers fail at the same moment, as behind one switch or after one bad release."""
        kind = self._chance.choice(("error", "flaky", "dark", "crash"))
        for machine in self._world.machines.values():
            if machine.life and self._chance.random() < 0.7:
                getattr(self, f"_{kind}")(machine)

    # --- the end of it ------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End every fault."""
        self.over = True
        self._note("everything is healed")
        world = self._world
        world.broker.come_up()
        self._clear()
        for machine in world.machines.values():
            self._make_well(machine)
        for controller in world.controllers:
            controller.start()
            controller.hold_append = False
            controller.prober.go_on()
        for frontend in world.frontends:
            frontend.start()
            frontend.slow_down(0)
        world.projector.start()

    def _make_well(self, machine: Machine) -> None:
        self._repair_now(machine)
        machine.condition = Condition()
        machine.corrupt_since = -1
        if machine.up:
            machine.outbox.reachable = True
            machine.outbox.retry()
        else:
            machine.start()

    def _repair_now(self, machine: Machine) -> None:
        if machine.condition.device:
            machine.start()
            machine.condition.hung = False
            self._repair(machine)

    def _leader(self) -> "Controller":
        leading = [c for c in self._world.controllers if c.up and c.leading]
        return self._chance.choice(leading or self._world.controllers)

    def _machine(self) -> Machine:
        return self._chance.choice(list(self._world.machines.values()))

    def _later(self, machine: Machine, act: Callable[[Machine], None], delay: int) -> None:
        """Act on this process only: the next one at the same place is another matter."""
        self._world.kernel.after(delay, self._if_same, machine, machine.life, act)

    def _if_same(self, machine: Machine, life: int, act: Callable[[Machine], None]) -> None:
        if machine.life == life:
            act(machine)

    def _coin(self) -> bool:
        return self._chance.random() < 0.5

    def _seconds(self, low: int, high: int) -> int:
        return int(low + (high - low) * self._chance.random() ** 2) * SECOND
