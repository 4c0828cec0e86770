"""Changes between two pictures, applied to the first, give the second."""

from itertools import pairwise
from typing import Any

import pytest
from console_kit import applied
from hypothesis import given
from hypothesis import strategies as st

from controller.console.rows import changes

ROWS = st.dictionaries(st.sampled_from(["w0", "w1", "w2", "w3"]), st.integers(0, 3), max_size=4)
SECTIONS = st.fixed_dictionaries({"workers": ROWS, "events": ROWS, "head": ROWS})


@given(SECTIONS, SECTIONS)
def test_changes_applied_to_one_picture_give_the_other(before: Any, after: Any) -> None:
    assert applied(before, changes(before, after)) == after


@given(st.lists(SECTIONS, min_size=2, max_size=6))
def test_applying_all_changes_gives_the_last_picture(pictures: list[Any]) -> None:
    page = pictures[0]
    for before, after in pairwise(pictures):
        page = applied(page, changes(before, after))
    assert page == pictures[-1]


@pytest.mark.slow
@given(SECTIONS, SECTIONS)
def test_changes_contain_no_unchanged_rows(before: Any, after: Any) -> None:
    new = changes(before, after)
    assert all(rows for rows in new.values())
    assert all(before[section].get(key) != row for section, rows in new.items() for key, row in rows.items())


def test_only_the_changed_rows_of_a_thousand_are_sent() -> None:
    rows = {f"w{n}": n for n in range(1000)}
    moved = {**rows, "w7": -1}
    del moved["w8"]
    assert changes({"workers": rows}, {"workers": moved}) == {"workers": {"w7": -1, "w8": None}}
