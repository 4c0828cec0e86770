"""Every row of the health table, and every "changes nothing": the full product of states and facts.

The expectations are independent of the code: they are written from the specification.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from fleet_story import (
    START,
    Story,
    awaited,
    device_faulted,
    device_limited,
    device_recovered,
    disputed,
    drain_requested,
    drained,
    engine_faulted,
    failed,
    heard,
    joined,
    left,
    passed,
    poisonous,
    proposed,
    request_failed,
    resume,
    served,
    shutdown,
    silent,
    slow,
    slow_cleared,
    suspected,
)

from events.codec import KINDS
from events.decisions import HealthStatus
from events.fact import Fact
from events.observations import (
    AdaptersChanged,
    BreakerMove,
    ChaosInjected,
    ExposureUnknown,
    FrontendBreakersMoved,
    GoldenRequested,
    MoveRequested,
    ObserverBlind,
    PanicBegan,
    RequestAbandoned,
    RestartRequested,
    TokensUnlikely,
    WorkerLingered,
    WorkerObservation,
)

H, S, U, DR, DEAD = HealthStatus
LIMIT = 0.3  # the weight that a device allows

Arrange = Callable[[Story], Any]


def joining(story: Story) -> None:
    story.tell(joined("w0"))


def joining_failed_twice(story: Story) -> None:
    story.tell(joined("w0"))
    story.tell(failed("w0"))
    story.tell(failed("w0"))


def joining_carried(story: Story) -> None:
    """A new life of a worker that was convicted of wrong answers."""
    corrupt(story)
    story.tell(joined("w0", "i1x"))


def healthy(story: Story) -> None:
    story.up("w0")


def ramping(story: Story) -> None:
    """HEALTHY at 0.25, just back from UNHEALTHY."""
    doubted(story)
    story.wait(60)
    story.tell(passed("w0"))


def ramping_half(story: Story) -> None:
    ramping(story)
    story.tell(passed("w0"))


def suspicious(story: Story) -> None:
    healthy(story)
    story.tell(failed("w0"))


def suspicious_twice(story: Story) -> None:
    suspicious(story)
    story.tell(failed("w0"))


def suspected_slow(story: Story) -> None:
    healthy(story)
    for _ in range(3):
        story.tell(slow("w0"))


def suspected_slow_quick_twice(story: Story) -> None:
    suspected_slow(story)
    story.tell(passed("w0"))
    story.tell(passed("w0"))


def slow_on_the_ramp(story: Story) -> None:
    """Suspected of slowness at 0.25: a failure still counts as a failure during the ramp."""
    ramping(story)
    story.tell(slow("w0"), slow("w0"), slow("w0"))


def doubted(story: Story) -> None:
    """UNHEALTHY by three failed canaries; the budget of one worker keeps it in service."""
    suspicious_twice(story)
    story.tell(failed("w0"))


def trial_due(story: Story) -> None:
    doubted(story)
    story.wait(60)


def trial_due_corrupt(story: Story) -> None:
    corrupt(story)
    story.wait(60)


def corrupt(story: Story) -> None:
    healthy(story)
    story.tell(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"))


def silent_worker(story: Story) -> None:
    healthy(story)
    story.tell(silent("w0"))


def heard_again(story: Story) -> None:
    """UNHEALTHY after a silence that is over; its trial has begun."""
    silent_worker(story)
    story.tell(heard("w0"))


def given_up(story: Story) -> None:
    """DRAINING after five failed trials, and not yet empty."""
    story.up("w1", "w2", "w3")
    doubted(story)
    for _ in range(5):
        story.reach_trial()
        story.tell(failed("w0"))


def draining(story: Story) -> None:
    healthy(story)
    story.tell(drain_requested("w0"))


def draining_resumed(story: Story) -> None:
    draining(story)
    story.tell(resume("w0"))


def drained_empty(story: Story) -> None:
    draining(story)
    story.tell(drained("w0"))


def shutting_down(story: Story) -> None:
    healthy(story)
    story.tell(shutdown("w0"))


def shut_down_empty(story: Story) -> None:
    shutting_down(story)
    story.tell(drained("w0"))


def dead(story: Story) -> None:
    healthy(story)
    story.tell(left("w0"))


STATES: dict[str, tuple[Arrange, HealthStatus, float]] = {
    "joining": (joining, S, 0.0),
    "joining_failed_twice": (joining_failed_twice, S, 0.0),
    "joining_carried": (joining_carried, S, 0.0),
    "healthy": (healthy, H, 1.0),
    "ramping": (ramping, H, 0.25),
    "ramping_half": (ramping_half, H, 0.5),
    "suspicious": (suspicious, S, 0.5),
    "suspicious_twice": (suspicious_twice, S, 0.5),
    "suspected_slow": (suspected_slow, S, 0.5),
    "suspected_slow_quick_twice": (suspected_slow_quick_twice, S, 0.5),
    "slow_on_the_ramp": (slow_on_the_ramp, S, 0.25),
    "doubted": (doubted, U, 0.0),
    "trial_due": (trial_due, U, 0.0),
    "trial_due_corrupt": (trial_due_corrupt, U, 0.0),
    "corrupt": (corrupt, U, 0.0),
    "silent_worker": (silent_worker, U, 0.0),
    "heard_again": (heard_again, U, 0.0),
    "given_up": (given_up, DR, 0.0),
    "draining": (draining, DR, 0.0),
    "draining_resumed": (draining_resumed, DR, 0.0),
    "drained_empty": (drained_empty, DR, 0.0),
    "shutting_down": (shutting_down, DR, 0.0),
    "shut_down_empty": (shut_down_empty, DR, 0.0),
    "dead": (dead, DEAD, 0.0),
}

Make = Callable[[str, str], Fact]

FACTS: dict[str, Make] = {
    "good": lambda w, i: passed(w, i),
    "good_but_slow": lambda w, i: passed(w, i, slow=True),
    "latency_spike": lambda w, i: failed(w, i, reason="latency_spike"),
    "no_response": lambda w, i: failed(w, i, reason="no_response"),
    "timeout": lambda w, i: failed(w, i, reason="timeout"),
    "exception": lambda w, i: failed(w, i, reason="exception"),
    "unconfirmed_mismatch": lambda w, i: failed(w, i, reason="token_mismatch", golden="agreed"),
    "unconfirmed_drift": lambda w, i: failed(w, i, reason="logit_drift", golden="agreed"),
    "confirmed_without_a_golden": lambda w, i: failed(w, i, reason="token_mismatch", confirmed=True),
    "confirmed_against_anothers": lambda w, i: failed(
        w, i, reason="token_mismatch", confirmed=True, golden="provisional"
    ),
    "confirmed_mismatch": lambda w, i: failed(w, i, reason="token_mismatch", confirmed=True, golden="agreed"),
    "confirmed_drift": lambda w, i: failed(w, i, reason="logit_drift", confirmed=True, golden="agreed"),
    "non_finite": lambda w, i: failed(w, i, reason="non_finite"),
    "slow": lambda w, i: slow(w, i),
    "slow_cleared": lambda w, i: slow_cleared(w, i),
    "silent": lambda w, i: silent(w, i),
    "heard": lambda w, i: heard(w, i),
    "lingered": lambda w, i: WorkerLingered(worker=w, instance=i, pid=1),
    "device_faulted": lambda w, i: device_faulted(w, i),
    "device_faulted_mildly": lambda w, i: device_faulted(w, i, fatal=False),
    "device_limited": lambda w, i: device_limited(w, LIMIT, i),
    "device_recovered": lambda w, i: device_recovered(w, i),
    "engine_faulted": lambda w, i: engine_faulted(w, i),
    "engine_faulted_mildly": lambda w, i: engine_faulted(w, i, fatal=False),
    "drain_requested": lambda w, i: drain_requested(w, i),
    "shutdown_began": lambda w, i: shutdown(w, i),
    "drain_finished": lambda w, i: drained(w, i),
    "resume": lambda w, i: resume(w, i),
    "move_requested": lambda w, i: MoveRequested(worker=w, instance=i, by="op"),
    "golden_requested": lambda w, i: GoldenRequested(
        worker=w, instance=i, act="approve", canary_key="k", canaries=("c1",), by="op"
    ),
    "restart_requested": lambda w, i: RestartRequested(worker=w, instance=i, by="op"),
    "awaited": lambda w, i: awaited(w, i),
    "adapters_changed": lambda w, i: AdaptersChanged(worker=w, instance=i, adapters=("sql",)),
    "left": lambda w, i: left(w, i),
    "left_at_once": lambda w, i: left(w, i, mode="immediate"),
    "request_failed_thrice": lambda w, i: request_failed(w, 3, instance=i),
    "request_poisonous": lambda w, i: poisonous(w, 0, instance=i),
    "request_suspected": lambda w, i: suspected(w, instance=i),
    "requests_served": lambda w, i: served(w, instance=i),
    "golden_proposed": lambda w, i: proposed(w, instance=i),
    "tokens_unlikely": lambda w, i: TokensUnlikely(
        worker=w, instance=i, found_by="users", tokens=100, unlikely=50, peers_share=0.0, probability=1e-9
    ),
    "golden_disputed": lambda w, i: disputed(w, (7,), against="w9", instance=i),
    "chaos": lambda w, i: ChaosInjected(worker=w, instance=i, fault="kill"),
    "exposure_unknown": lambda w, i: ExposureUnknown(
        frontend="f", worker=w, instance=i, since=START, until=START, why="restarted"
    ),
    "abandoned": lambda w, i: RequestAbandoned(
        frontend="f", request="r", model="llama", worker=w, instance=i, reason="cancelled", tokens=1
    ),
    "observer_blind": lambda w, i: ObserverBlind(observer="o", silent=3, known=4),
    "own_breakers": lambda w, i: FrontendBreakersMoved(
        frontend="f",
        moves=(BreakerMove(worker=w, instance=i, position="open", ago_ms=1.0, reason="requests: stalled"),),
        dropped=0,
    ),
    "panic": lambda w, i: PanicBegan(frontend="f", model="llama", routable_share=0.1),
}

GOOD = ("good", "good_but_slow", "latency_spike")
FAILING = (
    "no_response",
    "timeout",
    "exception",
    "unconfirmed_mismatch",
    "unconfirmed_drift",
    "confirmed_without_a_golden",
    "confirmed_against_anothers",
)
CONVICTING = (
    "confirmed_mismatch",
    "confirmed_drift",
    "non_finite",
    "silent",
    "device_faulted",
    "engine_faulted",
)
LEAVING = ("drain_requested", "shutdown_began")
ALIVE = [name for name in STATES if name != "dead"]


@dataclass(frozen=True)
class Row:
    """One row of the table: the result of any of `facts` in any of `states`."""

    states: tuple[str, ...] | list[str]
    facts: tuple[str, ...]
    to: HealthStatus
    weight: float


ROWS = [
    Row(["joining", "joining_failed_twice"], GOOD, H, 1.0),
    Row(["healthy"], FAILING, S, 0.5),
    Row(["suspicious", "suspicious_twice"], GOOD, H, 1.0),
    Row(["suspected_slow_quick_twice"], ("good",), H, 1.0),
    Row(["joining_failed_twice", "suspicious_twice"], FAILING, U, 0.0),
    Row(["ramping"], GOOD, H, 0.5),
    Row(["ramping_half"], GOOD, H, 1.0),
    Row(["ramping", "ramping_half", "slow_on_the_ramp"], FAILING, U, 0.0),
    Row(["trial_due"], GOOD, H, 0.25),
    Row(["heard_again"], GOOD, H, 1.0),
    Row(["given_up"], ("drain_finished",), DEAD, 0.0),
    Row(["draining_resumed"], GOOD, H, 0.25),
    Row([name for name in ALIVE if name != "given_up"], CONVICTING, U, 0.0),
    Row(
        ["given_up"], CONVICTING, DR, 0.0
    ),  # UNHEALTHY, and its five trials have still failed: two rows at once
    Row(ALIVE, LEAVING, DR, 0.0),
    Row(ALIVE, ("left", "left_at_once"), DEAD, 0.0),
]


def expected(state: str, fact: str) -> tuple[HealthStatus, float]:
    """Return the expectation of the specification; a pair without a row changes nothing."""
    rows = [row for row in ROWS if state in row.states and fact in row.facts]
    assert len(rows) <= 1, f"the table contradicts itself for {state} on {fact}"
    if fact == "device_limited":
        _, status, weight = STATES[state]
        return status, min(weight, LIMIT)
    return (rows[0].to, rows[0].weight) if rows else STATES[state][1:]


@pytest.mark.parametrize("state", STATES)
def test_each_state_can_be_reached(state: str) -> None:
    arrange, status, weight = STATES[state]
    story = Story()
    arrange(story)
    assert (story.worker().health.status, story.worker().health.weight) == (status, weight)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_the_whole_table(state: str) -> None:
    """One test covers all facts of a state: two thousand separate tests would cost more than they check."""
    found = {}
    for fact, make in FACTS.items():
        story = Story()
        STATES[state][0](story)
        story.tell(make("w0", story.worker().joined.instance))
        found[fact] = (story.worker().health.status, story.worker().health.weight)
    assert found == {fact: expected(state, fact) for fact in FACTS}


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_facts_of_another_life_change_nothing(state: str) -> None:
    for fact, make in FACTS.items():
        story = Story()
        STATES[state][0](story)
        before = story.worker()
        assert story.tell(make("w0", "another")) == (), fact
        assert story.worker() == before, fact


@pytest.mark.parametrize("state", STATES)
def test_a_new_instance_joins_as_suspicious_with_weight_0(state: str) -> None:
    story = Story()
    STATES[state][0](story)
    story.tell(joined("w0", "next"))
    worker = story.worker()
    assert story.status() == S
    assert worker.weight == (1.0 if worker.serves_suspect else 0.0)
    assert not worker.serves_suspect or worker.health.corrupt, (
        "as the only worker, although a canary convicted it"
    )
    assert worker.breaker.position == "closed"


@pytest.mark.parametrize("state", STATES)
def test_a_former_instance_does_not_return(state: str) -> None:
    story = Story()
    STATES[state][0](story)
    story.tell(joined("w0", "next"))
    before = story.worker()
    story.tell(joined("w0", "i1"), joined("w0", "next"))
    assert story.worker() == before


@pytest.mark.parametrize("state", [s for s in ALIVE if s not in ("silent_worker", "given_up")])
def test_silence_ends_every_life_after_30_s(state: str) -> None:
    story = Story()
    STATES[state][0](story)
    story.tell(silent("w0", story.worker().joined.instance))
    story.wait(29)
    assert story.status() is U
    story.wait(1)
    assert story.status() is DEAD


def test_no_kind_of_fact_about_a_worker_is_missing_from_the_table() -> None:
    """Facts that name no worker, or only inform the operator, cannot affect a worker's health."""
    known = {type(make("w0", "i1")) for make in FACTS.values()} | {type(joined("w0"))}
    about_workers = {kind for kind in KINDS.values() if issubclass(kind, WorkerObservation)}
    assert about_workers <= known, {kind.__name__ for kind in about_workers - known}
