"""A small value in a KV bucket that many processes may write, with compare-and-set.

The broker holds the bucket in memory, so that a write costs no fsync. Memory is enough, because the value is a lease of one
second, which is useless after a restart. The bucket has no TTL, and the caller handles the expiry of the lease. With a TTL, a
process could create a new value only after both the old value and its deletion marker had expired.
"""

from base64 import b64decode
from dataclasses import dataclass
from typing import Protocol

from events.journal import stream
from events.journal.broker import (
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    WRONG_LAST_SEQUENCE,
    create_stream,
    decode_ack,
    stored_message,
)
from events.journal.port import Fenced, JournalUnavailable
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.subjects import BUCKET

DEADLINE_S = 0.5


class Cell(Protocol):
    """A value with a revision number for compare-and-set. Revision 0 means that no value has been written."""

    async def read(self) -> tuple[bytes, int]:
        """Return the value and its revision. Raise JournalUnavailable if the broker does not answer."""

    async def write(self, value: bytes, revision: int) -> int:
        """Replace the value if its revision is still `revision`, and return the new revision.

        Raise Fenced if another value has been written since. Raise JournalUnavailable if the outcome is unknown.
        """


@dataclass
class NatsCell:
    """A cell that is stored as one key of the KV bucket HOLDFAST."""

    connection: BrokerConnection
    key: str

    @property
    def subject(self) -> str:
        return f"$KV.{BUCKET}.{self.key}"

    async def read(self) -> tuple[bytes, int]:
        query, absent = {"last_by_subj": self.subject}, (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND)
        message = await stored_message(self.connection, f"KV_{BUCKET}", query, DEADLINE_S, absent)
        if message is None:
            await self._make()
            return b"", 0
        return b64decode(message.get("data", "")), int(message["seq"])

    async def write(self, value: bytes, revision: int) -> int:
        if not self.connection.connected:
            raise JournalUnavailable
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        try:
            answer = await self.connection.request(self.subject, value, DEADLINE_S, headers)
        except DISCONNECTED as error:
            raise JournalUnavailable(f"{self.key} was not written: {error!r}") from error
        ack = decode_ack(answer.body)
        if ack.code in WRONG_LAST_SEQUENCE:
            raise Fenced(f"{self.key} has been written since {revision}")
        if ack.error:
            raise JournalUnavailable(f"{self.key} was not written: {ack.error}")
        return ack.seq

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
        await create_stream(self.connection, config)
