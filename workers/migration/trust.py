"""Decides whether the KV caches that this worker has computed may be sent to another worker.

    trusted ── convicted, a fatal device fault, NaN in the logits ──▶ distrusted

A doubt is a reason to distrust the worker's results. Checksums only show that bytes arrive unchanged. A KV cache that was
computed wrongly passes them, and would spread wrong answers to other workers. Therefore every shipment passes through this
module. Only a `TrustedSender` creates shipments, and a `TrustedSender` can be created only while its `Trust` has no doubts. An
import contract prevents other modules from sending KV caches.

A new doubt aborts every shipment and permanently invalidates every earlier `TrustedSender`. When a doubt is cleared, the blocks
that were computed before may still be wrong. Streams that began before that moment are therefore not shipped.
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

CONVICTED = "convicted"  # cause of a doubt: the fleet has convicted this worker of wrong answers
THREADS_MAX = 32  # maximum number of shipments at once, because each occupies a thread

log = structlog.get_logger(__name__)


class SenderDistrusted(HoldfastError):
    """This worker's results may be wrong and must not be sent."""


class OutgoingShipment(Protocol):
    """The interface of a KV transfer from this worker.

    `kv_transfer.sender.Shipment` implements it, in a module that is imported late because it needs numpy. All methods except
    `cancel` and `close` raise TransferFailed if the transfer fails.
    """

    @property
    def way(self) -> str:
        """The link that carries the bytes: "shm", "socket" or a transport's name. Known once the transfer is open."""

    async def open(self) -> None: ...
    async def send(self, blocks: Buffer) -> None: ...
    async def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class TrustedSender:
    """The permission to send this worker's KV caches. It is valid until a new doubt about the worker is raised."""

    def __init__(self, trust: "Trust") -> None:
        """Create the permission to send KV caches. Raise SenderDistrusted if there are doubts about this worker."""
        trust.check()
        self._trust = trust
        self._losses = trust.losses

    def check(self) -> None:
        """Raise SenderDistrusted if a doubt was raised after this permission was created, even if that doubt has been cleared."""
        if self._losses != self._trust.losses:
            raise SenderDistrusted(self._trust.reason or "the source was distrusted meanwhile")

    async def shipment(self, grant: Grant) -> OutgoingShipment:
        """Return a transfer that uses `grant`. The next doubt about this worker aborts the transfer.

        Raise SenderDistrusted if a doubt was raised after this permission was created.
        """
        await self._trust.load()
        self.check()
        return self._trust.shipment(grant)


class Trust:
    """Holds the doubts about one worker's results, and creates the worker's shipments while there are no doubts."""

    def __init__(
        self, transport: Callable[[], Transport | None] = lambda: None, key: FleetKey | None = None
    ) -> None:
        """Start without doubts about the worker's results.

        `transport` returns the transport for targets that support it, or None if only shared memory and sockets are used. `key`
        is the fleet key that targets must know.
        """
        self.losses = 0  # number of doubts raised
        # number of doubts raised and cleared; between two equal values, the worker was trusted throughout or not at all
        self.turns = 0
        self._transport = transport
        self._key = key
        self._doubts: dict[str, str] = {}
        self._shipments: weakref.WeakSet[OutgoingShipment] = weakref.WeakSet()
        self._threads: ThreadPoolExecutor | None = None
        # `Mappings` of `kv_transfer.sender`, which needs numpy; None until the first shipment
        self.mappings: Any = None

    @property
    def doubts(self) -> Set[str]:
        """The causes of the current doubts about this worker's results."""
        return self._doubts.keys()

    @property
    def reason(self) -> str:
        """The reason of the oldest current doubt about this worker's results; empty if there are no doubts."""
        return next(iter(self._doubts.values()), "")

    def check(self) -> None:
        """Raise SenderDistrusted if there is a doubt about this worker's results."""
        if self._doubts:
            raise SenderDistrusted(self.reason)

    def lose(self, cause: str, reason: str) -> bool:
        """Add a doubt about the worker's results and abort all shipments.

        Return False, and change nothing, if there is a doubt with this `cause` already.
        """
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
        """Clear the doubt that has this cause. Only streams that begin when no doubts remain may be shipped.

        Aborted shipments stay aborted.
        """
        if self._doubts.pop(cause, None) is not None:
            self.turns += 1
            log.info("doubt_cleared", cause=cause, trusted=not self._doubts)

    async def load(self) -> None:
        """Import the modules that shipments need, in a thread.

        They are not imported earlier, because they need numpy, which a worker without shipments does not need.
        """
        if self.mappings is None:
            await asyncio.to_thread(__import__, "workers.kv_transfer.sender")
            from workers.kv_transfer.sender import Mappings

            self.mappings = self.mappings or Mappings()

    def shipment(self, grant: Grant) -> OutgoingShipment:
        """Create the sender of one KV cache (a shipment). `grant` permits it to write into the target's memory.

        Only `TrustedSender` may call this method, after `load`. Raise SenderDistrusted if there are doubts.
        """
        from workers.kv_transfer.sender import Sender, Shipment

        self.check()
        self._threads = self._threads or ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kv-send")
        made = Shipment(Sender(grant, self.mappings, self._transport(), self._key), self._threads)
        self._shipments.add(made)
        return made

    def close(self) -> None:
        """Abort all running shipments and end their threads."""
        for one in list(self._shipments):
            one.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
