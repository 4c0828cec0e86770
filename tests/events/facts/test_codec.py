"""Facts are encoded and decoded without loss, across versions."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from sys import float_info
from typing import Any
from uuid import UUID

import msgspec
import pytest
from any_fact import facts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from events import codec
from events.decisions import Absorbed
from events.fact import Decision, Fact
from events.journal.broker import parse_headers
from events.journal.port import Journal  # noqa: F401  (the port must import without a broker)
from events.observations import (
    GoldenProposed,
    Profile,
    WorkerHeard,
    WorkerJoined,
    WorkerLeft,
    WorkerSlow,
    canary_key,
)
from events.subjects import subject

AT = datetime(2026, 1, 1, 12, 30, 0, 123456, tzinfo=UTC)
SAMPLES = Path(__file__).parent / "samples"
AGREED = b'{"decided_at": "2026-01-01T00:00:00Z", "by": [], "canary_key": "%s", "canary": "%s"}'
HEARD = b'{"worker": "w", "instance": "i", "observer": "o"}'
EXPOSED = b'{"frontend": "f", "worker": "w", "instance": "i", "why": "y", "since": "%s", "until": "%s"}'


def headers_of(fact: Fact, **more: object) -> dict[str, str]:
    said = {"id": "0190-1", "source": "c1", "source_number": 7, "said_at": AT, **more}
    return codec.encode_headers(fact, **said)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", codec.KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_kind_is_decoded_as_it_was_encoded(kind: str, data: st.DataObject) -> None:
    fact = data.draw(facts_of(codec.KINDS[kind]))
    recorded = codec.decode(3, AT, headers_of(fact, through=2), codec.encode_body(fact))
    assert recorded.fact == fact
    assert type(recorded.fact) is codec.KINDS[kind]
    assert (recorded.seq, recorded.id, recorded.source, recorded.source_number) == (3, "0190-1", "c1", 7)
    assert (recorded.through, recorded.said_at) == (2, AT)
    assert codec.decode_body(kind, codec.encode_body(fact)) == fact
    assert json.loads(codec.to_json(fact)) == json.loads(codec.encode_body(fact))


def test_the_headers_are_cloudevents() -> None:
    fact = WorkerHeard(worker="w0", instance="i1", observer="o")
    headers = headers_of(fact, correlation="incident-4", causation="e9", traceparent="00-a")
    assert headers == {
        "ce-specversion": "1.0",
        "ce-id": "0190-1",
        "ce-type": "holdfast.worker_heard",
        "ce-source": "c1",
        "ce-time": "2026-01-01T12:30:00.123456+00:00",
        "ce-datacontenttype": "application/json",
        "Nats-Msg-Id": "0190-1",
        "source-number": "7",
        "correlation": "incident-4",
        "causation": "e9",
        "traceparent": "00-a",
    }


def on_the_wire(headers: Mapping[str, str]) -> bytes:
    """Return headers as NATS carries them."""
    return (
        "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    ).encode()


BROKERS = {"Nats-Expected-Last-Subject-Sequence": "7", "Nats-Batch-Id": "b", "Nats-Batch-Sequence": "2"}
TOKEN = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters=":-/."), max_size=12)


@settings(deadline=None)
@given(
    source=TOKEN.filter(bool), number=st.integers(0, 2**40), through=st.none() | st.integers(0, 2**40), correlation=TOKEN,
    causation=TOKEN, traceparent=TOKEN, more=st.sampled_from([{}, BROKERS]),
)  # fmt: skip
def test_the_fast_decoder_of_our_own_headers_agrees_with_the_slow_one(
    source: str, number: int, through: int | None, correlation: str, causation: str, traceparent: str, more: dict[str, str]
) -> None:  # fmt: skip
    fact = WorkerHeard(worker="w0", instance="i1", observer="o")
    headers = headers_of(
        fact, source=source, source_number=number, through=through, correlation=correlation, causation=causation,
        traceparent=traceparent,
    )  # fmt: skip
    raw, body = on_the_wire({**headers, **more}), codec.encode_body(fact)
    quick = codec.decode_written(3, AT, raw, body)
    assert quick is not None
    assert quick == codec.decode(3, AT, parse_headers(raw), body)


@pytest.mark.parametrize(
    "change",
    [
        {"ce-specversion": "1.1"},
        {"ce-type": "another.programs"},
        {"ce-source": "a name with spaces"},
        {"source-number": "many"},
        {"X-Other": "x"},
        {"traceparent": "a\r\nce-id: another"},
    ],
)
def test_headers_in_another_form_are_left_to_the_slow_decoder(change: dict[str, str]) -> None:
    fact = WorkerHeard(worker="w0", instance="i1", observer="o")
    raw = on_the_wire({**headers_of(fact), **change})
    assert codec.decode_written(3, AT, raw, codec.encode_body(fact)) is None
    assert codec.decode_written(3, AT, None, codec.encode_body(fact)) is None


def test_the_fast_decoder_refuses_what_the_slow_one_refuses() -> None:
    headers = headers_of(WorkerHeard(worker="w", instance="i", observer="o"))
    with pytest.raises(codec.BadEvent, match="not a valid worker_heard"):
        codec.decode_written(5, AT, on_the_wire(headers), b"not json")
    with pytest.raises(codec.BadEvent, match="isoformat"):
        codec.decode_written(5, AT, on_the_wire({**headers, "ce-time": "2026-0+00:00"}), HEARD)
    with pytest.raises(codec.UnknownKind, match="'tomorrow'"):
        codec.decode_written(12, AT, on_the_wire({**headers, "ce-type": "holdfast.tomorrow"}), b"{}")


def test_an_unknown_kind_is_refused_by_name() -> None:
    headers = headers_of(WorkerHeard(worker="w", instance="i", observer="o"))
    with pytest.raises(codec.UnknownKind, match="'tomorrow'"):
        codec.decode(12, AT, {**headers, "ce-type": "holdfast.tomorrow"}, b"{}")
    with pytest.raises(codec.UnknownKind, match="tomorrow"):
        codec.decode_body("tomorrow", b"{}")


def test_an_unknown_word_may_be_from_a_newer_version() -> None:
    left = WorkerLeft(worker="w", instance="i", mode="graceful")
    body = codec.encode_body(left).replace(b"graceful", b"with_a_smile")
    with pytest.raises(codec.UnknownKind, match=r"worker_left.*'with_a_smile'"):
        codec.decode(12, AT, headers_of(left), body)


def of(kind: str) -> dict[str, str | None]:
    return {"ce-type": f"holdfast.{kind}"}


@pytest.mark.parametrize(
    "headers",
    [
        {"ce-specversion": None},
        {"ce-id": None},
        {"ce-id": "x" * 601},
        {"ce-source": ""},
        {"ce-time": "yesterday"},
        {"ce-time": "2026-01-01T00:00:00"},
        {"ce-time": "1026-01-01T00:00:00Z"},
        {"source-number": "many"},
        {"source-number": "9" * 19},
        of("Tomorrow"),
    ],
)
def test_headers_that_are_no_facts_are_refused(headers: Mapping[str, str | None]) -> None:
    refused(headers, HEARD)


@pytest.mark.parametrize(
    "headers, body",
    [
        ({}, b"not json"),
        ({}, b"{}"),
        ({}, b'{"worker": 3, "instance": "i", "observer": "o"}'),
        ({}, b'{"worker": "\xff", "instance": "i", "observer": "o"}'),
        ({}, HEARD[:-1] + b', "of_tomorrow": ' + b"[" * 100_000),
        ({}, HEARD.replace(b"o", b"o" * 1024 * 1024)),
        ({}, bytes(8_000_000)),
        (of("tomorrow"), b"no object"),
        (of("tomorrow"), b'{"much": "%s"}' % (b"o" * 1024 * 1024)),
        (of("worker_left"), b'{"worker": "w", "instance": "i", "mode": "graceful", "exit": 1e9}'),
        (of("worker_silent"), b'{"worker": "w", "instance": "i", "observer": "o", "silent_s": NaN}'),
        (of("worker_silent"), b'{"worker": "w", "instance": "i", "observer": "o", "silent_s": 1e999}'),
        (of("observer_blind"), b'{"observer": "o", "silent": 9007199254740993, "known": 1}'),
        (of("observer_blind"), b'{"observer": "o", "silent": -1, "known": 1}'),
        (of("golden_agreed"), AGREED % (b"k", b"\\u0000")),
        (of("golden_agreed"), AGREED % (b"k" * 601, b"c")),
        (of("exposure_unknown"), EXPOSED % (b"2026-01-01T00:00:00", b"2026-01-01T00:00:00Z")),
        (of("exposure_unknown"), EXPOSED % (b"2026-01-01T00:00:00Z", b"9026-01-01T00:00:00Z")),
    ],
)
def test_a_body_that_can_be_no_fact_is_refused(headers: Mapping[str, str | None], body: bytes) -> None:
    refused(headers, body)


def refused(headers: Mapping[str, str | None], body: bytes) -> None:
    whole: dict[str, str | None] = {
        **headers_of(WorkerHeard(worker="w", instance="i", observer="o")),
        **headers,
    }
    given_headers = {name: value for name, value in whole.items() if value is not None}
    with pytest.raises(codec.BadEvent):
        codec.decode(5, AT, given_headers, body)
    with pytest.raises(codec.BadEvent):
        codec.decode_written(5, AT, on_the_wire(given_headers), body) or codec.decode(
            5, AT, given_headers, body
        )


def test_a_field_from_a_later_version_is_tolerated_and_a_missing_optional_one_is_its_default() -> None:
    joined = codec.decode_body(
        "worker_joined",
        json.dumps(
            {
                **json.loads((SAMPLES / "worker_joined.json").read_text())["body"],
                "a_field_of_tomorrow": {"nested": [1]},
                "topology": {"host": "h", "rack": "r7"},
            }
        ).encode(),
    )
    assert isinstance(joined, WorkerJoined)
    assert joined.topology.host == "h"
    bare = codec.decode_body("absorbed", b'{"decided_at": "2026-01-01T00:00:00Z"}')
    assert bare == Absorbed(decided_at=datetime(2026, 1, 1, tzinfo=UTC))


def holds(kept: Any, sample: Any) -> bool:
    """Return whether the decoded value contains all of a sample. Its dataclasses may have gained fields since."""
    if isinstance(sample, dict):
        return all(name in kept and holds(kept[name], value) for name, value in sample.items())
    return bool(kept == sample)


@pytest.mark.parametrize("kind", codec.KINDS)
def test_a_sample_of_every_kind_ever_written_still_decodes(kind: str) -> None:
    """A new kind adds its sample here (`python tests/events/facts/record_samples.py`); a sample is never changed."""
    path = SAMPLES / f"{kind}.json"
    assert path.exists(), (
        f"record a sample of the new kind {kind}: python tests/events/facts/record_samples.py"
    )
    sample = json.loads(path.read_text())
    recorded = codec.decode(1, AT, sample["headers"], json.dumps(sample["body"]).encode())
    assert recorded.fact.kind() == kind
    assert subject(recorded.fact) == sample["subject"]
    kept = json.loads(codec.to_json(recorded.fact))
    assert holds(kept, sample["body"])


def test_no_kind_that_has_a_sample_was_removed() -> None:
    assert {path.stem for path in SAMPLES.glob("*.json")} == set(codec.KINDS)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_do_not_make_a_fact_unreadable(odd: float) -> None:
    """Written as null they would stop every fold at this event."""
    slow = WorkerSlow(worker="w", instance="i", frontend="f", latency_ms=odd, baseline_ms=1.0)
    read = codec.decode_body("worker_slow", codec.encode_body(slow))
    assert isinstance(read, WorkerSlow)
    assert read.latency_ms == {"nan": 0.0, "inf": float_info.max, "-inf": -float_info.max}[str(odd)]
    golden = GoldenProposed(
        worker="w",
        instance="i",
        canary_key="k",
        canary="c",
        prompt=(1,),
        tokens=(2,),
        top_k=(((2, odd), (3, -1.0)),),
        margin=odd,
        tolerance=0.0,
    )
    assert codec.decode_body("golden_proposed", codec.encode_body(golden)).kind() == "golden_proposed"


def test_ids_are_uuid7_and_grow_with_time() -> None:
    ids = [codec.new_id(now_ms) for now_ms in range(1_700_000_000_000, 1_700_000_000_200)]
    assert ids == sorted(ids)
    assert len({codec.new_id(5) for _ in range(1000)}) == 1000
    parsed = UUID(codec.new_id())
    assert (parsed.version, parsed.variant) == (7, "specified in RFC 4122")


def test_kinds_are_snake_case_and_only_leaves() -> None:
    assert "canary_failed" in codec.KINDS and "health_changed" in codec.KINDS
    assert not {"worker_observation", "canary_result", "worker_decision", "decision", "fact"} & set(
        codec.KINDS
    )


def test_canary_keys_differ_wherever_answers_may() -> None:
    parts = {
        "model": "m",
        "revision": "r",
        "tokenizer": "t",
        "engine": "e",
        "engine_version": "1",
        "dtype": "d",
        "device": "g",
    }
    keys = {canary_key(**parts, tp=1), canary_key(**parts, tp=2)}
    keys |= {canary_key(**{**parts, name: "other"}, tp=1) for name in parts}
    assert len(keys) == 2 + len(parts)


def test_bodies_are_plain_json_for_any_consumer() -> None:
    profile = Profile(kv_blocks=1, block_tokens=2, max_batch=3, prefill_tokens_per_s=4.0, tpot_ms=((1, 2.0),))
    assert msgspec.json.decode(msgspec.json.encode(profile))["tpot_ms"] == [[1, 2.0]]


def test_decisions_have_their_number_in_the_body() -> None:
    for kind in codec.KINDS.values():
        if issubclass(kind, Decision):
            assert {"number", "decided_at", "cause", "incident"} <= set(kind.__dataclass_fields__)
