"""Since when has nothing kept the leader, or a worker's canaries, from their work?"""

from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.prober import PROBER
from controller.simulator.world.world import SimulatedWorld


class Steadiness:
    """What is without any fault, and since when, in microseconds of virtual time. Told to look once a second."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.since = 0  # of the leader and the broker together
        self.leader: SimulatedController | None = None
        self.empty_since: dict[str, int] = {}  # places of lost workers, beside a spare that could take them
        self.full_since: dict[str, int] = {}  # models whose workers all carry their full share
        self.unserved_since: dict[str, int] = {}  # models without a serving worker, beside a suspect one
        self.convicted_under: dict[str, int | None] = {}  # instances: the decision that opened their breaker
        self.acquitted_since: dict[str, int] = {}  # of these: nothing convicts them since
        self.last_of_model: dict[str, int] = {}  # when an instance served for want of another
        self.idle_since: dict[
            tuple[str, str], int
        ] = {}  # workers with room, beside somebody who waits at a frontend
        self._world = world
        self._probed_since: dict[str, int] = {}  # by worker

    def probed_since(self, worker: str) -> int:
        """Return since when nothing kept a worker's canaries from being asked."""
        return self._probed_since.get(worker, 0)

    def look(self) -> None:
        """See who leads, and whom it can probe."""
        world, now = self._world, self._world.kernel.now
        leaders = [c for c in world.controllers if c.up and c.leading and not c.paused]
        network = world.broker.network
        calm = world.broker.up and not network.loss and not network.slow
        fit = calm and len(leaders) == 1 and not leaders[0].hold_append
        leader = leaders[0] if fit else None
        if leader is None or leader is not self.leader:
            self.leader, self.since = leader, now
        probing = leader is not None and not leader.prober.stalled and self.since != now
        for machine in world.machines.values():
            condition = machine.condition
            faulty = condition.flaky or condition.erring or condition.cut
            if not probing or faulty or not machine.reachable(PROBER):
                self._probed_since[machine.name] = now
