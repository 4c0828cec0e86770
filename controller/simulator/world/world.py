"""The interface of the whole simulated world, for the faults, the operators and the checks."""

from collections.abc import Sequence
from typing import Protocol

from controller.deciders.fleet import Fleet
from controller.simulator.world.broker import Broker
from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.planner import SimulatedPlanner
from controller.simulator.world.projector import SimulatedProjector
from controller.simulator.world.replica import Replica
from controller.simulator.world.requests.demand import SimulatedDemand
from controller.simulator.world.requests.frontends import SimulatedFrontend
from controller.simulator.world.requests.traffic import ClientTally
from controller.simulator.world.scenario import Scenario
from controller.simulator.world.seams import Seams


class SimulatedWorld(Protocol):
    """Everything that is simulated in one run."""

    scenario: Scenario
    seams: Seams
    kernel: Kernel
    broker: Broker
    machines: dict[str, Machine]
    controllers: list[SimulatedController]
    frontends: list[SimulatedFrontend]
    projector: SimulatedProjector
    planners: list[SimulatedPlanner]
    demand: SimulatedDemand
    tally: ClientTally

    def believed(self) -> Fleet:
        """Return the fleet as the leader has folded it; without a leader, the fold of the whole journal."""
        ...

    def stalled(self, machine: Machine) -> None:
        """Report to every frontend that a worker has sent nothing for longer than the stall timeout."""
        for frontend in self.frontends:
            frontend.stalled(machine)

    def linked(self, machine: Machine) -> bool:
        """Return whether any frontend reports a live connection to this worker."""
        return any(frontend.linked(machine) for frontend in self.frontends)

    def was_corrupt(self, worker: str, instance: str) -> bool:
        """Return whether this instance of a worker was ever corrupt."""
        return instance in self.machines[worker].corrupt_lives

    def replicas(self) -> list[Replica]:
        """Return the folds of all running processes."""
        folds = [c.replica for c in self.controllers if c.up] + [f.replica for f in self.frontends if f.up]
        return [*folds, self.projector.replica] if self.projector.up else folds

    def outboxes(self) -> Sequence[SimulatedOutbox]:
        """Return the outboxes of all running processes."""
        ...
