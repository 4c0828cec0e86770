"""A field that is added to a folded state, with a default, survives every kind of fact.

Each state gets a subclass with one more field, as a later release might. A state that is rebuilt field by field, by position
or by name, loses it. A part of a state may be reset, but only as a whole, to its initial value.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, make_dataclass
from datetime import UTC, datetime
from typing import Any, get_args, get_type_hints

import pytest
from any_fact import INSTANTS, facts_of
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.deciders import breaker, budget, degradation, drain, fold, golden, health, incident
from controller.deciders.breaker import Breaker
from controller.deciders.budget import Budget
from controller.deciders.degradation import Degradation
from controller.deciders.drain import Drain
from controller.deciders.fleet import Fleet, Worker
from controller.deciders.fold import AwaitedWorker
from controller.deciders.golden import Golden
from controller.deciders.health_state import Canaries, Charges, Exit, Health, Slowness, Trials
from controller.deciders.incident import Incident
from controller.deciders.thresholds import BusyThresholds
from controller.deciders.votes import GoldenMoves, OperatorRequest, Vote
from controller.deciders.worker import Conviction, LastCanary, Spare
from events.codec import KINDS
from events.decisions import IncidentClosed
from events.fact import Fact, Recorded
from events.frozen import replace
from events.observations import WorkerJoined

AT = datetime(2026, 1, 1, tzinfo=UTC)
ADDED = 7  # no default
STATES = (Fleet, Worker, Health, Breaker, Drain, Budget, Degradation, Golden, Incident)
PARTS = (Canaries, Slowness, Charges, Trials, Exit, GoldenMoves)  # of a Health and of a Golden
EXTENDED: dict[type[Any], type[Any]] = {
    cls: make_dataclass(f"Extended{cls.__name__}", [("added", int, 0)], bases=(cls,), frozen=True, slots=True)
    for cls in (*STATES, *PARTS)
}
EVOLVE: dict[type[Any], Callable[..., Any]] = {
    Health: health.evolve,
    Breaker: breaker.evolve,
    Drain: drain.evolve,
    Budget: budget.evolve,
    Degradation: degradation.evolve,
    Golden: golden.evolve,
    Incident: lambda state, fact, cause: incident.evolve(state, fact),
}


def extended(state: Any) -> Any:
    """Return a state with the field added to it and to all states in it."""
    cls = type(state)
    if isinstance(state, dict):
        return {key: extended(value) for key, value in state.items()}
    if cls in EXTENDED or cls in EXTENDED.values():
        own = {f.name: extended(getattr(state, f.name)) for f in fields(state) if f.name != "added"}
        return EXTENDED.get(cls, cls)(**own, added=ADDED)
    return state


def kept(state: Any) -> bool:
    """Return whether a state and each of its parts still have the field; a part may have been reset as a whole."""
    parts = [getattr(state, f.name) for f in fields(state)]
    parts = [part for part in parts if isinstance(part, PARTS)]
    whole = all(getattr(part, "added", 0) == ADDED or part == type(part)() for part in parts)
    return getattr(state, "added", 0) == ADDED and whole


def any_state(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Return values of a state: arbitrary fields, also in its parts, and the added ones set."""
    st.register_type_strategy(float, st.floats(0, 1))
    st.register_type_strategy(datetime, INSTANTS)
    hints = get_type_hints(cls)
    known = {f.name: hints[f.name] for f in fields(cls)}
    drawn = {name: any_state(hint) if hint in PARTS else st.from_type(hint) for name, hint in known.items()}
    return st.builds(EXTENDED[cls], **drawn, added=st.just(ADDED))


STRATEGIES = {cls: any_state(cls) for cls in EVOLVE}


def ends(state: Any, fact: Fact) -> bool:
    """Return whether a fact ends a state, as the close of an incident does."""
    return isinstance(state, Incident) and isinstance(fact, IncidentClosed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=3)  # one is enough: each state is rebuilt by one line
def test_a_machine_keeps_an_unknown_field(kind: type[Fact], data: st.DataObject) -> None:
    fact = data.draw(facts_of(kind))
    for cls, evolve in EVOLVE.items():
        state = data.draw(STRATEGIES[cls])
        after = evolve(state, fact, "e1")
        assert after is None if ends(state, fact) else kept(after), (state, fact, after)


def states(fleet: Fleet) -> dict[tuple[str, ...], Any]:
    """Return all states of a fleet by their location. A worker's machines belong to one life, so its instance is part of it."""
    found: dict[tuple[str, ...], Any] = {("fleet",): fleet}
    for name, worker in fleet.workers.items():
        life = ("worker", name, worker.joined.instance)
        machines = {"health": worker.health, "breaker": worker.breaker, "drain": worker.drain}
        found |= {("worker", name): worker, (*life, "budget"): worker.budget}
        found |= {(*life, machine): state for machine, state in machines.items()}
    for kind in ("goldens", "models", "incidents"):
        found |= {(kind, str(key)): state for key, state in getattr(fleet, kind).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=3)  # one is enough: each state is rebuilt by one line
def test_a_fleet_and_its_states_keep_an_unknown_field(kind: type[Fact], data: st.DataObject) -> None:
    story = data.draw(st.lists(facts_of(WorkerJoined), min_size=2, max_size=4))
    story += data.draw(st.lists(facts_of(kind), min_size=1, max_size=4))
    fleet = extended(Fleet())
    for seq, fact in enumerate(story, 1):
        before = states(fleet)
        after = fold.evolve(fleet, Recorded(seq=seq, at=AT, fact=fact, id=f"e{seq}"))
        for where, state in states(after).items():
            known = before.get(where)
            assert known is None or kept(state), (where, fact, state)
        fleet = extended(after)


def test_a_state_that_is_rebuilt_from_known_fields_is_detected() -> None:
    state = extended(Breaker("w0", "i1"))
    rebuilt = Breaker(*(getattr(state, f.name) for f in fields(Breaker)))
    assert kept(state) and not kept(rebuilt)


def test_a_rebuilt_part_is_detected_and_a_reset_one_is_not() -> None:
    state = extended(Health("w0", "i1", canaries=Canaries(failures=2)))
    assert kept(state) and kept(replace(state, canaries=replace(state.canaries, failures=3)))
    assert kept(replace(state, canaries=Canaries()))
    assert not kept(replace(state, canaries=Canaries(failures=3)))


def test_every_state_of_a_fleet_is_covered() -> None:
    """A new state must be added to `STATES`, or here if the next fact replaces it as a whole."""
    said_once = {LastCanary, Conviction, Vote, OperatorRequest, AwaitedWorker, BusyThresholds, Spare}
    assert _dataclasses(Fleet) == {*STATES, *PARTS, *said_once}


def _dataclasses(hint: Any) -> set[type[Any]]:
    """Return the deciders' dataclasses that a value of this type may hold."""
    found: set[type[Any]] = set()
    if is_dataclass(hint) and isinstance(hint, type) and hint.__module__.startswith("controller.deciders."):
        found.add(hint)
        for inner in get_type_hints(hint).values():
            found |= _dataclasses(inner)
    for part in get_args(hint):
        found |= _dataclasses(part)
    return found
