"""Trust in a worker's KV cache: whether another worker may receive it.

The wrong results of a worker remain in its KV cache, and stay wrong on any worker that receives the cache. So sending a cache
requires a `TrustedSource` of the sender. None can be created for a worker that is dead, was ejected for its answers or
actions, or is suspected of wrong answers. A worker that is draining, throttled or slow still computes correctly, and is
trusted. So is a worker that has lost an NVLink.
"""

from controller.deciders.fleet import Worker
from controller.deciders.health_state import CORRUPT_REASONS
from events.decisions import HealthStatus
from events.errors import HoldfastError

FIT = (HealthStatus.HEALTHY, HealthStatus.SUSPICIOUS, HealthStatus.DRAINING)


class SourceDistrusted(HoldfastError):
    """The KV cache of this worker is not trusted."""


class TrustedSource:
    """A worker instance with a KV cache that may be sent to another worker now.

    Do not store this object, because trust can end.
    """

    __slots__ = ("instance", "worker")

    def __init__(self, worker: Worker | None) -> None:
        """Raise SourceDistrusted if the fleet's state of the worker gives a reason to doubt its KV cache."""
        if worker is None:
            raise SourceDistrusted("the source is unknown")
        if reason := _doubt(worker):
            raise SourceDistrusted(f"the source is not trusted: {reason}")
        self.worker, self.instance = worker.joined.worker, worker.joined.instance


def _doubt(worker: Worker) -> str:
    """Return the reason why a worker's KV cache is not trusted, or an empty string if it is trusted."""
    health = worker.health
    if health.status not in FIT or health.joining:
        return f"it is {health.status.value}"
    accused, canaries = health.charges.accused, health.canaries
    if health.convicted or accused or health.exit.given_up:
        return accused or next(iter(health.charges.convictions), health.reason)
    if canaries.failures and canaries.failure in CORRUPT_REASONS:
        return canaries.failure
    return "its answers contradict another worker's" if health.disputed else ""
