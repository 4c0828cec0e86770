"""The parts of what-if: spells, canary timing, incremental deciding, and simulated runs."""

import random
from itertools import pairwise
from typing import Any, Literal

import pytest
from fleet_history import EPOCH, History
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.what_if import QUESTIONS, Prediction, predictions, slack_s
from controller.deciders.fleet import Shares, changed_since, settle, settled
from controller.replay.whatif.canary_schedule import NOTHING, Asker
from controller.replay.whatif.journal_stretch import CHECKS, GOOD, MUTE, SLOW, WRONG, RecordedCanaries
from controller.replay.whatif.spells import spells
from events.frozen import replace
from events.observations import CanaryFailed, CanaryPassed, CanarySlow

NAMES = ("c0", "c1", "c2", "c3")
SCHEDULED, TRIAL = CHECKS.index("scheduled"), CHECKS.index("trial")


def told(answers: str, *, every: float = 10.0, trials: frozenset[int] = frozenset()) -> RecordedCanaries:
    """Return canary results in turn: `.` correct, `~` correct but slow, `x` wrong, `-` no answer."""
    found = RecordedCanaries("w0", "w0-a", names=list(NAMES))
    life: dict[str, Any] = {
        "worker": "w0",
        "instance": "w0-a",
        "canary_key": "key",
        "check_type": "scheduled",
    }
    probe = {**life, "sent_under": 0, "sent_at": EPOCH, "latency_ms": 50.0}
    found.good = CanaryPassed(**probe, canary="c0")
    for n, answer in enumerate(answers):
        found.sent.append(every * n)
        found.at.append(every * n + 0.05)
        found.check.append(TRIAL if n in trials else SCHEDULED)
        found.asked.append(n % len(NAMES))
        found.said.append({".": GOOD, "~": SLOW, "x": WRONG, "-": MUTE}[answer])
        if answer == "~":
            found.facts[n] = CanarySlow(**probe, canary=NAMES[n % 4], baseline_ms=10.0)
        elif answer != ".":
            wrong = answer == "x"
            reason: Literal["token_mismatch", "timeout"] = "token_mismatch" if wrong else "timeout"
            found.facts[n] = CanaryFailed(**probe, canary=NAMES[n % 4], reason=reason, confirmed=wrong)
    return found


# --- spells ---------------------------------------------------------------------------------------------------------


def test_a_spell_begins_after_the_last_good_canary_and_ends_before_the_next() -> None:
    (spell,) = spells(told("..--.."))
    assert (spell.after, spell.first, spell.last, spell.before) == (10, 20, 30, 40)
    assert [spell.began(place) for place in (0, 0.5, 1)] == [10, 15, 20]
    assert [spell.ended(place) for place in (0.5, 1)] == [35, 40]
    assert spell.ended(0) == pytest.approx(30)


def test_a_wrong_answer_concerns_only_its_canary_and_other_canaries_lie_in_between() -> None:
    (spell,) = spells(told("......xx........"))  # c2, and then c3
    assert spell.asked == {2, 3}
    assert (spell.after, spell.first, spell.last, spell.before) == (30, 60, 70, 100), (
        "c3 was right at 30, c2 is at 100"
    )
    assert spell.detects(2)
    assert not spell.detects(1)


def test_an_endless_spell_lasts_for_ever_except_at_place_0() -> None:
    (spell,) = spells(told("..--"))
    assert spell.ended(1) == spell.ended(0.5) == float("inf")
    assert spell.ended(0) == pytest.approx(30)


def test_a_single_slow_answer_is_most_likely_a_spell_of_one_canary() -> None:
    canaries = told("...~...")
    (spell,) = spells(canaries)
    assert spell.began(0.5) == canaries.sent[3]
    assert spell.ended(0.5) == pytest.approx(canaries.at[3])
    assert (spell.began(1), spell.ended(1)) == (30, 40)
    (longer,) = spells(told("...~~.."))
    assert (longer.began(0.5), longer.ended(0.5)) == (25, 45)


@given(st.text(alphabet=".x-", min_size=1, max_size=30), st.sampled_from((0.0, 0.5, 1.0)))
def test_every_failed_canary_lies_in_a_spell_and_no_passed_one_in_a_mute_spell(
    answers: str, place: float
) -> None:
    canaries = told(answers)
    found = spells(canaries)
    for n, answer in enumerate(answers):
        there = [
            one.said
            for one in found
            if one.began(place) <= canaries.sent[n] < one.ended(place) and one.detects(n % len(NAMES))
        ]
        if answer != ".":
            assert {"x": WRONG, "-": MUTE}[answer] in there
        elif place > 0:
            assert MUTE not in there


# --- canary timing ----------------------------------------------------------------------------------------------


def asked(asker: Asker, *, calm: bool, until: float = 1000.0) -> list[tuple[float, int]]:
    """Return when canaries are sent, and the result of each."""
    found, at = [], 0.0
    while (question := asker.following(at, calm, False)) is not None and question.sent < until:
        if question.said != NOTHING:
            asker.mark_sent()
        at = question.at
        found.append((round(question.sent, 3), question.said))
    return found


def test_recorded_canaries_keep_their_times_and_results() -> None:
    asker = Asker(told("..-."), 0.0, 10.0, None, 0.5)
    assert asked(asker, calm=False, until=40) == [(0, GOOD), (10, GOOD), (20, MUTE), (30, GOOD)]


def test_a_calm_worker_gets_only_canaries_that_do_not_pass() -> None:
    assert asked(Asker(told("....-..."), 0.0, 10.0, None, 0.5), calm=True) == [(40, MUTE)]


def test_a_shorter_interval_detects_earlier_and_never_before_the_beginning() -> None:
    canaries = told(".....-----...")
    first = {
        (every, place): next(at for at, said in asked(Asker(canaries, 0.0, 10.0, every, place), calm=True) if said == MUTE)
        for every in (1.0, 10.0, 30.0)
        for place in (0.0, 0.5, 1.0)
    }  # fmt: skip
    for every in (1.0, 10.0, 30.0):
        assert 40 <= first[every, 0.0] <= first[every, 0.5] <= first[every, 1.0] <= 50 + 1.1 * every + 0.01
    for lower, higher in pairwise((1.0, 10.0, 30.0)):
        assert first[lower, 0.5] <= first[higher, 0.5]


def test_after_a_join_a_longer_interval_never_detects_earlier() -> None:
    """The end of the join round does not determine the next canary's time: longer intervals detect later."""
    canaries = told("....-----...", every=1.0)
    canaries.check[:4] = bytes([CHECKS.index("join")]) * 4
    first = [
        next(at for at, said in asked(Asker(canaries, 0.0, 1.0, every, 0.5), calm=True) if said == MUTE)
        for every in (2.0, 3.0, 4.0, 5.0)
    ]
    assert first == sorted(first)


def test_without_recorded_canaries_results_follow_those_before_and_after() -> None:
    canaries = told("..--......")
    for kept in (canaries.at, canaries.sent):
        del kept[4:8]
    del canaries.asked[4:8], canaries.said[4:8], canaries.check[4:8]  # it was drained from 40 to 80
    asker = Asker(canaries, 0.0, 10.0, None, 0.5)
    found = asked(asker, calm=False, until=85)
    assert found[:4] == [(0, GOOD), (10, GOOD), (20, MUTE), (30, MUTE)]
    between = [(at, said) for at, said in found if 30 < at < 80]
    assert [said for _, said in between] == [MUTE, MUTE, GOOD, GOOD], "the estimated recovery is halfway"
    assert found[-1] == (80, GOOD)


def test_canaries_continue_at_their_interval_without_a_recorded_trial() -> None:
    """The trial at 36 delayed the canary at 46: without the trial it comes at 40."""
    canaries = told("..----")
    canaries.sent[4], canaries.at[4] = 36.0, 36.05
    canaries.sent[5], canaries.at[5] = 46.0, 46.05
    canaries.check[4] = TRIAL
    with_it = Asker(canaries, 0.0, 10.0, None, 0.5)
    with_it.trial(36.0)
    assert [at for at, _ in asked(with_it, calm=False, until=56)] == [0, 10, 20, 30, 46]
    without = Asker(canaries, 0.0, 10.0, None, 0.5)
    sent = [at for at, said in asked(without, calm=False, until=65) if said != NOTHING]
    assert sent == [0, 10, 20, 30, 40, 50, 60]


def test_a_later_join_is_admitted_by_a_canary_of_that_time_and_probed_until_one_passes() -> None:
    canaries = told("......")
    canaries.check[0] = CHECKS.index("join")
    later = Asker(canaries, 30.0, 10.0, None, 0.5)
    question = later.following(30.0, False, True)
    assert question is not None and (question.check, question.sent) == ("join", 30.0)
    later.mark_sent()
    again = later.following(question.at, False, True)
    assert again is not None and (again.check, again.sent) == ("join", 32.0)
    at_once = Asker(canaries, 0.0, 10.0, None, 0.5).following(0.0, False, True)
    assert at_once is not None and (at_once.check, at_once.guessed) == ("join", False)


def test_a_trial_near_a_recorded_one_has_its_result() -> None:
    asker = Asker(told("..-.", trials=frozenset({2})), 0.0, 10.0, None, 0.5)
    question = asker.trial(19.5)
    assert (question.sent, question.said, question.guessed) == (20, MUTE, False)


def test_an_unrecorded_trial_has_the_result_of_the_canaries_around_it() -> None:
    for at, said in ((12.0, GOOD), (35.0, MUTE), (75.0, GOOD)):
        question = Asker(told("..-----..."), 0.0, 10.0, None, 0.5).trial(at)
        assert (question.said, question.guessed) == (said, True)


def test_between_a_failed_and_a_passed_canary_the_place_decides_a_trials_result() -> None:
    answers = told("..---....")
    assert [Asker(answers, 0.0, 10.0, None, place).trial(46.0).said for place in (0.0, 1.0)] == [GOOD, MUTE]


# --- incremental deciding -----------------------------------------------------------------------------------


def test_cached_shares_give_the_same_decisions_as_without_a_cache() -> None:
    history, shares, dice = History().start(5), Shares(), random.Random(1)
    for n in range(200):
        worker = f"w{dice.randrange(5)}"
        history.say(history.failed(worker) if dice.random() < 0.3 else history.passed(worker))
        now, fleet = history.now, history.fleet
        decided = settle(history.policy, fleet, now)
        assert settle(history.policy, fleet, now, shares=shares) == decided, n
        among = [worker, *_others_with_pending_changes(history)]
        assert settled(history.policy, fleet, now, among, shares)[0] == decided, n
        history.append(decided, through=len(history.events))
        names = sorted(history.fleet.workers)
        expected = [
            (one.joined.profile, one.carries) for one in (history.fleet.workers[name] for name in names)
        ]
        assert list(shares.of(history.fleet.workers).get("llama", [])) == expected
        assert shares.ranks("llama", history.fleet.workers) == Shares().ranks("llama", history.fleet.workers)
        if dice.random() < 0.1:  # one of them returns as another instance, or a new one joins
            history.say(history.joined(f"w{dice.randrange(8)}", f"again-{n}"))


def test_changed_workers_are_found_in_any_order_of_names() -> None:
    fleet = History().start(3).fleet.workers
    other = replace(fleet["w1"], incident="i")
    assert changed_since(fleet, fleet) == []
    assert changed_since(fleet, {**fleet, "w1": other}) == ["w1"]
    assert changed_since({}, fleet) == [*fleet]
    turned = {name: fleet[name] for name in reversed([*fleet])}
    assert changed_since(turned, {**fleet, "w1": other}) == ["w1"]
    assert changed_since({"w9": fleet["w0"], **turned}, {**fleet, "w1": other}) == ["w1"]


def _others_with_pending_changes(history: History) -> list[str]:
    """Return workers that are in doubt, or for which time alone may have made a decision due."""
    return [name for name, one in history.fleet.workers.items() if not one.fully_healthy]


# --- checks against simulated runs -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("question", ["one failure", "wait 40 s", "canary every 3 s", "silent after 2 s"])
def test_a_second_run_under_the_other_policy_lies_within_the_predictions(question: str) -> None:
    """Four faults and three figures each: twelve per seed. `python -m benchmarks what_if` counts how many of 1,200 hold."""
    values = QUESTIONS[question]
    found: list[Prediction] = predictions(0, values)
    outside = [one for one in found if not one.within(slack_s(values))]
    assert len(found) == 12
    assert len(outside) <= 1, outside
