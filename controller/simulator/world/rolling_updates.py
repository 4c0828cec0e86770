"""Rolling updates in one world of three: new weights under the same model name, worker by worker.

- Engines that report no lineage are updated in place or by a restart. The canary key stays, and the old goldens convict.
- Engines that report their lineage are updated by a restart. The canary key changes, and the worker is held back until its
  goldens are agreed.

The updates draw from their own random stream.
"""

from collections.abc import Callable
from random import Random

from controller.simulator.world.kernel import SECOND, coin
from controller.simulator.world.machines import Machine
from controller.simulator.world.world import SimulatedWorld

WORLDS = 3  # one of this many worlds has updates
UPDATES_MAX = 2  # per model


class RollingUpdates:
    """The updates of one world. `note` records each in the history."""

    def __init__(self, world: SimulatedWorld, chance: Random, note: Callable[[str], None]) -> None:
        self.struck: dict[str, int] = {}
        self._world, self._kernel = world, world.kernel
        self._chance = chance
        self._note = note
        self._newest: dict[str, int] = {}  # weights by model
        self._over = False
        self.reports_lineage = False
        if chance.randrange(WORLDS) == 0:
            self._plan()

    def _plan(self) -> None:
        """Choose whether engines report their lineage, and when each model gets new weights."""
        self.reports_lineage = coin(self._chance)
        for machine in self._world.machines.values():
            machine.standing.weights.reported = self.reports_lineage
        for model in self._world.scenario.models:
            for _ in range(self._chance.randint(1, UPDATES_MAX)):
                at = int(self._world.scenario.heal_at * (0.1 + 0.8 * self._chance.random()))
                self._kernel.after(at, self._update, model)

    def _update(self, model: str) -> None:
        """Start to update a model's workers in random order. A single worker is not updated: no other could confirm it."""
        machines = self._of(model)
        if self._over or len(machines) < 2:
            return
        self._newest[model] = newest = self._newest.get(model, 0) + 1
        self.struck["weights"] = self.struck.get("weights", 0) + 1
        gap, restart = self._chance.choice((5, 25, 60)) * SECOND, coin(self._chance)
        self._note(f"new weights {newest} of {model}, {'told' if self.reports_lineage else 'not told'}")
        self._chance.shuffle(machines)
        for place, machine in enumerate(machines):
            self._kernel.after(place * gap, self._renew, machine, newest, restart or self.reports_lineage)

    def _renew(self, machine: Machine, weights: int, restart: bool) -> None:
        if self._over:
            return
        loaded = machine.standing.weights
        loaded.after_start = weights
        if restart:
            machine.stop()
        else:
            loaded.load()

    def fit(self, machine: Machine) -> None:
        """Give a new machine the newest weights of its model."""
        weights = machine.standing.weights
        weights.reported, weights.after_start = self.reports_lineage, self._newest.get(machine.model, 0)

    def heal(self) -> None:
        """Update all workers of a model to its newest weights."""
        self._over = True
        for machine in self._world.machines.values():
            weights = machine.standing.weights
            weights.after_start = self._newest.get(machine.model, 0)
            if weights.loaded != weights.after_start:
                if self.reports_lineage:
                    machine.stop()
                else:
                    weights.load()

    def _of(self, model: str) -> list[Machine]:
        machines = self._world.machines
        return [one for one in machines.values() if one.model == model and not one.standing.retired]
