"""All invariants, safety and liveness, in the order in which they are checked and reported."""

from types import ModuleType

from controller.simulator.checks import decisions, end, folds, overload, planner, requests, spares, world
from controller.simulator.checks.watch import Invariant


def invariants_of(*modules: ModuleType) -> dict[str, Invariant]:
    """Return the invariants that these modules define, by name."""
    stated = [value for module in modules for value in vars(module).values()]
    return {found.name: found for found in stated if isinstance(found, Invariant)}


INVARIANTS = invariants_of(decisions, spares, overload, planner, folds, world, end)
ALL_INVARIANTS = INVARIANTS | invariants_of(requests)  # with --live-requests
