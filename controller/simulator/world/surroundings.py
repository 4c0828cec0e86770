"""What lies around every played process: time, the broker, the machines, and who wants to hear what it does."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from controller.deciders.fleet import FleetPolicy
from controller.simulator.world.broker import Broker
from controller.simulator.world.kernel import Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.replica import Listen, Replica
from controller.simulator.world.scenario import Scenario
from controller.simulator.world.seams import Seams, Stored
from events.order import Order


class Linked(Protocol):
    """Who reports its live connections to workers: a frontend."""

    @property
    def name(self) -> str: ...
    def linked(self, machine: Machine) -> bool:
        """Return whether it has said lately that its connection to this worker lives."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all processes of a simulation have in common. Durations are in microseconds of virtual time."""

    kernel: Kernel
    broker: Broker
    seams: Seams
    policy: Callable[[], FleetPolicy]  # with which a controller starts
    machines: Mapping[str, Machine]
    frontends: Callable[[], Iterable[Linked]]
    scenario: Scenario
    tell: Callable[..., None]  # the watch: what has happened, and to what
    decided: Callable[[str], None]  # an append has reached the broker

    def replica(
        self,
        name: str,
        listen: Listen,
        stored: Stored | None = None,
        order: Callable[..., Order[Any]] | None = None,
    ) -> Replica:
        """Return a process's own fold, which reads from the beginning or from what is stored."""
        return Replica(name, self.broker, self.seams, listen, stored, order)
