"""The retry decision after each response."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.webhooks.retry_policy import (
    RETRY_AFTER_MAX_S,
    Answer,
    Delivered,
    ReceiverGone,
    RetryLater,
    Undeliverable,
    is_away,
    retry_after_s,
    step,
)
from controller.webhooks.settings import NotifierSettings

SETTINGS = NotifierSettings(tries_max=3, hold_s=1_000, wait_min_s=1, wait_max_s=60)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LAST, OLD = 3, 1_000.0  # the try, and the age in seconds, at which an event is given up


@pytest.mark.parametrize(
    ("status", "first", "last_try", "old"),
    [
        (200, Delivered, Delivered, Delivered),
        (202, Delivered, Delivered, Delivered),
        (204, Delivered, Delivered, Delivered),
        (301, RetryLater, RetryLater, Undeliverable),  # redirects are not followed
        (400, RetryLater, Undeliverable, RetryLater),
        (401, RetryLater, RetryLater, Undeliverable),
        (403, RetryLater, RetryLater, Undeliverable),
        (404, RetryLater, RetryLater, Undeliverable),
        (413, RetryLater, Undeliverable, RetryLater),
        (422, RetryLater, Undeliverable, RetryLater),
        (408, RetryLater, RetryLater, Undeliverable),
        (410, ReceiverGone, ReceiverGone, ReceiverGone),
        (425, RetryLater, RetryLater, Undeliverable),
        (429, RetryLater, RetryLater, Undeliverable),
        (500, RetryLater, Undeliverable, RetryLater),
        (501, RetryLater, Undeliverable, RetryLater),
        (502, RetryLater, RetryLater, Undeliverable),
        (503, RetryLater, RetryLater, Undeliverable),
        (504, RetryLater, RetryLater, Undeliverable),
        (None, RetryLater, RetryLater, Undeliverable),
    ],
)
def test_the_decision_after_a_response(status: int | None, first: type, last_try: type, old: type) -> None:
    """On the first try, on the last try of a refused event, and at the maximum age of a waiting event."""
    answer = Answer(status, "refused")
    assert isinstance(step(SETTINGS, answer, 1, 0.0, 0.5), first)
    assert isinstance(step(SETTINGS, answer, LAST, 0.0, 0.5), last_try)
    assert isinstance(step(SETTINGS, answer, 1, OLD, 0.5), old)


def test_the_reason_for_giving_up_is_reported() -> None:
    refused, away = Answer(422, "what is this"), Answer(None, "no answer within 10 s")
    assert step(SETTINGS, refused, 3, 0.0, 0.5) == Undeliverable("it answered 422, 3 times")
    assert step(SETTINGS, away, 9, OLD, 0.5) == Undeliverable(
        "no answer within 10 s; the event is older than 1000 s"
    )


def test_waits_double_up_to_the_longest_with_jitter_below() -> None:
    def wait_s(tries: int, chance: float) -> float:
        done = step(SETTINGS, Answer(503), tries, 0.0, chance)
        assert isinstance(done, RetryLater)
        return done.wait_s

    assert [wait_s(tries, 1.0) for tries in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert [wait_s(tries, 0.0) for tries in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert wait_s(10_000, 1.0) == 60


@pytest.mark.parametrize(("said", "waits"), [(0, 1), (90, 90), (1e9, 3_600)])
def test_retry_after_is_respected_up_to_a_maximum(said: float, waits: float) -> None:
    assert step(SETTINGS, Answer(429, "", said), 1, 0.0, 1.0) == RetryLater(waits)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("Thu, 01 Jan 2026 00:01:30 GMT", 90.0),
        ("Wed, 31 Dec 2025 23:59:00 GMT", 0.0),
        ("-5", None),
        ("9" * 400, None),
        ("soon", None),
        ("", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert retry_after_s({"Retry-After": header}, NOW) == seconds


@given(
    st.one_of(st.none(), st.integers(100, 599)), st.integers(1, 10_000), st.floats(0, 1), st.floats(0, 1e6)
)
def test_no_event_is_tried_for_ever(status: int | None, tries: int, chance: float, after_s: float) -> None:
    """Whatever a receiver answers, each try ends in a bounded wait or in the end, and time or tries bring the end."""
    answer = Answer(status, "", after_s)
    found = step(SETTINGS, answer, tries, 0.0, chance)
    if isinstance(found, RetryLater):
        assert 0 < found.wait_s <= RETRY_AFTER_MAX_S
        assert is_away(status) or tries < SETTINGS.tries_max
        age_s = timedelta(seconds=SETTINGS.hold_s).total_seconds()
        assert not isinstance(step(SETTINGS, answer, SETTINGS.tries_max, age_s, chance), RetryLater)


def test_an_invalid_policy_is_rejected() -> None:
    for wrong in ({"tries_max": 0}, {"wait_min_s": 0}, {"wait_min_s": 2, "wait_max_s": 1}, {"hold_s": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NotifierSettings.model_validate(wrong)
