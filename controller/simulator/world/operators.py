"""Simulated operators (drain, resume, scale), and the supervisor that restarts worker processes."""

from random import Random

from controller.simulator.world.kernel import SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.world import SimulatedWorld
from events.decisions import HealthStatus
from events.fact import Observation
from events.observations import DrainRequested, ResumeRequested, ScaleSet, WorkerLeft

PATROL = 5 * SECOND
LOOKS = 30 * SECOND  # time between operators' checks, once everything is healed


class Operators:
    """The operators: they send commands to any controller that is up, and try again later if none is."""

    def __init__(self, world: SimulatedWorld, chance: Random) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = chance
        self.drained: dict[str, str] = {}  # by worker: the instance that was drained
        self._resumed: set[str] = set()  # instances resumed although their own worker's golden convicts them

    def drain(self, machine: Machine) -> None:
        """Drain a worker; later resume it, stop it, or leave it drained."""
        name, instance = machine.name, machine.instance
        deadline_s = self._chance.choice((None, 5.0, 20.0, 60.0))
        self._publish(DrainRequested(worker=name, instance=instance, deadline_s=deadline_s, by="operator"))
        self.drained[name] = instance
        what = self._chance.random()
        delay = self._chance.randrange(1, 60) * SECOND
        if what < 0.5:
            self._kernel.after(delay, self.resume, machine, instance)
        elif what < 0.8:
            self._kernel.after(delay, self._stop, machine, instance)

    def resume(self, machine: Machine, instance: str) -> None:
        """Request that a worker resumes."""
        self._publish(ResumeRequested(worker=machine.name, instance=instance, by="operator"))

    def resume_all(self) -> None:
        """Resume everything that was drained, and restart workers with disputed answers to a canary.

        A dispute is voted on again only when a worker joins, so an operator has to resolve it.
        """
        for name, instance in self.drained.items():
            self.resume(self._world.machines[name], instance)
        for model in self._world.scenario.models if self._world.planners else ():
            self.release(model)
        for name, worker in self._world.believed().workers.items():
            if worker.health.disputed:
                self._world.machines[name].stop()
        self._resume_unjustly_convicted()

    def _resume_unjustly_convicted(self) -> None:
        """Resume each worker convicted only by an unconfirmed golden of its own earlier instance: no vote can decide this."""
        self._kernel.after(LOOKS, self._resume_unjustly_convicted)
        for name, worker in self._world.believed().workers.items():
            machine, instance = self._world.machines[name], worker.joined.instance
            if worker.health.charges.own_goldens and instance not in self._resumed:
                self._resumed.add(instance)
                self.resume(machine, instance)

    def scale(self, model: str) -> None:
        """Set the number of a model's workers, and release it to the planner some time later."""
        workers = self._chance.randint(1, self._world.scenario.workers)
        self._publish(ScaleSet(model=model, workers=workers, by="operator", reason="a trial"))
        later = self._chance.randrange(60, 600) * SECOND
        self._kernel.after(later, self.release, model)

    def release(self, model: str) -> None:
        """Release a model's size to the planner."""
        self._publish(ScaleSet(model=model, workers=None, by="operator", reason="it is over"))

    def _stop(self, machine: Machine, instance: str) -> None:
        if machine.instance == instance:
            machine.stop()

    def _publish(self, fact: Observation, tries: int = 5) -> None:
        for controller in self._world.controllers:
            if controller.up and not controller.paused:
                controller.outbox.observe(fact)
                return
        if tries:
            self._kernel.after(5 * SECOND, self._publish, fact, tries - 1)


class SimulatedSupervisor:
    """Starts processes that have ended, and kills those that the fleet considers DEAD but that still run."""

    def __init__(self, world: SimulatedWorld, chance: Random) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = chance
        self._outbox = SimulatedOutbox(world.broker, "supervisor.1")
        world.kernel.after(PATROL, self._patrol)

    def soon(self, machine: Machine) -> None:
        """Restart a process that ended without notice; mostly report its end as well."""
        if machine.up:
            return
        if self._chance.random() < 0.6:
            left = WorkerLeft(worker=machine.name, instance=machine.instance, mode="immediate", exit=-9)
            late = self._chance.choice((0, 0, 40 * SECOND))  # the next process may start before the report
            self._kernel.after(late, self._outbox.observe, left)
        self._kernel.after(self._chance.randrange(1, 30) * SECOND, machine.start)

    def _patrol(self) -> None:
        world = self._world
        world.kernel.after(PATROL, self._patrol)
        fleet = world.believed()
        for machine in world.machines.values():
            if not machine.up and not machine.life and world.kernel.now < world.scenario.late:
                continue
            if not machine.up:
                world.kernel.after(self._chance.randrange(3, 20) * SECOND, machine.start)
                continue
            worker = fleet.remembered(machine.name)
            if worker is None or worker.joined.instance != machine.instance:
                continue
            if worker.health.status is HealthStatus.DEAD:
                machine.crash()
                self.soon(machine)
            elif (
                worker.health.disputed and not machine.draining and world.kernel.now > world.scenario.heal_at
            ):
                machine.stop()  # the dispute began after the operators' last check (`Operators.resume_all`)
