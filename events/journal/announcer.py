"""Announces the kinds of facts that this process knows, and receives the kinds that are in force.

Every few seconds the process publishes its `Known` on `live.known.ROLE.NAME`, and the leading controller replies with the kinds
in force on `live.kinds.NAME`. A process that may read the journal also reads the last `PolicyAdopted` from it, because a
controller of an older release does not reply.
"""

import asyncio
import contextlib
from collections.abc import Sequence

import msgspec
import structlog
from nats.aio.msg import Msg

from events import subjects
from events.decisions import PolicyAdopted
from events.journal import stream
from events.journal.broker import BrokerRefused
from events.journal.kind_gate import KindGate
from events.journal.port import JournalUnavailable
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.versions import Known, names, new_kinds, stated_kinds

ANNOUNCE_S = 5.0
UNINFORMED_S = 0.5  # between two announcements while the kinds in force are not known
LOOK_S = 5.0  # between two reads of the journal while some of our kinds are not in force

log = structlog.get_logger(__name__)


class Announcer:
    """One process's announcements. `workers`: the workers of a worker process, which may not read the journal."""

    def __init__(
        self,
        connection: BrokerConnection,
        gate: KindGate,
        source: str,
        known: Known,
        workers: Sequence[str] = (),
    ) -> None:
        self._connection, self._gate = connection, gate
        self._source, self._known, self._workers = source, known, list(workers)
        role, _, rest = source.partition(":")
        name = self._workers[0] if self._workers else rest.partition(":")[0]
        self._subject = subjects.known(role, name)
        self._answers = subjects.kinds(name if self._workers else f"{role}-{name}")

    async def run(self) -> None:
        """Announce, and update the kinds in force, until cancelled."""
        await self._listen()
        looking = [] if self._workers else [self._look()]
        await asyncio.gather(self._announce(), *looking)

    async def leave(self) -> None:
        """Announce that this process is ending."""
        await self._publish(left=True)

    async def _listen(self) -> None:
        while True:
            try:
                await self._connection.subscribe(self._answers, self._heard)
                return
            except DISCONNECTED:
                await asyncio.sleep(UNINFORMED_S)

    async def _announce(self) -> None:
        while True:
            await self._connection.up.wait()
            await self._publish()
            await asyncio.sleep(ANNOUNCE_S if self._gate.informed else UNINFORMED_S)

    async def _publish(self, *, left: bool = False) -> None:
        if not self._connection.connected:
            return
        body = {"source": self._source, **self._known.as_body(), "workers": self._workers, "left": left}
        client = self._connection.client
        with contextlib.suppress(*DISCONNECTED):
            await client.publish(self._subject, msgspec.json.encode(body))

    async def _look(self) -> None:
        ours, found = new_kinds(), None
        while found is None or not ours <= found:
            await self._connection.up.wait()
            with contextlib.suppress(JournalUnavailable, BrokerRefused, *DISCONNECTED):
                found = await adopted(self._connection)
            if found is not None:
                self._gate.learn(found)
            await asyncio.sleep(LOOK_S if self._gate.informed else UNINFORMED_S)

    async def _heard(self, message: Msg) -> None:
        try:
            self._gate.learn(names(msgspec.json.decode(message.data, type=dict[str, list[str]])["kinds"]))
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            log.debug("kinds_refused", why=str(error))


async def adopted(connection: BrokerConnection) -> frozenset[str] | None:
    """Return the kinds beyond those of 0.2.0 that are in force; None: the journal holds no such decision. Raise
    JournalUnavailable or BrokerRefused."""
    event = await stream.last_on(connection, f"{subjects.DECIDED}.{PolicyAdopted.kind()}")
    if event is None or not isinstance(event.fact, PolicyAdopted):
        return None
    return stated_kinds(event.fact.kinds, event.fact.deciders_version)
