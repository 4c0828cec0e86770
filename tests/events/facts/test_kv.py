"""KV events on the wire."""

import msgspec
import pytest

from events import kv, subjects
from events.kv import (
    Cleared,
    Dump,
    Events,
    InvalidRange,
    KvBatch,
    KvRefused,
    KvRequest,
    Removed,
    Stored,
    Tier,
    TooNew,
)

HIGHEST = 2**64 - 1
EVENTS: list[kv.KvEvent] = [
    Stored([1, HIGHEST], parent=7, tier=Tier.HOST),
    Stored([3]),
    Removed([HIGHEST], tier=Tier.DISK),
    Cleared(),
]


def test_a_batch_survives_the_wire() -> None:
    batch = KvBatch("w3", "i1", 2, 40, EVENTS)
    assert kv.batch(kv.encode(batch)) == batch


@pytest.mark.parametrize(
    "ask", [KvRequest(), KvRequest(1, 5), KvRequest(1, 5, 9), KvRequest(0, dump=12, part=3)]
)
def test_a_request_survives_the_wire(ask: KvRequest) -> None:
    assert kv.ask(kv.encode(ask)) == ask


@pytest.mark.parametrize(
    "answer",
    [
        Events(40, EVENTS),
        Dump(44, 1, 3, EVENTS),
        TooNew(44),
        InvalidRange(9, 5),
        KvRefused("another life of this worker"),
    ],
)
def test_an_answer_survives_the_wire(answer: kv.Answer) -> None:
    assert kv.answer(kv.encode(answer)) == answer


def test_additions_of_later_versions_are_ignored() -> None:
    longer = msgspec.msgpack.encode(["w3", "i1", 0, 1, [["stored", [1], None, 0, "new"]], "new"])
    assert kv.batch(longer) == KvBatch("w3", "i1", 0, 1, [Stored([1])])


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode(["w3", "i1", 0, 1, [["moved", [1]]]])])
def test_what_is_no_batch_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        kv.batch(body)


def test_every_worker_has_subjects_that_frontends_subscribe_to() -> None:
    assert subjects.kv_events("gpu.7") == "kv.events.gpu_7"
    assert subjects.kv_ask("gpu.7", "i 1") == "kv.ask.gpu_7.i_1"
    assert subjects.KV_EVENTS == "kv.events.*"
