"""An operator approves, retires and records goldens: the effects of a request and their limits."""

from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import pytest
from fleet_story import START, Story, disputed, failed, joined, kinds, only, passed, proposed

from controller.deciders.fleet import evolve
from controller.deciders.golden import Golden
from events.decisions import GoldenAgreed, GoldenRetired, HealthStatus
from events.fact import Recorded
from events.observations import CanaryFailed, GoldenAnswer, GoldenRequested

H, S, U, DR, DEAD = HealthStatus
OLD, NEW = (1, 2), (5, 6)


def requested(
    act: Literal["approve", "retire", "record"],
    worker: str = "",
    *,
    canaries: tuple[str, ...] = ("c1",),
    **more: Any,
) -> GoldenRequested:
    instance = "i1" if worker else ""
    return GoldenRequested(
        act=act, canary_key="k", canaries=canaries, worker=worker, instance=instance, by="ann", **more
    )


def imported(tokens: tuple[int, ...], canary: str = "c1", prompt: tuple[int, ...] = (9,)) -> GoldenRequested:
    answer = GoldenAnswer(canary=canary, prompt=prompt, tokens=tokens, asked=4)
    return requested("approve", canaries=(), answers=(answer,))


def golden(story: Story, canary: str = "c1") -> Golden:
    return story.fleet.goldens["k", canary]


def contradicts(worker: str) -> CanaryFailed:
    fact = failed(worker, reason="token_mismatch", confirmed=True, golden="agreed")
    return replace(fact, expected=OLD, got=NEW, whole=True)


def agreed(count: int = 2) -> Story:
    story = Story()
    for number in range(count):
        story.tell(joined(f"w{number}"), proposed(f"w{number}", OLD), passed(f"w{number}"))
        story.tell(passed(f"w{number}"))
    assert golden(story).status == "agreed"
    return story


def test_approving_a_provisional_golden_makes_it_agreed_by_the_operator_and_its_voters() -> None:
    story = Story().up("w0")
    story.tell(proposed("w0", OLD))
    decisions = story.tell(requested("approve"))
    assert kinds(decisions) == ["GoldenAgreed"]
    assert only(decisions, GoldenAgreed).by == ("operator ann", "w0")
    assert (golden(story).status, golden(story).tokens, golden(story).moves.wanted) == ("agreed", OLD, None)
    assert golden(story).approved
    story.tell(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"))
    assert story.status("w0") is U  # from now on it convicts


def test_approving_the_answers_of_a_convicted_worker_replaces_the_golden_and_tries_it_at_once() -> None:
    story = agreed()
    story.tell(contradicts("w0"))
    assert story.status("w0") is U
    decisions = story.tell(requested("approve", "w0"))
    assert kinds(decisions)[:2] == ["GoldenRetired", "GoldenAgreed"]
    assert "BreakerHalfOpened" in kinds(decisions)
    assert (golden(story).tokens, golden(story).by) == (NEW, ("operator ann", "w0"))
    story.tell(passed("w0"))
    assert story.status("w0") is H


def test_approving_an_agreed_or_unknown_answer_changes_nothing() -> None:
    story = agreed()
    assert story.tell(requested("approve")) == ()
    assert story.tell(requested("approve", "w0")) == ()
    assert story.tell(requested("approve", "w0", canaries=("unknown",))) == ()
    assert story.tell(imported(OLD)) == ()
    assert golden(story).moves.wanted is None


def test_a_retired_golden_convicts_no_worker_and_one_good_answer_to_the_next_one_acquits() -> None:
    story = agreed(3)
    story.tell(contradicts("w0"))
    decisions = story.tell(requested("retire"))
    retired = next(d for d in decisions if isinstance(d, GoldenRetired))
    assert retired.reason == "retire: operator ann"
    assert (golden(story).status, golden(story).votes) == ("retired", ())
    story.tell(proposed("w1", NEW))
    assert golden(story).status == "provisional"
    story.tell(passed("w0"))
    assert not story.worker("w0").health.corrupt
    assert golden(story).by == ("w0", "w1")


def test_record_retires_a_golden_and_names_the_worker_that_provides_the_next() -> None:
    story = agreed()
    story.tell(requested("record", "w1"))
    assert (golden(story).status, golden(story).moves.recorder) == ("retired", "w1")
    story.tell(proposed("w1", NEW))
    assert (golden(story).status, golden(story).moves.recorder, golden(story).tokens) == (
        "provisional",
        "",
        NEW,
    )


def test_record_also_lifts_a_dispute() -> None:
    story = Story().up("w0", "w1")
    story.tell(proposed("w0", OLD), disputed("w1", NEW, against="w0"))
    assert story.worker("w0").health.disputed
    story.tell(requested("record", "w1"))
    assert golden(story).moves.recorder == "w1"
    assert not story.worker("w0").health.disputed


@pytest.mark.parametrize("known", [True, False], ids=["in place of an agreed one", "before any worker joins"])
def test_an_imported_golden_is_agreed_with_its_prompt(known: bool) -> None:
    story = agreed() if known else Story()
    decisions = story.tell(imported(NEW, prompt=(9, 9)))
    assert kinds([d for d in decisions if isinstance(d, GoldenRetired | GoldenAgreed)]) == (
        ["GoldenRetired", "GoldenAgreed"] if known else ["GoldenAgreed"]
    )
    one = golden(story)
    assert (one.status, one.tokens, one.prompt, one.asked, one.by) == (
        "agreed", NEW, (9, 9), 4, ("operator ann",)
    )  # fmt: skip


def test_several_goldens_are_imported_by_one_request() -> None:
    story = Story()
    answers = tuple(GoldenAnswer(canary=name, prompt=(9,), tokens=NEW) for name in ("c1", "c2"))
    story.tell(requested("approve", canaries=(), answers=answers))
    assert [golden(story, name).status for name in ("c1", "c2")] == ["agreed", "agreed"]


def test_an_approved_golden_can_be_outvoted_by_a_quorum() -> None:
    story = agreed(3)
    story.tell(imported((7, 7)))
    for name in ("w0", "w1", "w2"):
        story.tell(replace(contradicts(name), sent_under=story.fleet.number, expected=(7, 7)))
    assert (golden(story).status, golden(story).tokens) == ("agreed", NEW)


def test_a_request_that_reached_the_journal_after_its_deadline_is_ignored() -> None:
    story = agreed()
    late = requested("retire", until=START - timedelta(seconds=1))
    fleet = evolve(story.fleet, Recorded(seq=10**6, at=START, fact=late, id="late"))
    assert fleet.goldens == story.fleet.goldens
