"""What becomes of an answer that a corrupt worker has fed: each setting, and what must hold for any values."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.frontend.generations.corruption_policy import (
    ComputeAgain,
    EndInError,
    Keep,
    StartOver,
    respond,
)
from controller.frontend.settings import OnCorruption


@pytest.mark.parametrize(
    ("setting", "seen", "on_source", "carried", "text", "expected"),
    [
        ("error", 0, True, True, False, EndInError()),
        ("restart", 5, True, True, False, EndInError()),
        ("restart", 4, True, True, False, StartOver(4)),
        ("continue", 4, True, True, False, StartOver(4)),
        ("continue", 4, True, True, True, StartOver(0)),  # where a text can be cut is not known
        ("continue", 5, True, True, False, Keep()),  # moved with all others of its worker
        ("continue", 5, False, True, False, ComputeAgain()),  # well where it is, with a KV cache from there
        ("continue", 5, False, False, False, Keep()),
    ],
)
def test_tokens_from_index_4_on_may_be_wrong(
    setting: OnCorruption, seen: int, on_source: bool, carried: bool, text: bool, expected: object
) -> None:
    response = respond(setting, first=4, seen=seen, on_source=on_source, carried=carried, text=text)
    assert response == expected


@given(
    st.sampled_from(get_args(OnCorruption)), st.integers(0, 9), st.integers(0, 9), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_nothing_that_was_seen_is_taken_back_and_nothing_wrong_is_kept_unseen(
    setting: OnCorruption, first: int, seen: int, on_source: bool, carried: bool, text: bool
) -> None:
    response = respond(setting, first=first, seen=seen, on_source=on_source, carried=carried, text=text)
    if isinstance(response, StartOver):
        assert seen <= first and response.keep in (0, first)
    else:
        assert seen > first or setting == "error"
