"""The form of a control message distinguishes it from every acknowledgement of the broker."""

import json

from events.intrusion.control_message import acknowledged, control, foreign

ACK = {"stream": "FLEET", "seq": 12}


def test_an_acknowledgement_is_no_control_message() -> None:
    for verb in ("drain", "resume", "retire", "stop", "distrust", "batch", "chaos"):
        assert foreign(verb, "w1", ACK)
        assert foreign(verb, "w1", {**ACK, "duplicate": True, "batch": "b", "count": 2})
        assert foreign(verb, "w1", {"type": "io.nats.jetstream.api.v1.stream_info_response", "config": {}})


def test_a_control_message_is_for_one_worker_and_one_verb() -> None:
    message = control("retire", "w1", "i1", "controller:c0:life", {})
    assert foreign("retire", "w1", message) == ""
    assert foreign("retire", "w2", message) and foreign("drain", "w1", message)
    assert foreign("retire", "w1", {**message, "control": 1})


def test_messages_of_a_controller_of_0_2_0_are_control_messages() -> None:
    assert foreign("drain", "w1", {"instance": "i1", "deadline_s": 3.0}) == ""
    assert foreign("chaos", "w1", {"fault": "slow", "argument": 2.0, "rank": None}) == ""


def test_an_acknowledgement_names_the_fact_that_it_acknowledges() -> None:
    assert acknowledged(json.dumps(ACK).encode()) == 12
    for none in (
        b"",
        b"{}",
        b"[1]",
        b'{"stream":"FLEET","seq":12,"duplicate":true}',
        b'{"holder":"c"}',
        b"\xff",
    ):
        assert acknowledged(none) is None
