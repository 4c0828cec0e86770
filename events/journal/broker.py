"""The JetStream protocol: requests to its API, acknowledgements, and the headers of messages."""

from collections.abc import Container
from datetime import UTC, datetime, timedelta

import msgspec
from nats.errors import NoRespondersError

from events.journal.port import JournalUnavailable
from events.json_types import Json
from events.nats.connection import DISCONNECTED, BrokerConnection
from events.nats.urls import masked

API = "$JS.API"
API_DEADLINE_S = 2.0
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

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


class BrokerRefused(JournalUnavailable):
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
    def error_text(self) -> str:
        """The error text, if the error is from a controller's fact intake (which writes workers' facts to the journal), else
        ""."""
        return str(self.error.get("description", "")) if self.error and self.code >= INTAKE_REFUSES else ""


decode_ack = msgspec.json.Decoder(Ack).decode
NO_RESPONDERS = Ack(error={"err_code": 503, "description": "JetStream does not respond"})


async def ask(
    connection: BrokerConnection,
    verb: str,
    body: Json | None = None,
    deadline_s: float | None = None,
) -> Json:
    """Send a request to JetStream's API and return its answer.

    Raise JournalUnavailable if no answer arrives within `deadline_s` (2 s by default). Raise its subclass BrokerRefused if the
    answer is an error.
    """
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


async def stored_message(
    connection: BrokerConnection,
    stream: str,
    query: Json,
    deadline_s: float | None = None,
    absent: Container[int] = (MESSAGE_NOT_FOUND,),
) -> Json | None:
    """Return the message of a stream that `query` selects, as JetStream's API encodes it.

    Return None if JetStream answers with one of the error codes in `absent`. Raise JournalUnavailable for any other error, or if
    no answer arrives.
    """
    try:
        answer = await ask(connection, f"STREAM.MSG.GET.{stream}", query, deadline_s)
    except BrokerRefused as error:
        if error.code not in absent:
            raise
        return None
    message: Json = answer["message"]
    return message


async def create_stream(connection: BrokerConnection, config: Json) -> None:
    """Create a stream. If a stream of that name exists, leave it as it is, even if its configuration differs.

    Raise JournalUnavailable if JetStream does not answer, or refuses for a reason other than an existing stream.
    """
    try:
        await ask(connection, f"STREAM.CREATE.{config['name']}", config)
    except BrokerRefused as error:
        if error.code != STREAM_EXISTS:
            raise


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


def delivered(reply: bytes) -> tuple[int, datetime]:
    """Return the stream sequence and the time in the reply subject of a delivered message. The time is rounded down to
    microseconds.

    The reply subject is $JS.ACK.stream.consumer.deliveries.SEQ.consumer-seq.TIME.pending. A longer reply subject has a domain
    and an account before the stream.
    """
    tokens = reply.split(b".")
    at = 5 if len(tokens) == 9 else 7
    return int(tokens[at]), EPOCH + timedelta(microseconds=int(tokens[at + 2]) // 1000)
