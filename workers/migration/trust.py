"""May what this worker has computed be sent to another?

    trusted ── convicted, a fatal device fault, NaN in the logits ──▶ distrusted

Checksums show that bytes arrive as they left, not that they were computed well: a KV cache of a worker whose answers are
wrong would take the corruption along. So the way out leads through here: only a `TrustedSender` makes a shipment, only a
`Trust` without doubts hands one out (an import contract sees to the rest), and the first doubt breaks off every
shipment and makes every `TrustedSender` of before worthless, for ever. A doubt that is taken back is no word about what was
computed before: a stream that had begun by then is not shipped.
"""

import asyncio
import weakref
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import structlog

from events.errors import HoldfastError
from events.fleet_key import FleetKey
from workers.kv_transfer.messages import Buffer, Description, Grant
from workers.kv_transfer.transport import Transport

CONVICTED = "convicted"  # a doubt: the fleet has convicted this worker of wrong answers
THREADS_MAX = 32  # each shipment under way has one

log = structlog.get_logger(__name__)


class SenderDistrusted(HoldfastError):
    """What this worker has computed may be wrong, and is sent nowhere."""


class OutgoingShipment(Protocol):
    """A transfer from this worker, which `kv_transfer.sender` makes once numpy is there. All but `cancel` and `close` raise
    TransferFailed."""

    @property
    def way(self) -> str:
        """Over what the bytes go. Known once it is open."""
        ...

    async def open(self) -> None: ...
    async def send(self, blocks: Buffer) -> None: ...
    async def finish(self, tail: Buffer, tokens: Sequence[int], computed: int, state: bytes) -> None: ...
    def cancel(self) -> None: ...
    def close(self) -> None: ...


class TrustedSender:
    """The permission to send. Made only for a `Trust`."""

    def __init__(self, trust: "Trust") -> None:
        """Hold for as long as that trust has no new doubt. Raise SenderDistrusted if it has one already."""
        trust.check()
        self._trust = trust
        self._losses = trust.losses

    def check(self) -> None:
        """Raise SenderDistrusted if there was a doubt since."""
        if self._losses != self._trust.losses:
            raise SenderDistrusted(self._trust.reason or "there was a doubt about it meanwhile")

    async def shipment(self, grant: Grant, description: Description) -> OutgoingShipment:
        """Prepare a transfer, which the first doubt breaks off. Raise SenderDistrusted."""
        await self._trust.load()
        self.check()
        return self._trust.shipment(grant, description)


class Trust:
    """The doubts about what one worker computes, and its only way out for KV caches."""

    def __init__(
        self,
        transport: Callable[[], Transport | None] = lambda: None,
        key: FleetKey | None = None,
    ) -> None:
        """Trust it. `transport`: by which to send to targets that have it too, besides shared memory and sockets. `key`: the
        fleet's, which targets must know."""
        self.losses = 0
        self.turns = 0  # doubts that came, and that went: two equal numbers have no doubt in between
        self._transport = transport
        self._key = key
        self._doubts: dict[str, str] = {}
        self._shipments: weakref.WeakSet[OutgoingShipment] = weakref.WeakSet()
        self._threads: ThreadPoolExecutor | None = None
        self._mappings: Any = (
            None  # of `kv_transfer.sender`, which needs numpy; None until something is shipped
        )

    @property
    def doubts(self) -> Set[str]:
        """The causes of the present doubts."""
        return self._doubts.keys()

    @property
    def reason(self) -> str:
        """Why it is not trusted; empty: it is."""
        return next(iter(self._doubts.values()), "")

    @property
    def mapped(self) -> int:
        """How many regions of other workers are mapped here, to be used again."""
        return 0 if self._mappings is None else int(self._mappings.kept)

    def check(self) -> None:
        """Raise SenderDistrusted if there is a doubt."""
        if self._doubts:
            raise SenderDistrusted(self.reason)

    def lose(self, cause: str, reason: str) -> bool:
        """Doubt what this worker computes, and break off all shipments; False if the cause is known already."""
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
        """Take a doubt back: what is computed from now on may be sent. What was under way stays broken off."""
        if self._doubts.pop(cause, None) is not None:
            self.turns += 1
            log.info("doubt_cleared", cause=cause, trusted=not self._doubts)

    async def load(self) -> None:
        """Import what shipping needs, off the loop: a worker that never ships does without numpy."""
        if self._mappings is None:
            sender: Any = await asyncio.to_thread(
                __import__, "workers.kv_transfer.sender", fromlist=["Mappings"]
            )
            self._mappings = self._mappings or sender.Mappings()

    def shipment(self, grant: Grant, description: Description) -> OutgoingShipment:
        """Prepare a transfer. Only for `TrustedSender`, after `load`."""
        from workers.kv_transfer.sender import Shipment

        self.check()
        self._threads = self._threads or ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="kv-send")
        made = Shipment(grant, description, self._mappings, self._threads, self._transport(), self._key)
        self._shipments.add(made)
        return made

    def close(self) -> None:
        """Break off what is under way, and let the threads go."""
        for one in list(self._shipments):
            one.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None
