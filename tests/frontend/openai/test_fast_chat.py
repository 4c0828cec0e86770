"""A plain chat is parsed without pydantic, with the same result."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from controller.frontend.errors import ApiError
from controller.frontend.openai.request_models import PlainChat
from controller.frontend.openai.request_parser import (
    ParsedRequest,
    parse_any_chat,
    plain_chat,
    read_chat,
    read_json,
)

PLAIN: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
ODD = st.sampled_from([
    None, True, False, 0, 1, -1, 2, 1.0, 0.5, 64.0, 64.5, 2.0000001, -0.0, 1e-320, 1e300, "", "1", "0.5", "yes", "true", " 1",
    2**31, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), [], {}, ["a"], [1], {"a": 1},
    {"include_usage": True}, {"include_usage": 1}, {"include_usage": None}, {"include_usage": False, "more": 1},
])  # fmt: skip
TEXT = st.sampled_from(["", "hello", "wörld 😀", "\0"]) | st.text(max_size=5)
MESSAGES = st.fixed_dictionaries({"content": TEXT, "role": TEXT}) | st.fixed_dictionaries(
    {"role": TEXT},
    optional={
        "name": TEXT,
        "tool_calls": ODD,
        "content": TEXT | ODD | st.just([{"type": "text", "text": "a"}]),
    },
)
NAMES = [
    *PlainChat.__struct_fields__,
    "n",
    "stop",
    "tools",
    "user",
    "logprobs",
    "top_logprobs",
    "top_k",
    "cache_salt",
    "min_p",
    "",
]
USUAL = st.fixed_dictionaries(
    {"model": TEXT, "messages": st.lists(MESSAGES, max_size=3)},
    optional={
        "stream": st.booleans(),
        "stream_options": st.none() | st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
        "max_tokens": st.none() | st.integers(-1, 2**70),
        "max_completion_tokens": st.none() | st.integers(0, 2**70),
        "temperature": st.none() | st.floats(-0.1, 2.1) | st.integers(-1, 3),
        "top_p": st.none() | st.floats(-0.1, 1.1) | st.integers(-1, 2),
        "seed": st.none() | st.integers(-(2**65), 2**65),
        "ignore_eos": st.booleans(),
    },
)
BODIES = USUAL | st.builds(
    lambda usual, odd: usual | odd, USUAL, st.dictionaries(st.sampled_from(NAMES), ODD, max_size=3)
)


def understood(parse: Callable[[bytes], ParsedRequest], body: bytes) -> str:
    """Return the parsed request, types included, or the error."""
    try:
        return repr(parse(body))
    except ApiError as error:
        return f"{error.status} {error.body()}"


def read_any_chat(body: bytes) -> ParsedRequest:
    """Parse a body as if none were plain."""
    return parse_any_chat(read_json(body))


@pytest.mark.slow
@given(BODIES)
@settings(max_examples=600, deadline=None)
def test_a_body_is_parsed_the_same_either_way(body: dict[str, Any]) -> None:
    raw = msgspec.json.encode(body)
    event("plain" if plain_chat(raw) is not None else "not plain")
    assert understood(read_chat, raw) == understood(read_any_chat, raw)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"stream": True, "stream_options": {"include_usage": True}}, {"max_tokens": 64, "temperature": 0, "ignore_eos": True},
        {"max_completion_tokens": 9, "max_tokens": 8, "top_p": 1, "seed": 3, "temperature": 0.7},
        {"stream_options": None, "max_tokens": None, "temperature": None, "top_p": None, "seed": None},
        {"messages": [{"content": "be kind", "role": "system"}, {"role": "user", "content": ""}]},
    ],
)  # fmt: skip
def test_common_bodies_are_plain(more: dict[str, Any]) -> None:
    body = msgspec.json.encode(PLAIN | more)
    assert plain_chat(body) is not None
    assert understood(read_chat, body) == understood(read_any_chat, body)
    assert isinstance(read_chat(body), ParsedRequest)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2}, {"stop": "x"}, {"tools": [{}]}, {"user": "me"}, {"max_tokens": "5"}, {"max_tokens": 0}, {"stream": 1},
        {"temperature": True}, {"seed": -1}, {"seed": 2**63 - 1}, {"messages": []}, {"cache_salt": "s"}, {"logprobs": True},
        {"messages": [{"role": "user", "content": None}]}, {"messages": [{"role": "user", "content": "a", "name": "b"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, {"messages": PLAIN["messages"] * 1001},
    ],
)  # fmt: skip
def test_all_other_bodies_are_left_to_pydantic(more: dict[str, Any]) -> None:
    body = msgspec.json.encode(PLAIN | more)
    assert plain_chat(body) is None
    assert understood(read_chat, body) == understood(read_any_chat, body)


@pytest.mark.parametrize("given", [None, [], "x", 1, {}, {"model": "m"}])
def test_a_body_that_is_not_a_chat_is_refused_as_before(given: Any) -> None:
    body = msgspec.json.encode(given)
    assert understood(read_chat, body) == understood(read_any_chat, body)
    assert understood(read_chat, body).startswith("400")


MESSAGE = b'"messages": [{"role": "user", "content": "hello"}]'


@pytest.mark.parametrize(
    ("body", "well"),
    [
        (b'{"model": "a", "model": "b", "n": 1, ' + MESSAGE + b"}", True),
        (b'{"model": "a", "model": "b", "max_tokens": 3, "max_tokens": null, ' + MESSAGE + b"}", True),
        (b' \n{"model": "m", "max_tokens": 64.0, "temperature": 1e0, ' + MESSAGE + b"}\r\n ", True),
        (b'{"model": "m", "temperature": 1e999, ' + MESSAGE + b"}", False),
        (b'{"model": "m", "temperature": NaN, ' + MESSAGE + b"}", False),
        (b'{"model": "m", "seed": 123456789012345678901234567890, ' + MESSAGE + b"}", False),
        (b'{"model": "m", ' + MESSAGE + b"} {}", False),
        (b'{"model": "m", ' + MESSAGE, False),
        (b'{"model": "m", "user": 1, ' + MESSAGE, False),
        (b'{"model": "\xff", ' + MESSAGE + b"}", False),
        (b'{"model": "\\ud800", ' + MESSAGE + b"}", False),
        (b'\xef\xbb\xbf{"model": "m", ' + MESSAGE + b"}", False),
        (b"[" * 100_000, False),
        (b'{"model": ' + b"[" * 100_000, False),
        (b"", False),
    ],
)
def test_special_bytes_are_parsed_the_same_either_way(body: bytes, well: bool) -> None:
    assert understood(read_chat, body) == understood(read_any_chat, body)
    assert understood(read_chat, body).startswith("ParsedRequest(" if well else "400")
