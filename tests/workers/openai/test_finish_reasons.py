"""An upstream's own finish_reason reaches the client; what cannot be one is `stop`."""

import json

import pytest

from events.wire import Generate, Sampling, finish_reason
from workers.engines.openai.reading import UpstreamStream


@pytest.mark.parametrize(
    ("given", "passed"),
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
def test_the_reason_is_passed_on(given: object, passed: str) -> None:
    stream = UpstreamStream(Generate(1, "r1", [1], 1, Sampling(max_tokens=4)), "nowhere")
    event = {"choices": [{"index": 0, "text": "hi", "finish_reason": given}]}
    chunks = stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert [chunk.finish for chunk in chunks] == [passed]
    assert finish_reason(given) == passed
