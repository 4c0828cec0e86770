"""A registration with an impossible value is refused by the fold, from decider version 6 on."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from fleet_story import joined

from controller.deciders.fold import Fleet, evolve
from events.fact import Recorded
from events.intrusion.registration import impossible
from events.observations import WorkerJoined

AT = datetime(2026, 1, 1, tzinfo=UTC)
IMPOSSIBLE: list[dict[str, Any]] = [
    {"context_tokens": 0},
    {"context_tokens": -1},
    {"context_tokens": 1 << 40},
    {"tp": 0},
    {"dp": 1 << 20},
    {"waiting_max": -1},
    {"migration_limit": -3},
    {"profile": {"kv_blocks": -1}},
    {"profile": {"prefill_tokens_per_s": 1e300}},
    {"profile": {"prefill_tokens_per_s": float("nan")}},
    {"profile": {"tpot_ms": ((1, 1e300),)}},
    {"profile": {"tpot_ms": ((-1, 5.0),)}},
    {"profile": {"tpot_ms": ((1, 1.0),) * 5000}},
]


def claiming(**values: Any) -> WorkerJoined:
    honest = joined("w0")
    profile = replace(honest.profile, **values.pop("profile", {}))
    return replace(honest, profile=profile, **values)


def test_an_honest_registration_has_nothing_impossible() -> None:
    assert impossible(claiming()) == ""


@pytest.mark.parametrize("values", IMPOSSIBLE, ids=str)
def test_an_impossible_value_keeps_a_worker_out_of_the_fleet(values: dict[str, Any]) -> None:
    fact = claiming(**values)
    assert impossible(fact)
    assert not evolve(Fleet(), Recorded(1, AT, fact, "e1")).workers


def test_an_impossible_second_registration_leaves_the_first_life_in_place() -> None:
    fleet = evolve(Fleet(), Recorded(1, AT, claiming(), "e1"))
    again = replace(claiming(context_tokens=-1), instance="i2")
    assert evolve(fleet, Recorded(2, AT, again, "e2")) is fleet


def test_a_journal_of_decider_version_5_is_folded_as_it_was() -> None:
    fleet = Fleet(deciders_version=5)
    assert evolve(fleet, Recorded(1, AT, claiming(context_tokens=0), "e1")).workers
