"""What lies around every played process: time, the broker, the machines, and who wants to hear what it does."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.deciders.fleet import FleetPolicy
from controller.simulator.world.broker import Broker, Network
from controller.simulator.world.kernel import Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.outbox import AcknowledgedNumbers, SimulatedOutbox
from controller.simulator.world.replica import Listen, Replica
from controller.simulator.world.seams import Seams, Stored
from events.observations import ScaleProposed


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
    network: Network
    seams: Seams
    acknowledged: AcknowledgedNumbers
    policy: Callable[[], FleetPolicy]  # with which a controller starts
    machines: Mapping[str, Machine]
    frontends: Callable[[], Iterable[Linked]]
    interval: int  # between canaries of one worker
    silent_after_s: float  # until a worker counts as silent
    tick: int  # between looks at the clock, at heartbeats, and at who is to be probed
    listen: Listen
    decided: Callable[[str], None]  # an append has reached the broker
    accused: Callable[[str, str], None]  # an observer calls a worker silent
    proposed: Callable[[ScaleProposed], None]  # a planner is about to say so

    def replica(self, name: str, listen: Listen, stored: Stored | None = None) -> Replica:
        """Return a process's own fold, which reads from the beginning or from what is stored."""
        return Replica(name, self.broker, self.network, self.seams, listen, stored)

    def new_outbox(self, source: str) -> SimulatedOutbox:
        """Return the outbox of a process that begins."""
        return SimulatedOutbox(self.broker, source, self.acknowledged)
