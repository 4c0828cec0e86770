"""What is due, for whom asks again and again: a fleet that was calm is not settled again before it could be otherwise.

Nothing is due in a calm fleet until a fact changes it, or until a time that its own machines name. A fleet is frozen,
so that the same object is the same fleet: nothing that is remembered here can be out of date.
"""

from collections.abc import Callable
from datetime import datetime

from controller.deciders.fold import Fleet
from controller.deciders.policy import FleetPolicy
from controller.deciders.settle import next_due, settle
from events.fact import Decision

Settle = Callable[[FleetPolicy, Fleet, datetime], tuple[Decision, ...]]


class Asking:
    """One decider's questions, under one policy."""

    def __init__(self, policy: FleetPolicy, settle: Settle = settle) -> None:
        self._policy = policy
        self._settle = settle
        self._calm: Fleet | None = None  # in which nothing was due when it was asked about last
        self._until: datetime | None = None  # nor will be until then

    def due(self, fleet: Fleet, now: datetime) -> tuple[Decision, ...]:
        """Return what `settle` returns."""
        if fleet is self._calm and (self._until is None or now < self._until):
            return ()
        decisions = self._settle(self._policy, fleet, now)
        if decisions:
            self._calm = None
        else:
            self._calm, self._until = fleet, next_due(self._policy, fleet, now)
        return decisions
