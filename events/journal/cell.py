"""A small value with compare-and-set in a KV bucket, which many processes may write.

The broker holds the bucket in memory, so that a write costs no fsync. Memory is enough, because the value is a lease of one
second, which is useless after a restart. The caller handles the expiry of the lease. The bucket has no TTL, because after an
expiry the create of a new value would also wait for the TTL of the deletion marker.
"""

from base64 import b64decode
from dataclasses import dataclass, field
from typing import Protocol

from events.journal import broker, stream
from events.journal.broker import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    Ack,
    BrokerRefused,
    ask,
)
from events.journal.port import Fenced, JournalUnavailable
from events.json_types import Json
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.subjects import BUCKET

DEADLINE_S = 0.5


class Cell(Protocol):
    """A value with a revision number for compare-and-set. Revision 0 means that no value has been written."""

    async def read(self) -> tuple[bytes, int]:
        """Return the value and its revision. Raise JournalUnavailable."""
        ...

    async def write(self, value: bytes, revision: int) -> int:
        """Replace the value if its revision is still `revision`, and return the new revision. Raise Fenced if another value
        has been written since, or JournalUnavailable."""
        ...


@dataclass
class MemoryCell:
    """A cell in memory: the test double of `NatsCell`."""

    value: bytes = b""
    revision: int = 0
    reachable: bool = True

    async def read(self) -> tuple[bytes, int]:
        if not self.reachable:
            raise JournalUnavailable
        return self.value, self.revision

    async def write(self, value: bytes, revision: int) -> int:
        if not self.reachable:
            raise JournalUnavailable
        if revision != self.revision:
            raise Fenced(f"revision {self.revision} has been written since {revision}")
        self.value, self.revision = value, revision + 1
        return self.revision


@dataclass
class NatsCell:
    """A cell that is stored as one key of the KV bucket HOLDFAST."""

    connection: BrokerConnection
    key: str
    _made: bool = field(default=False, init=False)

    @property
    def subject(self) -> str:
        return f"$KV.{BUCKET}.{self.key}"

    async def read(self) -> tuple[bytes, int]:
        try:
            request = {"last_by_subj": self.subject}
            answer = await ask(self.connection, f"STREAM.MSG.GET.KV_{BUCKET}", request, DEADLINE_S)
        except BrokerRefused as error:
            if error.code == STREAM_NOT_FOUND:
                await self._make()
            elif error.code != MESSAGE_NOT_FOUND:
                raise JournalUnavailable(str(error)) from error
            return b"", 0
        message: Json = answer["message"]
        return b64decode(message.get("data", "")), int(message["seq"])

    async def write(self, value: bytes, revision: int) -> int:
        ack = await self._publish(value, revision)
        if ack.code in WRONG_LAST_SEQUENCE:
            raise Fenced(f"{self.key} has been written since {revision}")
        if ack.error:
            raise JournalUnavailable(f"{self.key} was not written: {ack.error}")
        return ack.seq

    async def _publish(self, value: bytes, revision: int) -> Ack:
        if not self.connection.connected:
            raise JournalUnavailable
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            answer = await self.connection.request(self.subject, value, DEADLINE_S, headers)
        except DISCONNECTED as error:
            raise JournalUnavailable(f"{self.key} was not written: {error!r}") from error
        return broker.decode_ack(answer.body)

    async def _make(self) -> None:
        config = {
            "name": f"KV_{BUCKET}",
            "subjects": [f"$KV.{BUCKET}.>"],
            "storage": "memory",
            "max_msgs_per_subject": 1,
            "discard": "new",
            "num_replicas": stream.replicas_for(self.connection),
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "allow_direct": True,
        }
        try:
            await ask(self.connection, f"STREAM.CREATE.KV_{BUCKET}", config)
        except BrokerRefused as error:
            if error.code != broker.STREAM_EXISTS:
                raise JournalUnavailable(str(error)) from error
