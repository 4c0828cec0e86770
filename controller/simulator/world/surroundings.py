"""The environment of every simulated process: time, broker, machines, and the watch's hooks."""

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
    """A process that reports its live connections to workers: a frontend."""

    @property
    def name(self) -> str: ...
    def linked(self, machine: Machine) -> bool:
        """Return whether this process recently reported a live connection to a worker."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The objects that all processes of a simulation share. Durations are microseconds of virtual time."""

    kernel: Kernel
    broker: Broker
    seams: Seams
    policy: Callable[[], FleetPolicy]  # the policy of a controller that starts now
    machines: Mapping[str, Machine]
    frontends: Callable[[], Iterable[Linked]]
    scenario: Scenario
    notify: Callable[..., None]  # checks the invariants of a hook
    decided: Callable[[str], None]  # called when an append reached the broker

    def replica(
        self,
        name: str,
        listen: Listen,
        stored: Stored | None = None,
        order: Callable[..., Order[Any]] | None = None,
    ) -> Replica:
        """Return a new fold for a process, which reads from the beginning or from what is stored."""
        return Replica(name, self.broker, self.seams, listen, stored, order)
