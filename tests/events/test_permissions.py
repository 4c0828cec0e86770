"""The table of broker permissions by role."""

from collections.abc import Iterable

import pytest
from memory_bus import matches

from controller.catalogue import EMITTERS
from events import subjects
from events.broker_users import ROLES, names, worker_user, workers_of
from events.permissions import PUBLISHES, BrokerUser, users

WORKERS = (worker_user("w1"), worker_user("x8", 3))
USERS = {user.name: user for user in users(WORKERS, WORKERS)}
SPOKEN = {
    "worker": "the worker",
    "controller": "controller",
    "frontend": "a frontend",
    "supervisor": "the supervisor",
    "planner": "the planner",
    "operator": "an operator, by",
}


def may(allowed: Iterable[str], subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in allowed)


def test_there_is_a_user_for_each_role_and_each_process_of_workers() -> None:
    assert set(USERS) == {*ROLES, "worker-w1", "worker-x8+3"}


def test_exactly_the_emitting_roles_may_publish_a_fact() -> None:
    said: dict[str, set[str]] = {}
    for role, kinds in PUBLISHES.items():
        for kind in kinds:
            said.setdefault(kind.kind(), set()).add(role)
    assert said.keys() == EMITTERS.keys()
    for name, roles in said.items():
        for role, words in SPOKEN.items():
            assert (role in roles) is (words in EMITTERS[name]), (name, role)


@pytest.mark.parametrize("role", PUBLISHES)
def test_each_role_may_publish_its_own_facts(role: str) -> None:
    user = USERS["worker-w1" if role == "worker" else role]
    for kind in PUBLISHES[role]:
        about = {"fleet": "all", "worker": "w1"}.get(kind.entity, "x")
        subject = f"{subjects.OBSERVED}.{kind.entity}.{about}.{kind.kind()}"
        assert may(
            user.publish, subjects.fact_of_worker(user.name, subject) if role == "worker" else subject
        ), kind


@pytest.mark.parametrize(
    "subject",
    [
        "$JS.API.STREAM.DELETE.FLEET",
        "$JS.API.STREAM.PURGE.FLEET",
        "$JS.API.STREAM.MSG.DELETE.FLEET",
        "$JS.API.STREAM.RESTORE.FLEET",
        "$JS.API.STREAM.SNAPSHOT.FLEET",
        "$JS.API.DIRECT.GET.FLEET",
        "$JS.API.STREAM.CREATE.OTHER",
        "$JS.API.SERVER.REMOVE",
    ],
)
def test_no_role_can_delete_history(subject: str) -> None:
    assert [user.name for user in USERS.values() if may(user.publish, subject)] == []


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        ("$JS.API.STREAM.UPDATE.FLEET", {"supervisor"}),  # its bounds
        ("fleet.observed.fleet.all.snapshot_kept", {"controller"}),
        ("fleet.decided.health_changed", {"controller"}),
        ("control.drain", {"operator"}),
        ("control.chaos", {"operator"}),
        ("live.stop.w1", {"controller"}),
        ("live.beat.w1", {"worker-w1"}),
        ("kv.events.x9", {"worker-x8+3"}),
        ("fleet.observed.worker.w1.worker_joined", {"controller"}),  # from the intake
        ("fleet.observed.worker.w1.worker_left", {"controller", "supervisor"}),
        ("fleet.observed.worker.w1.worker_awaited", {"controller"}),
        ("say.worker-w1.w1.worker_joined", {"worker-w1"}),
        ("say.worker-w1.w2.worker_joined", set()),
        ("say.worker-x8+3.x10.device_faulted", {"worker-x8+3"}),
        ("say.worker-w1", {"worker-w1"}),
        ("fleet.observed.worker.w1.worker_lingered", {"controller"}),
        ("fleet.observed.event.7.event_quarantined", {"operator"}),
        ("say.worker-x8+3.x11.device_faulted", set()),
        ("fleet.observed.worker.w1.canary_passed", {"controller"}),
        ("answer.w1.frontend.x.1", {"worker-w1"}),
        ("_INBOX.operator.x.1", {"controller"}),
        ("_INBOX.controller.x.1", {"controller"}),
        (subjects.responses("f1"), {"frontend"}),
        ("_INBOX.frontend.x.1", {"controller", "frontend"}),
        ("$KV.HOLDFAST.lease", {"controller"}),
        ("$JS.API.STREAM.CREATE.FLEET", {"controller", "supervisor"}),
        ("$JS.ACK.FLEET.audit.1.2.3.4.5", {"reader", "notifier"}),
        ("$JS.API.CONSUMER.CREATE.FLEET.audit.fleet.decided.>", {"reader", "notifier"}),
        ("dead.webhook.ops", {"notifier"}),
        ("$JS.API.STREAM.CREATE.DEAD_LETTERS", {"notifier"}),
        ("$JS.API.STREAM.MSG.DELETE.DEAD_LETTERS", {"operator"}),
    ],
)
def test_the_roles_that_may_publish_a_subject(subject: str, roles: set[str]) -> None:
    assert {user.name for user in USERS.values() if may(user.publish, subject)} == roles


@pytest.mark.parametrize(
    ("subject", "roles"),
    [
        ("control.drain", {"controller"}),
        ("live.stop.w1", {"worker-w1"}),
        ("plane.w1.i.x-1", {"worker-w1"}),
        ("answer.w1.frontend.x.1", {"frontend"}),
        ("_INBOX.frontend.x.1", {"frontend"}),
        (subjects.responses("f1"), {"frontend"}),
        ("fleet.observed.worker.w1.worker_joined", set()),
        ("$JS.API.STREAM.INFO.FLEET", set()),
    ],
)
def test_the_roles_that_may_subscribe_to_a_subject(subject: str, roles: set[str]) -> None:
    assert {user.name for user in USERS.values() if may(user.subscribe, subject)} == roles


def test_workers_can_neither_read_the_journal_nor_publish_to_it() -> None:
    """So none of their acknowledgements can be sent past the permissions of others."""
    for name in WORKERS:
        told = ("$JS", "$KV", "fleet.")
        assert not any(subject.startswith(told) for subject in USERS[name].publish)


def test_a_worker_of_0_2_0_publishes_to_the_journal_itself() -> None:
    (direct,) = [user for user in users(["worker-w1"], ()) if user.name == "worker-w1"]
    assert may(direct.publish, "fleet.observed.worker.w1.worker_joined")
    assert may(direct.publish, "$JS.API.STREAM.INFO.FLEET") and not may(direct.publish, "say.worker-w1")


def test_a_process_of_many_workers_is_named_after_the_first() -> None:
    assert worker_user("w.1") == "worker-w_1"
    assert workers_of(worker_user("w9", 3)) == names("w9", 3) == ("w9", "w10", "w11")
    assert workers_of("operator") == workers_of("worker-w1+x") == ()


def test_the_worker_that_a_subject_addresses() -> None:
    worker, instance = "w1", "i1"
    for subject in (
        subjects.command("drain", worker),
        subjects.command("chaos", worker),
        subjects.kv_ask(worker, instance),
        subjects.plane(worker, instance),
        f"{subjects.plane(worker, instance)}.channel",
    ):
        assert subjects.addressed_worker(subject) == worker
    for subject in (subjects.beat(worker), subjects.links("f"), subjects.kv_events(worker), "control.drain"):
        assert subjects.addressed_worker(subject) is None


def test_a_reply_subject_belongs_to_its_worker_and_its_requester() -> None:
    subject = subjects.answer("w1", "frontend.c1", 7)
    assert matches(subjects.answers("frontend.c1"), subject)
    assert not matches(subjects.answers("frontend.c2"), subject)
    user: BrokerUser = USERS["worker-w1"]
    assert may(user.publish, subject) and not may(user.publish, subjects.answer("w2", "frontend.c1", 7))
