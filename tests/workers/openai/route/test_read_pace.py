"""How fast the streams of one upstream are read: tokens at once, everything else at a limited rate."""

import pytest

from workers.engines.openai.read_pace import BURST_BYTES, BYTES_PER_S, PER_TOKEN_BYTES, WAIT_S_MAX, ReadPace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_answer_never_waits() -> None:
    pace = ReadPace(Clock())
    assert {pace.take(PER_TOKEN_BYTES * 64, 64) for _ in range(1000)} == {0.0}


def test_bytes_without_tokens_wait_after_the_burst() -> None:
    clock = Clock()
    pace = ReadPace(clock)
    assert pace.take(BURST_BYTES, 0) == 0.0
    assert pace.take(BYTES_PER_S // 4, 0) == pytest.approx(0.25)
    clock.now += 0.25
    assert pace.take(BYTES_PER_S // 8, 0) == pytest.approx(0.125)


def test_a_flood_of_hours_is_limited_to_the_rate() -> None:
    clock, read = Clock(), 0
    pace = ReadPace(clock)
    while clock.now < 3700.0:
        read += 65536
        clock.now += pace.take(65536, 0)
    assert read == pytest.approx(3600 * BYTES_PER_S + BURST_BYTES, rel=0.01)


def test_a_wait_stays_short_so_that_a_cancelled_stream_ends() -> None:
    pace = ReadPace(Clock())
    assert pace.take(100 * BURST_BYTES, 0) == WAIT_S_MAX


def test_tokens_do_not_pay_for_a_flood_between_them() -> None:
    pace = ReadPace(Clock())
    assert any(pace.take(128 * 1024, 1) for _ in range(10))
