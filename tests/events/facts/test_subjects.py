"""Subjects on the broker."""

import pytest
from any_fact import facts
from hypothesis import given
from hypothesis import strategies as st

from events import subjects
from events.fact import Decision, Fact
from events.observations import ObserverBlind, RequestsRejected, WorkerHeard


def test_observations_are_under_their_entity_and_decisions_under_their_kind() -> None:
    heard = WorkerHeard(worker="w3", instance="i", observer="o")
    assert subjects.subject(heard) == "fleet.observed.worker.w3.worker_heard"
    blind = ObserverBlind(observer="o", silent=1, known=1)
    assert subjects.subject(blind) == "fleet.observed.fleet.all.observer_blind"
    rejected = RequestsRejected(frontend="f0", model="m", count=1, reason="r", tier="standard")
    assert subjects.subject(rejected) == "fleet.observed.frontend.f0.requests_rejected"


@given(facts())
def test_every_fact_has_a_subject_of_the_stream(fact: Fact) -> None:
    subject = subjects.subject(fact)
    root = subjects.DECIDED if isinstance(fact, Decision) else subjects.OBSERVED
    assert subject.startswith(root + ".")
    assert subject.endswith("." + fact.kind())
    assert len(subject.split(".")) == (3 if isinstance(fact, Decision) else 5)


@given(st.text())
def test_any_name_becomes_one_token(name: str) -> None:
    token = subjects.token(name)
    assert token and not set(token) & set(". *>\t\r\n\0")
    assert subjects.token(token) == token


@pytest.mark.parametrize(
    "made, expected",
    [
        (subjects.beat("w.1"), "live.beat.w_1"),
        (subjects.links("f 0"), "live.links.f_0"),
        (subjects.command("chaos", "w*"), "live.chaos.w_"),
        (subjects.command("drain", ">"), "live.drain._"),
        (subjects.command("resume", "w3"), "live.resume.w3"),
    ],
)
def test_live_subjects_cannot_be_broken_by_a_name(made: str, expected: str) -> None:
    assert made == expected
