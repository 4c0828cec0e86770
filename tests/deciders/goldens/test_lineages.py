"""A worker of a new lineage is held back until a quorum agrees on its goldens; it is not convicted."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from fleet_story import Story, failed, joined, left, passed, proposed

from controller.deciders.fleet import FleetPolicy
from controller.deciders.golden import GoldenPolicy
from events.decisions import HealthChanged, HealthStatus, WeightCapped
from events.observations import GoldenRequested, WorkerJoined, canary_key, is_new_lineage

H, S, U, DR, DEAD = HealthStatus
PLACE: dict[str, Any] = {
    "model": "llama", "revision": "r1", "tokenizer": "t", "engine": "openai", "engine_version": "1",
    "dtype": "unknown", "tp": 1, "device": "upstream",
}  # fmt: skip


def key(lineage: str = "", **other: Any) -> str:
    return canary_key(**{**PLACE, **other}, lineage=lineage)


OLD, NEW = key("root=a"), key("root=b")


def member(name: str, instance: str = "i1", of: str = OLD) -> WorkerJoined:
    return replace(joined(name, instance, key=of), lineage=of.rpartition("|")[2])


def answers(story: Story, name: str, tokens: tuple[int, ...], instance: str = "i1", of: str = OLD) -> None:
    story.tell(replace(proposed(name, tokens, instance=instance), canary_key=of))
    story.tell(passed(name, instance, key=of))


def serving(count: int = 2, policy: FleetPolicy | None = None) -> Story:
    story = Story(policy)
    for number in range(count):
        story.tell(member(f"w{number}"))
        answers(story, f"w{number}", (1, 2))
    assert all(story.worker(f"w{number}").weight == 1.0 for number in range(count))
    return story


def updated(story: Story, name: str, of: str = NEW, tokens: tuple[int, ...] = (5, 6)) -> None:
    """Update a server's weights: a new life of its worker joins with another lineage and answers."""
    story.tell(left(name), member(name, "i2", of))
    answers(story, name, tokens, "i2", of)


def test_the_first_worker_of_a_new_lineage_is_held_and_a_second_one_releases_both() -> None:
    story = serving(3)
    updated(story, "w0")
    first = story.worker("w0")
    assert (first.health.status, first.weight, first.health.held) == (S, 0.0, True)
    assert not first.health.corrupt and "new_lineage" in first.reasons[0]
    story.wait(300)
    assert story.worker("w0").weight == 0.0
    updated(story, "w1")
    assert [story.worker(name).weight for name in ("w0", "w1", "w2")] == [1.0, 1.0, 1.0]


def test_a_held_worker_serves_as_the_last_worker_of_its_model_and_is_marked() -> None:
    story = serving()
    updated(story, "w0")
    assert story.worker("w0").weight == 0.0
    story.tell(left("w1"))
    assert (story.worker("w0").weight, story.worker("w0").serves_suspect) == (1.0, True)
    story.tell(member("w1", "i2", NEW))
    assert story.worker("w0").weight == 1.0  # the other one has not answered yet
    answers(story, "w1", (5, 6), "i2", NEW)
    assert [story.worker(name).serves_suspect for name in ("w0", "w1")] == [False, False]
    assert [story.worker(name).weight for name in ("w0", "w1")] == [1.0, 1.0]


def test_a_worker_that_contradicts_the_first_of_a_new_lineage_releases_neither() -> None:
    story = serving(3)
    updated(story, "w0")
    updated(story, "w1", tokens=(8, 8))
    assert [story.worker(name).weight for name in ("w0", "w1", "w2")] == [0.0, 0.0, 1.0]
    updated(story, "w2")
    assert [story.worker(name).weight for name in ("w0", "w2")] == [1.0, 1.0]


def test_an_operator_releases_a_held_worker_by_approving_its_answers() -> None:
    story = serving()
    updated(story, "w0")
    story.tell(
        GoldenRequested(act="approve", canary_key=NEW, canaries=("c1",), worker="w0", instance="i2", by="ann")
    )
    assert (story.status("w0"), story.worker("w0").weight) == (H, 1.0)


def test_a_restart_alone_is_no_new_lineage() -> None:
    story = serving()
    story.tell(left("w0"), member("w0", "i2"))
    story.tell(passed("w0", "i2", key=OLD))
    assert story.worker("w0").weight == 1.0


def test_a_new_lineage_lifts_convictions_by_old_goldens_but_not_for_non_finite_answers() -> None:
    wrong = replace(failed("w0", reason="token_mismatch", confirmed=True, golden="agreed"), canary_key=OLD)
    for fact, convicted in ((wrong, False), (replace(wrong, reason="non_finite"), True)):
        story = serving()
        story.tell(fact)
        assert story.worker("w0").health.corrupt
        story.tell(left("w0"), member("w0", "i2", NEW))
        assert story.worker("w0").health.corrupt is convicted


def test_a_worker_is_not_held_when_the_workers_of_the_old_lineage_are_forgotten() -> None:
    story = serving()
    updated(story, "w0")
    story.tell(left("w1"))
    story.wait(timedelta(minutes=10).total_seconds() + 1)
    story.tell(passed("w0", "i2", key=NEW))
    assert "w1" not in story.fleet.workers
    assert story.status("w0") is H


def test_a_first_start_holds_no_worker_whatever_its_lineage() -> None:
    story = Story()
    for name, of in (("w0", OLD), ("w1", NEW)):
        story.tell(member(name, of=of))
        answers(story, name, (1, 2), of=of)
    assert [story.worker(name).weight for name in ("w0", "w1")] == [1.0, 1.0]


def test_without_the_setting_and_under_older_deciders_a_new_lineage_serves_at_once() -> None:
    for policy in (FleetPolicy(golden=GoldenPolicy(hold_new_lineage=False)), FleetPolicy().at(5)):
        story = serving(policy=policy)
        updated(story, "w0")
        assert story.status("w0") is H


@pytest.mark.parametrize(
    ("other", "new"),
    [
        (key("root=a"), True),
        (key("root=a", revision="r2", engine_version="2", tokenizer="u", dtype="fp8"), True),
        (key("", revision="r2"), True),
        (key(""), False),  # before, the engine told nothing
        (key("root=a", model="other"), False),
        (key("root=a", engine="simulated"), False),
        (key("root=a", device="H100"), False),
        (key("root=a", tp=2), False),
        ("k", False),
    ],
)
def test_a_lineage_is_new_only_among_others_of_its_kind(other: str, new: bool) -> None:
    assert is_new_lineage(NEW, (other,)) is new
    assert not is_new_lineage(NEW, (other, NEW))
    assert not is_new_lineage(key(""), (other,))


def test_a_worker_is_held_by_one_decision_with_its_reason() -> None:
    story = serving()
    story.tell(left("w0"), member("w0", "i2", NEW))
    story.tell(replace(proposed("w0", (5, 6), instance="i2"), canary_key=NEW))
    decisions = story.tell(passed("w0", "i2", key=NEW))
    changed = [d for d in decisions if isinstance(d, HealthChanged)]
    assert [(d.before, d.after, d.reason, d.weight) for d in changed] == [(S, S, "new_lineage", 0.0)]
    assert not any(isinstance(d, WeightCapped) for d in decisions)
    assert story.tell(passed("w0", "i2", key=NEW)) == ()
