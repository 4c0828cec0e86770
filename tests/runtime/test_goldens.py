"""The comparison of canary answers with goldens, and its tolerance."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from controller.runtime.canary.goldens import (
    POOL,
    Calibration,
    Canary,
    CanaryAnswer,
    ExpectedAnswer,
    compare,
    configured,
    distance,
    extended,
    pool,
    rank,
    read,
)
from controller.runtime.settings import CanarySettings, ConfiguredCanary
from events.wire import Chunk, Logprob

TOP = ((5, -0.1), (6, -2.5), (7, -3.0))


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_the_seeds_three_prompts_come_first() -> None:
    assert list(POOL.values())[:3] == [
        "The capital of France is",
        "2 + 2 = ",
        "The first five prime numbers are 2, 3, 5,",
    ]


@pytest.mark.parametrize("encode", [words, str.encode, lambda text: [1, *words(text)]])
def test_prompts_are_at_least_as_long_as_asked_in_the_models_own_tokens(encode) -> None:  # type: ignore[no-untyped-def]
    canaries = pool(encode, tokens=32, prompt_tokens_min=32)
    assert all(len(canary.prompt) >= 32 for canary in canaries)
    assert len({canary.prompt for canary in canaries}) == len(POOL)


def test_extending_a_prompt_keeps_the_question_at_its_end() -> None:
    text = extended("2 + 2 = ", words, 32)
    assert text.endswith("2 + 2 = ")
    assert extended(text, words, 32) == text


def test_extending_gives_up_on_a_tokenizer_that_yields_nothing() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        extended("x", lambda text: [], 32)


def test_b15_candidates_with_the_largest_margin_at_each_step_come_first() -> None:
    sure = CanaryAnswer((1, 2), (((1, -0.1), (9, -5.0)), ((2, -0.1), (9, -4.0))))
    unsure = CanaryAnswer((1, 2), (((1, -0.1), (9, -9.0)), ((2, -0.7), (9, -0.71))))
    short = CanaryAnswer((1,), (((1, 0.0), (9, -50.0)),))
    broken = CanaryAnswer((1, 2), (), finite=False)
    answers = {"unsure": unsure, "short": short, "sure": sure, "broken": broken, "mute": CanaryAnswer(())}
    assert rank(answers, tokens=2) == ("sure", "unsure", "short")


def test_equal_answers_do_not_differ() -> None:
    found = compare(CanaryAnswer((5,), (TOP,)), tokens=(5,), top_k=(TOP,), tolerance=1e-3)
    assert (found.reason, found.distance) == (None, 0.0)


def test_tokens_must_be_equal() -> None:
    for tokens in ((5, 6), (), (5, 7, 8), (9, 7)):
        assert (
            compare(CanaryAnswer(tokens), tokens=(5, 7), top_k=(), tolerance=1e-3).reason == "token_mismatch"
        )


def test_b14_logprobs_are_compared_within_a_tolerance() -> None:
    shifted = ((5, -0.1005), (6, -2.5), (7, -3.0))
    golden: dict[str, Any] = {"tokens": (5,), "top_k": (TOP,)}
    assert compare(CanaryAnswer((5,), (shifted,)), tolerance=1e-3, **golden).reason is None
    drifted = compare(CanaryAnswer((5,), (shifted,)), tolerance=1e-4, **golden)
    assert drifted.reason == "logit_drift"
    assert drifted.distance == pytest.approx(5e-4)


def test_b14_tolerance_zero_means_exact_tokens_only() -> None:
    far = ((5, -9.0), (6, -9.5))
    assert compare(CanaryAnswer((5,), (far,)), tokens=(5,), top_k=(TOP,), tolerance=0.0).reason is None


def test_what_is_missing_from_a_top_k_was_below_its_last_entry() -> None:
    swapped = ((5, -0.1), (6, -2.5), (8, -3.0))  # two tied candidates for the third place
    assert distance((TOP,), (swapped,), positions=1) == 0.0
    gone = ((5, -0.1), (8, -2.9), (9, -3.4))  # 6 was at -2.5 and is now below -3.4
    assert distance((TOP,), (gone,), positions=1) == pytest.approx(0.9)


def test_positions_beyond_the_first_wrong_token_are_not_compared() -> None:
    other = ((5, -9.0),)
    assert distance((TOP, TOP, TOP), (TOP, TOP, other), positions=1) == 0.0
    assert distance((), (TOP,), positions=1) is None


def test_an_answer_without_the_logprobs_of_its_golden_drifts() -> None:
    assert compare(CanaryAnswer((5,)), tokens=(5,), top_k=(TOP,), tolerance=1e-3).reason == "logit_drift"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_anything_that_is_not_finite_is_its_own_reason(bad: float) -> None:
    chosen = read([Chunk(0, [5], logprobs=[Logprob(bad, [(5, -0.1)])])])
    listed = read([Chunk(0, [5], logprobs=[Logprob(-0.1, [(5, -0.1), (6, bad)])])])
    for answer in (chosen, listed):
        assert compare(answer, tokens=(5,), top_k=(), tolerance=0.0).reason == "non_finite"


def test_chunks_are_read_as_one_answer() -> None:
    chunks = [
        Chunk(0, [1, 2], logprobs=[Logprob(-0.1, [(1, -0.1)]), Logprob(-0.2, [(2, -0.2)])]),
        Chunk(0, [3]),
    ]
    assert read(chunks) == CanaryAnswer((1, 2, 3), (((1, -0.1),), ((2, -0.2),)))
    assert read([Chunk(0, [], text="hé"), Chunk(0, [], text="!")]).tokens == tuple("hé!".encode())


# --- tolerance --------------------------------------------------------------------------------------------


def calibration(**more: float) -> Calibration:
    return Calibration(CanarySettings(**more))


def test_the_tolerance_is_the_largest_of_thirty_healthy_samples_with_a_margin() -> None:
    made = calibration()
    for n in range(29):
        made.add(0.001 * (n % 5))
    assert made.tolerance == 0.1
    made.add(0.01)
    assert made.tolerance == pytest.approx(0.03)


def test_a_worker_that_drifts_from_its_start_does_not_widen_the_tolerance() -> None:
    made = calibration()
    for n in range(40):
        made.add(0.0001 * (n % 3), "w1")
        made.add(0.0, "w2")
        made.add(0.05, "drifting")
    assert made.tolerance == 1e-3
    for _ in range(40):
        made.add(0.04, "w4")
        made.add(0.045, "w5")
    assert made.tolerance == pytest.approx(0.15)  # three of five: that is this engine's noise
    for name in ("drifting", "w4", "w5"):
        made.forget(name)
    assert made.tolerance == 1e-3


def test_old_samples_of_a_worker_are_dropped() -> None:
    made = calibration()
    for far in (*[0.02] * 100, *[0.01] * 99):
        made.add(far, "w1")
    assert made.tolerance == pytest.approx(0.06)
    made.add(0.01, "w1")
    assert made.tolerance == pytest.approx(0.03)


def test_with_two_workers_the_one_that_is_off_cannot_be_determined() -> None:
    made = calibration()
    for _ in range(20):
        made.add(0.0, "w1")
        made.add(0.02, "w2")
    assert made.tolerance == pytest.approx(0.06)


def test_the_tolerance_has_a_floor() -> None:
    made = calibration()
    for _ in range(30):
        made.add(0.0)
    made.add(math.nan)
    assert made.tolerance == 1e-3


def test_a_fixed_tolerance_is_not_calibrated() -> None:
    for fixed in (0.0, 0.5):
        made = calibration(tolerance=fixed)
        for _ in range(40):
            made.add(2.0)
        assert made.tolerance == fixed


@pytest.mark.slow
def test_calibrated_noise_gives_no_false_alarm_in_ten_thousand_probes() -> None:
    draw = random.Random(7)
    made = calibration()

    def noisy() -> CanaryAnswer:
        top = tuple((token, value + draw.uniform(-9e-5, 9e-5)) for token, value in TOP)
        return CanaryAnswer((5,) * 32, (top,) * 32)

    alarms = 0
    for _ in range(10_000):
        found = compare(noisy(), tokens=(5,) * 32, top_k=(TOP,) * 32, tolerance=made.tolerance)
        alarms += found.reason is not None
        made.add(found.distance or 0.0)
    assert alarms == 0
    assert made.tolerance == 1e-3


# --- the seed's configured form ---------------------------------------------------------------------------

SEED = {
    "prompt": "The capital of France is",
    "expected_tokens": [3681],
    "max_tokens": 1,
    "temperature": 0.0,
    "check_logits": True,
    "expected_top_logit_range": (-0.5, 0.0),  # the seed's is of raw logits, which no engine reports (B14)
}


def test_the_seeds_configured_form_is_accepted() -> None:
    (canary,) = configured([ConfiguredCanary.model_validate(SEED)], "llama", words)
    assert canary.expected == (3681,)
    assert canary.prompt == tuple(words("The capital of France is"))
    assert canary.top_logit_range == (-0.5, 0.0)
    plain = {
        "prompt": "2 + 2 = ",
        "expected_tokens": [1, 2],
        "max_tokens": 2,
        "temperature": 0.0,
        "check_logits": False,
    }
    assert configured([ConfiguredCanary.model_validate(plain)], "llama", words)[0].top_logit_range is None


def test_the_best_value_of_the_first_position_is_checked_against_its_range() -> None:
    def reason(best: float) -> str | None:
        answer = CanaryAnswer((1,), (((1, best), (2, -9.0)),))
        return compare(answer, tokens=(1,), top_k=(), tolerance=0.0, top_logit_range=(-0.5, 0.0)).reason

    assert (reason(-0.1), reason(-0.6), reason(0.1)) == (None, "logit_drift", "logit_drift")
    silent = compare(CanaryAnswer((1,)), tokens=(1,), top_k=(), tolerance=0.0, top_logit_range=(-0.5, 0.0))
    assert silent.reason is None, "missing logprobs are no fault"


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.7},
        {"expected_tokens": []},
        {"expected_tokens": [1, 2]},
        {"expected_tokens": [-1]},
        {"prompt": ""},
        {"max_tokens": 0},
        {"expected_top_logit_range": (0.0, -0.5)},
        {"expected_top_logit_range": (15.0, 25.0)},
        {"expected_top_logit_range": None},
        {"unknown": 1},
    ],
)
def test_an_inconsistent_configured_canary_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ConfiguredCanary.model_validate({**SEED, **change})


def test_a_configured_canary_can_be_for_one_model_only() -> None:
    canary = ConfiguredCanary.model_validate({**SEED, "model": "llama", "name": "paris"})
    assert configured([canary], "qwen", words) == ()
    assert configured([canary], "llama", words)[0].id.startswith("paris-")
    changed = canary.model_copy(update={"expected_tokens": (1,)})
    assert configured([changed], "llama", words)[0].id != configured([canary], "llama", words)[0].id


def test_only_a_configured_canary_has_its_own_answer() -> None:
    assert not Canary("x", (1,), 4).configured


# --- properties -------------------------------------------------------------------------------------------

VALUES = st.floats(-30, 0)
TOPS = st.lists(st.tuples(st.integers(0, 50), VALUES), min_size=1, max_size=6, unique_by=lambda e: e[0]).map(
    lambda entries: tuple(sorted(entries, key=lambda e: -e[1]))
)
ANSWERS = st.lists(st.tuples(st.integers(0, 50), TOPS), min_size=1, max_size=8).map(
    lambda rows: CanaryAnswer(tuple(t for t, _ in rows), tuple(top for _, top in rows))
)


@given(ANSWERS)
def test_an_answer_never_differs_from_itself(answer: CanaryAnswer) -> None:
    found = compare(answer, tokens=answer.tokens, top_k=answer.top_k, tolerance=1e-3)
    assert (found.reason, found.distance) == (None, 0.0)


@given(ANSWERS, ANSWERS)
def test_the_distance_is_symmetric_and_wrong_tokens_are_never_overlooked(
    one: CanaryAnswer, other: CanaryAnswer
) -> None:
    forth = distance(one.top_k, other.top_k, positions=8)
    assert forth == distance(other.top_k, one.top_k, positions=8)
    assert forth is not None and forth >= 0
    found = compare(other, tokens=one.tokens, top_k=one.top_k, tolerance=100.0)
    assert (found.reason == "token_mismatch") == (one.tokens != other.tokens)


@given(ANSWERS, st.integers(0, 7), st.floats(0.01, 5))
def test_one_shifted_logprob_is_found_wherever_it_is(answer: CanaryAnswer, place: int, shift: float) -> None:
    place %= len(answer.tokens)
    (token, value), *rest = answer.top_k[place]
    moved = ((token, value + shift), *rest)
    top_k = (*answer.top_k[:place], moved, *answer.top_k[place + 1 :])
    found = compare(
        CanaryAnswer(answer.tokens, top_k), tokens=answer.tokens, top_k=answer.top_k, tolerance=shift / 2
    )
    assert found.reason == "logit_drift"
    assert found.distance == pytest.approx(shift)


@pytest.mark.slow
@given(ANSWERS, ANSWERS, st.integers(0, 8), st.sampled_from((0.0, 1.0, 20.0)))
def test_an_answer_is_cut_at_the_first_wrong_token_with_the_same_reason(
    right: CanaryAnswer, other: CanaryAnswer, alike: int, tolerance: float
) -> None:
    said = CanaryAnswer(right.tokens[:alike] + other.tokens, right.top_k[:alike] + other.top_k)
    whole = compare(said, tokens=right.tokens, top_k=right.top_k, tolerance=tolerance)
    expected = ExpectedAnswer(right.tokens, right.top_k, tolerance)
    rows = list(zip(said.tokens, said.top_k, strict=True))
    heard = next(
        (n + 1 for n, (token, top) in enumerate(rows) if expected.departs(chunk_of(token, top))), len(rows)
    )
    cut = CanaryAnswer(said.tokens[:heard], said.top_k[:heard], cut=heard < len(rows))
    found = compare(cut, tokens=right.tokens, top_k=right.top_k, tolerance=tolerance)
    assert (found.reason is None) == (whole.reason is None)
    assert heard <= alike + len(other.tokens)
    if cut.cut and cut.tokens == right.tokens[:heard]:
        assert found.reason == "logit_drift" and (found.distance or 0) > tolerance


def chunk_of(token: int, top: tuple[tuple[int, float], ...]) -> Chunk:
    return Chunk(0, [token], logprobs=[Logprob(top[0][1], list(top))])
