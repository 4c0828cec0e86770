"""The shared link of the contention benchmark is a bottleneck, and the prediction uses its rate."""

from benchmarks.failures import contention


def test_two_transfers_share_the_rate_of_a_single_one() -> None:
    found = contention.measure(8, 40e6, 1)
    alone_ms = 8 * (1 << 20) / 40e6 * 1000
    assert alone_ms < found["predicted_ms"][1] < 1.2 * alone_ms
    assert found["predicted times"] >= contention.TIMES_MIN
    assert found["measured_ms"][1] > 0.8 * alone_ms
    assert found["measured_ms"][2] > 1.4 * alone_ms  # the mean of both: the first may end a little earlier
    assert found["loopback_ms"][2] > 0
