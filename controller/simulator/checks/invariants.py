"""What must never happen, or must always happen in the end, in the order in which it is checked and reported."""

from collections.abc import Mapping

from controller.simulator.checks import decisions, end, folds, overload, planner, spares, world
from controller.simulator.checks.watch import Invariant

INVARIANTS: Mapping[str, Invariant] = {
    found.name: found
    for module in (decisions, spares, overload, planner, folds, world, end)
    for found in vars(module).values()
    if isinstance(found, Invariant)
}
