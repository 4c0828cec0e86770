"""The whole played world, as those see it who strike it, look after it, or check it."""

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
    """Everything that is played in one run."""

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
        """Return the fleet as the leader sees it, or else as everybody who read everything would."""
        ...

    def stalled(self, machine: Machine) -> None:
        """Nothing has come from this worker for longer than a frontend bears."""
        for frontend in self.frontends:
            frontend.stalled(machine)

    def linked(self, machine: Machine) -> bool:
        """Return whether any frontend reports a live connection to this worker."""
        return any(frontend.linked(machine) for frontend in self.frontends)

    def was_corrupt(self, worker: str, instance: str) -> bool:
        """Return whether this life of a worker ever answered wrongly."""
        return instance in self.machines[worker].corrupt_lives

    def replicas(self) -> list[Replica]:
        """Return the folds of all processes that are up."""
        folds = [c.replica for c in self.controllers if c.up] + [f.replica for f in self.frontends if f.up]
        return [*folds, self.projector.replica] if self.projector.up else folds

    def outboxes(self) -> Sequence[SimulatedOutbox]:
        """Return what all processes that are up have still to say."""
        ...
