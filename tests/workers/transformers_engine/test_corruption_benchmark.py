"""The benchmark of silent corruption with a few faults: detections by the rules of 0.2.0 and today's."""

import random
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: make test-engines")
pytestmark = pytest.mark.engines

from benchmarks.corruption.sdc import delay, measured  # noqa: E402
from benchmarks.corruption.sdc_bench import prepared  # noqa: E402
from benchmarks.corruption.weight_faults import KINDS, AnyFaultInjector, draw_fault  # noqa: E402


def test_a_few_faults_are_judged_by_both_rules_and_found_within_a_round(tiny: Path) -> None:
    bench = prepared(tiny, 1)
    seen = list(measured(bench, "exponent top bit", 2, seed=1))
    assert all(one.noticed and one.noticed_before and one.covering for one in seen)
    found = delay(bench, seen)
    assert found["faults"] == 2
    assert found["today"]["max_intervals"] <= found["0.2.0"]["max_intervals"] + 1 <= 5

    weights = bench.stepper.model.parameters()
    surgeon = AnyFaultInjector(weights)
    for kind in KINDS:  # a golden's part of the answer is judged as if it had been requested alone
        surgeon.inflict(draw_fault(weights, kind, random.Random(kind)))
        today, _ = bench.noticed()
        alone = bench.differences([one.golden for one in bench.covering])
        surgeon.heal()
        assert [(d.reason, d.distance) for d in today] == [(d.reason, d.distance) for d in alone], kind
