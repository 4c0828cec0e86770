"""Goldens: proposed, agreed, disputed, and voted on again."""

from typing import Any

import pytest
from fleet_story import Story, disputed, failed, joined, kinds, left, only, passed, proposed, resume

from controller.deciders.fleet import FleetPolicy
from controller.deciders.golden import Golden
from controller.deciders.votes import Vote, agrees, camps, distance
from events.decisions import GoldenAgreed, GoldenRetired, HealthStatus
from events.observations import TopK

H, S, U, DR, DEAD = HealthStatus
KEY = ("k", "c1")
RIGHT, WRONG = (1, 2), (1, 3)


def golden(story: Story) -> Golden:
    return story.fleet.goldens[KEY]


def dispute() -> Story:
    """Return a story in which w0 has proposed and w1 answers otherwise."""
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", WRONG))
    story.tell(disputed("w1", RIGHT, against="w0"))
    return story


def test_a_first_answer_is_provisional_and_a_second_workers_agrees() -> None:
    story = Story().up("w0", "w1")
    assert story.tell(proposed("w0")) == ()
    assert golden(story).status == "provisional"
    decisions = story.tell(proposed("w1"))
    assert kinds(decisions) == ["GoldenAgreed"]
    assert only(decisions, GoldenAgreed).by == ("w0", "w1")
    assert golden(story).status == "agreed"


def test_a_pass_against_a_provisional_golden_is_a_vote() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0"))
    assert kinds(story.tell(passed("w1"))) == ["GoldenAgreed"]


def test_a_pass_from_before_the_golden_existed_does_not_replace_the_workers_own_answer() -> None:
    """Both are probed before either answer is folded: w1 passed because there was no golden to compare with."""
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", WRONG), proposed("w1", RIGHT), passed("w1"))
    assert golden(story).status == "retired"
    assert (story.status("w0"), story.status("w1")) == (S, S)  # one of them is wrong; it is unknown which
    story.tell(joined("w2"), proposed("w2", RIGHT))
    assert (golden(story).by, golden(story).tokens) == (("w1", "w2"), RIGHT)


def test_one_worker_never_agrees_with_itself() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0"), proposed("w0"), passed("w0"))
    story.tell(left("w0"), joined("w0", "i2"))
    story.tell(proposed("w0", instance="i2"), passed("w0", "i2"))
    assert golden(story).status == "provisional"


def test_a_lone_worker_resumed_after_a_conviction_by_its_own_golden_starts_over() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0", WRONG), passed("w0"))  # it was corrupt when its golden was recorded
    story.tell(left("w0"), joined("w0", "i2"))
    wrong: dict[str, Any] = {"reason": "token_mismatch", "confirmed": True, "golden": "provisional"}
    story.tell(failed("w0", "i2", **wrong))  # its next life is healthy, but that cannot be known
    assert story.status("w0") is U
    decisions = story.tell(resume("w0", "i2"))
    assert [d.reason for d in decisions if isinstance(d, GoldenRetired)] == ["disputed: operator against w0"]
    story.tell(failed("w0", "i2", **wrong))  # a straggler: a retired golden convicts no worker
    assert not story.worker("w0").health.corrupt
    story.tell(proposed("w0", RIGHT, instance="i2"))
    assert (golden(story).status, golden(story).tokens) == ("provisional", RIGHT)
    assert golden(story).proposed_instance == "i2"


def test_a_resume_keeps_goldens_that_are_agreed_or_did_not_convict() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0"))
    assert story.tell(resume("w0")) == ()
    assert golden(story).status == "provisional"
    story.tell(joined("w1"), passed("w1"))
    story.tell(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"), resume("w0"))
    assert golden(story).status == "agreed"


def test_a_configured_answer_is_agreed_at_once() -> None:
    story = Story()
    assert kinds(story.tell(proposed("", configured=True))) == ["GoldenAgreed"]
    assert golden(story).by == ("configured",)
    assert story.tell(proposed("", configured=True)) == ()
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", WRONG), proposed("w1", WRONG))
    story.tell(proposed("w0", RIGHT, configured=True))
    assert (golden(story).status, golden(story).tokens) == ("agreed", RIGHT)


def test_logits_must_agree_within_the_tolerance() -> None:
    near, far = ((((1, -0.1),),), (((1, -0.1005),),)), ((((1, -0.1),),), (((1, -0.2),),))
    for (one, other), expected in ((near, "agreed"), (far, "retired")):
        story = Story().up("w0", "w1")
        story.tell(proposed("w0", top_k=one, tolerance=1e-3))
        story.tell(proposed("w1", top_k=other, tolerance=1e-3))
        assert golden(story).status == expected


def test_a_dispute_makes_both_suspicious_and_retires_the_golden() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", WRONG))
    decisions = story.tell(disputed("w1", RIGHT, against="w0"))
    assert any(isinstance(d, GoldenRetired) for d in decisions)
    assert golden(story).status == "retired"
    for name in ("w0", "w1"):
        assert (story.status(name), story.worker(name).weight) == (S, 0.5)


def test_other_canaries_do_not_end_a_dispute() -> None:
    story = dispute()
    for _ in range(5):
        story.tell(passed("w0", canary="c2"), passed("w1", canary="c2"))
    assert story.status("w0") is story.status("w1") is S


def test_the_next_worker_decides_and_the_other_is_convicted_by_its_next_canary() -> None:
    story = dispute()
    story.tell(joined("w2"), proposed("w2", RIGHT), passed("w2", canary="c2"))
    assert (golden(story).status, golden(story).tokens, golden(story).by) == ("agreed", RIGHT, ("w1", "w2"))
    story.tell(passed("w0", canary="c2"), passed("w1", canary="c2"))
    assert story.status("w1") is H
    assert story.status("w0") is S  # it dissents until it passes this canary
    story.tell(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"))
    assert story.status("w0") is U


def test_a_dissenter_that_passes_is_no_longer_in_doubt() -> None:
    story = dispute()
    story.tell(joined("w2"), proposed("w2", RIGHT))
    story.tell(passed("w0"))
    story.tell(passed("w0"))
    assert story.status("w0") is H


def test_the_survivor_of_a_dispute_is_not_in_doubt_for_ever() -> None:
    story = dispute()
    story.tell(left("w0"))
    story.tell(passed("w1", canary="c2"))
    assert story.status("w1") is H


def test_a_pass_is_no_vote_for_a_disputed_answer() -> None:
    """A former leader's (wrong) proposal is folded before the new leader's (right) one, which w2 has passed."""
    story = Story().up("w0", "w1", "w2")
    story.record(proposed("w0", WRONG))
    story.record(proposed("w1", RIGHT))
    story.record(story.stamp(passed("w2")))
    story.settle()
    assert golden(story).status == "retired"
    assert not any(isinstance(e.fact, GoldenAgreed) for e in story.events)
    story.tell(proposed("w2", RIGHT))
    assert golden(story).tokens == RIGHT


def test_contradicting_proposals_are_a_dispute() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", WRONG))
    assert "GoldenRetired" in kinds(story.tell(proposed("w1", RIGHT)))
    assert story.status("w0") is story.status("w1") is S


def test_a_disputing_worker_that_joins_stays_out_of_service() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0"))
    story.tell(joined("w1"), disputed("w1", WRONG, against="w0"), passed("w1", canary="c2"))
    assert (story.status("w1"), story.worker("w1").weight) == (S, 0.0)
    story.tell(resume("w1"))
    story.tell(passed("w1", canary="c2"))
    assert story.status("w1") is H


def test_a_restarted_worker_votes_again() -> None:
    story = dispute()
    story.tell(left("w0"), joined("w0", "i2"))
    story.tell(proposed("w0", RIGHT, instance="i2"), passed("w0", "i2", canary="c2"))
    assert golden(story).by == ("w0", "w1")
    assert story.status("w0") is H


def test_a_dispute_about_an_agreed_golden_is_ignored() -> None:
    story = Story().up("w0", "w1", "w2")
    story.tell(proposed("w0"), proposed("w1"))
    story.tell(disputed("w2", WRONG, against="w0"))
    assert golden(story).status == "agreed"
    assert story.status("w2") is H


def test_n23_goldens_are_kept_per_canary_key() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0"))
    upgraded = joined("w1", key="k2")
    story.tell(upgraded)
    story.tell(passed("w1", key="k2"))
    assert golden(story).status == "provisional"
    assert story.status("w1") is H


def test_votes_are_bounded() -> None:
    names = [f"w{n}" for n in range(80)]
    story = Story()
    for n, name in enumerate(names):
        story.record(joined(name))
        story.record(proposed(name, (n,)))
    assert len(golden(story).votes) == 64


@pytest.mark.parametrize(
    "one, other, expected",
    [
        ((((1, -1.0), (2, -2.0)),), (((1, -1.5), (3, -2.0)),), 0.5),
        ((), (), 0.0),
        ((((1, -1.0),),), (), 0.0),
    ],
)
def test_distance_is_the_worst_shared_logprob(
    one: tuple[TopK, ...], other: tuple[TopK, ...], expected: float
) -> None:
    assert distance(one, other) == expected


def test_answers_without_logits_agree_by_their_tokens() -> None:
    assert agrees(Vote("a", "i", (1,), (((1, -1.0),),)), Vote("b", "i", (1,)), 1e-3)
    assert not agrees(Vote("a", "i", (1,)), Vote("b", "i", (2,)), 1e-3)


# One tie at the second token: 2 and 3 are 0.05 apart, and each worker picked its own best.
SEEN_BY_W0 = (((1, -0.1), (5, -3.0)), ((2, -0.70), (3, -0.75)), ((4, -0.1), (5, -4.0)))
SEEN_BY_W1 = (((1, -0.1), (5, -3.0)), ((3, -0.71), (2, -0.74)), ((6, -0.2), (5, -4.0)))
TIED = Vote("w0", "i", (1, 2, 4), SEEN_BY_W0), Vote("w1", "i", (1, 3, 6), SEEN_BY_W1)


def test_answers_that_diverge_at_a_near_tie_are_one_camp() -> None:
    one, other = TIED
    assert not agrees(one, other, 1e-3), "as before the margin existed"
    assert agrees(one, other, 1e-3, 0.1) and agrees(other, one, 1e-3, 0.1)
    assert not agrees(one, other, 1e-3, 0.01), "a clear lead"
    third = Vote("w2", "i", (1, 7, 4), SEEN_BY_W0)
    assert not agrees(one, third, 1e-3, 0.1), "7 is in neither list"
    assert not agrees(one, Vote("w1", "i", (1, 3, 6)), 1e-3, 0.1), "without logprobs no tie is visible"
    drifted = Vote("w1", "i", (1, 3, 6), (((1, -0.3), (5, -3.0)), *SEEN_BY_W1[1:]))
    assert not agrees(one, drifted, 1e-3, 0.1), "the tokens before the tie are compared"
    assert [len(camp) for camp in camps([*TIED, third], 1e-3, 0.1)] == [2, 1]


def test_two_workers_that_diverge_at_a_near_tie_agree_and_neither_is_in_doubt() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", (1, 2, 4), top_k=SEEN_BY_W0, tolerance=1e-3))
    decisions = story.tell(proposed("w1", (1, 3, 6), top_k=SEEN_BY_W1, tolerance=1e-3))
    assert kinds(decisions) == ["GoldenAgreed"]
    agreed = only(decisions, GoldenAgreed)
    assert (agreed.by, agreed.tied) == (("w0", "w1"), ("w1",))
    assert (golden(story).tokens, golden(story).dissent) == ((1, 2, 4), ())
    assert (story.status("w0"), story.status("w1")) == (H, H)


def test_before_version_6_two_workers_at_a_near_tie_disagreed() -> None:
    story = Story(FleetPolicy().at(5)).up("w0", "w1")
    story.tell(proposed("w0", (1, 2, 4), top_k=SEEN_BY_W0, tolerance=1e-3))
    decisions = story.tell(proposed("w1", (1, 3, 6), top_k=SEEN_BY_W1, tolerance=1e-3))
    assert "GoldenRetired" in kinds(decisions) and "GoldenAgreed" not in kinds(decisions)
    assert (story.status("w0"), story.status("w1")) == (S, S)


def configured_story(*workers: str) -> Story:
    story = Story().up(*workers)
    story.tell(proposed("", RIGHT, configured=True))
    assert golden(story).status == "agreed"
    return story


def test_a_configured_answer_that_more_workers_contradict_than_confirm_is_retired_for_good() -> None:
    story = configured_story("w0", "w1", "w2")
    assert story.tell(disputed("w0", WRONG, against="configured")) == ()
    decisions = story.tell(disputed("w1", WRONG, against="configured"))
    assert [d.reason for d in decisions if isinstance(d, GoldenRetired)] == [
        "disputed: w0, w1 against the configured answer"
    ]
    assert kinds(decisions) == ["GoldenRetired"], "only the configuration is in doubt"
    assert story.tell(proposed("", RIGHT, configured=True)) == () and golden(story).status == "retired"
    assert {worker.weight for worker in story.fleet.workers.values()} == {1.0}
    story.tell(proposed("", (9,), configured=True))
    assert (golden(story).status, golden(story).tokens) == ("agreed", (9,)), (
        "another configured answer counts as new"
    )


def test_a_configured_answer_stands_if_as_many_confirm_it_or_its_opponents_differ() -> None:
    story = configured_story("w0", "w1", "w2", "w3")
    story.tell(disputed("w0", WRONG, against="configured"), disputed("w1", (8,), against="configured"))
    story.tell(passed("w2"), passed("w3"))
    assert story.tell(disputed("w1", WRONG, against="configured")) == ()
    assert golden(story).status == "agreed"


def test_disputed_logprobs_do_not_confirm_a_configured_answer() -> None:
    story = configured_story("w0", "w1")
    story.tell(disputed("w0", RIGHT, against="configured"), disputed("w1", RIGHT, against="configured"))
    assert golden(story).status == "retired"


def test_two_confirmations_of_a_configured_answer_are_remembered() -> None:
    story = configured_story("w0", "w1", "w2")
    for name in ("w0", "w1", "w2", "w0"):
        story.tell(passed(name))
    assert [vote.worker for vote in golden(story).votes] == ["configured", "w0", "w1"]
    before = golden(story)
    story.tell(passed("w1"))
    assert golden(story) is before, "a state that nothing changes stays the same object"
