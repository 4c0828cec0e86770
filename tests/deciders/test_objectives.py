"""The SLO of a model's time to first token, read from a policy as the journal carries it."""

from typing import Any

import pytest

from controller.deciders.capacity import Slo, slo_of
from controller.deciders.degradation import DegradationPolicy
from controller.deciders.policy import FleetPolicy


def adopted(**slos: Slo) -> Any:
    named = {name.replace("any", "*"): slo for name, slo in slos.items()}
    return FleetPolicy(degradation=DegradationPolicy(slos=named)).adopted


@pytest.mark.parametrize(
    ("policy", "objective"),
    [
        (None, 500.0),
        ({}, 500.0),
        (adopted(), 500.0),
        (adopted(m=Slo(slo_ttft_ms=200)), 200.0),
        (adopted(any=Slo(slo_ttft_ms=300)), 300.0),
        (adopted(any=Slo(slo_ttft_ms=300), m=Slo(slo_ttft_ms=200)), 200.0),
        (adopted(m=Slo(slo_ttft_ms=None)), None),
        (adopted(other=Slo(slo_ttft_ms=200)), 500.0),
    ],
)
def test_the_models_own_slo_then_the_shared_one_then_the_default(
    policy: Any, objective: float | None
) -> None:
    assert slo_of(policy, "m").slo_ttft_ms == objective
