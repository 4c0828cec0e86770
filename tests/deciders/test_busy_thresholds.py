"""Thresholds set at any frontend merge in the journal's order, and invalid ones change nothing."""

from datetime import UTC, datetime
from typing import Any

import pytest

from controller.deciders.fleet import Fleet, evolve
from controller.deciders.thresholds import NEVER, BusyThresholds
from controller.read_model import snapshot
from events.fact import Recorded
from events.observations import BusyThresholdsSet

AT = datetime(2026, 1, 1, tzinfo=UTC)


def after(*said: dict[str, Any], model: str = "m") -> Fleet:
    fleet = Fleet()
    for seq, one in enumerate(said, 1):
        fact = BusyThresholdsSet(**{"frontend": "f", "model": model, **one})
        fleet = evolve(fleet, Recorded(seq, AT, fact, f"e{seq}"))
    return fleet


def test_unset_thresholds_stay_and_the_last_value_applies() -> None:
    fleet = after(
        {"active_decode_blocks": 0.8},
        {"active_prefill_tokens": 100, "frontend": "another"},
        {"active_decode_blocks": 0.0},
        {"active_prefill_tokens_frac": 2.0, "model": "other"},
    )
    assert fleet.thresholds["m"] == BusyThresholds(0.0, 100, None)
    assert fleet.thresholds["other"] == BusyThresholds(None, None, 2.0)
    assert snapshot.decode(snapshot.encode(fleet)).thresholds == fleet.thresholds


@pytest.mark.parametrize(
    "odd",
    [{"active_decode_blocks": 1.5}, {"active_prefill_tokens": -1}, {"active_prefill_tokens_frac": -0.1}],
)
def test_invalid_thresholds_change_nothing(odd: dict[str, Any]) -> None:
    assert after({"active_decode_blocks": 0.8}, odd).thresholds["m"] == BusyThresholds(0.8)
    assert after(odd).thresholds["m"] == NEVER


def test_zero_is_a_threshold_and_none_is_unset() -> None:
    assert BusyThresholds(0.0) and BusyThresholds(None, 0) and not NEVER
    assert BusyThresholds(0.0, 0).over(BusyThresholds(0.5, 5, 1.0)) == BusyThresholds(0.0, 0, 1.0)
