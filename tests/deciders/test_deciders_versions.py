"""A fleet with processes of an older version decides as that version does, and writes no new kind."""

from dataclasses import replace
from datetime import timedelta

from fleet_story import START, Story, left

from controller.deciders.fleet import DECIDERS_VERSION, OLDEST, Fleet, FleetPolicy, in_force, load, settle
from events.decisions import PolicyAdopted
from events.versions import InForce, new_kinds


def adopted(fleet: Fleet, force: InForce | None = None, policy: FleetPolicy | None = None) -> PolicyAdopted:
    """Return the only decision that is due."""
    (found,) = settle(policy or FleetPolicy(), fleet, START, force=force)
    assert isinstance(found, PolicyAdopted)
    return found


def at(version: int, kinds: frozenset[str] = frozenset()) -> Fleet:
    """Return a fleet in which a version is in force."""
    policy = dict(FleetPolicy().at(version).adopted)
    return Fleet(number=7, policy=policy, deciders_version=version, kinds=kinds)


def test_the_first_leader_of_a_fleet_puts_all_kinds_in_force_at_once() -> None:
    first = adopted(Fleet())
    assert first.kinds == tuple(sorted(new_kinds()))
    assert first.deciders_version == DECIDERS_VERSION


def test_a_leader_in_a_fleet_of_0_2_0_adopts_the_oldest_version_and_no_new_kind() -> None:
    fact = adopted(replace(at(OLDEST), deciders_version=4))
    assert (fact.kinds, fact.deciders_version) == ((), OLDEST)


def test_what_is_in_force_stays_until_more_is_put_in_force() -> None:
    fleet = at(5, frozenset({"worker_forgotten"}))
    assert settle(FleetPolicy(), fleet, START) == ()
    more = InForce.of(new_kinds(), DECIDERS_VERSION, by="ann", command="c1")
    fact = adopted(fleet, more)
    assert (fact.deciders_version, fact.allowed_by, fact.command) == (DECIDERS_VERSION, "ann", "c1")
    assert fact.kinds == tuple(sorted(new_kinds()))


def test_an_older_version_decides_by_its_own_policy_and_writes_it_as_it_did() -> None:
    policy = FleetPolicy()
    assert policy.degradation.exit_at_provisioned and not policy.at(5).degradation.exit_at_provisioned
    assert policy.at(5) is policy.at(5) and policy.at(DECIDERS_VERSION) == policy
    assert "exit_at_provisioned" not in policy.at(5).adopted["degradation"], "version 5 had no such field"
    assert load(policy.at(5).adopted) == policy.at(5)
    assert load(policy.adopted) == policy


def test_a_leader_that_knows_less_than_is_in_force_adopts_what_it_knows() -> None:
    """It was rolled back before anything unknown to it was written."""
    fleet = replace(at(5, new_kinds() | {"of_tomorrow"}), deciders_version=99)
    fact = adopted(fleet)
    assert fact.deciders_version == DECIDERS_VERSION
    assert fact.kinds == tuple(sorted(new_kinds()))
    assert in_force(fleet).kinds == new_kinds()


def test_a_decision_of_a_kind_that_is_not_in_force_is_not_made() -> None:
    story = Story().up("w0", "w1")
    story.tell(left("w0"))
    later = story.now + timedelta(hours=1)
    due = settle(story.policy, story.fleet, later)
    assert "worker_forgotten" in {fact.kind() for fact in due}
    barred = replace(story.fleet, kinds=frozenset())
    due = settle(story.policy, barred, later)
    assert "worker_forgotten" not in {fact.kind() for fact in due}
    assert settle(story.policy, barred, later) == due, "the fleet is still calm"
