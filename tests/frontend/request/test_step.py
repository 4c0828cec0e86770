"""The request state machine: examples of each transition, and invariants for any order of events."""

from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from json_types import Json
from msgspec import structs

from controller.frontend.errors import internal
from controller.frontend.request import effects as do
from controller.frontend.request import events as on
from controller.frontend.request.failures import KINDS, PLANNED, Failure, Suspicion
from controller.frontend.request.state import AnswerProgress, Move, OnCorruption, RequestState, RequestTerms
from controller.frontend.request.step import PAUSE_S, SUSPECT_PAUSE_S, Next, step
from controller.migration import planned_move
from controller.router.endpoints import Server

A, B, C = (Server((name, "1")) for name in "abc")
BROKE, ERRED, DRAINS = Failure("disconnected", ""), Failure("engine_error", "E"), Failure("drain", "")
SOME = AnswerProgress(accepted=3, reached=3)
NONE = AnswerProgress()


def new(**terms: Any) -> RequestState:
    return RequestState(RequestTerms(**{"prompt_tokens": 10, "max_tokens": 9, **terms}), 0.0)


def play(state: RequestState, *events: on.Event, now: float = 1.0) -> Next:
    """Return the state after these events, and the effects of the last one."""
    effects: do.Effects = ()
    for event in events:
        state, effects = step(state, event, now)
    return state, effects


def running(*events: on.Event, **terms: object) -> RequestState:
    """Return a request that runs on worker A and has a token."""
    return play(new(**terms), on.Launched(), on.Sent(A), on.FirstToken(), *events)[0]


def failed(
    state: RequestState,
    failure: Failure,
    answer: AnswerProgress = SOME,
    suspicion: Suspicion = Suspicion.NONE,
) -> Next:
    """Return the result of a failed attempt, once it is judged."""
    return play(state, on.AttemptFailed(failure, answer), on.Judged(suspicion))


def ends(effects: do.Effects) -> do.End:
    (end,) = (effect for effect in effects if isinstance(effect, do.End))
    return end


def kinds(effects: do.Effects) -> list[type]:
    return [type(effect) for effect in effects]


# --- the undisturbed course


def test_an_undisturbed_request_is_routed_once_and_finishes() -> None:
    state, effects = play(new(), on.Launched())
    assert effects == (do.SelectWorker(),)
    state, effects = play(state, on.Sent(A))
    assert (state.phase, state.spent, effects) == ("running", 1, ())
    state, effects = play(state, on.FirstToken())
    assert effects == (do.Started(first=True),)
    state, effects = play(state, on.Finished("stop"))
    assert state.phase == "done"
    assert effects == (do.Complete("stop", alone=True),)


def test_a_worker_that_does_not_know_the_end_gets_a_cancel() -> None:
    _, effects = play(running(), on.Finished("stop", cancel=True))
    assert effects[0] == do.CancelStream("complete")


# --- failures


@pytest.mark.parametrize(
    ("failures", "answer", "terms", "phase", "code"),
    [
        ([BROKE], SOME, {}, "rerouting", None),
        ([ERRED, BROKE], SOME, {}, "parked", None),  # the second in a row, by its connection
        ([BROKE, ERRED], SOME, {}, "rerouting", None),  # the second in a row, by the engine
        (
            [BROKE],
            AnswerProgress(9, 9),
            {"migration_limit": 0},
            "done",
            None,
        ),  # only the last frame is missing
        ([ERRED], SOME, {"max_seq_len": 12}, "done", "engine_error"),  # over the cap
        # the first failure is returned
        ([BROKE, ERRED], SOME, {"migration_limit": 1}, "done", "disconnected"),
    ],
)
def test_a_failure_leads_to_the_expected_phase(
    failures: list[Failure], answer: AnswerProgress, terms: Json, phase: str, code: str | None
) -> None:
    state, effects = failed(running(**terms), failures[0], answer)
    for failure in failures[1:]:
        state = play(state, on.Resumed(), on.Sent(B))[0]
        state, effects = failed(state, failure, answer)
    assert state.phase == phase
    if phase == "parked":
        assert state.not_before == 1.0 + PAUSE_S
    if phase == "done":
        error = ends(effects).error
        assert (error.code if error is not None else None) == code


def test_the_suspicion_after_a_failure_decides_where_the_request_goes() -> None:
    suspect, _ = failed(play(new(), on.Launched(), on.Sent(A))[0], BROKE, NONE, Suspicion.SUSPECT)
    assert (suspect.phase, suspect.not_before) == ("parked", 1.0 + SUSPECT_PAUSE_S)
    poisonous, effects = failed(running(), ERRED, SOME, Suspicion.POISONOUS)
    error = ends(effects).error
    assert poisonous.phase == "done" and error is not None and error.code == "request_poisonous"
    assert do.ReportAbandoned("request_poisonous") in effects


def test_the_failed_worker_is_avoided_and_one_with_a_broken_connection_is_the_last_resort() -> None:
    state = failed(running(), BROKE)[0]
    _, effects = play(state, on.Resumed())
    assert effects == (do.SelectWorker(avoid=frozenset({A.key})),)
    state = failed(running(), ERRED)[0]
    _, effects = play(state, on.Resumed())
    assert effects == (do.SelectWorker(avoid=frozenset({A.key}), fallback=frozenset({A.key})),)


def test_an_answer_that_cannot_be_continued_restarts_if_its_client_has_received_none_of_it() -> None:
    state = running(forbidden="n_over_1")
    state, effects = failed(state, BROKE, AnswerProgress(accepted=3, reached=0))
    assert do.Rewind(0) in effects and state.move is not None and state.move.tokens == 0
    state, effects = failed(running(forbidden="n_over_1"), BROKE, SOME)
    assert state.phase == "done" and do.ReportAbandoned("n_over_1") in effects


def test_a_worker_without_room_costs_nothing_and_is_not_reported() -> None:
    state = play(new(), on.Launched(), on.Sent(A))[0]
    state, effects = play(state, on.AttemptFailed(Failure("overloaded", ""), NONE, closed=True))
    assert (state.spent, state.last, state.declined) == (0, None, frozenset({A.key}))
    assert kinds(effects) == [do.TurnedAway, do.LeaveWorker, do.SelectWorker]


# --- no worker


@pytest.mark.parametrize(
    ("code", "stands_in", "phase"),
    [
        ("all_workers_busy", False, "queued"),
        ("no_routable_worker", True, "queued"),  # a suspect will serve as the last worker
        ("no_routable_worker", False, "done"),
        ("held", False, "parked"),  # it may crash workers
    ],
)
def test_a_new_request_without_a_worker(code: str, stands_in: bool, phase: str) -> None:
    assert play(new(), on.Launched(), on.NoWorkerFound(code, stands_in))[0].phase == phase


@pytest.mark.parametrize(
    ("failure", "event", "phase"),
    [
        (ERRED, on.NoWorkerFound("no_routable_worker"), "parked"),
        (ERRED, on.NoWorkerFound("all_workers_failed"), "done"),
        (ERRED, on.NoWorkerFound("all_workers_failed", stands_in=True), "parked"),
        (
            BROKE,
            on.NoWorkerFound("all_workers_failed"),
            "parked",
        ),  # a new worker may join, or that one return
        (ERRED, on.NoWorkerFound("request_poisonous"), "done"),
        (ERRED, on.NoWorkerFound("upstream_overloaded", reopens_s=60.0), "parked"),  # its client has tokens
    ],
)
def test_a_begun_request_without_a_worker(failure: Failure, event: on.NoWorkerFound, phase: str) -> None:
    state = failed(running(), failure)[0]
    assert play(state, on.Resumed(), event)[0].phase == phase


@pytest.mark.parametrize(
    ("reopens_s", "stands_in", "phase"),
    [(10.1, False, "done"), (inf, False, "done"), (9.9, False, "parked"), (inf, True, "parked")],
)
def test_before_the_first_token_closed_workers_are_waited_for_no_longer_than_others(
    reopens_s: float, stands_in: bool, phase: str
) -> None:
    state = failed(play(new(), on.Launched(), on.Sent(A))[0], ERRED, NONE)[0]
    event = on.NoWorkerFound("upstream_overloaded", stands_in, reopens_s)
    assert play(state, on.Resumed(), event)[0].phase == phase


# --- workers out of service, and tokens that may be wrong


@pytest.mark.parametrize(
    ("corrupt", "terms", "others", "leaves"),
    [
        (False, {}, {B.key}, True),
        (False, {}, set(), False),
        (False, {"max_seq_len": 12}, {B.key}, False),
        (True, {"max_seq_len": 12}, set(), True),  # wrong tokens are worse than none
    ],
)
def test_a_worker_out_of_service_is_left(
    corrupt: bool, terms: Json, others: set[tuple[str, str]], leaves: bool
) -> None:
    state, _ = play(running(**terms), on.WorkerUnhealthy(corrupt, others, SOME))
    assert (state.phase == "judging") is leaves


def test_a_request_that_every_other_worker_has_failed_stays() -> None:
    state = play(failed(running(), BROKE)[0], on.Resumed(), on.Sent(B), on.FirstToken())[0]
    assert play(state, on.WorkerUnhealthy(False, {A.key}, SOME))[0].phase == "running"


@pytest.mark.parametrize(
    ("setting", "reached", "at", "carried", "text", "action", "rewind"),
    [
        ("error", 0, A, True, False, "error", None),
        ("restart", 5, A, True, False, "error", None),
        ("restart", 4, A, True, False, "restart", 4),
        ("continue", 4, A, True, False, "restart", 4),
        ("continue", 4, A, True, True, "restart", 0),  # it is unknown where a text can be cut
        ("continue", 5, A, True, False, "continue", None),  # moved together with all others of its worker
        # now on a healthy worker, with a KV cache from the convicted one
        ("continue", 5, B, True, False, "continue", None),
        ("continue", 5, B, False, False, "continue", None),
    ],
)
def test_tokens_from_index_4_on_may_be_wrong(
    setting: OnCorruption,
    reached: int,
    at: Server,
    carried: bool,
    text: bool,
    action: str,
    rewind: int | None,
) -> None:
    state = running(on_corruption=setting)
    exposed = on.Exposed(4, A.key if at is A else C.key, carried, False, AnswerProgress(6, reached, text))
    state, effects = play(state, exposed)
    (report,) = (effect for effect in effects if isinstance(effect, do.ReportExposure))
    assert report.action == action
    assert [effect.count for effect in effects if isinstance(effect, do.Rewind)] == [rewind] * (
        rewind is not None
    )
    assert (state.phase == "done") is (action == "error")
    if action == "continue":
        computed_again = carried and at is not A
        assert state.spoilt and (state.phase == "judging") is computed_again


# --- moves


def transferring() -> RequestState:
    return play(running(), on.TransferBegun())[0]


def test_a_transfer_switches_after_the_sources_last_token() -> None:
    state, effects = play(transferring(), on.TransferAdvanced(planned_move.TargetReserved()))
    assert effects == (do.TransferStep("ship"),)
    state, effects = play(state, on.TransferAdvanced(planned_move.TargetCommitted((7, 8)), said=(7,)))
    assert effects == ()
    state, effects = play(state, on.TransferAdvanced(planned_move.SourceProgressed(), said=(7, 8)))
    assert effects == (do.TransferStep("switch"),)
    move = Move(DRAINS, DRAINS, A, 0.0, 3)
    state, effects = play(state, on.Switched(B, move))
    assert kinds(effects) == [do.CancelStream, do.NoteUnjudged, do.TransferOver]
    assert state.attempt is not None and (state.attempt.server, state.attempt.paid, state.spent) == (
        B,
        False,
        1,
    )


def test_a_source_that_fails_mid_transfer_cancels_the_target() -> None:
    state = play(transferring(), on.TransferAdvanced(planned_move.TargetReserved()))[0]
    state, effects = failed(state, BROKE)
    assert do.TransferStep("cancel") in effects and state.transfer is None
    assert state.move is not None and state.move.refused == "its source failed meanwhile"


def test_a_preempted_request_continues_at_the_same_position() -> None:
    move = Move(Failure("preempted", ""), Failure("preempted", ""), A, 1.0, 3)
    state, effects = play(running(), on.MovedOnPurpose(move, None))
    assert state.phase == "preempted" and kinds(effects) == [do.CancelStream, do.NoteUnjudged, do.LeaveWorker]
    state, effects = play(state, on.Resumed(B.key), now=4.0)
    assert (state.put_off_s, state.free, effects) == (3.0, True, (do.SelectWorker(planned=B.key),))


# --- time and the client


def test_a_parked_request_is_woken_after_its_pause_and_given_up_at_its_limit() -> None:
    state = failed(play(failed(running(reroute_s=5.0), ERRED)[0], on.Resumed(), on.Sent(B))[0], BROKE)[0]
    assert play(state, on.Woken())[0].phase == "parked"
    assert play(state, on.Woken(), now=1.0 + PAUSE_S)[1] == (do.Reroute(),)
    assert play(state, on.Tick(), now=6.0)[0].phase == "parked"
    _, effects = play(state, on.Tick(), now=6.1)
    error = ends(effects).error
    assert error is not None and error.code == "engine_error" and do.ReportAbandoned("no_worker") in effects


def test_a_request_without_a_first_token_in_time_ends() -> None:
    state = play(new(first_token_s=2.0), on.Launched(), on.Sent(A))[0]
    assert play(state, on.Tick(latency=2.0), now=4.0)[0].phase == "running"
    _, effects = play(state, on.Tick(latency=2.0), now=4.1)
    error = ends(effects).error
    assert error is not None and error.code == "first_token_timeout" and do.CancelStream() in effects
    assert play(running(first_token_s=2.0), on.Tick(), now=99.0)[0].phase == "running"


PHASES: dict[str, RequestState] = {
    "new": new(),
    "running": running(),
    "queued": play(new(), on.Launched(), on.NoWorkerFound("all_workers_busy"))[0],
    "rerouting": failed(running(), BROKE)[0],
    "parked": play(new(), on.Launched(), on.NoWorkerFound("held"))[0],
    "preempted": play(running(), on.MovedOnPurpose(Move(DRAINS, DRAINS, A, 0.0, 3), None))[0],
    "transfer": transferring(),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_ends_any_phase(phase: str) -> None:
    state, effects = play(PHASES[phase], on.ClientGone())
    assert state.phase == "done" and ends(effects).finish == "cancelled"
    assert (do.LeaveWorker() in effects) is (phase in ("running", "transfer"))
    assert (do.TransferStep("cancel") in effects) is (phase == "transfer")


# --- any order of events

servers = st.sampled_from([A, B, C])
failures = st.sampled_from([*KINDS, *PLANNED]).map(lambda reason: Failure(reason, ""))
answers = st.builds(AnswerProgress, st.integers(0, 9), st.integers(0, 9), st.booleans())
planned = st.sampled_from([*PLANNED]).map(lambda reason: Failure(reason, ""))
moves = st.builds(Move, planned, planned, servers, st.just(0.0), st.integers(0, 9))
anything = st.one_of(
    st.just(on.FirstToken()),
    st.builds(on.Finished, st.sampled_from(["stop", "length"]), st.booleans()),
    st.builds(on.RequestRejected, st.just(internal())),
    st.builds(on.AttemptFailed, failures, answers, st.booleans()),
    st.builds(on.WorkerUnhealthy, st.booleans(), st.sets(servers.map(lambda s: s.key)), answers),
    st.builds(on.Exposed, st.integers(0, 9), servers.map(lambda s: s.key), st.booleans(), st.booleans(), answers),
    st.builds(on.MovedOnPurpose, moves, st.none() | servers.map(lambda s: s.key)),
    st.just(on.TransferBegun()),
    st.builds(
        on.TransferAdvanced,
        st.sampled_from([planned_move.TargetReserved(), planned_move.Lost(""), planned_move.GivenUp("")]),
    ),
    st.just(on.Resumed()), st.just(on.Woken()), st.just(on.Tick()), st.just(on.ClientGone()),
)  # fmt: skip
found_none = st.sampled_from(["held", "all_workers_busy", "all_workers_failed", "no_routable_worker"])
replies = st.one_of(
    st.builds(on.Sent, servers),
    st.builds(on.ConnectFailed, servers.map(lambda s: s.key)),
    st.builds(on.NoWorkerFound, found_none, st.booleans()),
)
ATTACHED = {on.FirstToken, on.Finished, on.AttemptFailed, on.TransferBegun}  # these need an attempt


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.lists(anything, max_size=25), st.data(), st.integers(0, 3))
def test_in_any_order_of_events_each_attempt_is_left_once_and_the_request_ends_once(
    events: list[on.Event], data: st.DataObject, limit: int
) -> None:
    """Check the invariants of `RequestState` after each step. Events that the driver would not feed are left out."""
    state, now, over, attached = new(migration_limit=limit, first_token_s=500.0), 0.0, 0, 0
    for event in [on.Launched(), *events]:
        if type(event) in ATTACHED and state.attempt is None:
            continue
        if isinstance(event, on.Exposed) and not state.begun:
            continue
        if isinstance(event, on.TransferBegun) and (state.transfer is not None or not state.has_output):
            continue
        if isinstance(event, on.MovedOnPurpose) and (state.attempt is None or state.transfer is not None):
            continue
        following: on.Event | None = event
        while following is not None:
            now += 1.0
            state, effects = step(state, following, now)
            following = None
            for effect in effects:
                match effect:
                    case do.SelectWorker(avoid=avoid, fallback=fallback):
                        assert state.failed <= avoid and state.failed <= fallback, (
                            "it has failed there for good"
                        )
                        following = data.draw(replies)
                        attached += isinstance(following, on.Sent)
                        if isinstance(following, on.Sent) and not state.free and not state.missed:
                            # A request with an unreachable planned target has already left its source: it is sent on.
                            assert state.spent <= limit, "the budget is not exceeded"
                    case do.Judge():
                        following = on.Judged(data.draw(st.sampled_from(Suspicion)))
                    case do.LeaveWorker():
                        attached -= 1
                    case do.Complete():
                        attached, over = attached - 1, over + 1
                    case do.End() | do.Refuse():
                        over += 1
        assert state.phase not in ("routing", "judging"), "these phases are transient"
        assert (state.attempt is not None) == (state.phase == "running") == bool(attached)
        assert state.attempt is None or state.last is state.attempt
        assert state.transfer is None or state.phase == "running"
        assert over == (state.phase == "done")
        assert state.tried >= state.failed and state.failing is None
        assert state.disturbed or (state.move, state.outage, state.tried) == (None, None, frozenset())
    state, effects = play(state, on.ClientGone())
    assert over + sum(isinstance(effect, do.End) for effect in effects) == 1
    assert play(structs.replace(state), on.Launched(), on.Sent(A))[0] == state, "a done request stays done"
