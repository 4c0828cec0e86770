"""An agreed golden is outvoted by workers on more hosts that contradict it alike."""

from dataclasses import replace
from typing import Any

import pytest
from fleet_story import Story, failed, joined, kinds, left, passed, proposed
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.deciders.fleet import FleetPolicy
from controller.deciders.golden import GoldenPolicy
from events.decisions import BreakerHalfOpened, GoldenAgreed, GoldenRetired, HealthStatus
from events.observations import CanaryFailed

H, S, U, DR, DEAD = HealthStatus
OLD, NEW, OTHER = (1, 2), (5, 6), (8, 9)
KEY = ("k", "c1")


def contradicts(
    worker: str,
    tokens: tuple[int, ...] = NEW,
    *,
    instance: str = "i1",
    canary: str = "c1",
    whole: bool = True,
) -> CanaryFailed:
    fact = failed(worker, instance, reason="token_mismatch", confirmed=True, golden="agreed", canary=canary)
    return replace(fact, expected=OLD, got=tokens, whole=whole)


def agreed(count: int, policy: FleetPolicy | None = None, **registered: Any) -> Story:
    """Return a story with `count` workers that agree on one golden."""
    story = Story(policy)
    for number in range(count):
        story.tell(replace(joined(f"w{number}"), **registered))
        story.tell(proposed(f"w{number}", OLD), passed(f"w{number}"))
        story.tell(passed(f"w{number}"))
        assert story.worker(f"w{number}").weight == 1.0
    assert story.fleet.goldens[KEY].status == "agreed"
    return story


def test_a_majority_that_contradicts_alike_retires_a_golden_and_its_answer_is_agreed() -> None:
    story = agreed(3)
    assert not any(isinstance(d, GoldenRetired) for d in story.tell(contradicts("w0")))
    decisions = story.tell(contradicts("w1"))
    retired = next(d for d in decisions if isinstance(d, GoldenRetired))
    assert (retired.outvoted_by, retired.reason) == (("w0", "w1"), "outvoted: w0, w1 against w2")
    assert next(d for d in decisions if isinstance(d, GoldenAgreed)).by == ("w0", "w1")
    golden = story.fleet.goldens[KEY]
    assert (golden.status, golden.tokens) == ("agreed", NEW)


def test_workers_convicted_by_an_outvoted_golden_are_tried_at_once_and_need_not_be_acquitted() -> None:
    story = agreed(3)
    story.tell(contradicts("w0"))
    assert story.status("w0") is U
    decisions = story.tell(contradicts("w1"))
    tried = {d.worker for d in decisions if isinstance(d, BreakerHalfOpened)}
    assert tried == {"w0"}
    assert story.status("w1") is not U  # the deciding vote is no evidence against its worker
    story.tell(passed("w0"))
    assert (story.status("w0"), story.worker("w0").weight) == (H, 0.25)


def test_a_trial_that_fails_by_an_outvoted_golden_is_followed_by_another_at_once() -> None:
    story = agreed(3)
    story.tell(contradicts("w0"))
    story.wait(61)
    assert story.worker("w0").breaker.position == "half_open"
    story.tell(contradicts("w1"))  # the golden falls while the trial is under way
    story.record(replace(failed("w0"), sent_under=story.fleet.number))
    decisions = story.settle()
    assert kinds(decisions)[-1] == "BreakerHalfOpened"
    story.tell(passed("w0"))
    assert story.status("w0") is H


def test_the_deciding_vote_does_not_eject_a_returning_worker() -> None:
    story = agreed(3)
    story.tell(contradicts("w0"))
    story.tell(contradicts("w1"))
    story.tell(passed("w0"), passed("w1"))
    assert (story.status("w0"), story.worker("w0").weight) == (H, 0.25)
    story.tell(contradicts("w1", OTHER))  # new weights again, while w0 is on its ramp
    story.tell(contradicts("w0", OTHER))
    assert story.fleet.goldens[KEY].tokens == OTHER
    assert (story.status("w0"), story.worker("w0").weight) == (H, 0.25)
    story.tell(passed("w1"))
    assert story.status("w1") is H


def test_neither_one_worker_nor_half_of_them_outvote_a_golden() -> None:
    story = agreed(2)
    for _ in range(5):
        story.tell(contradicts("w0"))
    assert story.fleet.goldens[KEY].tokens == OLD
    story = agreed(4)
    story.tell(contradicts("w0"), contradicts("w1"))
    assert story.fleet.goldens[KEY].tokens == OLD


def test_contradictions_that_differ_do_not_add_up() -> None:
    story = agreed(3)
    story.tell(contradicts("w0", NEW), contradicts("w1", OTHER))
    assert story.fleet.goldens[KEY].tokens == OLD


def test_a_worker_that_agrees_with_neither_stays_convicted() -> None:
    story = agreed(4)
    story.tell(contradicts("w3", OTHER), contradicts("w0"), contradicts("w1"), contradicts("w2"))
    assert story.fleet.goldens[KEY].tokens == NEW
    assert story.worker("w3").health.corrupt
    story.tell(contradicts("w3", OTHER))
    story.wait(61)
    story.tell(contradicts("w3", OTHER))
    assert story.status("w3") is U


def test_a_worker_convicted_by_an_outvoted_golden_returns_with_one_good_answer_to_that_canary() -> None:
    story = agreed(4)
    story.tell(contradicts("w3", whole=False))  # its whole answer is unknown
    story.tell(contradicts("w0"), contradicts("w1"), contradicts("w2"))
    assert story.worker("w3").health.corrupt
    story.tell(passed("w3", canary="c2"))
    assert story.worker("w3").health.corrupt
    story.tell(passed("w3"))
    assert not story.worker("w3").health.corrupt


def test_results_compared_with_an_outvoted_golden_convict_no_worker_afterwards() -> None:
    story = agreed(3)
    before = story.fleet.number
    story.tell(contradicts("w0"), contradicts("w1"))
    late = replace(contradicts("w1"), sent_under=before)
    story.tell(passed("w1"), late, fresh=False)
    assert not story.worker("w1").health.corrupt


@pytest.mark.parametrize("field", ["server", "account"])
def test_workers_of_one_server_or_account_are_one_voice(field: str) -> None:
    one: dict[str, Any] = {field: "one"}
    story = agreed(3, **one)
    story.tell(contradicts("w0"), contradicts("w1"), contradicts("w2"))
    assert story.fleet.goldens[KEY].tokens == OLD


def test_a_truncated_answer_is_no_vote() -> None:
    story = agreed(2)
    story.tell(contradicts("w0", whole=False), contradicts("w1", whole=False))
    assert story.fleet.goldens[KEY].tokens == OLD


def test_a_vote_ends_with_its_life_and_with_a_right_answer() -> None:
    story = agreed(4)
    story.tell(contradicts("w0"), passed("w0"), contradicts("w1"))
    assert story.fleet.goldens[KEY].tokens == OLD  # w1 against w2 and w3
    story.tell(left("w1"), joined("w1", "i2"))
    story.tell(contradicts("w2"))
    assert story.fleet.goldens[KEY].tokens == OLD  # w2 against w3


def test_without_the_setting_a_golden_is_not_outvoted_as_in_version_5() -> None:
    story = agreed(3, FleetPolicy(golden=GoldenPolicy(outvote=False)))
    decisions = [d for name in ("w0", "w1", "w2") for d in story.tell(contradicts(name))]
    assert "GoldenRetired" not in kinds(decisions)


class Servers:
    """Servers with weights that are updated one after another; each is probed with two canaries in turn."""

    def __init__(self, count: int) -> None:
        self.story = agreed(count)
        self.answers = dict.fromkeys(self.story.fleet.workers, OLD)
        for name in self.answers:
            self.story.tell(proposed(name, OLD, canary="c2"), passed(name, canary="c2"))

    def ask(self, name: str) -> None:
        """Probe one worker with both canaries, and with its trial if one is due."""
        for canary in ("c1", "c2"):
            mine, golden = self.answers[name], self.story.fleet.goldens["k", canary].tokens
            fact = passed(name, canary=canary) if mine == golden else contradicts(name, mine, canary=canary)
            self.story.tell(fact)
            assert any(worker.routable for worker in self.story.fleet.workers.values())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_rolling_update_of_2_3_or_8_servers_in_any_order_always_leaves_one_that_serves(
    data: st.DataObject,
) -> None:
    count = data.draw(st.sampled_from((2, 3, 8)))
    servers = Servers(count)
    for name in data.draw(st.permutations(sorted(servers.answers))):
        servers.answers[name] = NEW
        for _ in range(2):
            for other in data.draw(st.permutations(sorted(servers.answers))):
                servers.ask(other)
            servers.story.wait(30)
    for _ in range(40):
        for name in servers.answers:
            servers.ask(name)
        servers.story.wait(30)
    assert all(worker.weight == 1.0 for worker in servers.story.fleet.workers.values())
