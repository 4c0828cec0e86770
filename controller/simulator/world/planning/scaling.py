"""Applies planner proposals as `holdfast up` does: starts workers, and stops the newest ones."""

from collections.abc import Callable, Sequence
from random import Random

from controller.simulator.world.broker import Follower
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.machines import Machine
from controller.simulator.world.operators import SimulatedSupervisor
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.planner import SUPERVISOR
from controller.simulator.world.world import SimulatedWorld
from events.fact import Recorded
from events.observations import ScaleApplied, ScaleProposed

GRACE = 30 * SECOND  # grace period before a worker that is stopping is killed
FAILS = 0.1  # share of proposals that fail for lack of room


class SimulatedScaling:
    """Follows the proposals on the journal. `make` adds the machine of one more worker of a model."""

    def __init__(
        self,
        world: SimulatedWorld,
        supervisor: SimulatedSupervisor,
        make: Callable[[str], Machine],
        chance: Random,
    ) -> None:
        self.outbox = SimulatedOutbox(world.broker, "scaling.1")
        self._world, self._kernel, self._supervisor = world, world.kernel, supervisor
        self._make, self._chance = make, chance
        self._follower = Follower(world.broker, 0, self._read)

    def _read(self, batch: Sequence[Recorded]) -> None:
        latest = {
            event.fact.model: (event.id, event.fact)
            for event in batch
            if isinstance(event.fact, ScaleProposed) and event.fact.by == SUPERVISOR
        }
        for proposal, fact in latest.values():
            self._apply_proposal(proposal, fact)

    def _apply_proposal(self, proposal: str, fact: ScaleProposed) -> None:
        ok = self._chance.random() >= FAILS
        if ok:
            self._scale(fact.model, fact.after)
        says = "done" if ok else "there is no room"
        self.outbox.observe(
            ScaleApplied(
                model=fact.model, proposal=proposal, after=fact.after, by=SUPERVISOR, ok=ok, says=says
            )
        )

    def _scale(self, model: str, after: int) -> None:
        workers = self._world.believed().workers
        kept = {name for name, worker in workers.items() if worker.spare.kept}
        current = [
            machine
            for machine in self._world.machines.values()
            if machine.model == model and not machine.standing.retired and machine.name not in kept
            and (machine.name in workers or not machine.hardware.spare)
        ]  # fmt: skip
        for _ in range(after - len(current)):
            machine = self._make(model)
            self._kernel.after(self._chance.randrange(1, 20) * SECOND, machine.start)
        for machine in current[after:]:  # the newest workers
            machine.standing.retired = True
            machine.stop()
            self._kernel.after(GRACE, self._end, machine)

    def _end(self, machine: Machine) -> None:
        """Kill a worker that has not left within the grace period."""
        if machine.up:
            machine.crash()
            self._supervisor.soon(machine)
