"""The dead letter stream: stores events that could not be delivered to a webhook, with the reason.

    dead.webhook.<webhook>    one letter: the webhook, the reason, the number of tries, and the undelivered event

The line shows the subject and the content of a message. The broker drops the oldest letters beyond 10,000 letters, 64 MiB or 30
days. If a notifier stops right after it has stored a letter, the next notifier stores the same letter again. If this copy arrives
within two minutes of the original, the broker discards the copy.
"""

import base64
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime

import msgspec

from events import subjects
from events.errors import HoldfastError
from events.journal.broker import (
    API_DEADLINE_S,
    MESSAGE_NOT_FOUND,
    STREAM_NOT_FOUND,
    ask,
    create_stream,
    decode_ack,
    stored_message,
)
from events.journal.port import JournalUnavailable
from events.json_types import Json
from events.nats.connection import DISCONNECTED, BrokerConnection

LETTERS_MAX = 10_000
BYTES_MAX = 64 << 20
AGE_MAX_S = 30 * 86_400
DUPLICATES_S = 120
_NS = 1_000_000_000
_AWAY: tuple[type[Exception], ...] = (*DISCONNECTED, JournalUnavailable)
STREAM: Json = {
    "name": subjects.DEAD_STREAM,
    "subjects": [f"{subjects.DEAD}.*"],
    "retention": "limits",
    "storage": "file",
    "discard": "old",
    "max_msgs": LETTERS_MAX,
    "max_bytes": BYTES_MAX,
    "max_age": AGE_MAX_S * _NS,
    "duplicate_window": DUPLICATES_S * _NS,
}


class LetterNotStored(HoldfastError):
    """The broker did not accept a dead letter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """An event that could not be delivered to a webhook, with the reason and the last HTTP status."""

    webhook: str  # the webhook's name
    reason: str  # why the last try failed, in words
    tries: int  # deliveries that the last notifier process tried; those of earlier processes are not counted
    status: int | None  # HTTP status of the last response; None: no try got a response
    event: Json  # CloudEvents 1.0 in structured mode, as JSON
    given_up_at: datetime  # by the notifier's clock


class DeadLetters:
    """Stores, lists and deletes the dead letters of a fleet, over one broker connection."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._made = False

    async def bury(self, letter: DeadLetter) -> None:
        """Store a letter, and create the stream first if it is missing. Raise LetterNotStored if the broker does not accept
        the letter."""
        headers = {"Nats-Msg-Id": f"{letter.webhook}:{letter.event['id']}"}
        try:
            if not self._made:
                await create_stream(self._connection, STREAM)
                self._made = True
            answer = await self._connection.request(
                subjects.dead(letter.webhook), msgspec.json.encode(letter), API_DEADLINE_S, headers
            )
        except _AWAY as error:
            self._made = False  # an operator may have deleted the stream
            raise LetterNotStored(f"{LetterNotStored.__doc__} ({error!r})") from error
        if (ack := decode_ack(answer.body)).error:
            raise LetterNotStored(f"{LetterNotStored.__doc__} ({ack.error})")

    async def all(self, webhook: str = "") -> AsyncIterator[tuple[int, DeadLetter]]:
        """Yield each letter with its position on the stream, the oldest first. If `webhook` is set, yield only the letters of
        that webhook.

        Raise JournalUnavailable if the broker does not answer.
        """
        subject = subjects.dead(webhook) if webhook else f"{subjects.DEAD}.*"
        after, absent = 0, (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND)
        for _ in range(LETTERS_MAX):
            query = {"seq": after + 1, "next_by_subj": subject}
            found = await stored_message(self._connection, subjects.DEAD_STREAM, query, absent=absent)
            if found is None:
                return
            after = int(found["seq"])
            with contextlib.suppress(msgspec.MsgspecError):  # another program has written to the stream
                body = base64.b64decode(found.get("data", ""))
                yield after, msgspec.json.decode(body, type=DeadLetter)

    async def forget(self, seq: int) -> None:
        """Delete the letter at position `seq` of the stream. Raise JournalUnavailable if the broker does not answer or
        refuses."""
        asked = {"seq": seq, "no_erase": True}
        await ask(self._connection, f"STREAM.MSG.DELETE.{subjects.DEAD_STREAM}", asked)
