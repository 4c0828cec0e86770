"""Tracks since when the leader, and each worker's canaries, have run without interference from faults."""

from controller.simulator.world.controllers import SimulatedController
from controller.simulator.world.kernel import SECOND
from controller.simulator.world.prober import PROBER
from controller.simulator.world.world import SimulatedWorld

SLACK = 8 * SECOND  # time for a tick, an append with its retries, and reading


class Steadiness:
    """The conditions that are currently true, and since when, in microseconds of virtual time. Updated once a second."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.since = 0  # since when both the leader and the broker have run without faults
        self.leader: SimulatedController | None = None
        self.convicted_under: dict[str, int | None] = {}  # by instance: the decision that opened its breaker
        self.last_of_model: dict[str, int] = {}  # when an instance last served because no other one could
        self.probed_since: dict[str, int] = {}  # by worker: since when its canaries could be sent
        self._world = world
        self._since: dict[tuple[str, ...], int] = {}

    def lasts_since(self, *what: str, so: bool) -> int:
        """Return since when a condition has been true at every tick; the current time if `so` is false."""
        now = self._world.kernel.now
        if so:
            return self._since.setdefault(what, now)
        self._since.pop(what, None)
        return now

    def overdue(self, due: int) -> bool:
        """Return whether the leader has run long enough without faults to act on what was due at `due`."""
        world = self._world
        clocks = 2 * world.scenario.skew
        return (
            self.leader is not None and world.kernel.now - max(due + clocks, self.since) > SLACK + 5 * SECOND
        )

    def look(self) -> None:
        """Update the leader and the workers that it can probe."""
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
                self.probed_since[machine.name] = now
