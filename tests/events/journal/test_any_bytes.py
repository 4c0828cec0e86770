"""Random messages among real events: the reader continues, and the fold is the same as without them."""

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from any_fact import facts
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_journal import MemoryJournal, MemoryStream

from controller.deciders.fleet import Fleet, evolve
from controller.read_model import rows
from events import codec, subjects
from events.decisions import Absorbed
from events.fact import Decision, Fact, Observation, Recorded, Skipped
from events.journal import messages
from events.observations import SnapshotKept
from events.order import Order

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKENS = st.sampled_from(
    ["observed", "decided", "worker", "w0", "all", "canary_passed", "absorbed", "5", "x"]
)
ANY_SUBJECT = st.lists(TOKENS, min_size=1, max_size=5).map(lambda tokens: ".".join(["fleet", *tokens]))
ANY_HEADERS = (
    st.none()
    | st.binary(max_size=80)
    | st.binary(max_size=80).map(lambda b: b"NATS/1.0\r\n" + b + b"\r\n\r\n")
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda v: st.lists(v, max_size=3),
)
Message = tuple[str, bytes, bytes | None]


def headers_of(fact: Fact, number: int) -> dict[str, str]:
    return codec.encode_headers(fact, id=codec.new_id(), source="s:1", source_number=number, said_at=NOW)


def strange() -> st.SearchStrategy[Message]:
    return st.tuples(ANY_SUBJECT, st.binary(max_size=60), ANY_HEADERS)


@st.composite
def spoilt(draw: st.DrawFn) -> Message:
    """An observation as we would write it, with one change."""
    fact = draw(facts().filter(lambda fact: isinstance(fact, Observation)))
    subject, body, headers = subjects.subject(fact), codec.encode_body(fact), headers_of(fact, 1)
    how = draw(st.sampled_from(["header", "number", "body", "field", "subject", "decided"]))
    if how == "header":
        del headers[draw(st.sampled_from(["ce-specversion", "ce-id", "ce-type", "ce-source"]))]
    elif how == "number":
        headers["source-number"] = draw(
            st.text(st.characters(exclude_categories=("Nd", "Cc", "Cs")), min_size=1)
        )
    elif how == "body":
        body = body[: draw(st.integers(0, len(body) - 1))]
    elif how == "field":
        fields = json.loads(body)
        required = [name for name, value in fields.items() if isinstance(value, str | int | float)]
        body = json.dumps({**fields, required[0]: [draw(ANY_JSON)]}).encode()
    else:
        subject += ".more" if how == "subject" else ""
        subject = subject.replace("observed", "decided") if how == "decided" else subject
    return subject, body, messages.as_sent(headers)


def real() -> st.SearchStrategy[Fact]:
    return facts().filter(lambda fact: isinstance(fact, Observation)) | st.just(Absorbed(decided_at=NOW))


async def read(stream: MemoryStream) -> list[Recorded]:
    journal = MemoryJournal(stream, "reader")
    return [e async for batch in journal.read(0, until=len(stream.events)) for e in batch]


def folded(events: list[Recorded]) -> tuple[Order[tuple[Any, ...]], Order[Fleet]]:
    ids: Order[tuple[Any, ...]] = Order(lambda state, event: (*state, event.id), ())
    fleet = Order(evolve, Fleet())
    for event in events:
        ids.take(event)
        fleet.take(event)
    return ids, fleet


@settings(max_examples=80, deadline=None)
@given(st.lists(real() | strange() | spoilt(), max_size=12))
def test_any_bytes_among_real_events_leave_the_fold_as_it_is(said: list[Fact | Message]) -> None:
    mixed, clean = MemoryStream(), MemoryStream()
    for number, each in enumerate(said, 1):
        if not isinstance(each, Fact):
            mixed.publish(*each[:2], each[2])
            continue
        for stream, stored in ((mixed, mixed.events), (clean, clean.events)):
            fact, headers = as_said(each, stored), headers_of(each, number)
            headers |= {"ce-id": f"e{number}", "Nats-Msg-Id": f"e{number}"}
            if isinstance(fact, Decision):
                headers |= {"through": str(len(stored)), "source-number": "0"}
            stream.add(fact, headers)
    events = asyncio.run(read(mixed))
    assert len(events) == len(said)
    ids, fleet = folded(events)
    assert ids.shown == folded(asyncio.run(read(clean)))[0].shown
    assert ids.last_seq == fleet.last_seq == len(said)
    assert ids.position.decided == mixed.decided, "the next decision would be refused"
    rows.state(fleet.shown)
    assert len(rows.event_rows(events)) == sum(
        isinstance(e.fact, Observation | Decision) and not isinstance(e.fact, SnapshotKept) for e in events
    )


def as_said(fact: Fact, stored: list[Recorded]) -> Fact:
    number = 1 + sum(isinstance(event.fact, Decision) for event in stored)
    return Absorbed(number=number, decided_at=NOW) if isinstance(fact, Decision) else fact


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.none() | st.binary(max_size=300), st.binary(max_size=300))
def test_no_message_makes_the_reader_fail(subject: bytes, headers: bytes | None, body: bytes) -> None:
    event = messages.read(1, NOW, subject, headers, body)
    assert isinstance(event.fact, Skipped)
    assert messages.read(1, NOW, subject, headers, body) == event, "every reader skips the same"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(spoilt(), st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_no_slightly_changed_event_makes_the_reader_fail(message: Message, more: Mapping[str, str]) -> None:
    subject, body, headers = message
    raw = (
        (headers or b"")[:-2]
        + "".join(f"{name}: {value}\r\n" for name, value in more.items()).encode()
        + b"\r\n"
    )
    messages.read(1, NOW, subject.encode(), raw, body)
