"""Injects faults at the rates that the scenario gives for each kind.

Every fault ends by itself, and `heal` ends all of them. After `heal`, no fault is injected any more.
"""

from collections.abc import Callable
from random import Random

from controller.simulator.world.fleet_faults import FleetFaults
from controller.simulator.world.kernel import MINUTE
from controller.simulator.world.machines import Condition, Machine
from controller.simulator.world.operators import Operators, SimulatedSupervisor
from controller.simulator.world.rolling_updates import RollingUpdates
from controller.simulator.world.worker_faults import WorkerFaults
from controller.simulator.world.world import SimulatedWorld

HOUR = 60 * MINUTE


class FaultInjector:
    """Schedules and injects the faults of a run. `note` records each fault in the history."""

    def __init__(
        self,
        world: SimulatedWorld,
        operators: Operators,
        supervisor: SimulatedSupervisor,
        chance: Random,
        note: Callable[[str], None],
    ) -> None:
        self.struck: dict[str, int] = {}
        self._world = world
        self._kernel = world.kernel
        self._chance = chance
        self._note = note
        self._worker_faults = WorkerFaults(world, supervisor, chance, note)
        self._fleet_faults = FleetFaults(world, self._worker_faults, operators, chance)
        self.updates = RollingUpdates(world, world.kernel.chance("weights"), note)

    def begin(self) -> None:
        """Schedule the first fault of every kind, each at its own random time."""
        scenario = self._world.scenario
        for kind, per_hour in scenario.worker_faults.items():
            self._plan(kind, per_hour * scenario.workers)
        for kind, per_hour in scenario.fleet_faults.items():
            self._plan(kind, per_hour)

    def corrupt_from_start(self, machine: Machine) -> None:
        """Make a worker corrupt before any golden is agreed."""
        self._worker_faults.corrupt_from_start(machine)

    def _plan(self, kind: str, per_hour: float) -> None:
        gap = int(self._chance.expovariate(per_hour / HOUR))
        self._kernel.after(gap, self._strike, kind, per_hour)

    def _strike(self, kind: str, per_hour: float) -> None:
        if self._fleet_faults.over:
            return
        self._plan(kind, per_hour)
        self.struck[kind] = self.struck.get(kind, 0) + 1
        if kind in self._world.scenario.worker_faults:
            machine = self._fleet_faults.any_machine()
            if not machine.life:
                return  # the machine has not started yet
            self._note(f"{kind} {machine.name}")
            self._worker_faults.kinds[kind](machine)
        else:
            self._note(kind)
            self._fleet_faults.kinds[kind]()

    def heal(self) -> None:
        """End every fault."""
        self._fleet_faults.over = True
        self._note("everything is healed")
        world = self._world
        world.broker.come_up()
        self._fleet_faults.calm()
        self.updates.heal()
        for machine in world.machines.values():
            self._make_well(machine)
        for controller in world.controllers:
            controller.start()
            controller.hold_append = False
            controller.prober.resume()
        for frontend in world.frontends:
            frontend.start()
            frontend.slow_down(0)
        world.projector.start()
        for planner in world.planners:
            planner.start()
        world.demand.suppress_reports(0)

    def _make_well(self, machine: Machine) -> None:
        self._repair_now(machine)
        for fault_class in list(machine.condition.limits):
            machine.limit(fault_class, None)
        machine.condition = Condition()
        if machine.up:
            machine.outbox.reachable = True
            machine.outbox.retry()
        else:
            machine.start()

    def _repair_now(self, machine: Machine) -> None:
        if machine.condition.device:
            machine.start()
            machine.condition.hung = False
            self._worker_faults.repair(machine)
