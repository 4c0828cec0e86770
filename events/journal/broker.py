"""The JetStream protocol: requests to its API, acknowledgements, and the headers of messages."""

import msgspec
from nats.errors import NoRespondersError

from events.errors import HoldfastError
from events.journal.port import JournalUnavailable
from events.json_types import Json
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.nats.urls import masked

API = "$JS.API"
API_DEADLINE_S = 2.0

WRONG_LAST_SEQUENCE = (10071, 10164)  # the fence failed, because another writer has written
DUPLICATE_IN_BATCH = 10201
BATCH_DISABLED = (10174, 10205)
MESSAGE_TOO_LARGE = 10054
INTAKE_REFUSES = 90001  # not JetStream's: the controller's fact intake refuses this fact for good
INTAKE_LATER = 90002  # not JetStream's: the fact intake does not accept this fact now
STREAM_NOT_FOUND = 10059
MESSAGE_NOT_FOUND = 10037
STREAM_EXISTS = 10058

_HEADER_LINE = "NATS/1.0"


class BrokerRefused(HoldfastError):
    """JetStream answered a request with an error."""

    def __init__(self, code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream error {code})")
        self.code = code


class Ack(msgspec.Struct):
    """JetStream's acknowledgement of a published message, or its error."""

    stream: str = ""
    seq: int = 0
    count: int = 1
    error: Json | None = None

    @property
    def code(self) -> int:
        """The error's code, or 0 if there is no error."""
        found = {"code": -1} | (self.error or {"code": 0})
        return int(found.get("err_code", found["code"]))

    @property
    def said(self) -> str:
        """The error text of the controller's fact intake. Empty if there is no error, or if the error is JetStream's."""
        return str(self.error.get("description", "")) if self.error and self.code >= INTAKE_REFUSES else ""


decode_ack = msgspec.json.Decoder(Ack).decode
NO_RESPONDERS = Ack(error={"err_code": 503, "description": "JetStream does not respond"})


async def ask(
    connection: BrokerConnection,
    verb: str,
    body: Json | None = None,
    deadline_s: float | None = None,
) -> Json:
    """Send a request to JetStream's API and return its answer. Raise BrokerRefused if the answer is an error, and
    JournalUnavailable if no answer arrives within `deadline_s` (2 s by default)."""
    if not connection.connected:
        raise JournalUnavailable(
            f"the journal at {masked(connection.url)} cannot be reached (NATS is not connected)"
        )
    payload = msgspec.json.encode(body) if body is not None else b""
    try:
        limit_s = API_DEADLINE_S if deadline_s is None else deadline_s
        message = await connection.request(f"{API}.{verb}", payload, limit_s)
    except NoRespondersError as error:
        raise JournalUnavailable(
            f"NATS at {masked(connection.url)} runs without JetStream, or is starting"
        ) from error
    except DISCONNECTED as error:
        raise JournalUnavailable(
            f"the journal at {masked(connection.url)} did not answer {verb}: {error!r}"
        ) from error
    answer: Json = msgspec.json.decode(message.body)
    if refusal := answer.get("error"):
        raise BrokerRefused(
            refusal.get("err_code", refusal.get("code", -1)), refusal.get("description", "refused")
        )
    return answer


def parse_headers(raw: bytes | None) -> dict[str, str]:
    """Parse the headers of a message. A status in the first line, as in `NATS/1.0 408 Timeout`, is returned as `Status` and
    `Description`."""
    if not raw:
        return {}
    first, *lines = raw.decode("utf-8", "replace").rstrip("\r\n").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name] = value.strip()
    if len(first) > len(_HEADER_LINE):
        status, _, description = first[len(_HEADER_LINE) :].strip().partition(" ")
        headers["Status"], headers["Description"] = status, description
    return headers


def delivered(reply: bytes) -> tuple[int, int]:
    """Parse the stream sequence and the timestamp (Unix nanoseconds) from the reply subject of a delivered message.

    The reply subject is $JS.ACK.stream.consumer.deliveries.SEQ.consumer-seq.TIME.pending. A longer reply subject has a domain
    and an account before the stream.
    """
    tokens = reply.split(b".")
    at = 5 if len(tokens) == 9 else 7
    return int(tokens[at]), int(tokens[at + 2])
