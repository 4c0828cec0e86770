"""What becomes of an answer that has lost its worker: examples of each way out, and what must hold for any values."""

from math import inf

import pytest
from frontend_kit import joined
from hypothesis import given
from hypothesis import strategies as st
from scripted_worker import ScriptedWorker

from controller.frontend.generations.migration_policy import (
    PAUSE_S,
    Abandon,
    Finish,
    GoOn,
    LineUp,
    Park,
    Refuse,
    after_failure,
    leaves_unhealthy,
    why_not_carried,
    without_worker,
)
from controller.frontend.request.failures import KINDS, PLANNED, Failure
from controller.frontend.request.generation_request import Move
from controller.router.endpoints import Endpoint
from controller.router.selection.filter import AllClosed, AllTried

BROKE, ERRED, DRAINS = Failure("disconnected", ""), Failure("engine_error", "E"), Failure("drain", "")
failures = st.sampled_from([*KINDS, *PLANNED]).map(lambda reason: Failure(reason, ""))


@pytest.mark.parametrize(
    ("failure", "replaced", "missing", "refusal", "expected"),
    [
        (BROKE, None, 7, "", GoOn(BROKE)),
        (BROKE, ERRED, 7, "", Park(ERRED, PAUSE_S)),  # the second in a row, by its connection
        (ERRED, BROKE, 7, "", GoOn(BROKE)),  # the second in a row, by the engine
        (BROKE, DRAINS, 7, "", GoOn(BROKE)),  # the attempt before was left on purpose
        (BROKE, None, 0, "budget_exhausted", Finish("length")),  # only the last word is missing
        (ERRED, None, 7, "over_cap", Abandon("over_cap", ERRED)),
        (ERRED, BROKE, 7, "budget_exhausted", Abandon("budget_exhausted", BROKE)),  # the first is told
    ],
)
def test_a_failure_leads_to(
    failure: Failure, replaced: Failure | None, missing: int, refusal: str, expected: object
) -> None:
    assert after_failure(failure, replaced=replaced, missing_tokens=missing, refusal=refusal) == expected


@given(failures, st.none() | failures, st.integers(-1, 5), st.sampled_from(["", "over_cap", "n_over_1"]))
def test_nobody_is_asked_against_the_budget_and_nothing_complete_is_given_up(
    failure: Failure, replaced: Failure | None, missing: int, refusal: str
) -> None:
    decision = after_failure(failure, replaced=replaced, missing_tokens=missing, refusal=refusal)
    match decision:
        case Finish():
            assert missing <= 0
        case Abandon(reason, told):
            assert missing > 0 and reason == refusal != "" and told in (failure, replaced)
        case Park(told) | GoOn(told):
            assert missing > 0 and not refusal and told in (failure, replaced)


def move(failure: Failure, original: Failure = ERRED) -> Move:
    return Move(failure, original, Endpoint(joined(ScriptedWorker())), 0.0, 3)


@pytest.mark.parametrize(
    ("code", "under_way", "may_return", "expected"),
    [
        ("no_routable_worker", None, True, Refuse()),
        ("no_routable_worker", move(ERRED), False, Park(ERRED)),
        (AllTried.code, move(ERRED), False, Abandon(AllTried.code, ERRED)),
        (AllTried.code, move(ERRED), True, Park(ERRED)),
        (AllTried.code, move(BROKE), False, Park(ERRED)),  # a new one may join
    ],
)
def test_where_nobody_can_take_it(
    code: str, under_way: Move | None, may_return: bool, expected: object
) -> None:
    assert without_worker(code, under_way, may_return=may_return) == expected


def test_where_a_suspect_stands_in_a_request_waits_for_it() -> None:
    assert without_worker("no_routable_worker", None, may_return=False, stands_in=True) == LineUp()
    assert without_worker(AllTried.code, move(ERRED), may_return=False, stands_in=True) == Park(ERRED)


@pytest.mark.parametrize(
    ("begun", "stands_in", "reopens_s", "expected"),
    [
        (False, False, 10.1, Refuse()),  # the client can wait better than the frontend
        (False, False, inf, Refuse()),  # each has declined it
        (False, False, 9.9, Park(ERRED)),
        (False, True, inf, Park(ERRED)),
        (True, False, 60.0, Park(ERRED)),  # its client has tokens: only another worker makes the rest
    ],
)
@pytest.mark.parametrize("failure", [ERRED, BROKE, DRAINS])
@pytest.mark.parametrize("may_return", [False, True])
def test_where_all_that_are_left_are_closed(
    failure: Failure, may_return: bool, begun: bool, stands_in: bool, reopens_s: float, expected: object
) -> None:
    """A worker that may come back does not count: it may be gone for good, and the closed ones say when."""
    decision = without_worker(
        AllClosed.code,
        move(failure),
        may_return=may_return,
        stands_in=stands_in,
        begun=begun,
        reopens_s=reopens_s,
        patience_s=10.0,
    )
    assert decision == expected


A, B = ("a", "1"), ("b", "1")


@pytest.mark.parametrize(
    ("corrupt", "refusal", "others", "tried", "leaves"),
    [
        (False, "", {A}, set(), True),
        (False, "", {A}, {A}, False),  # whoever could take it has failed it already
        (False, "", set(), set(), False),
        (False, "over_cap", {A}, set(), False),
        (True, "over_cap", set(), {A, B}, True),  # wrong tokens are worse than none
    ],
)
def test_a_worker_out_of_service_is_left(
    corrupt: bool, refusal: str, others: set[tuple[str, str]], tried: set[tuple[str, str]], leaves: bool
) -> None:
    assert leaves_unhealthy(corrupt=corrupt, refusal=refusal, others=others, tried=tried) is leaves


def test_why_a_kv_cache_did_not_come_along() -> None:
    assert why_not_carried(BROKE, "no room", under_way=True) == "its source failed meanwhile"
    assert why_not_carried(Failure("engine_shutdown", ""), "no room", under_way=False) == "no room"
    assert why_not_carried(BROKE, "no room", under_way=False) == ""  # that was wanted of a worker that lived
