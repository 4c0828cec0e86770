"""Facts are found under every worker that they name, in the store, its double and the journal."""

import argparse
from dataclasses import fields, replace
from typing import Any

import pytest
from fleet_history import EPOCH, History
from memory_journal import MemoryJournal
from store_databases import OpenStore

from controller.commands.operator_commands import is_wanted
from controller.read_model.worker_names import OTHER_FIELDS, PATHS, workers_of
from controller.replay.event_lookup import JournalArchive
from controller.runtime.projection.projector import Projector
from events import codec
from events import observations as o
from events.decisions import GoldenAgreed, GoldenRetired, SpareActivated, SpareReleased
from events.fact import Decision, Fact, Observation, Recorded

GOLDEN: dict[str, Any] = {"canary_key": "key", "canary": "c0"}


def naming_several(history: History) -> dict[str, Fact]:
    """Return facts that name w1 in another field than `worker`."""
    of_w0: dict[str, Any] = {"worker": "w0", "instance": "w0-a"}
    decided: dict[str, Any] = {"decided_at": history.now, "number": 1}
    answer: dict[str, Any] = {"frontend": "frontend-0", "request": "r1", "model": "llama"}
    moves = tuple(
        o.BreakerMove(worker=name, instance=f"{name}-a", position="open", ago_ms=1.0, reason="stalled")
        for name in ("w0", "w1")
    )
    return {
        "moves": o.FrontendBreakersMoved(frontend="frontend-0", moves=moves, dropped=0),
        "source": history.migrated("r1", "w1", "w2"),
        "target": history.migrated("r1", "w2", "w1"),
        "resumed": o.RequestResumed(
            **answer, source="w2", target="w1", target_instance="w1-a", tokens=1, gap_ms=1.0, exact=True
        ),
        "to": o.MoveRequested(**of_w0, to="w1"),
        "proposed_by": o.GoldenDisputed(**of_w0, **GOLDEN, proposed_by="w1", tokens=(1,)),
        "by": GoldenAgreed(**decided, **GOLDEN, by=("w0", "w1")),
        "tied": GoldenAgreed(**decided, **GOLDEN, by=("w0",), tied=("w1",)),
        "outvoted_by": GoldenRetired(**decided, **GOLDEN, reason="outvoted", outvoted_by=("w0", "w1")),
        "replaces": SpareActivated(**decided, **of_w0, replaces="w1", reason="dead"),
        "returned": SpareReleased(**decided, **of_w0, returned="w1"),
    }


async def test_a_fact_is_found_under_each_worker_that_it_names(open_store: OpenStore) -> None:
    history = History().start()
    said = naming_several(history)
    number = history.latest.position.number
    for fact in said.values():
        if isinstance(fact, Decision):
            number += 1
            history.append([replace(fact, number=number)], through=len(history.events))
        else:
            assert isinstance(fact, Observation)
            history.say(fact)
    kinds = {fact.kind() for fact in said.values()}
    store = open_store()
    await Projector(MemoryJournal(history.stream, "reader-1"), store).catch_up(len(history.events))
    for archive in (store, JournalArchive(MemoryJournal(history.stream, "reader-1"))):
        for worker in ("w0", "w1", "w2"):
            found = [event async for batch in archive.select(worker=worker) for event in batch]
            assert found == [event for event in history.events if worker in workers_of(event.fact)]
            if worker == "w1":
                assert [e.fact.kind() for e in found if e.fact.kind() in kinds] == [
                    fact.kind() for fact in said.values()
                ]


@pytest.mark.parametrize("field", naming_several(History()))
def test_holdfast_events_selects_it_by_worker(field: str) -> None:
    event = Recorded(1, EPOCH, naming_several(History())[field], "id-1")
    assert is_wanted(event, argparse.Namespace(kind=None, worker="w1"))
    assert not is_wanted(event, argparse.Namespace(kind=None, worker="w9"))


def test_no_kind_that_names_a_worker_is_left_out() -> None:
    names = {name for listed in OTHER_FIELDS.values() for name in listed} - {"by"} | {"worker"}
    for kind in codec.KINDS.values():
        own = {(field.name,) for field in fields(kind) if field.name in names}
        assert own <= set(PATHS[kind]), kind
    assert PATHS[o.FrontendBreakersMoved] == (("moves", "worker"),)
