"""Synchronises the counts of requests in flight among frontends, over core NATS.

    own tracker ──▶ Replicas ──▶ kv.slots      256 events at a time, or fewer once the first has waited 1 ms
    kv.slots ──▶ Replicas ──▶ own tracker
    each second: report that this frontend runs, and drop the frontends that are gone

The tracker (`ActiveSequences`) counts the requests in flight on each worker. `Replicas` merges the events of other frontends'
trackers into this frontend's tracker. While the broker is unavailable, events are lost, and the counts of other frontends stay
unchanged. When the broker is available again, every frontend sends its whole state.
"""

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from uuid import uuid4

import msgspec
import structlog

from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.replicas import SILENT_S, Replicas
from events import slot_messages as wire
from events import subjects
from events.nats.connection import BrokerConnection, when_connected

WINDOW_S = 0.001  # how long events wait to be sent with others
BEAT_S = 1.0  # interval of presence messages
# if more bytes wait to be sent, events are dropped and the whole state is sent later
UNSENT_BYTES_MAX = 16 * 1024 * 1024
_ROUTE = f"{subjects.KV_SLOTS} ".encode()

log = structlog.get_logger(__name__)


class SlotSync:
    """Keeps one frontend's tracker of requests in flight in sync with the trackers of other frontends.

    `run` must run on the frontend's event loop. `peers` returns the names of the frontends that are known to serve.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        frontend: str,
        slots: ActiveSequences,
        peers: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self.replicas = Replicas(frontend, uuid4().hex, slots, self._on_event)
        self.bad = 0  # number of invalid messages
        self._connection = connection
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # loop time since which the broker is connected; None: it is not
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
        """Connect to the broker and build the synchronisation. Raise BadBrokerUrl if `url` is invalid.

        If the broker is not connected within `wait_s` seconds, the returned object continues to connect in the background.
        """
        connection = await BrokerConnection.open(url, f"slots:{frontend}", wait_s=wait_s)
        return cls(connection, frontend, slots, peers)

    async def close(self) -> None:
        """Close the broker connection."""
        if self._timer is not None:
            self._timer.cancel()
        await self._connection.close()

    @property
    def connected(self) -> bool:
        """Whether this frontend is connected to the broker. Without the broker, frontends receive no messages of one another."""
        return self._since is not None

    async def run(self) -> None:
        """Receive and send the events of trackers until cancelled."""
        await when_connected(partial(self._connection.subscribe_raw, subjects.KV_SLOTS, self._on_message))
        if self._connection.connected:
            self._changed(True)
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._loop.time()
            self._send()
            if self._since is not None and now - self._since > SILENT_S:
                for name in self.replicas.look(self._peers(), now):
                    log.info("slots_frontend_gone", frontend=name)

    # --- outgoing -----------------------------------------------------------------------------------------

    def _on_event(self) -> None:
        """Send the tracker's pending events after `WINDOW_S` seconds, or at once if they fill a message."""
        if self.replicas.waiting >= wire.EVENTS_MAX:
            self._send()
        elif self._timer is None:
            self._timer = self._loop.call_later(WINDOW_S, self._send)

    def _send(self) -> None:
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
            client.post(_ROUTE, b"", wire.encode(self.replicas.request_all()))
            self._send()

    # --- incoming -----------------------------------------------------------------------------------------

    def _on_message(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
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
            self._on_event()
