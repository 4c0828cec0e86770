"""The classification of upstream errors: client errors with the server's message, or server errors."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from events.refusal import RequestRefusal, read_refusal
from events.wire import ERRORS, Generate, Sampling, finish_reason
from workers.engines.openai.stream_decoder import WORDS_MAX, UpstreamStream, error_of, refusal_of

VLLM = {
    "error": {
        "message": "bogus is no type",
        "type": "BadRequestError",
        "param": "response_format",
        "code": 400,
    }
}


def streamed(said: Any, *, canary: bool = False) -> str:
    """Return the error of an answer that consists of this one event, with HTTP 200."""
    reading = UpstreamStream(Generate(1, "r", [5], 1, Sampling(max_tokens=9), canary), "token_ids")
    chunks = reading.feed(b"data: " + json.dumps(said).encode() + b"\n\n")
    assert reading.over and len(chunks) == 1
    return chunks[0].error or ""


def test_a_4xx_error_in_a_stream_is_a_client_error_and_keeps_its_message() -> None:
    reason, _, detail = streamed(VLLM).partition(":")
    assert reason == "invalid_request"
    assert read_refusal(detail) == RequestRefusal(
        "bogus is no type", 400, "BadRequestError", "response_format"
    )


@pytest.mark.parametrize(
    "said",
    [
        VLLM,
        {"error": {"message": "bogus is no type", "type": "BadRequestError", "code": "422"}},
        {"object": "error", "message": "bogus is no type", "type": "BadRequestError", "code": 400},  # SGLang
        {
            "error": {"message": "bogus is no type", "type": "invalid_request_error", "code": "bad_schema"}
        },  # OpenAI
        {"error": {"message": "bogus is no type", "status": 413}},
    ],
)
def test_client_errors_are_recognised_in_every_servers_format(said: Any) -> None:
    assert streamed(said).startswith("invalid_request: ")
    assert "bogus is no type" in streamed(said)
    assert (
        streamed(said, canary=True) == "engine_error: the upstream reports an error: bogus is no type"
    )  # canaries are known to be valid


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}},
            "engine_error",
        ),
        ({"error": {"message": "EngineCore died"}}, "engine_error"),
        ({"error": "EngineCore died"}, "engine_error"),
        (
            {"error": {"message": "EngineCore encountered an issue. See stack trace", "code": 500}},
            "upstream_lost",
        ),
        ({"error": None}, "engine_error"),
        ({"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}, "engine_error"),
        ({"error": {"message": "unknown caller", "code": 401}}, "engine_error"),
        ({"error": {"message": "later", "code": 429}}, "overloaded"),
        ({"error": {"message": "odd", "code": True}}, "engine_error"),
        ({"error": {"message": "odd", "code": 4000}}, "engine_error"),
    ],
)
def test_errors_about_the_server_are_server_errors(said: Any, reason: str) -> None:
    assert streamed(said).partition(":")[0] == reason


def test_a_4xx_response_before_the_stream_keeps_its_status() -> None:
    error = error_of({"error": {"message": "no", "type": "T", "param": "p"}}, 418, canary=False)
    assert read_refusal(error.partition(":")[2]) == RequestRefusal("no", 418, "T", "p")


def test_a_servers_message_is_bounded() -> None:
    found = refusal_of(
        {"error": {"message": "x" * 100_000, "type": "t" * 100_000, "param": "p" * 100_000, "code": 400}}
    )
    assert found is not None
    assert (len(found.message), len(found.type), len(found.param or "")) == (WORDS_MAX + 1, 100, 100)


@given(
    st.builds(RequestRefusal, st.text(), st.integers(400, 499), st.text(), st.none() | st.text()),
)
def test_a_refusal_is_passed_on_unchanged(refusal: RequestRefusal) -> None:
    reason, _, detail = refusal.error.partition(":")
    found = read_refusal(detail)
    assert reason in ERRORS
    plain = refusal == RequestRefusal(refusal.message) and not refusal.message.startswith("{")
    if plain:
        assert found.message == (refusal.message.strip() or "the worker refused the request")
    else:
        assert found == refusal


@given(st.text())
def test_any_detail_is_a_4xx_refusal(detail: str) -> None:
    assert 400 <= read_refusal(detail).status < 500


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(("error", "code", "type", "message", "param", "status")), inner, max_size=6
            )
        ),
        max_leaves=9,
    )
)
def test_any_error_object_is_classified(said: Any) -> None:
    for canary in (False, True):
        assert error_of(said, canary=canary).partition(":")[0] in ERRORS


@pytest.mark.parametrize(
    ("reason", "passed"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "content_filter"),
        ("tool_calls", "tool_calls"),
        ("insufficient_system_resource", "insufficient_system_resource"),
        ("<script>", "stop"),
        ("x" * 41, "stop"),
        ("", "stop"),
        (7, "stop"),
        ({"type": "stop"}, "stop"),
    ],
)
def test_an_upstreams_own_finish_reason_is_passed_on(reason: object, passed: str) -> None:
    """An invalid finish_reason becomes `stop`."""
    stream = UpstreamStream(Generate(1, "r1", [1], 1, Sampling(max_tokens=4)), "nowhere")
    event = {"choices": [{"index": 0, "text": "hi", "finish_reason": reason}]}
    chunks = stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert [chunk.finish for chunk in chunks] == [passed]
    assert finish_reason(reason) == passed
