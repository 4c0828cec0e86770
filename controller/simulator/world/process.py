"""A host that runs simulated processes of one kind, one after another."""

from collections.abc import Callable
from random import Random

from controller.simulator.world.broker import BrokerMessage
from controller.simulator.world.outbox import SimulatedOutbox
from controller.simulator.world.surroundings import Surroundings


class SimulatedProcess:
    """The host. Calls scheduled with `_later` run in the process that scheduled them, or not at all."""

    def __init__(self, name: str, surroundings: Surroundings, chance: Random) -> None:
        self.name = name
        self.surroundings, self._kernel = surroundings, surroundings.kernel
        self.up = False
        self.life = 0
        self._chance = chance
        self._spool: list[BrokerMessage] = []  # facts that the last process had not sent

    @property
    def source(self) -> str:
        """The name of the current process."""
        return f"{self.name}.{self.life}"

    def start(self) -> None:
        """Start a process, unless one is up."""
        if not self.up:
            self.life += 1
            self.up = True
            self._begin()

    def crash(self) -> None:
        """End without notice."""
        if self.up:
            self.up = False
            self._end()

    def _begin(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _outbox(self) -> SimulatedOutbox:
        outbox = SimulatedOutbox(self.surroundings.broker, self.source)
        outbox.inherit(self._spool)
        self._spool = []
        return outbox

    def _later(self, delay: int, act: Callable[..., None], *args: object) -> None:
        self._kernel.after(delay, self._if_same, self.life, act, *args)

    def _if_same(self, life: int, act: Callable[..., None], *args: object) -> None:
        if self.up and self.life == life:
            act(*args)
