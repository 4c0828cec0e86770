"""Whose KV cache may another worker take over?

What a worker computed wrongly is in its KV cache, and would go on being wrong wherever that is sent. So a shipment can
be asked for with a `TrustedSource` only, and there is none of a worker that is dead, or taken out of service for what it said
or did, or under suspicion of wrong answers. Draining, throttled, slow, a lost NVLink: those compute rightly.
"""

from controller.deciders.fleet import Worker
from controller.deciders.health_state import CORRUPT_REASONS
from controller.router.endpoints import Key
from events.decisions import HealthStatus
from events.errors import HoldfastError

FIT = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS, HealthStatus.DRAINING)


class SourceDistrusted(HoldfastError):
    """What this worker has computed is not taken over."""


class TrustedSource:
    """One life of a worker whose KV cache may be sent on, as the fleet knows it now. Keep none: trust can end."""

    __slots__ = ("instance", "worker")

    def __init__(self, worker: Worker | None) -> None:
        """Raise SourceDistrusted unless the fleet's state of the worker speaks for it."""
        if worker is None:
            raise SourceDistrusted("nothing is known of the source")
        if reason := _doubt(worker):
            raise SourceDistrusted(f"the source is not trusted: {reason}")
        self.worker = worker.joined.worker
        self.instance = worker.joined.instance

    @property
    def key(self) -> Key:
        """The worker and its instance, as an endpoint is found by."""
        return self.worker, self.instance


def _doubt(worker: Worker) -> str:
    """Return why a worker's state is not trusted; empty if it is."""
    health = worker.health
    if health.status not in FIT or health.joining:
        return f"it is {health.status.value}"
    accused, said = health.charges.accused, health.canaries
    if health.convicted or accused or health.exit.given_up:
        return accused or next(iter(health.convictions), health.reason)
    if said.failures and said.failure in CORRUPT_REASONS:
        return said.failure
    return "its answers contradict another worker's" if health.disputed else ""
