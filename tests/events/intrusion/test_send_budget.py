"""A budget allows a burst and then its rate."""

from events.intrusion.send_budget import Rate, SendBudget, TrafficBudget, traffic


def test_a_muted_sender_is_dropped_for_a_second() -> None:
    budget = TrafficBudget(traffic(1.0, 1.0, 1.0, 1.0), 0.0)
    assert budget.take(1, 10, 0.0) and not budget.take(1, 10, 0.1) and not budget.muted(0.1)
    budget.mute(0.1)
    assert budget.muted(1.0) and not budget.muted(1.2)


def test_a_burst_and_then_the_rate() -> None:
    budget = SendBudget(Rate(per_s=2.0, burst=3.0), 0.0)
    assert [budget.take(1, 0.0) for _ in range(4)] == [True, True, True, False]
    assert budget.take(1, 0.5)
    assert not budget.take(1, 0.5) and not budget.take(4, 1000.0)
