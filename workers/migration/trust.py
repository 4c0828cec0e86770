"""Decides whether the KV caches that this worker has computed may be sent to another worker.

    trusted ── convicted, a fatal device fault, NaN in the logits ──▶ distrusted

Checksums show that bytes arrive unchanged, not that they were computed correctly: the KV cache of a worker with wrong
answers would spread the corruption. Therefore every shipment must pass through this module. Only a `TrustedSender` makes a
shipment, and only a `Trust` without doubts creates one; an import contract enforces the rest.

The first doubt aborts every shipment and permanently invalidates every earlier `TrustedSender`. After a doubt is cleared, blocks
computed before may still be wrong: a stream that had begun by then is not shipped.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import structlog

from events.errors import HoldfastError
from events.fleet_key import FleetKey
from workers.kv_transfer.messages import Buffer, Grant, Transport

CONVICTED = "convicted"  # a doubt: the fleet has convicted this worker of wrong answers
THREADS_MAX = 32  # one per running shipment

log = structlog.get_logger(__name__)


class SenderDistrusted(HoldfastError):
    """This worker's results may be wrong and must not be sent."""


class OutgoingShipment(Protocol):
    """A transfer from this worker. `kv_transfer.sender` implements it, and is imported late because it needs numpy.

    All methods except `cancel` and `close` raise TransferFailed.
    """

    @property
    def way(self) -> str:
        """How the bytes travel. Known once the transfer is open."""

    async def open(self) -> None: ...
    async def send(self, blocks: Buffer) -> None: ...
    async def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class TrustedSender:
    """The permission to send KV caches. Obtained only from a `Trust`."""

    def __init__(self, trust: "Trust") -> None:
        """Be valid until the trust gets a new doubt. Raise SenderDistrusted if it already has one."""
        trust.check()
        self._trust = trust
        self._losses = trust.losses

    def check(self) -> None:
        """Raise SenderDistrusted if a doubt has occurred after this sender was created."""
        if self._losses != self._trust.losses:
            raise SenderDistrusted(self._trust.reason or "the source was distrusted meanwhile")

    async def shipment(self, grant: Grant) -> OutgoingShipment:
        """Prepare a transfer, which the first doubt aborts. Raise SenderDistrusted."""
        await self._trust.load()
        self.check()
        return self._trust.shipment(grant)


class Trust:
    """The doubts about one worker's results, and the only access to sending its KV caches."""

    def __init__(
        self, transport: Callable[[], Transport | None] = lambda: None, key: FleetKey | None = None
    ) -> None:
        """Start without doubts.

        `transport` returns a transport besides shared memory and sockets, for targets that have it too. `key`: the fleet key,
        which targets must know.
        """
        self.losses = 0
        self.turns = 0  # number of doubts raised and cleared: between two equal values there was none
        self._transport = transport
        self._key = key
        self._doubts: dict[str, str] = {}
        self._shipments: weakref.WeakSet[OutgoingShipment] = weakref.WeakSet()
        self._threads: ThreadPoolExecutor | None = None
        # of `kv_transfer.sender`, which needs numpy; None until the first shipment
        self._mappings: Any = None

    @property
    def doubts(self) -> Set[str]:
        """The causes of the current doubts."""
        return self._doubts.keys()

    @property
    def reason(self) -> str:
        """Why this worker is not trusted; empty if it is trusted."""
        return next(iter(self._doubts.values()), "")

    @property
    def mapped(self) -> int:
        """Number of regions of other workers kept mapped for reuse."""
        return 0 if self._mappings is None else int(self._mappings.kept)

    def check(self) -> None:
        """Raise SenderDistrusted if there is a doubt about this worker."""
        if self._doubts:
            raise SenderDistrusted(self.reason)

    def lose(self, cause: str, reason: str) -> bool:
        """Add a doubt, and abort all shipments; return False if the cause is already known."""
        if cause in self._doubts:
            return False
        self._doubts[cause] = reason
        self.losses += 1
        self.turns += 1
        log.error("distrusted", cause=cause, reason=reason, shipments=len(self._shipments))
        for one in list(self._shipments):
            one.cancel()
        return True

    def regain(self, cause: str) -> None:
        """Clear a doubt: what is computed from now on may be sent. Aborted shipments stay aborted."""
        if self._doubts.pop(cause, None) is not None:
            self.turns += 1
            log.info("doubt_cleared", cause=cause, trusted=not self._doubts)

    async def load(self) -> None:
        """Import what shipping needs, off the loop: a worker that never ships needs no numpy."""
        if self._mappings is None:
            await asyncio.to_thread(__import__, "workers.kv_transfer.sender")
            from workers.kv_transfer.sender import Mappings

            self._mappings = self._mappings or Mappings()

    def shipment(self, grant: Grant) -> OutgoingShipment:
        """Create the shipment for a grant. Called only by `TrustedSender`, after `load`."""
        from workers.kv_transfer.sender import Shipment

        self.check()
        self._threads = self._threads or ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kv-send")
        made = Shipment(grant, grant.description, self._mappings, self._threads, self._transport(), self._key)
        self._shipments.add(made)
        return made

    def close(self) -> None:
        """Abort running shipments, and shut the threads down."""
        for one in list(self._shipments):
            one.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
