"""Injects faults at the rates that the scenario gives for each kind.

Every fault ends after a random time. `FaultInjector.heal` ends all faults at once, and no new fault is injected afterwards.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from controller.simulator.world.controllers import PROBER, SimulatedController
from controller.simulator.world.kernel import MINUTE, MS, SECOND, coin, seconds_drawn
from controller.simulator.world.machines import CANARIES, Condition, Machine
from controller.simulator.world.surroundings import SimulatedProcess
from controller.simulator.world.world import SimulatedWorld
from events.observations import DeviceFaulted, DeviceRecovered, EngineFaulted

HOUR = 60 * MINUTE
WORLDS = 3  # one of this many worlds has rolling updates
UPDATES_MAX = 2  # per model
WELL = Condition()


class RollingUpdates:
    """Deploys new weights under the same model name, worker by worker.

    Only about one seed in WORLDS has such updates. A golden is the stored right answer to a canary, and applies to all
    workers with the same canary key.

    - If the engines do not report their lineage (the identity of their weights), workers are updated in place or by a restart.
      The canary key stays the same, so the goldens of the old weights convict the updated workers of wrong answers.
    - If the engines report their lineage, workers are updated by a restart. The canary key changes, so an updated worker gets no
      requests until workers have agreed on goldens of the new key.
    """

    def __init__(self, world: SimulatedWorld, struck: Counter[str]) -> None:
        self._world, self._kernel, self._struck = world, world.kernel, struck
        self._chance = chance = world.kernel.chance("weights")
        self._newest: dict[str, int] = {}  # weights by model
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

        A model with only one worker is not updated, because no other worker could confirm the new answers.
        """
        machines = [one for one in self._world.machines.values() if one.model == model and not one.retired]
        if self._world.healed or len(machines) < 2:
            return
        self._newest[model] = newest = self._newest.get(model, 0) + 1
        self._struck["weights"] += 1
        gap, restart = self._chance.choice((5, 25, 60)) * SECOND, coin(self._chance)
        self._world.note(f"new weights {newest} of {model}, {'told' if self.reports_lineage else 'not told'}")
        self._chance.shuffle(machines)
        for place, machine in enumerate(machines):
            self._kernel.after(place * gap, self._renew, machine, newest, restart or self.reports_lineage)

    def _renew(self, machine: Machine, weights: int, restart: bool) -> None:
        if not self._world.healed:
            self._install(machine, weights, restart)

    def _install(self, machine: Machine, weights: int, restart: bool) -> None:
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
        """Give every worker the newest weights of its model."""
        for machine in self._world.machines.values():
            machine.weights.after_start = newest = self._newest.get(machine.model, 0)
            if machine.weights.loaded != newest:
                self._install(machine, newest, self.reports_lineage)


class WorkerFaults:
    """Injects faults into single workers: the process, engine, devices or connections.

    `kinds` contains a function for each kind of fault, which injects the fault into one worker.
    """

    def __init__(self, world: SimulatedWorld, chance: Random) -> None:
        self._world, self._kernel, self._chance = world, world.kernel, chance
        self.kinds: dict[str, Callable[[Machine], None]] = {
            "crash": world.supervisor.kill,
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
        """Make a worker give wrong answers before workers have agreed on any golden (stored right answer to a canary)."""
        self._world.note(f"corrupt from the start: {machine.name}")
        machine.corrupt(frozenset(range(self._chance.randrange(1, CANARIES + 1))), in_hardware=True)
        self._kernel.after(seconds_drawn(self._chance, 60, 1800), machine.heal_corruption)

    def _degrade(self, machine: Machine, what: str, values: tuple[float, ...], longest: int) -> None:
        """Set the field `what` of a worker's condition to a random one of `values`, for at most `longest` seconds."""
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
        """End a device fault of a machine, and let its running worker process report the recovery.

        If no process runs, the fault lasts until a process has started again.
        """
        if not machine.condition.device:
            return
        if not machine.up:
            self._kernel.after(10 * SECOND, self.repair, machine)
            return
        machine.condition.device = ""
        machine.observe(DeviceRecovered, device="gpu0", fault_class="xid", code="79")

    def _throttle(self, machine: Machine) -> None:
        """Limit a worker's weight for a while, as a throttled device does.

        The limit is chosen at random, and changes up to twice before it ends.
        """
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
        """Reset the field `what` of a worker's condition to its value without a fault."""
        setattr(machine.condition, what, getattr(WELL, what))


class FaultInjector:
    """Injects the faults of a run at random times. Each fault is recorded in the history."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.struck = Counter[str]()
        self._world, self._kernel, self._broker = world, world.kernel, world.broker
        self._chance = world.kernel.chance("faults")
        self.workers = WorkerFaults(world, self._chance)
        self.updates = RollingUpdates(world, self.struck)
        self._kinds: dict[str, Callable[[], None]] = {
            "broker": self._lose_broker,
            "lossy": self._lossy,
            "deaf": self._most_cut_off,
            "controller_crash": lambda: self._restart(self._chance.choice(world.controllers), 60),
            "controller_pause": lambda: self._leader().pause(seconds_drawn(self._chance, 1, 30)),
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
        for kind, per_hour in scenario.faults.items():
            self._plan(kind, per_hour)

    def _plan(self, kind: str, per_hour: float) -> None:
        gap = int(self._chance.expovariate(per_hour / HOUR))
        self._kernel.after(gap, self._strike, kind, per_hour)

    def _strike(self, kind: str, per_hour: float) -> None:
        if self._world.healed:
            return
        self._plan(kind, per_hour)
        self.struck[kind] += 1
        if kind in self.workers.kinds:
            machine = self._any_machine()
            if not machine.life:
                return  # the machine has not started yet
            self._world.note(f"{kind} {machine.name}")
            self.workers.kinds[kind](machine)
        else:
            self._world.note(kind)
            self._kinds[kind]()

    def heal(self) -> None:
        """End every fault at once, and start the processes that are down.

        The workers that operators have drained are resumed.
        """
        world = self._world
        world.healed = True
        world.note("everything is healed")
        world.broker.come_up()
        self._calm()
        self.updates.heal()
        for machine in world.machines.values():
            self._make_well(machine)
        for process in world.processes:
            process.start()
        for controller in world.controllers:
            controller.hold_append = False
            controller.prober.resume()
        for frontend in world.frontends:
            frontend.slow_down(0)
        world.demand.suppress_reports(0)
        world.operators.resume_all()

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

        In half of the cases, the broker first stores messages for some seconds without acknowledging them.
        """
        broker, kernel = self._broker, self._kernel
        if not broker.up or broker.mute:
            return
        broker.mute = coin(self._chance)
        kernel.after(seconds_drawn(self._chance, 1, 10) if broker.mute else 0, self._broker_gone)

    def _broker_gone(self) -> None:
        if not self._world.healed:
            self._broker.up = False
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
        """End the process on the host `place` without notice, and start a new process within `longest` seconds."""
        place.crash()
        self._kernel.after(seconds_drawn(self._chance, 1, longest), place.start)

    def _zombie(self) -> None:
        self._leader().hold_append = True

    def _prober_stall(self) -> None:
        controller = self._leader()
        if controller.up:
            controller.prober.stalled = True
            self._kernel.after(seconds_drawn(self._chance, 20, 180), controller.prober.resume)

    def _frontend_lag(self) -> None:
        frontend = self._chance.choice(self._world.frontends)
        if frontend.up:
            frontend.slow_down(seconds_drawn(self._chance, 1, 20))
            self._kernel.after(seconds_drawn(self._chance, 20, 120), frontend.slow_down, 0)

    def _upgrade(self) -> None:
        """Restart all workers one after another, with a new engine version."""
        machines = self._machines()
        version = 1 + max(machine.next_version for machine in machines)
        for i, machine in enumerate(machines):
            machine.next_version = version
            self._kernel.after(i * 30 * SECOND, self._renew, machine)

    def _renew(self, machine: Machine) -> None:
        if not self._world.healed:
            machine.stop()

    def _together(self) -> None:
        """Make most workers fail at the same time, as after a bad release or a network failure."""
        kind = self._chance.choice(("error", "flaky", "dark", "crash"))
        for machine in self._machines():
            if machine.life and self._chance.random() < 0.7:
                self.workers.kinds[kind](machine)

    def _planner_pause(self) -> None:
        """Delay the sending of the next proposal of one planner, chosen at random."""
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
