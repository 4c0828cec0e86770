"""The delay from a fault to its conviction: the controller's question order, without sampled slots."""

import pytest

from benchmarks.corruption.conviction_delay import SAMPLED, Question, compared, delays, schedule, table
from controller.runtime.settings import CanarySettings

ROW = ((5, -0.1), (6, -4.0), (7, -5.0), (8, -6.0), (9, -7.0))
QUESTIONS = [
    Question(id, (number,), (5,) * 8, (ROW,) * 8)
    for number, id in enumerate(("primes", "days", "sum", "france"))
]
SETTINGS = CanarySettings()


def test_the_controller_asks_each_question_in_turn_and_every_fifth_slot_is_sampled() -> None:
    before = schedule(QUESTIONS, SETTINGS.model_copy(update={"sampled_every": 0}))
    assert before[:8] == ["days", "france", "primes", "sum"] * 2
    today = schedule(QUESTIONS, SETTINGS)
    assert today[:10] == ["days", "france", "primes", "sum", SAMPLED] * 2


def test_a_delay_is_counted_over_all_phases_and_skips_sampled_slots() -> None:
    slots = ["a", "b", "c", "d", SAMPLED] * 4
    assert delays(slots, {"a"})[:5] == [1, 5, 4, 3, 2]
    assert delays(slots, {"a", "c"})[:5] == [1, 2, 1, 3, 2]


def test_a_fault_that_one_question_sees_is_found_one_interval_later_at_most() -> None:
    noticed = [(("days",), ("days",)), (("primes", "sum"), ("sum",)), (("sum",), ()), ((), ())]
    result = compared(QUESTIONS, noticed, SETTINGS)
    assert (result["faults"], result["caught_by_0_2_0_alone"], result["caught_today_alone"]) == (2, 1, 0)
    assert (result["0.2.0"]["max_intervals"], result["today"]["max_intervals"]) == (4, 5)
    assert result["difference"]["p99_s"] == pytest.approx(SETTINGS.interval_s)
    assert "| difference | " in table(result)


def test_without_faults_there_is_no_delay() -> None:
    assert "no delays" in table(compared(QUESTIONS, [((), ())], SETTINGS))
