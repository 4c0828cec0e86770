"""How the random walk derives from the journal when no worker could serve, to judge errors."""

from collections.abc import Sequence
from typing import Any

from fleet_history import EPOCH, History

from benchmarks.failures.walk import CONNECTS_S, Spans, able, without, without_worker
from events.fact import Recorded
from events.observations import ChaosInjected, RequestFailed, ShutdownBegan, WorkerLeft

END = EPOCH.timestamp() + 1000


def gaps(events: Sequence[Recorded], since: int) -> Spans:
    """Return when no worker could serve, in seconds since the `since`-th event."""
    begin = events[since - 1].at.timestamp()
    return [(round(a - begin, 3), round(b - begin, 3)) for a, b in without_worker(able(events), begin, END)]


def broken(worker: str, fault: str, duration_s: float | None = None, detail: str = "") -> ChaosInjected:
    about: dict[str, Any] = {"worker": worker, "instance": f"{worker}-a", "fault": fault, "detail": detail}
    return ChaosInjected(**about, duration_s=duration_s)


def test_gaps_are_cut_out_of_spans() -> None:
    assert without([(0, 10), (20, 30)], [(2, 3), (9, 22), (40, 50)]) == [(0, 2), (3, 9), (22, 30)]
    assert without([(0, 10)], [(0, 10)]) == []


def test_the_fleet_can_serve_while_one_worker_can() -> None:
    history = History().start(2)
    count = len(history.events)
    assert without_worker(able(history.events[:2]), 0, 1) == [(0, 1)], (
        "they have joined, and passed no canary"
    )
    assert gaps(history.events, count) == []
    history.say(broken("w0", "kill"))
    assert gaps(history.events, count) == []
    history.say(broken("w1", "blackhole", 3.0), broken("w1", "slow", 90.0))
    assert gaps(history.events, count) == [(2.0, 5.0 + CONNECTS_S)]


def test_a_worker_that_is_killed_cannot_serve_before_its_successor_has_passed_a_canary() -> None:
    history = History().start(1)
    count = len(history.events)
    history.say(broken("w0", "kill"))
    history.say(WorkerLeft(worker="w0", instance="w0-a", mode="immediate", exit=137))
    history.decide()
    history.say(history.joined("w0", "w0-b"), history.passed("w0", "w0-b", check="join"))
    history.decide()
    assert gaps(history.events, count) == [(1.0, 4.0)]


def test_a_worker_that_has_failed_its_requests_can_serve_and_one_that_shuts_down_cannot() -> None:
    history = History().start(1)
    count = len(history.events)
    history.say(broken("w0", "error", 60.0, "argument=2"))
    for failures in (1, 2):
        about = {"frontend": "f", "worker": "w0", "instance": "w0-a", "reason": "engine_error"}
        history.say(RequestFailed(**about, routed_under=0, failures_in_a_row=failures))
    assert gaps(history.events, count) == [(1.0, 3.0)]
    history.say(ShutdownBegan(worker="w0", instance="w0-a", mode="graceful"))
    assert gaps(history.events, count) == [(1.0, 3.0), (4.0, END - history.events[count - 1].at.timestamp())]
