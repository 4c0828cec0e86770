"""The simulated world as its parts use it, and the simulated operators, supervisor and scaling."""

import json
from collections.abc import Callable, Sequence

from controller.deciders.fleet import Fleet
from controller.simulator.world.broker import Follower, SimulatedOutbox
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.planner import SUPERVISOR, SimulatedPlanner, SimulatedProjector
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.scenario import Scenario, profile_of
from controller.simulator.world.seams import Seams
from controller.simulator.world.surroundings import Surroundings
from events import observations as seen
from events.decisions import HealthStatus
from events.fact import Observation, Recorded

PATROL = 5 * SECOND
LOOKS = 30 * SECOND  # time between operators' checks, once everything is healed
GRACE = 30 * SECOND  # grace period before a worker that is stopping is killed
FAILS = 0.1  # share of proposals that fail for lack of room


class SimulatedWorld(Surroundings):
    """All parts of a simulated run, as the faults, the operators and the checks use them."""

    frontends: list[SimulatedFrontend]
    shown: Callable[[], Fleet]  # returns the fleet state after the whole journal
    update: Callable[[Machine], None]  # installs the newest weights on a new machine

    def __init__(self, scenario: Scenario, seams: Seams, frontend: type[SimulatedFrontend]) -> None:
        """Create all machines and processes. `frontend` is the class of the frontends."""
        super().__init__(scenario, seams)
        self.notes: list[tuple[int, str]] = []  # sequence of the event before the fault, line of the history
        for index, name in enumerate(self._names()):
            self.machines[name] = self._machine(name, index)
        planning, self.projector = scenario.planning, SimulatedProjector(self)
        planners = numbered("planner", planning.planners if planning is not None else 0)
        controllers, frontends = scenario.controllers, scenario.frontends
        self.planners = [SimulatedPlanner(name, self, self.projector) for name in planners]
        self.controllers = [SimulatedController(name, self) for name in numbered("controller", controllers)]
        self.frontends = [frontend(name, self) for name in numbered("frontend", frontends)]
        self.processes = (*self.controllers, *self.frontends, *self.planners, self.projector)
        self.healed = False  # every fault has ended, and no new one begins
        self.operators, self.supervisor = Operators(self), SimulatedSupervisor(self)
        self.scaling = SimulatedScaling(self) if planning is not None else None

    def note(self, text: str) -> None:
        """Record a fault in the history."""
        line = json.dumps({"at_us": self.kernel.now, "fault": text}) + "\n"
        self.notes.append((self.broker.last_seq, line))

    def add_machine(self, model: str) -> Machine:
        """Add a machine for one more worker of a model, and return it. No process is started yet."""
        models, index = self.scenario.models, len(self.machines)
        while models[index % len(models)] != model:
            index += 1
        while (name := f"w{index + 1}") in self.machines:
            index += len(models)
        machine = self.machines[name] = self._machine(name, index)
        self.update(machine)
        return machine

    def _names(self) -> list[str]:
        return numbered("w", self.scenario.workers)

    def _machine(self, name: str, index: int) -> Machine:
        scenario, crowd = self.scenario, self.scenario.crowd
        spare = scenario.workers - scenario.spares <= index < scenario.workers
        waiting = crowd.waiting if crowd is not None else None
        model, host = scenario.models[index % len(scenario.models)], (self.kernel, self.broker, self._broken)
        return Machine(name, model, *host, profile=profile_of(crowd), spare=spare, waiting=waiting)

    def _broken(self, machine: Machine) -> None:
        for frontend in self.frontends:
            frontend.broken(machine)

    def leader_fold(self) -> Fleet:
        """Return the fleet state that the running leader has computed from the journal.

        Without a running leader, return the state after the whole journal.
        """
        for controller in self.controllers:
            if controller.up and controller.leading and not controller.paused:
                return controller.replica.fleet
        return self.shown()

    def stalled(self, machine: Machine) -> None:
        """Notify every frontend that a worker has sent nothing for longer than the stall timeout."""
        for frontend in self.frontends:
            frontend.stalled(machine)

    def was_corrupt(self, worker: str, instance: str) -> bool:
        """Return whether this worker instance was corrupt at any time."""
        return instance in self.machines[worker].corrupt_lives


def numbered(name: str, count: int) -> list[str]:
    """Return `count` names that consist of `name` and a number from 1 up."""
    return [f"{name}{number + 1}" for number in range(count)]


class Operators:
    """Simulates the operators.

    A command is published through any running controller. If no controller runs, publishing is retried up to five times.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = world.kernel.chance("operators")
        self.drained: dict[str, str] = {}  # by worker: the instance that was drained
        self._resumed: set[str] = set()  # instances resumed although their own worker's golden convicts them

    def drain(self, machine: Machine) -> None:
        """Drain a worker. Some time later, the worker is resumed, is stopped, or remains drained."""
        name, instance = machine.name, machine.instance
        wait_s = self._chance.choice((None, 5.0, 20.0, 60.0))
        self._publish(seen.DrainRequested(worker=name, instance=instance, deadline_s=wait_s, by="operator"))
        self.drained[name] = instance
        what = self._chance.random()
        delay = self._chance.randrange(1, 60) * SECOND
        if what < 0.5:
            self._kernel.after(delay, self.resume, machine, instance)
        elif what < 0.8:
            self._kernel.after(delay, self._stop, machine, instance)

    def resume(self, machine: Machine, instance: str) -> None:
        """Publish a command to resume a worker instance."""
        self._publish(seen.ResumeRequested(worker=machine.name, instance=instance, by="operator"))

    def resume_all(self) -> None:
        """Resume all drained workers, and restart workers with disputed canary answers.

        Workers vote on a disputed answer again only when a worker joins, and a restart causes a join. Also let the planner
        choose the number of workers of each model again.
        """
        for name, instance in self.drained.items():
            self.resume(self._world.machines[name], instance)
        for model in self._world.scenario.models if self._world.planners else ():
            self.release(model)
        for name, worker in self._world.leader_fold().workers.items():
            if worker.health.disputed:
                self._world.machines[name].stop()
        self._resume_unjustly_convicted()

    def _resume_unjustly_convicted(self) -> None:
        """Resume each worker that is convicted by its own former instance's golden (right answer to a canary).

        The present instance answers this canary differently, and no other worker has confirmed the golden. Votes cannot decide
        which answer is right, because both come from the same worker. Each instance is resumed once. The check is repeated at
        intervals of LOOKS.
        """
        self._kernel.after(LOOKS, self._resume_unjustly_convicted)
        for name, worker in self._world.leader_fold().workers.items():
            instance = worker.joined.instance
            if worker.health.charges.own_goldens and instance not in self._resumed:
                self._resumed.add(instance)
                self.resume(self._world.machines[name], instance)

    def scale(self, model: str) -> None:
        """Set the number of workers of a model. Some minutes later, let the planner choose the number again."""
        workers = self._chance.randint(1, self._world.scenario.workers)
        self._publish(seen.ScaleSet(model=model, workers=workers, by="operator", reason="a trial"))
        later = self._chance.randrange(60, 600) * SECOND
        self._kernel.after(later, self.release, model)

    def release(self, model: str) -> None:
        """Let the planner choose the number of workers of a model again."""
        self._publish(seen.ScaleSet(model=model, workers=None, by="operator", reason="it is over"))

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
    """Restarts workers that have ended, and kills worker processes that are DEAD in the leader's fleet state."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world, self._kernel = world, world.kernel
        self._chance = world.kernel.chance("supervisor")
        self._outbox = SimulatedOutbox(world.broker, "supervisor.1")
        world.kernel.after(PATROL, self._patrol)

    def kill(self, machine: Machine) -> None:
        """End a worker without notice, and schedule its restart. In most cases, also report the worker's end."""
        machine.crash()
        if self._chance.random() < 0.6:
            left = seen.WorkerLeft(worker=machine.name, instance=machine.instance, mode="immediate", exit=-9)
            late = self._chance.choice((0, 0, 40 * SECOND))  # the next process may start before the report
            self._kernel.after(late, self._outbox.observe, left)
        self._kernel.after(self._chance.randrange(1, 30) * SECOND, machine.start)

    def _patrol(self) -> None:
        world = self._world
        world.kernel.after(PATROL, self._patrol)
        fleet = world.leader_fold()
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
                self.kill(machine)
            elif worker.health.disputed and not machine.draining and world.healed:
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
            if isinstance(event.fact, seen.ScaleProposed) and event.fact.by == SUPERVISOR
        }
        for model, (proposal, fact) in latest.items():
            ok = self._chance.random() >= FAILS
            if ok:
                self._scale(model, fact.after)
            says = "done" if ok else "there is no room"
            self.outbox.observe(
                seen.ScaleApplied(
                    model=model, proposal=proposal, after=fact.after, by=SUPERVISOR, ok=ok, says=says
                )
            )

    def _scale(self, model: str, after: int) -> None:
        workers = self._world.leader_fold().workers
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
        supervisor = self._world.supervisor
        if machine.up:
            supervisor.kill(machine)
