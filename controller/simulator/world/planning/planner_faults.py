"""What goes wrong with planners, and with what they hear."""

from collections.abc import Callable
from random import Random

from controller.simulator.world.kernel import seconds_drawn
from controller.simulator.world.operators import Operators
from controller.simulator.world.world import SimulatedWorld


class PlannerFaults:
    """The faults of worlds with planners."""

    def __init__(self, world: SimulatedWorld, operators: Operators, chance: Random) -> None:
        self._world, self._kernel = world, world.kernel
        self._operators, self._chance = operators, chance
        self.kinds: dict[str, Callable[[], None]] = {
            "planner_crash": self._crash,
            "planner_pause": self._pause,
            "untold": self._untold,
            "scale_set": self._set,
        }

    def _crash(self) -> None:
        planner = self._chance.choice(self._world.planners)
        planner.crash()
        self._kernel.after(seconds_drawn(self._chance, 1, 120), planner.start)

    def _pause(self) -> None:
        """It stops between deciding and sending."""
        self._chance.choice(self._world.planners).hold = seconds_drawn(self._chance, 5, 40)

    def _untold(self) -> None:
        """No frontend can tell what comes."""
        demand = self._world.demand
        demand.keep_quiet(self._kernel.now + seconds_drawn(self._chance, 60, 480))

    def _set(self) -> None:
        """An operator has a number of his own tried."""
        self._operators.scale(self._chance.choice(self._world.scenario.models))
