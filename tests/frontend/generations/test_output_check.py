"""Nothing invalid that a worker sends reaches a client."""

from math import inf, nan

import pytest

from controller.frontend.generations.output_check import invalid
from controller.frontend.requests.failures import Failure, classify
from events.wire import Chunk, Logprob


def chunk(*tokens: int, **more: object) -> Chunk:
    return Chunk(1, list(tokens), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "good",
    [
        chunk(),
        chunk(0),
        chunk(999),
        chunk(0, 999, 3),
        chunk(5, logprobs=[Logprob(-0.5, [(5, -0.5), (6, -inf)])]),
        chunk(5, cached_tokens=0),
        chunk(5, cached_tokens=100),
        chunk(text="a"),
        chunk(error="engine_error"),
    ],
)
def test_what_an_engine_sends_is_valid(good: Chunk) -> None:
    assert invalid(good, 1000, 100) == ""


@pytest.mark.parametrize(
    "bad",
    [
        chunk(1000),
        chunk(-1),
        chunk(1 << 62),
        chunk(4, 5, 1000),
        chunk(4, -5, 6),
        chunk(5, logprobs=[Logprob(nan)]),
        chunk(5, logprobs=[Logprob(3.0)]),
        chunk(5, logprobs=[Logprob(-inf)]),
        chunk(5, logprobs=[Logprob(-0.5, [(1000, -1.0)])]),
        chunk(5, logprobs=[Logprob(-0.5, [(5, nan)])]),
        chunk(5, logprobs=[Logprob(-0.5, [(5, -1.0)] * 300)]),
        chunk(5, cached_tokens=101),
        chunk(5, cached_tokens=-1),
    ],
)
def test_what_no_engine_sends_is_the_workers_fault(bad: Chunk) -> None:
    assert invalid(bad, 1000, 100)


def test_a_workers_error_text_reaches_no_client() -> None:
    planted = "engine_error: key sk-123 at http://10.0.0.1 <script>"
    failure = classify(planted)
    assert "sk-123" in failure.detail, "the fact and the log may have it"
    assert "sk-123" not in str(failure.error) and "script" not in str(failure.error)
    assert str(failure.error) == failure.kind.message
    assert "as we say" in str(Failure("disconnected", "as we say").error)
