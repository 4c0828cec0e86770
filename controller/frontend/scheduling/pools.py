"""Times to first token of each worker pool, measured by this frontend.

A pool is the workers of one model and lineage. The scheduler reports sent requests and arrived first tokens; admission by
deadlines reads the predictions.
"""

from collections.abc import Callable, Collection

from controller.deciders.capacity import tpot_ms
from controller.router.endpoints import Endpoint, Lineage
from controller.router.load.ttft_predictor import FirstTokens
from controller.router.load.work import reading_s

PoolName = tuple[str, Lineage]


class Pools:
    """The first-token measurements of one frontend, by worker pool."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._pools: dict[PoolName, FirstTokens] = {}
        # By slot number: pool, worker, time of sending, time to read the prompts ahead and its own, time of a step.
        self._sent: dict[int, tuple[PoolName, str, float, float, float, float]] = {}

    def of(self, model: str, lineage: Lineage) -> FirstTokens:
        """Return the first-token measurements of a model's workers of this lineage."""
        pool = self._pools.get((model, lineage))
        if pool is None:
            pool = self._pools[model, lineage] = FirstTokens()
        return pool

    def sent(self, slot: int, endpoint: Endpoint, ahead_tokens: float, own_tokens: float) -> None:
        """Record that a request was sent to a worker rank, which prefills `ahead_tokens` of other prompts before it."""
        profile = endpoint.joined.profile
        ahead_s, own_s = reading_s(ahead_tokens, profile), reading_s(own_tokens, profile)
        name = (endpoint.model, endpoint.lineage)
        self._sent[slot] = name, endpoint.worker, self.now(), ahead_s, own_s, step_s(endpoint)
        self.of(*name).sent(ahead_s)

    def read(self, slot: int) -> None:
        """Record that the request's first token has arrived."""
        if (sent := self._sent.pop(slot, None)) is not None:
            name, worker, at, ahead_s, own_s, steps_s = sent
            self.of(*name).came(worker, ahead_s, own_s, steps_s, self.now() - at)

    def end(self, slot: int) -> None:
        """Drop a request that has left its worker."""
        self._sent.pop(slot, None)

    def keep(self, names: Collection[PoolName], workers: set[str]) -> None:
        """Drop all other pools and workers."""
        self._pools = {name: pool for name, pool in self._pools.items() if name in names}
        for pool in self._pools.values():
            pool.forget(workers)


def step_s(endpoint: Endpoint) -> float:
    """Return the registered duration in seconds of a worker's step with a full batch; 0 if none was registered."""
    found = tpot_ms(endpoint.joined.profile, max(1, endpoint.max_batch)) / 1000
    return found if found < 10.0 else 0.0
