"""The parts that all simulated processes share: host, fleet state, and interface to the world.

About ten processes fold the same facts in the same order into their fleet states. The fold is a pure function, so `Remembered`
caches the result of each step for all processes. The invariant watch folds all events again without the cache, and compares
the results.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from controller.deciders.fleet import Fleet
from controller.ports import Snapshot
from controller.runtime.initial_fold import FleetFold
from controller.simulator.world.broker import Broker, BrokerMessage, Follower, Network, SimulatedOutbox
from controller.simulator.world.kernel import Kernel
from controller.simulator.world.machines import Machine
from controller.simulator.world.scenario import Scenario
from controller.simulator.world.seams import Seams
from controller.simulator.world.traffic import ClientTally, SimulatedDemand
from events.fact import Recorded
from events.order import Order, Position

NOTHING = Snapshot(Fleet(), Position(), {})
Listen: TypeAlias = Callable[["Replica", Sequence[Recorded]], None]
STEPS_MAX = 100_000  # cached steps of the fold


class Remembered:
    """A function that folds events into the fleet, and caches each step for all processes."""

    def __init__(self, evolve: Callable[[Fleet, Recorded], Fleet]) -> None:
        self._evolve = evolve
        # Keyed by the identity of objects that the values keep alive.
        self._steps: dict[tuple[int, int], tuple[Fleet, Recorded, Fleet]] = {}

    def __call__(self, fleet: Fleet, recorded: Recorded) -> Fleet:
        """Return the fleet state after one event."""
        key = (id(fleet), id(recorded))
        known = self._steps.get(key)
        if known is not None:
            return known[2]
        if len(self._steps) >= STEPS_MAX:
            self._steps.clear()
        after = self._evolve(fleet, recorded)
        self._steps[key] = (fleet, recorded, after)
        return after


class Replica(FleetFold):
    """The fleet state that one process folds from the journal. `listen` is called after each batch of events."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        listen: Listen,
        stored: Snapshot | None = None,
        order: type[Order[Fleet]] = Order,
    ) -> None:
        self.name = name
        self._seams = seams = broker.seams
        found = stored or NOTHING
        super().__init__(order(seams.evolve, found.fleet, found.position, dict(found.sources)))
        self._listen = listen
        self.follower = Follower(broker, found.position.through, self._read)

    @property
    def known(self) -> int:
        """The sequence up to which the fleet state contains all decisions.

        A snapshot holds only the observations that its last decision took into account. After a start from a snapshot, the
        state therefore lacks all other observations from before that decision until the process reads them.
        """
        return max(self.seq, self.order.position.decided)

    def store(self) -> Snapshot:
        """Return the part of this fleet state that the state store keeps."""
        return self._seams.snapshot(self.order)

    def close(self) -> None:
        """Stop reading the journal."""
        self.follower.close()

    def _read(self, batch: Sequence[Recorded]) -> None:
        self.take(batch)
        self._listen(self, batch)


class Surroundings:
    """The simulated world, as its processes use it. Durations are in microseconds of virtual time."""

    frontends: Sequence["SimulatedProcess"]
    notify: Callable[..., None]  # checks the invariants of a hook
    stepped: Callable[..., None]  # called when the request machine has applied an event

    def __init__(self, scenario: Scenario, seams: Seams) -> None:
        self.scenario, self.kernel = scenario, Kernel(scenario.seed)
        self.seams = replace(seams, evolve=Remembered(seams.evolve))
        self.broker = Broker(self.kernel, self.seams, Network(self.kernel.chance("network")))
        self.machines: dict[str, Machine] = {}
        self.tally, self.demand = ClientTally(), SimulatedDemand(scenario, self.kernel)
        self.stored: Snapshot | None = None  # in the state store; None: nothing stored

    def linking(self) -> list["SimulatedProcess"]:
        """Return the running frontends, because only a running frontend reports live connections to workers."""
        return [frontend for frontend in self.frontends if frontend.up]


class SimulatedProcess:
    """A host that runs processes of one kind, one after another.

    A call that was scheduled with `_later` runs only if the process that scheduled the call is still up.
    """

    outbox: SimulatedOutbox  # of a process that publishes facts
    replica: Replica  # of a process that reads the journal
    source: str  # the name of the current process

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        self.name = name
        self.surroundings, self._kernel, self._broker = surroundings, surroundings.kernel, surroundings.broker
        self.up = False
        self.life = 0
        self._chance = surroundings.kernel.chance(name)
        self._spool: list[BrokerMessage] = []  # facts that the last process had not sent

    def start(self) -> None:
        """Start a process, unless one is up."""
        if not self.up:
            self.life += 1
            self.source = f"{self.name}.{self.life}"
            self.up = True
            self._begin()

    def linked(self, machine: Machine) -> bool:
        """Return whether this process has recently reported a live connection to a worker.

        Only frontends report connections, so the result is False in this class.
        """
        return False

    def crash(self) -> None:
        """End the current process without notice."""
        if self.up:
            self.up = False
            self._end()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _outbox(self) -> SimulatedOutbox:
        outbox = SimulatedOutbox(self._broker, self.source)
        outbox.inherit(self._spool)
        self._spool = []
        return outbox

    def _later(self, delay: int, act: Callable[..., None], *args: object) -> None:
        self._kernel.after(delay, self._if_same, self.life, act, *args)

    def _if_same(self, life: int, act: Callable[..., None], *args: object) -> None:
        if self.up and self.life == life:
            act(*args)
