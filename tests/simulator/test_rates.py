"""Failure arithmetic of a fleet, row by row of the corrections to the seed's numbers (N1–N5)."""

import json
from collections import Counter
from pathlib import Path

import pytest

from controller.simulator.rates import (
    FAULTS,
    LLAMA3_CLASSES,
    PRESETS,
    STEPFUN_CLASSES,
    Forecast,
    mtbf_hours,
)

TRACE = Path(__file__).parents[3] / "shared" / "data" / "gpu_faults.json"


def test_n01_a_thousand_gpus_at_3_percent_fail_every_12_days_not_daily() -> None:
    assert mtbf_hours(1000, 0.03) / 24 == pytest.approx(12.2, abs=0.05)
    assert [mtbf_hours(1000, afr) / 24 for afr in (0.05, 0.02)] == pytest.approx([7.3, 18.25], abs=0.05)
    assert mtbf_hours(1024, 0.03) == pytest.approx(285.2, abs=0.1)
    assert mtbf_hours(1000, 0.365) == pytest.approx(24.0)  # the rate that one failure a day would need


def test_n01_a_fleet_without_gpus_or_failures_is_refused() -> None:
    for gpus, afr in ((0, 0.03), (10, 0.0)):
        with pytest.raises(ValueError, match="no time between failures"):
            mtbf_hours(gpus, afr)


def test_n02_ten_thousand_gpus_fail_less_than_once_a_day() -> None:
    fleet = Forecast(rates=PRESETS["seed-3pct"], gpus=10_000, tp=1)
    assert fleet.failures_per_day == pytest.approx(0.82, abs=0.005)


def test_n03_grouping_changes_the_loss_and_not_the_number_of_failures() -> None:
    p = 0.03 / 365
    any_of_a_group = 1 - (1 - p) ** 8
    assert any_of_a_group == pytest.approx(6.57e-4, rel=0.002)
    alone = Forecast(rates=PRESETS["seed-3pct"], gpus=1024, tp=1)
    assert any_of_a_group * 128 == pytest.approx(alone.failures_per_day, rel=0.001)
    grouped = Forecast(rates=PRESETS["seed-3pct"], gpus=1024, tp=8)
    assert grouped.failures_per_day == alone.failures_per_day == pytest.approx(0.0841, abs=0.0001)
    assert grouped.mtbf_hours == alone.mtbf_hours
    assert grouped.gpu_hours_lost_per_day == pytest.approx(8 * alone.gpu_hours_lost_per_day)
    assert alone.gpu_hours_lost_per_day == pytest.approx(alone.failures_per_day * alone.rates.mttr_hours)


@pytest.mark.parametrize(
    ("preset", "per_year"),
    [
        ("llama3", 0.173),
        ("meta-rsc1", 0.297),
        ("meta-rsc2", 0.107),
        ("stepfun-2024", 0.191),
        ("seed-3pct", 0.03),
    ],
)
def test_n04_presets_give_the_annual_rates_of_their_sources(preset: str, per_year: float) -> None:
    assert PRESETS[preset].afr == pytest.approx(per_year, abs=0.001)


def test_n04_gpu_hardware_alone_is_a_part_of_all_causes() -> None:
    llama3, stepfun = PRESETS["llama3"], PRESETS["stepfun-2024"]
    assert llama3.gpu_share is not None and stepfun.gpu_share is not None
    assert llama3.afr * llama3.gpu_share == pytest.approx(0.101, abs=0.001)
    assert stepfun.afr * stepfun.gpu_share == pytest.approx(0.052, abs=0.001)
    assert stepfun.per_gpu_day * 8 * 1000 == pytest.approx(4.195, abs=0.001)
    assert mtbf_hours(1024, PRESETS["meta-rsc1"].afr) == pytest.approx(28.8, abs=0.1)


def test_n04_every_preset_names_its_source_and_a_whole_mix() -> None:
    for preset in PRESETS.values():
        assert preset.source and preset.mttr_source
        assert sum(preset.mix.values()) == pytest.approx(1.0)
        assert set(preset.mix) <= set(FAULTS)
    assert sum(count for count, _ in LLAMA3_CLASSES.values()) == 419


@pytest.mark.skipif(not TRACE.exists(), reason="needs ../shared/data/gpu_faults.json beside this clone")
def test_n04_the_stepfun_mix_is_that_of_the_trace() -> None:
    starts = [e["fault_type"] for e in json.loads(TRACE.read_text()) if e["event_type"] == "fault_start"]
    counted = Counter(fault["Class"] for fault in starts)
    counts = {name: count for name, (count, _) in STEPFUN_CLASSES.items()}
    assert sum(counted.values()) == sum(counts.values()) == 313
    assert counted["GPU"] == counts["GPU"]
    assert counted["Parameter Plane Cable"] == counts["cable"]
    assert counted["Unknown Error"] == counts["unknown"]


def test_n05_silent_corruption_comes_from_the_field_and_not_from_a_rate_per_flop() -> None:
    assert pytest.approx(100.0) == 1 / (1e13 * 1e-15)  # seconds, not days: FLOP/s, and faults per FLOP
    assert pytest.approx(115.7, abs=0.1) == 1 / (1e13 * 1e-20) / 86_400
    llama3 = PRESETS["llama3"]
    gpu_days = 1 / (llama3.per_gpu_day * llama3.mix["corrupt"])  # between two of them
    assert gpu_days == pytest.approx(147_456)
    assert gpu_days / 365 == pytest.approx(404, abs=0.1)
    assert gpu_days / 1000 == pytest.approx(147, abs=0.5)  # days between them in 1,000 GPUs
    assert llama3.mix["corrupt"] == pytest.approx(6 / 419)
