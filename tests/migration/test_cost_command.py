"""`holdfast cost`: the first document's tables for one's own hardware, as corrected."""

import json
from typing import Any

import pytest

from controller.cli import main
from controller.commands.cost import cold_start_s

SEEDS_LENGTHS = "256,1024,4096,16384,65536,131072"


def cost(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["cost", *words, "-o", "json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def link(found: dict[str, Any], name: str) -> dict[str, Any]:
    one: dict[str, Any]
    (one,) = [one for one in found["move"]["links"] if one["link"] == name]
    return one


def test_the_seeds_table_of_transfers_as_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    """At 900 GB/s 10 MiB take 0.0117 ms and 5 GiB 5.97 ms, twice the seed's values (N10); at 28 GB/s 192 ms (N11)."""
    found = cost(
        capsys,
        "--tokens",
        SEEDS_LENGTHS,
        "--setup-ms",
        "1e-9",
        "--link",
        "nvswitch=900",
        "--link",
        "pcie_gen4=28",
    )
    right = [0.0117, 0.0466, 0.186, 0.746, 2.98, 5.97]
    assert link(found, "nvswitch")["transfer_ms"] == pytest.approx(right, rel=0.01)
    assert link(found, "pcie_gen4")["transfer_ms"][-1] == pytest.approx(192, rel=0.01)
    assert found["move"]["kv_bytes_per_token"] == 327_680
    assert found["move"]["bytes"][-1] == 40 << 30  # over all eight shards


def test_the_setup_causes_the_only_crossover(capsys: pytest.CaptureFixture[str]) -> None:
    """Above 204.8 MB/s per shard a transfer wins except at the shortest lengths; the seed's 168,000 tokens are wrong (N13)."""
    found = cost(capsys, "--setup-ms", "5")
    assert found["move"]["transfer_wins_above_gb_per_s"] == pytest.approx(0.2048)
    for one in found["move"]["links"]:
        assert set(one["recommended"]) == {"transfer"} or one["link"] == "tcp"
    assert 25 <= link(found, "pcie_gen4")["crossover_tokens"] <= 40
    slow = link(cost(capsys, "--link", "tcp=0.1"), "tcp")
    assert set(slow["recommended"]) == {"reprefill"}


def test_failure_rate_of_a_fleet_and_cost_of_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """1,024 GPUs at 3 % a year fail every 11.9 days at any group size; groups of eight lose 8 times the GPU-hours (N1, N3)."""
    grouped, single = (
        cost(capsys, "--tp", tp, "--afr", "0.03", "--mttr-hours", "24")["fleet"] for tp in ("8", "1")
    )
    assert grouped["mtbf_hours"] == single["mtbf_hours"] == pytest.approx(285.2, abs=0.1)
    assert grouped["gpu_hours_lost_per_day"] == pytest.approx(8 * single["gpu_hours_lost_per_day"])
    assert (grouped["gpus_per_failure"], grouped["capacity_per_failure"]) == (8, 1 / 128)


def test_spares_are_the_quantile_of_the_units_away(capsys: pytest.CaptureFixture[str]) -> None:
    """128 nodes of StepFun's fleet need 8 spares for 99 % of the time and 10 for 99.9 % (N20)."""
    study = ("--rates", "stepfun-2024", "--gpus", "1024")
    assert cost(capsys, *study)["fleet"]["spare_groups"] == 8
    assert cost(capsys, *study, "--target", "0.999")["fleet"]["spare_groups"] == 10


def test_n19_a_cold_start_reads_the_weights_and_starts_the_engine() -> None:
    """140 GB in 5 to 20 s takes storage of 7 to 28 GB/s; at 2 GB/s, with a start of 60 s, a group serves after 130 s."""
    assert [cold_start_s(140, rate, 0) for rate in (28, 7)] == [5, 20]
    assert cold_start_s(140, 2, 60) == 130


def test_the_tables_are_printed_and_invalid_flags_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost"]) == 0
    text = capsys.readouterr().out
    for part in (
        "re-prefill",
        "crossover",
        "nvlink_direct",
        "a failure every",
        "blast radius",
        "spare groups",
    ):
        assert part in text
    assert max(map(len, text.splitlines())) <= 130
    for words, why in (
        (["--tp", "3"], "one must be a multiple of the other"),
        (["--gpus", "4"], "--gpus 4 is smaller than one group of --tp 8"),
    ):
        assert main(["cost", *words]) == 2
        assert why in capsys.readouterr().err
    for words, why in (
        (["--link", "rope=1"], "'rope' is not a link"),
        (["--link", "tcp"], "'tcp' is not NAME=GBPS, such as tcp=2.1"),
        (["--target", "0"], "'0' is not a share between 0 and 1"),
        (["--target", "1"], "'1' is not a share between 0 and 1"),
        (["--tokens", "0"], "'0' is not a whole number"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["cost", *words])
        assert why in capsys.readouterr().err


def test_a_group_of_one_gpu_is_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "--tp", "1"]) == 0
    assert "blast radius: 1 GPU," in capsys.readouterr().out
