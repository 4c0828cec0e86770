"""The breaker: examples, the seed's defects (B1–B6), and an independent model over a long random walk."""

import random
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from fleet_story import (
    START,
    Story,
    failed,
    heard,
    kinds,
    left,
    only,
    passed,
    poisonous,
    request_failed,
    served,
    silent,
    suspected,
)

from controller.deciders.breaker import Breaker, BreakerPolicy, admit, decide, evolve, wait_after
from controller.deciders.fleet import FleetPolicy
from events.decisions import BreakerClosed, BreakerHalfOpened, BreakerOpened, HealthChanged, HealthStatus
from events.observations import CanaryReason

POLICY = BreakerPolicy()
OTHERS = ("w1", "w2", "w3")  # so that the ejection budget has room


def opened_by_requests(story: Story | None = None) -> Story:
    story = (story or Story()).up("w0", *OTHERS)
    story.tell(request_failed("w0", 3))
    assert story.worker().breaker.position == "open"
    return story


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_failures_than_the_threshold_open_nothing(count: int) -> None:
    story = Story().up("w0", *OTHERS)
    assert story.tell(request_failed("w0", count)) == ()


def test_the_failures_of_a_poisonous_request_are_withdrawn() -> None:
    story = Story().up("w0", *OTHERS)
    assert story.tell(request_failed("w0", 2), poisonous("w0", 1), request_failed("w0", 2)) == ()
    assert story.worker().breaker.request_failures == 2
    story.tell(request_failed("w0", 3))
    assert story.worker().breaker.position == "open"


def test_failures_of_a_poisonous_request_from_before_the_last_move_are_not_withdrawn() -> None:
    story = opened_by_requests()
    before = story.worker()
    assert story.tell(poisonous("w0", 0, under=0), fresh=False) == () and story.worker() == before


def test_a_suspected_request_does_not_count_against_the_worker() -> None:
    story = Story().up("w0", *OTHERS)
    before = story.worker()
    assert story.tell(suspected("w0")) == () and story.worker() == before


def test_a_frontends_third_failure_in_a_row_opens_for_60_s() -> None:
    story = opened_by_requests()
    breaker = story.worker().breaker
    assert breaker.retry_at == story.now + timedelta(seconds=60)
    assert not story.worker().routable
    assert story.wait(59) == ()
    assert kinds(story.wait(1)) == ["BreakerHalfOpened"]


def test_the_first_canary_sent_under_half_open_is_the_trial() -> None:
    story = opened_by_requests()
    story.wait(60)
    number = story.worker().breaker.moved_by
    story.tell(passed("w0", under=number - 1), fresh=False)  # sent before
    assert story.worker().breaker.position == "half_open"
    story.tell(passed("w0", under=number), fresh=False)
    assert story.worker().breaker.position == "closed"
    assert story.worker().routable


def test_a_failed_trial_opens_again_for_twice_as_long_up_to_15_minutes() -> None:
    story = opened_by_requests()
    waits = []
    for _ in range(6):
        story.reach_trial()
        story.tell(failed("w0"))
        if story.worker().health.status in (HealthStatus.DRAINING, HealthStatus.DEAD):
            break
        retry_at = story.worker().breaker.retry_at
        assert retry_at is not None
        waits.append((retry_at - story.now).total_seconds())
    assert waits[:4] == [120, 240, 480, 900]


def test_backoff_1_gives_the_seeds_fixed_60_s() -> None:
    policy = BreakerPolicy(backoff=1)
    assert {wait_after(policy, n) for n in range(20)} == {timedelta(seconds=60)}


def test_waits_are_bounded_for_any_number_of_trials() -> None:
    assert wait_after(POLICY, 10_000) == timedelta(minutes=15)
    assert wait_after(BreakerPolicy(wait_min=timedelta(hours=1)), 3) == timedelta(hours=1)


def test_three_canaries_failed_in_a_row_open_the_breaker() -> None:
    state = Breaker("w0", "i1")
    for _ in range(3):
        state = evolve(state, failed("w0"))
    (decision,) = decide(POLICY, state, START)
    assert isinstance(decision, BreakerOpened) and decision.reason == "canaries: exception"


def test_an_unhealthy_worker_opens_its_breaker() -> None:
    story = Story().up("w0", *OTHERS)
    decisions = story.tell(silent("w0"))
    assert kinds(decisions) == ["IncidentOpened", "HealthChanged", "BreakerOpened"]
    assert only(decisions, BreakerOpened).reason == "unhealthy: silent"


def test_b01_successes_between_failures_reset_the_count() -> None:
    state = Breaker("w0", "i1")
    for _ in range(50):
        state = evolve(evolve(state, failed("w0")), passed("w0"))
        state = evolve(evolve(state, request_failed("w0", 1)), served("w0"))
        state = evolve(evolve(state, failed("w0")), passed("w0", slow=True))
    assert list(decide(POLICY, state, START)) == []


def test_b02_half_open_admits_exactly_one_request() -> None:
    state = Breaker("w0", "i1", trial_by="request")
    half = evolve(
        state, BreakerHalfOpened(worker="w0", instance="i1", deadline=START, number=4, decided_at=START)
    )
    once = admit(half)
    assert once is not None
    assert admit(once) is None
    assert admit(evolve(state, opened(1))) is None
    assert admit(state) is state


def test_b03_a_trial_without_an_outcome_counts_as_failed_at_its_deadline() -> None:
    story = opened_by_requests()
    story.wait(60)
    assert story.wait(29.9) == ()
    decisions = story.wait(0.1)
    assert kinds(decisions) == ["BreakerOpened"]
    opened = only(decisions, BreakerOpened)
    assert (opened.reason, opened.wait_s) == ("trial_failed: no result", 120)
    assert story.worker().health.trials.failed == 1


def test_b04_failures_while_open_do_not_keep_it_open() -> None:
    story = opened_by_requests()
    for _ in range(59):
        story.wait(1)
        assert story.tell(request_failed("w0", 9)) == ()
    assert kinds(story.wait(1)) == ["BreakerHalfOpened"]


def test_b05_any_failure_of_the_trial_opens_again_and_one_success_closes() -> None:
    story = opened_by_requests()
    story.wait(60)
    assert "BreakerOpened" in kinds(story.tell(failed("w0")))
    story.reach_trial()
    assert "BreakerClosed" in kinds(story.tell(passed("w0")))
    assert story.worker().breaker.trials_failed == 0


def test_b06_time_is_an_argument() -> None:
    state = evolve(Breaker("w0", "i1"), opened(1, retry_at=START + timedelta(seconds=60)))
    assert list(decide(POLICY, state, START + timedelta(seconds=59))) == []
    assert [type(d) for d in decide(POLICY, state, START + timedelta(seconds=60))] == [BreakerHalfOpened]


def test_stragglers_from_before_a_move_are_ignored() -> None:
    story = opened_by_requests()
    story.wait(60)
    story.tell(passed("w0"))
    closed_by = story.worker().breaker.moved_by
    assert story.tell(request_failed("w0", 3, under=closed_by - 1), fresh=False) == ()
    assert "BreakerOpened" in kinds(story.tell(request_failed("w0", 3, under=closed_by), fresh=False))


def test_requests_are_no_trial_of_the_fleets_breaker() -> None:
    story = opened_by_requests()
    story.wait(60)
    story.tell(served("w0"), request_failed("w0", 1))
    assert story.worker().breaker.position == "half_open"


def test_a_slow_trial_passes() -> None:
    story = opened_by_requests()
    story.wait(60)
    story.tell(passed("w0", slow=True))
    assert story.worker().breaker.position == "closed"


def test_the_second_result_of_a_trial_is_ignored() -> None:
    half = evolve(evolve(Breaker("w0", "i1"), opened(1)), half_opened(2))
    state = evolve(evolve(half, failed("w0", under=2)), passed("w0", under=2))
    assert [type(d) for d in decide(POLICY, state, START)] == [BreakerOpened]


def test_a_dead_worker_gets_no_trial() -> None:
    story = opened_by_requests()
    story.tell(left("w0"))
    assert kinds(story.wait(100_000)) == ["WorkerForgotten"]


def test_a_frontends_own_breaker_runs_on_its_requests_alone() -> None:
    local, number, now = Breaker("w0", "i1", trial_by="request"), 0, START
    for count in (1, 2, 3):
        local = evolve(local, request_failed("w0", count, under=number))
    local, number = absorb(local, number, now)
    assert local.position == "open" and admit(local) is None
    now += timedelta(seconds=60)
    local, number = absorb(local, number, now)
    tried = admit(local)
    assert tried is not None and admit(tried) is None
    local = evolve(tried, served("w0", under=number))
    local, number = absorb(local, number, now)
    assert admit(local) is local


def test_b03_a_frontends_trial_that_gets_lost_is_reclaimed() -> None:
    local, number, now = Breaker("w0", "i1", trial_by="request"), 0, START
    local = evolve(local, request_failed("w0", 3))
    local, number = absorb(local, number, now)
    for waited in (60, 120, 240):
        now += timedelta(seconds=waited)
        local, number = absorb(local, number, now)
        tried = admit(local)
        assert tried is not None
        assert admit(tried) is None  # cancelled or crashed: its end is never reported
        now += timedelta(seconds=30)
        local, number = absorb(tried, number, now)
        assert local.position == "open"


def absorb(state: Breaker, number: int, now: datetime) -> tuple[Breaker, int]:
    """Do what a frontend does: number the breaker's own decisions and absorb them."""
    for decision in list(decide(POLICY, state, now)):
        number += 1
        state = evolve(state, replace(decision, number=number))
    return state, number


def opened(number: int, retry_at: datetime = START) -> BreakerOpened:
    return BreakerOpened(
        worker="w0",
        instance="i1",
        retry_at=retry_at,
        wait_s=60.0,
        reason="x",
        number=number,
        decided_at=START,
    )


def half_opened(number: int) -> BreakerHalfOpened:
    return BreakerHalfOpened(
        worker="w0", instance="i1", deadline=START + timedelta(seconds=30), number=number, decided_at=START
    )


class Model:
    """An independent model of the breaker: it keeps the history since the last move and evaluates it anew."""

    def __init__(self) -> None:
        self.position, self.moved_by, self.lost = "closed", 0, 0
        self.said: list[tuple[str, bool, int, str]] = []  # by, good, failures in a row, why
        self.sick = self.rests = False
        self.until = START
        self.wrong = self.answers = False  # since it closed; since it opened
        self.muted = ""  # why it opened, if only because nothing was answered
        self.opened_at: datetime | None = None
        self.closed_at: datetime | None = None

    def hear(self, by: str, good: bool, in_a_row: int, under: int, why: str = "") -> None:
        if by == "canary" and not good and why == "exception":
            self.wrong, self.answers = True, False
        if by == "canary" and good and under >= self.moved_by:
            self.heard()
        if under >= self.moved_by and self.position != "open":
            self.said.append((by, good, in_a_row, why))

    def heard(self) -> None:
        self.answers = self.answers or (self.position == "open" and not self.wrong)

    def health(self, after: HealthStatus) -> None:
        self.rests = after in (HealthStatus.DRAINING, HealthStatus.DEAD)
        if after is HealthStatus.UNHEALTHY and self.position != "open":
            self.sick = True

    def due(self, now: datetime) -> str | None:
        if self.rests:
            return None
        if self.position == "closed":
            return "opened" if self.sick or self._tripped() else None
        if self.position == "open":
            return "half_opened" if now >= min(self.until, self._soon()) else None
        if self.sick:
            return "opened"
        trials = [good for good, _ in self._canaries()]
        if trials:
            return "closed" if trials[0] else "opened"
        return "opened" if now >= self.until else None

    def _soon(self) -> datetime:
        """Return when a silent worker that answers again is tried."""
        assert self.opened_at is not None
        if not (self.answers and self.muted):
            return self.until
        soon = self.opened_at + timedelta(seconds=30 if self.lost else 0)
        return soon if self.closed_at is None else max(soon, self.closed_at + timedelta(seconds=60))

    def _canaries(self) -> list[tuple[bool, str]]:
        return [(good, why) for by, good, _, why in self.said if by == "canary"]

    def _tripped(self) -> bool:
        canaries = 0
        for good, _ in self._canaries():
            canaries = 0 if good else canaries + 1
        requests = [(good, n) for by, good, n, _ in self.said if by == "request"]
        return canaries >= 3 or (bool(requests) and not requests[-1][0] and requests[-1][1] >= 3)

    def move(self, kind: str, number: int, now: datetime) -> None:
        if kind == "opened":
            self.muted = self._why_muted()
            self.opened_at = now
            self.lost = self.lost + 1 if self.position == "half_open" else 0
            self.until = now + timedelta(seconds=min(60 * 2**self.lost, 900))
        elif kind == "half_opened":
            self.until = now + timedelta(seconds=30)
        else:
            self.wrong, self.closed_at = False, now
        self.answers = False
        self.position = {"opened": "open", "half_opened": "half_open", "closed": "closed"}[kind]
        self.said, self.sick, self.moved_by = [], False, number

    def _why_muted(self) -> str:
        """Return the reason why it opens, if that is only missing answers."""
        if self.sick:
            return ""
        canaries = self._canaries()
        if self.position == "half_open":
            why = canaries[0][1] if canaries else "no result"
        else:  # the last reason is quoted if canaries opened it
            in_a_row = 0
            for good, _ in canaries:
                in_a_row = 0 if good else in_a_row + 1
            why = next(why for _, good, _, why in reversed(self.said) if not good) if in_a_row >= 3 else ""
        return why if why in ("timeout", "no result") else ""


KINDS = {BreakerOpened: "opened", BreakerHalfOpened: "half_opened", BreakerClosed: "closed"}
STEPS = 120_000


@pytest.mark.slow
def test_the_breaker_agrees_with_an_independent_model_over_a_long_random_walk() -> None:
    r = random.Random(7)
    state, model, number, now, moves = Breaker("w0", "i1"), Model(), 0, START, 0
    for step in range(STEPS):
        state, model = say_something(r, state, model, number)
        now += timedelta(seconds=r.choice([0, 0, 0, 1, 7, 31]))
        number += r.random() < 0.2  # other workers' decisions
        if r.random() < 0.5:
            continue
        decided = list(decide(POLICY, state, now))
        kind = KINDS[type(decided[0])] if decided else None
        assert kind == model.due(now), f"step {step}"
        if kind is not None:
            number += 1
            moves += 1
            state = evolve(state, replace(decided[0], number=number))
            model.move(kind, number, now)
            due = {"opened": state.retry_at, "half_opened": state.deadline, "closed": model.until}[kind]
            assert (state.position, due) == (model.position, model.until), f"step {step}"
    assert moves > STEPS / 100


def say_something(r: random.Random, state: Breaker, model: Model, number: int) -> tuple[Breaker, Model]:
    under = max(0, number - (r.randrange(4) if r.random() < 0.3 else 0))
    match r.randrange(13):
        case 12:
            model.heard()
            return evolve(state, heard("w0")), model
        case 0 | 1 | 2:
            model.hear("canary", True, 0, under)
            return evolve(state, passed("w0", under=under, slow=r.random() < 0.2)), model
        case 3 | 4 | 5:
            why: CanaryReason = "timeout" if r.random() < 0.9 else "exception"
            model.hear("canary", False, 0, under, why)
            return evolve(state, failed("w0", under=under, reason=why)), model
        case 6 | 7:
            model.hear("request", True, 0, under)
            return evolve(state, served("w0", under=under)), model
        case 8 | 9 | 10:
            count = r.randrange(1, 5)
            model.hear("request", False, count, under, "disconnected")
            return evolve(state, request_failed("w0", count, under=under)), model
        case _:
            after = r.choice(list(HealthStatus)[:4])
            model.health(after)
            return evolve(state, health_changed(after)), model


def health_changed(after: HealthStatus) -> HealthChanged:
    return HealthChanged(
        worker="w0",
        instance="i1",
        before=HealthStatus.HEALTHY,
        after=after,
        reason="x",
        weight=0.0,
        number=0,
        decided_at=START,
    )


def test_the_settings_reach_the_breaker() -> None:
    policy = FleetPolicy(breaker=BreakerPolicy(failures_max=1, wait_min=timedelta(seconds=5)))
    story = Story(policy).up("w0", *OTHERS)
    story.tell(request_failed("w0", 1))
    assert story.worker().breaker.retry_at == story.now + timedelta(seconds=5)
