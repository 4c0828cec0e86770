"""Injects faults at the rates that the scenario gives for each kind.

Every fault ends after a random time. `heal` ends all faults at once, and no new fault is injected after it.
"""

from collections import Counter
from collections.abc import Callable

from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import MINUTE, SECOND, coin, seconds_drawn
from controller.simulator.world.machines import Condition, Machine
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.surroundings import SimulatedProcess
from controller.simulator.world.worker_faults import WorkerFaults
from controller.simulator.world.world import SimulatedWorld

HOUR = 60 * MINUTE
WORLDS = 3  # one of this many worlds has rolling updates
UPDATES_MAX = 2  # per model


class RollingUpdates:
    """Deploys new weights under the same model name, worker by worker. One of WORLDS simulated worlds has such updates.

    - If the engines report no lineage, they are updated in place or by a restart. The canary key stays the same, so the old
      goldens convict the updated workers.
    - If the engines report their lineage, they are updated by a restart. The canary key changes, so a worker is held back
      until goldens of the new key are agreed.
    """

    def __init__(self, world: SimulatedWorld, struck: Counter[str]) -> None:
        self._world, self._kernel, self._struck = world, world.kernel, struck
        self._chance = chance = world.kernel.chance("weights")
        self._newest: dict[str, int] = {}  # weights by model
        self._over = False
        self.reports_lineage = False
        if chance.randrange(WORLDS) == 0:
            self._plan()

    def _plan(self) -> None:
        """Choose whether engines report their lineage, and when each model gets new weights."""
        self.reports_lineage = coin(self._chance)
        for machine in self._world.machines.values():
            machine.weights.reported = self.reports_lineage
        for model in self._world.scenario.models:
            for _ in range(self._chance.randint(1, UPDATES_MAX)):
                at = int(self._world.scenario.heal_at * (0.1 + 0.8 * self._chance.random()))
                self._kernel.after(at, self._update, model)

    def _update(self, model: str) -> None:
        """Start to update a model's workers in random order.

        A single worker is not updated, because no other worker could confirm its new answers.
        """
        machines = [one for one in self._world.machines.values() if one.model == model and not one.retired]
        if self._over or len(machines) < 2:
            return
        self._newest[model] = newest = self._newest.get(model, 0) + 1
        self._struck["weights"] += 1
        gap, restart = self._chance.choice((5, 25, 60)) * SECOND, coin(self._chance)
        self._world.note(f"new weights {newest} of {model}, {'told' if self.reports_lineage else 'not told'}")
        self._chance.shuffle(machines)
        for place, machine in enumerate(machines):
            self._kernel.after(place * gap, self._renew, machine, newest, restart or self.reports_lineage)

    def _renew(self, machine: Machine, weights: int, restart: bool) -> None:
        if self._over:
            return
        machine.weights.after_start = weights
        if restart:
            machine.stop()
        else:
            machine.weights.load()

    def fit(self, machine: Machine) -> None:
        """Give a new machine the newest weights of its model."""
        weights = machine.weights
        weights.reported, weights.after_start = self.reports_lineage, self._newest.get(machine.model, 0)

    def heal(self) -> None:
        """End all updates, and give every worker the newest weights of its model."""
        self._over = True
        for machine in self._world.machines.values():
            weights = machine.weights
            weights.after_start = self._newest.get(machine.model, 0)
            if weights.loaded != weights.after_start:
                if self.reports_lineage:
                    machine.stop()
                else:
                    weights.load()


class FaultInjector:
    """Injects the faults of a run at random times. Each fault is recorded in the history."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.struck = Counter[str]()
        self._world, self._kernel, self._broker = world, world.kernel, world.broker
        self._chance = world.kernel.chance("faults")
        self._over = False  # faults in progress no longer affect the broker and the workers
        self.workers = WorkerFaults(world, self._chance)
        self.updates = RollingUpdates(world, self.struck)
        self._kinds: dict[str, Callable[[], None]] = {
            "broker": self._lose_broker,
            "lossy": self._lossy,
            "deaf": self._most_cut_off,
            "controller_crash": lambda: self._restart(self._chance.choice(world.controllers), 60),
            "controller_pause": self._controller_pause,
            "zombie": self._zombie,
            "prober_stall": self._prober_stall,
            "frontend_crash": lambda: self._restart(self._chance.choice(world.frontends), 30),
            "frontend_lag": self._frontend_lag,
            "projector_crash": lambda: self._restart(world.projector, 120),
            "upgrade": self._upgrade,
            "drain": lambda: world.operators.drain(self._any_machine()),
            "together": self._together,
            "planner_crash": lambda: self._restart(self._chance.choice(world.planners), 120),
            "planner_pause": self._planner_pause,
            "untold": self._untold,
            "scale_set": lambda: world.operators.scale(self._chance.choice(world.scenario.models)),
        }

    def begin(self) -> None:
        """Schedule the first fault of each kind at a random time."""
        scenario = self._world.scenario
        for kind, per_hour in scenario.worker_faults.items():
            self._plan(kind, per_hour * scenario.workers)
        for kind, per_hour in scenario.fleet_faults.items():
            self._plan(kind, per_hour)

    def _plan(self, kind: str, per_hour: float) -> None:
        gap = int(self._chance.expovariate(per_hour / HOUR))
        self._kernel.after(gap, self._strike, kind, per_hour)

    def _strike(self, kind: str, per_hour: float) -> None:
        if self._over:
            return
        self._plan(kind, per_hour)
        self.struck[kind] += 1
        if kind in self._world.scenario.worker_faults:
            machine = self._any_machine()
            if not machine.life:
                return  # the machine has not started yet
            self._world.note(f"{kind} {machine.name}")
            self.workers.kinds[kind](machine)
        else:
            self._world.note(kind)
            self._kinds[kind]()

    def heal(self) -> None:
        """End every fault at once, and start the processes that are down."""
        self._over = True
        self._world.note("everything is healed")
        world = self._world
        world.broker.come_up()
        self._calm()
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
        if machine.condition.device:
            machine.start()
            machine.condition.hung = False
            self.workers.repair(machine)
        for fault_class in list(machine.condition.limits):
            machine.limit(fault_class, None)
        machine.condition = Condition()
        if machine.up:
            machine.outbox.reachable = True
            machine.outbox.send()
        else:
            machine.start()

    # --- faults of the whole fleet ------------------------------------------------------------------------------------

    def _lose_broker(self) -> None:
        """Make the broker unreachable for a while.

        In half of the cases, it first stores messages for some seconds without acknowledging them.
        """
        broker, kernel = self._broker, self._kernel
        if not broker.up or broker.mute:
            return
        broker.mute = coin(self._chance)
        kernel.after(seconds_drawn(self._chance, 1, 10) if broker.mute else 0, self._broker_gone)

    def _broker_gone(self) -> None:
        if not self._over:
            self._broker.go_down()
            low, high = (2, 90) if self._chance.random() < 0.7 else (125, 240)
            self._kernel.after(seconds_drawn(self._chance, low, high), self._broker_back)

    def _broker_back(self) -> None:
        self._broker.come_up()
        for machine in self._machines():
            if self._chance.random() < 0.2 and not machine.condition.cut:
                machine.announce_again()

    def _lossy(self) -> None:
        network = self._broker.network
        network.loss = self._chance.choice((0.01, 0.05, 0.2))
        network.slow = self._chance.choice((0.0, 0.05, 0.3))
        self._kernel.after(seconds_drawn(self._chance, 20, 240), self._calm)

    def _calm(self) -> None:
        """End the loss and delay of messages on the network."""
        self._broker.network.loss = self._broker.network.slow = 0.0

    def _most_cut_off(self) -> None:
        """Disconnect most workers from the broker at once, as a failed network switch would."""
        for machine in self._machines():
            if machine.life and self._chance.random() < 0.8:
                self.workers.cut(machine)

    def _restart(self, place: SimulatedProcess, longest: int) -> None:
        """End a process without notice, and start the next one on its host later."""
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
        """Restart all workers one after another, with a new engine version."""
        machines = self._machines()
        version = 1 + max(machine.next_version for machine in machines)
        for i, machine in enumerate(machines):
            machine.next_version = version
            self._kernel.after(i * 30 * SECOND, self._renew, machine)

    def _renew(self, machine: Machine) -> None:
        if not self._over:
            machine.stop()

    def _together(self) -> None:
        """Make most workers fail at the same time, as after a bad release or behind one failed switch."""
        kind = self._chance.choice(("error", "flaky", "dark", "crash"))
        for machine in self._machines():
            if machine.life and self._chance.random() < 0.7:
                self.workers.kinds[kind](machine)

    def _planner_pause(self) -> None:
        """Delay the next proposal of a planner between its decision and its sending."""
        self._chance.choice(self._world.planners).hold = seconds_drawn(self._chance, 5, 40)

    def _untold(self) -> None:
        """Suppress the frontends' traffic reports for a while."""
        demand = self._world.demand
        demand.suppress_reports(self._kernel.now + seconds_drawn(self._chance, 60, 480))

    def _any_machine(self) -> Machine:
        return self._chance.choice(self._machines())

    def _machines(self) -> list[Machine]:
        return [*self._world.machines.values()]

    def _leader(self) -> SimulatedController:
        leading = [c for c in self._world.controllers if c.up and c.leading]
        return self._chance.choice(leading or self._world.controllers)
