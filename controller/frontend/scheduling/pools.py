"""What does one frontend know of how fast each of its pools takes requests, and how long first tokens take there? A pool are the
workers of one model and lineage.

The scheduler tells it what is sent and read; admission by deadlines asks it.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from controller.deciders.capacity import tpot_ms
from controller.router.admission.pool import WorkerPool
from controller.router.admission.work import reading_s
from controller.router.endpoints import Endpoint, Lineage

PoolName = tuple[str, Lineage]


class _Sent(NamedTuple):
    """A request whose first token has not come yet."""

    pool: PoolName
    worker: str
    at: float
    ahead_s: float
    own_s: float
    step_s: float


class Pools:
    """One frontend's."""

    def __init__(self, now: Callable[[], float], frontends: Callable[[], int]) -> None:
        """`frontends` returns how many share the workers: each reckons with its part of them until it has seen what it gets."""
        self.now = now
        self._frontends = frontends
        self._pools: dict[PoolName, WorkerPool[asyncio.Future[Any]]] = {}
        self._sent: dict[int, _Sent] = {}  # by the router's number

    def of(self, model: str, lineage: Lineage) -> WorkerPool[asyncio.Future[Any]]:
        """Return the pool of a model's workers of this lineage."""
        pool = self._pools.get((model, lineage))
        if pool is None:
            pool = self._pools[model, lineage] = WorkerPool(self.now(), 1.0 / max(1, self._frontends()))
        return pool

    def sent(self, slot: int, endpoint: Endpoint, ahead_tokens: float, own_tokens: float) -> None:
        """A request was sent to a worker, one of whose ranks has so much to read before it."""
        profile = endpoint.joined.profile
        ahead_s, own_s = reading_s(ahead_tokens, profile), reading_s(own_tokens, profile)
        name = (endpoint.model, endpoint.lineage)
        self._sent[slot] = _Sent(name, endpoint.worker, self.now(), ahead_s, own_s, step_s(endpoint))
        self.of(*name).first.sent(ahead_s)

    def read(self, slot: int) -> None:
        """Its first token has come."""
        sent = self._sent.pop(slot, None)
        if sent is not None:
            took_s = self.now() - sent.at
            first = self.of(*sent.pool).first
            first.came(sent.worker, sent.ahead_s, sent.own_s, sent.step_s, took_s)

    def end(self, slot: int) -> None:
        """It is over there."""
        self._sent.pop(slot, None)

    def keep(self, names: set[PoolName], workers: set[str]) -> None:
        """Forget the pools that are gone and before which nobody waits, and workers that are."""
        self._pools = {
            name: pool for name, pool in self._pools.items() if name in names or len(pool.line) > 0
        }
        for pool in self._pools.values():
            pool.first.forget(workers)


def step_s(endpoint: Endpoint) -> float:
    """Return how long a step of a worker takes whose batch is full, by what it registered; 0 where it does not say."""
    found = tpot_ms(endpoint.joined.profile, max(1, endpoint.max_batch)) / 1000
    return found if found < 10.0 else 0.0
