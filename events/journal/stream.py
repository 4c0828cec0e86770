"""Creates the stream FLEET, and checks that its configuration can be trusted.

A server silently drops configuration fields that it does not know, and an operator may have created the stream by hand. So the
configuration is read back and compared. The stream is refused, with the reason, if a difference breaks a guarantee of the
journal.
"""

import re
from base64 import b64decode
from dataclasses import dataclass
from datetime import datetime

import structlog

from events import subjects
from events.errors import HoldfastError
from events.fact import Recorded
from events.journal.broker import (
    MESSAGE_NOT_FOUND,
    STREAM_EXISTS,
    STREAM_NOT_FOUND,
    BrokerRefused,
    ask,
    parse_headers,
    stored_message,
)
from events.journal.messages import QUARANTINES, quarantine_subject, quarantines, read
from events.journal.port import JournalGone, JournalUnavailable
from events.json_types import Json
from events.nats.connection import BrokerConnection
from events.nats.urls import masked

DUPLICATE_WINDOW_S = 120  # not essential, because folds detect duplicates by source number
REPLICAS = 3  # of a stream in a cluster
LOOKED_AT_MAX = 100  # messages read on a quarantine's subject to find the first valid one
# the settings that must have the values of `stream_config`
GUARANTEES = [
    "retention",
    "storage",
    "discard",
    "deny_delete",
    "deny_purge",
    "allow_atomic",
    "max_msgs_per_subject",
]
PLACE = re.compile("[0-9]{1,18}").fullmatch  # matches a stream sequence
# no suitable peers, no leader, no resources, no store: all may be temporary
NOT_YET = (10005, 10008, 10023, 10049)

log = structlog.get_logger(__name__)


class StreamRefused(HoldfastError):
    """The stream on the broker is not one that the journal can trust."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of a stream. `created` distinguishes the stream from another one with the same name."""

    created: str
    first_seq: int
    last_seq: int
    at: datetime  # when the broker measured the state, by the clock that stamps the stream's events
    quarantined: frozenset[int] = frozenset()  # sequences with a quarantine message; only from `state`


def stream_config(replicas: int) -> Json:
    """Return the configuration with which the stream is created."""
    return {
        "name": subjects.STREAM,
        "subjects": list(subjects.STREAM_SUBJECTS),
        "retention": "limits",
        "storage": "file",
        "discard": "new",  # a full journal refuses new events and drops none
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "num_replicas": replicas,
        "duplicate_window": DUPLICATE_WINDOW_S * 1_000_000_000,
        "deny_delete": True,
        "deny_purge": True,
        "allow_rollup_hdrs": False,
        "allow_atomic": True,
        "allow_direct": True,
    }


def differences(config: Json, replicas: int) -> list[str]:
    """Return descriptions of those parts of a stream's configuration that break a guarantee of the journal.

    Limits (age, bytes) are the operator's choice and are not compared. A reader notices dropped events and starts from a later
    snapshot (`events.journal.bounds`). The field `discard` is compared only for a stream without limits. A stream with
    limits is allowed to drop its oldest events to store new ones.
    """
    must = {name: value for name, value in stream_config(replicas).items() if name in GUARANTEES}
    if config.get("max_bytes", -1) > 0 or config.get("max_age", 0) > 0:
        must.pop("discard")
    found = [
        f"{name} is {config.get(name)!r}, not {value!r}"
        for name, value in must.items()
        if config.get(name, False) != value
    ]
    if sorted(config.get("subjects") or []) != sorted(subjects.STREAM_SUBJECTS):
        found.append(f"its subjects are {config.get('subjects')}, not {list(subjects.STREAM_SUBJECTS)}")
    if config.get("num_replicas", 1) < replicas:
        found.append(f"it has {config.get('num_replicas', 1)} replicas, not {replicas}")
    forbidden = ("no_ack", "sealed", "allow_rollup_hdrs", "mirror", "sources", "subject_transform")
    found += [f"{name} is set" for name in forbidden if config.get(name)]
    if config.get("persist_mode") == "async":
        found.append("persist_mode is async: it acknowledges data that is not on disk")
    return found


def replicas_for(connection: BrokerConnection) -> int:
    """Return the number of replicas for a stream on this broker: 1, or 3 in a cluster, even if fewer nodes are up."""
    return REPLICAS if connection.client.clustered else 1


async def ensure(connection: BrokerConnection, *, make: bool = True) -> StreamState:
    """Create the stream if it does not exist and `make` is set. Then read its configuration back and return its state.

    Raise StreamRefused if the stream cannot be trusted, JournalUnavailable if the broker does not answer, or JournalGone if
    the stream does not exist and `make` is not set.
    """
    replicas = replicas_for(connection)
    try:
        answer = await ask(connection, f"STREAM.INFO.{subjects.STREAM}")
    except BrokerRefused as error:
        if error.code in NOT_YET:  # for example, a cluster that elects a leader
            raise JournalUnavailable(f"the stream {subjects.STREAM} cannot be read yet: {error}") from error
        if error.code != STREAM_NOT_FOUND:
            raise StreamRefused(f"the stream {subjects.STREAM} cannot be read: {error}") from error
        if not make:
            raise _gone(connection) from error
        answer = await _create(connection, replicas)
    faults = differences(answer["config"], replicas)
    if faults:
        version = connection.client.server_version
        raise StreamRefused(
            f"the stream {subjects.STREAM} at {masked(connection.url)} cannot be trusted: {'; '.join(faults)}. "
            f"Holdfast needs nats-server 2.12 or newer (this is {version}) and a stream created by itself."
        )
    return _state(answer)


async def _create(connection: BrokerConnection, replicas: int) -> Json:
    try:
        answer = await ask(connection, f"STREAM.CREATE.{subjects.STREAM}", stream_config(replicas), 10.0)
        log.info("stream_created", stream=subjects.STREAM, replicas=replicas)
        return answer
    except BrokerRefused as error:
        if error.code in NOT_YET:
            raise JournalUnavailable(
                f"the stream {subjects.STREAM} cannot be created with {replicas} replicas yet: {error}. "
                f"A cluster needs {REPLICAS} nodes with JetStream and room on their disks."
            ) from error
        # STREAM_EXISTS: another process created the stream first, with other replicas
        if error.code != STREAM_EXISTS:
            raise StreamRefused(f"the stream {subjects.STREAM} cannot be created: {error}") from error
        return await ask(connection, f"STREAM.INFO.{subjects.STREAM}")


async def state(connection: BrokerConnection) -> StreamState:
    """Return the stream's current state. Raise JournalUnavailable if the broker does not answer, or its subclass JournalGone
    if there is no stream."""
    try:
        request = {"subjects_filter": QUARANTINES}
        return _state(await ask(connection, f"STREAM.INFO.{subjects.STREAM}", request))
    except BrokerRefused as error:
        if error.code == STREAM_NOT_FOUND:
            raise _gone(connection) from error
        raise


def _gone(connection: BrokerConnection) -> JournalGone:
    return JournalGone(
        f"there is no stream {subjects.STREAM} at {masked(connection.url)}. {JournalGone.__doc__}"
    )


async def quarantine(connection: BrokerConnection, seq: int) -> Recorded | None:
    """Return the event that quarantines the event at the sequence `seq`, or None if that event is not quarantined.

    Raise JournalUnavailable if the broker does not answer.
    """
    subject, after = quarantine_subject(seq), seq
    for _ in range(LOOKED_AT_MAX):
        event = await next_on(connection, subject, after)
        if event is None or quarantines(event) == seq:
            return event
        after = event.seq
    return None


async def next_on(connection: BrokerConnection, subject: str, after: int) -> Recorded | None:
    """Return the first event on a subject with a sequence above `after`, or None if there is no such event.

    Raise JournalUnavailable if the broker does not answer.
    """
    query = {"seq": after + 1, "next_by_subj": subject}
    found = await stored_message(connection, subjects.STREAM, query)
    return None if found is None else _stored(found)


def _stored(found: Json) -> Recorded:
    return read(
        int(found["seq"]),
        datetime.fromisoformat(found["time"]),
        found["subject"].encode(),
        b64decode(found.get("hdrs", "")),
        b64decode(found.get("data", "")),
    )


async def last_on(connection: BrokerConnection, subject: str) -> Recorded | None:
    """Return the newest event on a subject, or None if the subject has none. Raise JournalUnavailable if the broker does not
    answer."""
    query, absent = {"last_by_subj": subject}, (MESSAGE_NOT_FOUND, STREAM_NOT_FOUND)
    found = await stored_message(connection, subjects.STREAM, query, absent=absent)
    return None if found is None else _stored(found)


async def consumer_names(connection: BrokerConnection) -> list[str]:
    """Return the names of all consumers of the stream. Raise JournalUnavailable if the broker does not answer."""
    found: list[str] = []
    while True:
        answer = await ask(connection, f"CONSUMER.NAMES.{subjects.STREAM}", {"offset": len(found)})
        page = answer.get("consumers") or []
        found += page
        if not page or len(found) >= int(answer.get("total", 0)):
            return found


async def id_at(connection: BrokerConnection, seq: int) -> str | None:
    """Return the `ce-id` of the message at `seq` ("" if the message has none), or None if no message is stored there."""
    found = await stored_message(connection, subjects.STREAM, {"seq": seq})
    return None if found is None else parse_headers(b64decode(found.get("hdrs", ""))).get("ce-id", "")


def _state(answer: Json) -> StreamState:
    state = answer["state"]
    named = (subject.split(".")[3] for subject in state.get("subjects") or ())
    return StreamState(
        created=answer["created"],
        first_seq=state["first_seq"],
        last_seq=state["last_seq"],
        at=datetime.fromisoformat(answer["ts"]),
        quarantined=frozenset(int(place) for place in named if PLACE(place)),
    )
