"""The interface of the simulated world, the operators, and the supervisor that restarts workers."""

from collections.abc import Sequence
from typing import Protocol

from controller.deciders.fleet import Fleet
from controller.simulator.world.broker import Follower, SimulatedOutbox
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.planner import SUPERVISOR, SimulatedPlanner, SimulatedProjector
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.surroundings import Replica, Surroundings
from events import observations
from events.decisions import HealthStatus
from events.fact import Observation, Recorded

PATROL = 5 * SECOND
LOOKS = 30 * SECOND  # time between operators' checks, once everything is healed
GRACE = 30 * SECOND  # grace period before a worker that is stopping is killed
FAILS = 0.1  # share of proposals that fail for lack of room


class SimulatedWorld(Surroundings, Protocol):
    """All parts of a simulated run, as the faults, the operators and the checks use them."""

    controllers: list[SimulatedController]
    frontends: list[SimulatedFrontend]
    projector: SimulatedProjector
    planners: list[SimulatedPlanner]
    operators: "Operators"
    supervisor: "SimulatedSupervisor"

    def note(self, text: str) -> None:
        """Record a fault in the history."""
        ...

    def add_machine(self, model: str) -> Machine:
        """Add a machine for one more worker of a model, and return it. No process is started yet."""
        ...

    def believed(self) -> Fleet:
        """Return the fleet that the leader has folded. Without a running leader, return the fold of the whole journal."""
        ...

    def replicas(self) -> list[Replica]:
        """Return the folds of all running processes."""
        ...

    def outboxes(self) -> list[SimulatedOutbox]:
        """Return the outboxes of all running processes."""
        ...

    def stalled(self, machine: Machine) -> None:
        """Notify every frontend that a worker has sent nothing for longer than the stall timeout."""
        for frontend in self.frontends:
            frontend.stalled(machine)

    def was_corrupt(self, worker: str, instance: str) -> bool:
        """Return whether this worker instance was corrupt at any time."""
        return instance in self.machines[worker].corrupt_lives


class Operators:
    """Simulates the operators. A command goes to any running controller, and is repeated later if no controller runs."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = world.kernel.chance("operators")
        self.drained: dict[str, str] = {}  # by worker: the instance that was drained
        self._resumed: set[str] = set()  # instances resumed although their own worker's golden convicts them

    def drain(self, machine: Machine) -> None:
        """Drain a worker. Some time later, it is resumed, is stopped, or remains drained."""
        name, instance = machine.name, machine.instance
        deadline_s = self._chance.choice((None, 5.0, 20.0, 60.0))
        self._publish(
            observations.DrainRequested(worker=name, instance=instance, deadline_s=deadline_s, by="operator")
        )
        self.drained[name] = instance
        what = self._chance.random()
        delay = self._chance.randrange(1, 60) * SECOND
        if what < 0.5:
            self._kernel.after(delay, self.resume, machine, instance)
        elif what < 0.8:
            self._kernel.after(delay, self._stop, machine, instance)

    def resume(self, machine: Machine, instance: str) -> None:
        """Publish a command to resume a worker instance."""
        self._publish(observations.ResumeRequested(worker=machine.name, instance=instance, by="operator"))

    def resume_all(self) -> None:
        """Resume all workers that were drained, and restart workers with disputed answers to a canary.

        Workers vote again on a dispute only when a worker joins, so an operator has to end the dispute.
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
        """Resume each worker that only the unconfirmed golden of its own former instance convicts.

        No votes can decide this case. The check is repeated every LOOKS.
        """
        self._kernel.after(LOOKS, self._resume_unjustly_convicted)
        for name, worker in self._world.believed().workers.items():
            machine, instance = self._world.machines[name], worker.joined.instance
            if worker.health.charges.own_goldens and instance not in self._resumed:
                self._resumed.add(instance)
                self.resume(machine, instance)

    def scale(self, model: str) -> None:
        """Set the number of workers of a model, and release it to the planner some minutes later."""
        workers = self._chance.randint(1, self._world.scenario.workers)
        self._publish(observations.ScaleSet(model=model, workers=workers, by="operator", reason="a trial"))
        later = self._chance.randrange(60, 600) * SECOND
        self._kernel.after(later, self.release, model)

    def release(self, model: str) -> None:
        """Let the planner choose the number of workers of a model again."""
        self._publish(observations.ScaleSet(model=model, workers=None, by="operator", reason="it is over"))

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
    """Starts workers that have ended, and kills processes that the fleet considers DEAD."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = world.kernel.chance("supervisor")
        self._outbox = SimulatedOutbox(world.broker, "supervisor.1")
        world.kernel.after(PATROL, self._patrol)

    def soon(self, machine: Machine) -> None:
        """Schedule the restart of a worker that ended without notice. In most cases, also report its end."""
        if machine.up:
            return
        if self._chance.random() < 0.6:
            left = observations.WorkerLeft(
                worker=machine.name, instance=machine.instance, mode="immediate", exit=-9
            )
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


class SimulatedScaling:
    """Applies the planners' proposals, as `holdfast up` does.

    It starts new workers, or stops the newest ones.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self.outbox = SimulatedOutbox(world.broker, "scaling.1")
        self._world, self._kernel = world, world.kernel
        self._chance = world.kernel.chance("scaling")
        self._follower = Follower(world.broker, 0, self._read)

    def _read(self, batch: Sequence[Recorded]) -> None:
        latest = {
            event.fact.model: (event.id, event.fact)
            for event in batch
            if isinstance(event.fact, observations.ScaleProposed) and event.fact.by == SUPERVISOR
        }
        for model, (proposal, fact) in latest.items():
            ok = self._chance.random() >= FAILS
            if ok:
                self._scale(model, fact.after)
            says = "done" if ok else "there is no room"
            self.outbox.observe(
                observations.ScaleApplied(
                    model=model, proposal=proposal, after=fact.after, by=SUPERVISOR, ok=ok, says=says
                )
            )

    def _scale(self, model: str, after: int) -> None:
        workers = self._world.believed().workers
        kept = {name for name, worker in workers.items() if worker.spare.kept}
        current = [
            machine
            for machine in self._world.machines.values()
            if machine.model == model and not machine.retired and machine.name not in kept
            and (machine.name in workers or not machine.spare)
        ]  # fmt: skip
        for _ in range(after - len(current)):
            machine = self._world.add_machine(model)
            self._kernel.after(self._chance.randrange(1, 20) * SECOND, machine.start)
        for machine in current[after:]:  # the newest workers
            machine.retired = True
            machine.stop()
            self._kernel.after(GRACE, self._end, machine)

    def _end(self, machine: Machine) -> None:
        """Kill a worker that has not left within the grace period."""
        if machine.up:
            machine.crash()
            supervisor = self._world.supervisor
            supervisor.soon(machine)
