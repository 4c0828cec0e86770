"""Faults of the whole fleet: broker, network, controllers, frontends, projector, many workers at once."""

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import SECOND, coin, seconds_drawn
from controller.simulator.world.machines import Machine
from controller.simulator.world.operators import Operators
from controller.simulator.world.planner import SimulatedPlanner
from controller.simulator.world.projector import SimulatedProjector
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.worker_faults import WorkerFaults
from controller.simulator.world.world import SimulatedWorld

StrikeFleet: TypeAlias = Callable[[], None]
Place: TypeAlias = SimulatedController | SimulatedFrontend | SimulatedPlanner | SimulatedProjector


class FleetFaults:
    """The faults of the fleet. Once `over`, faults in progress no longer affect the broker and the workers."""

    def __init__(
        self, world: SimulatedWorld, workers: WorkerFaults, operators: Operators, chance: Random
    ) -> None:
        self.over = False
        self._world = world
        self._kernel = world.kernel
        self._broker = world.broker
        self._network = world.broker.network
        self._workers = workers
        self._operators = operators
        self._chance = chance
        self.kinds: dict[str, StrikeFleet] = {
            "broker": self._lose_broker,
            "lossy": self._lossy,
            "deaf": self._most_cut_off,
            "controller_crash": lambda: self._restart(chance.choice(world.controllers), 60),
            "controller_pause": self._controller_pause,
            "zombie": self._zombie,
            "prober_stall": self._prober_stall,
            "frontend_crash": lambda: self._restart(chance.choice(world.frontends), 30),
            "frontend_lag": self._frontend_lag,
            "projector_crash": lambda: self._restart(world.projector, 120),
            "upgrade": self._upgrade,
            "drain": self._drain,
            "together": self._together,
            "planner_crash": lambda: self._restart(chance.choice(world.planners), 120),
            "planner_pause": self._planner_pause,
            "untold": self._untold,
            "scale_set": self._set_scale,
        }

    def _lose_broker(self) -> None:
        """Take the broker down; in some cases, it first stores messages without acknowledging them for a while."""
        broker, kernel = self._broker, self._kernel
        if not broker.up or broker.mute:
            return
        broker.mute = coin(self._chance)
        kernel.after(seconds_drawn(self._chance, 1, 10) if broker.mute else 0, self._broker_gone)

    def _broker_gone(self) -> None:
        if not self.over:
            self._broker.go_down()
            low, high = (2, 90) if self._chance.random() < 0.7 else (125, 240)
            self._kernel.after(seconds_drawn(self._chance, low, high), self._broker_back)

    def _broker_back(self) -> None:
        self._broker.come_up()
        for machine in self._machines():
            if self._chance.random() < 0.2 and not machine.condition.cut:
                machine.announce_again()

    def _lossy(self) -> None:
        network = self._network
        network.loss = self._chance.choice((0.01, 0.05, 0.2))
        network.slow = self._chance.choice((0.0, 0.05, 0.3))
        self._kernel.after(seconds_drawn(self._chance, 20, 240), self.calm)

    def calm(self) -> None:
        """End all loss and delay on the network."""
        self._network.loss = self._network.slow = 0.0

    def _most_cut_off(self) -> None:
        """Disconnect most workers from the broker at once, as a failed switch does."""
        for machine in self._machines():
            if machine.life and self._chance.random() < 0.8:
                self._workers.cut(machine)

    def _restart(self, place: Place, longest: int) -> None:
        """Kill a process without notice, and start its successor later."""
        place.crash()
        self._kernel.after(seconds_drawn(self._chance, 1, longest), place.start)

    def _controller_pause(self) -> None:
        self._leader().pause(seconds_drawn(self._chance, 1, 30))

    def _zombie(self) -> None:
        self._leader().hold_append = True

    def _prober_stall(self) -> None:
        controller = self._leader()
        if controller.up:
            prober = controller.prober
            prober.stalled = True
            self._kernel.after(seconds_drawn(self._chance, 20, 180), prober.resume)

    def _frontend_lag(self) -> None:
        frontend = self._chance.choice(self._world.frontends)
        if frontend.up:
            frontend.slow_down(seconds_drawn(self._chance, 1, 20))
            self._kernel.after(seconds_drawn(self._chance, 20, 120), self._catch_up, frontend)

    def _catch_up(self, frontend: SimulatedFrontend) -> None:
        if frontend.up:
            frontend.slow_down(0)

    def _upgrade(self) -> None:
        """Restart one worker after another with a new engine version."""
        machines = self._machines()
        version = 1 + max(machine.next_version for machine in machines)
        for i, machine in enumerate(machines):
            machine.next_version = version
            self._kernel.after(i * 30 * SECOND, self._renew, machine)

    def _renew(self, machine: Machine) -> None:
        if not self.over:
            machine.stop()

    def _drain(self) -> None:
        self._operators.drain(self.any_machine())

    def _together(self) -> None:
        """Make several workers fail at the same moment, as behind one switch or after one bad release."""
        kind = self._chance.choice(("error", "flaky", "dark", "crash"))
        for machine in self._machines():
            if machine.life and self._chance.random() < 0.7:
                self._workers.kinds[kind](machine)

    def _planner_pause(self) -> None:
        """Pause a planner between deciding and sending."""
        self._chance.choice(self._world.planners).hold = seconds_drawn(self._chance, 5, 40)

    def _untold(self) -> None:
        """Stop all traffic reports from frontends for a while."""
        demand = self._world.demand
        demand.suppress_reports(self._kernel.now + seconds_drawn(self._chance, 60, 480))

    def _set_scale(self) -> None:
        """Let an operator set a model's number of workers for a while."""
        self._operators.scale(self._chance.choice(self._world.scenario.models))

    def any_machine(self) -> Machine:
        """Return a random worker's machine."""
        return self._chance.choice(self._machines())

    def _machines(self) -> list[Machine]:
        machines = self._world.machines
        return list(machines.values())

    def _leader(self) -> SimulatedController:
        leading = [c for c in self._world.controllers if c.up and c.leading]
        return self._chance.choice(leading or self._world.controllers)
