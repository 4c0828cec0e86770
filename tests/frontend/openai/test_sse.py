"""The response head of an event stream, byte by byte."""

import time
from email.utils import parsedate_to_datetime

import pytest

from controller.frontend.openai import sse
from controller.frontend.openai.request_head import Head


def head(version: tuple[int, int], *, chunked: bool, keep: bool) -> Head:
    """Return a request's head."""
    return Head("completions", "", "interactive", "", "", version, keep, chunked)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_a_response_head_has_the_requested_properties(chunked: bool, keep: bool) -> None:
    version = (1, 1) if chunked else (1, 0)
    lines = sse.response_head(
        head(version, chunked=chunked, keep=keep), {"X-Request-Id": "a", "X-Word": "\u20ac"}
    )
    first, *fields, empty, rest = lines.split(b"\r\n")
    assert (first, empty, rest) == (b"HTTP/1.1 200 OK" if chunked else b"HTTP/1.0 200 OK", b"", b"")
    assert [field for field in fields if not field.startswith(b"Date: ")] == [
        b"Content-Type: text/event-stream; charset=utf-8",
        b"Cache-Control: no-cache",
        b"X-Accel-Buffering: no",
        b"X-Request-Id: a",
        b"X-Word: ?",
        *([b"Transfer-Encoding: chunked"] if chunked else []),
        *([] if keep else [b"Connection: close"]),
    ]


def test_a_response_head_has_the_date_of_its_second() -> None:
    def dated() -> float:
        said = sse.response_head(head((1, 1), chunked=True, keep=True), {}).decode()
        return parsedate_to_datetime(said.split("Date: ")[1].split("\r\n")[0]).timestamp()

    before = int(time.time())
    assert before <= dated() <= time.time()
    sse.head_beginning((1, 1), before - 3600, 200, sse.EVENT_STREAM)  # the cached head of an hour ago
    assert before <= dated() <= time.time()
    assert [sse.head_beginning((1, 1), second, 200, sse.EVENT_STREAM)[-14:] for second in (0, 1, 0)] == [
        "00:00:00 GMT\r\n",
        "00:00:01 GMT\r\n",
        "00:00:00 GMT\r\n",
    ]
