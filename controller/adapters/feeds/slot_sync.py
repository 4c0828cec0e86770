"""Frontends tell each other what they have in flight, over core NATS.

    our tracker ──▶ Replicas ──▶ kv.slots      256 events at a time, or what a millisecond has brought
    kv.slots ──▶ Replicas ──▶ our tracker
    each second: that we are there, who is there no more

While the broker is away the counts stay as they were, and what happens meanwhile is not kept: afterwards everybody tells
everything again.
"""

import asyncio
from collections.abc import Callable, Collection
from uuid import uuid4

import msgspec
import structlog

from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.replicas import SILENT_S, Replicas
from events import slots as wire
from events import subjects
from events.nats.connection import DISCONNECTED, BrokerConnection

WINDOW_S = 0.001
BEAT_S = 1.0
RETRY_S = 0.2
UNSENT_BYTES_MAX = 16 * 1024 * 1024  # beyond, the broker does not keep up, and is told everything again later
_ROUTE = f"{subjects.KV_SLOTS} ".encode()

log = structlog.get_logger(__name__)


class SlotSync:
    """Keeps one frontend's slot tracker in step with the others'. It listens to the tracker, and needs nothing more.

    `run` is a service of the frontend's loop. `peers` names the frontends that serve now, as far as is known.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        frontend: str,
        slots: ActiveSequences,
        peers: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.replicas = Replicas(frontend, uuid4().hex, slots, self._happened)
        self.bad = 0  # messages that were none of ours
        self._connection = connection
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # connected without a break
        self._timer: asyncio.TimerHandle | None = None
        connection.listen(self._changed)

    @classmethod
    async def open(
        cls,
        url: str,
        frontend: str,
        slots: ActiveSequences,
        peers: Callable[[], Collection[str]] = tuple,
        *,
        wait_s: float = 2.0,
    ) -> "SlotSync":
        """Connect to the broker within `wait_s`, or go on trying in the background. Raise BadBrokerUrl."""
        connection = await BrokerConnection.open(url, f"slots:{frontend}", wait_s=wait_s)
        return cls(connection, frontend, slots, peers)

    async def close(self) -> None:
        """Let go of the broker."""
        if self._timer is not None:
            self._timer.cancel()
        await self._connection.close()

    @property
    def connected(self) -> bool:
        """Whether the others can be told, and heard."""
        return self._since is not None

    async def run(self) -> None:
        """Hear and tell until cancelled."""
        while True:
            try:
                await self._connection.subscribe_raw(subjects.KV_SLOTS, self._heard)
                break
            except DISCONNECTED:  # it is on its way out or back
                await asyncio.sleep(RETRY_S)
        if self._connection.connected:
            self._changed(True)
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._loop.time()
            self._say()
            if self._since is not None and now - self._since > SILENT_S:
                for name in self.replicas.look(self._peers(), now):
                    log.info("slots_frontend_gone", frontend=name)

    # --- out ----------------------------------------------------------------------------------------------

    def _happened(self) -> None:
        """There is something to be said: in a moment, or at once where there is much of it."""
        if self.replicas.waiting >= wire.EVENTS_MAX:
            self._say()
        elif self._timer is None:
            self._timer = self._loop.call_later(WINDOW_S, self._say)

    def _say(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        client = self._connection.client
        if self._since is None or not client.is_connected:
            self.replicas.lost()
            return
        for batch in self.replicas.batches(self._loop.time()):
            if client.unsent() > UNSENT_BYTES_MAX or not client.post(_ROUTE, b"", wire.encode(batch)):
                self.replicas.lost()
                break
        client.write()

    def _changed(self, connected: bool) -> None:
        self._since = self._loop.time() if connected else None
        if connected:
            client = self._connection.client
            client.post(_ROUTE, b"", wire.encode(self.replicas.want_all()))
            self._say()

    # --- in -----------------------------------------------------------------------------------------------

    def _heard(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        now = self._loop.time()
        try:
            wanted = self.replicas.take(wire.decode(body), now)
        except (msgspec.MsgspecError, ValueError) as error:
            self.bad += 1
            log.warning("slots_refused", error=str(error))
            return
        if wanted is not None:
            client = self._connection.client
            client.post(_ROUTE, b"", wire.encode(wanted))
            client.write()
        if self.replicas.due(now):
            self._happened()
