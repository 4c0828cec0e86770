"""Panic: is so much of a model out of service that our own breakers had better be ignored?

Below half of the routable weight, a frontend that goes on believing its own breakers would send everything to the
few that are left, and break them too. Weight counts as lost whoever has taken it away, the fleet or we; it is said when
panic begins and when it ends. Workers that the fleet itself has taken out of service are never brought back by this.

What a reader would get wrong: a breaker on trial counts as open here, else each trial would end the panic and begin
it anew.
"""

from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from controller.frontend.health.local_breakers import LocalBreakers
from controller.router.endpoints import Endpoint
from events.fact import Observation
from events.observations import PanicBegan, PanicEnded


class Panic:
    """In which models this frontend ignores its own breakers."""

    def __init__(
        self,
        frontend: str,
        share_min: float,
        breakers: LocalBreakers,
        observe: Callable[[Observation], object],
        gauge: Gauge,
    ) -> None:
        self._frontend = frontend
        self._share_min = share_min
        self.breakers = breakers
        self._observe = observe
        self._gauge = gauge
        self.models: set[str] = set()  # where there was panic when it was looked at last

    def ignores(self, model: str, endpoints: Sequence[Endpoint]) -> bool:
        """Say whether our own breakers are ignored for this model now; they may have moved since the last look."""
        if self.breakers.any_open:
            self.look(model, endpoints)
        return model in self.models

    def look(self, model: str, endpoints: Sequence[Endpoint]) -> None:
        """See whether there is panic over a model, and say so when that changes."""
        share = self.breakers.routable_share(endpoints)
        panic = share < self._share_min
        if panic != (model in self.models):
            (self.models.add if panic else self.models.discard)(model)
            kind = PanicBegan if panic else PanicEnded
            self._observe(kind(frontend=self._frontend, model=model, routable_share=share))
            self._gauge.labels(model).set(panic)
