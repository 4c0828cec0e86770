"""Panic: is so much of a model out of service by our own breakers that it is better to ignore them?

Below half of the routable weight, a frontend that goes on believing its own breakers would send everything to the
few that are left, and break them too. It says so when it begins and when it ends. Workers that the fleet itself
has taken out of service are never brought back by this.
"""

from collections.abc import Callable, Sequence

from controller.frontend.metrics import FrontendMetrics
from controller.frontend.outcomes import Outcomes
from controller.router.table import Seat
from events.fact import Observation
from events.observations import PanicBegan, PanicEnded


class Panic:
    """In which models this frontend ignores its own breakers."""

    def __init__(
        self,
        frontend: str,
        share_min: float,
        outcomes: Outcomes,
        observe: Callable[[Observation], object],
        metrics: FrontendMetrics,
    ) -> None:
        self._frontend = frontend
        self._share_min = share_min
        self._outcomes = outcomes
        self._observe = observe
        self._metrics = metrics
        self._models: set[str] = set()

    def look(self, model: str, seats: Sequence[Seat]) -> bool:
        """Say whether there is panic over a model now."""
        if not self._outcomes.any_open and model not in self._models:
            return False
        allowed = self._outcomes.allowed
        service = [seat for seat in seats if seat.counts]
        weight = sum(seat.weight for seat in service if allowed(seat))
        held = any(seat.routable and not allowed(seat) for seat in service)
        share = weight / len(service) if service else 0.0
        panic = held and share < self._share_min
        if panic != (model in self._models):
            self._turn(model, panic, share)
        return panic

    def _turn(self, model: str, panic: bool, share: float) -> None:
        (self._models.add if panic else self._models.discard)(model)
        kind = PanicBegan if panic else PanicEnded
        self._observe(kind(frontend=self._frontend, model=model, routable_share=share))
        self._metrics.panic.labels(model).set(panic)
