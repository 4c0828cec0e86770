"""`holdfast simulate`: its output and its exit status."""

import argparse
import json
from pathlib import Path

import pytest

from controller.simulator.cli import add_arguments, run_cli
from controller.simulator.simulation import ALL_INVARIANTS, INVARIANTS, SweepRun


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run_cli(parser.parse_args(words))


def test_a_run_prints_what_happened_and_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--seed", "4", "--workers", "4", "--minutes", "10") == 0
    said = capsys.readouterr().out
    assert "x real time" in said
    assert "invariants: all held" in said
    for invariant in INVARIANTS.values():
        assert invariant.sentence in said
    assert "again: holdfast simulate --seed 4 --workers 4 --minutes 10" in said


def test_rates_print_failures_and_losses_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "4", "--minutes", "5", "--rates", "meta-rsc1", "--tp", "8") == 0
    said = capsys.readouterr().out
    assert "failure events per day    0.0260" in said
    assert "GPU-hours lost per day    4.99" in said
    assert "29.7% a year" in said


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "3", "--minutes", "5", "--rates", "llama3", "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["violation"] is None
    assert found["times_real_time"] > 0
    assert found["rates"]["failures_per_day"] == pytest.approx(24 * 419 / (54 * 16_384))
    assert found["command"] == SweepRun(1, 3, 5.0, "llama3").command
    assert set(found["checks"]) == set(INVARIANTS)


def test_live_requests_are_checked_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--seed", "4", "--workers", "4", "--minutes", "10", "--live-requests")
    assert run(*words) == 0
    said = capsys.readouterr().out
    for invariant in ALL_INVARIANTS.values():
        assert invariant.sentence in said
    assert f"again: holdfast simulate {' '.join(words)}" in said


@pytest.mark.parametrize(("minutes", "said"), [(60.0, "60"), (10_080.0, "10080"), (1.23456789, "1.23456789")])
def test_the_command_that_repeats_a_run_has_its_exact_duration(minutes: float, said: str) -> None:
    assert SweepRun(7, 4, minutes).command == f"holdfast simulate --seed 7 --workers 4 --minutes {said}"


def test_several_seeds_print_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--runs", "3", "--workers", "3", "--minutes", "3") == 0
    assert capsys.readouterr().out.count("all invariants held") == 3


@pytest.mark.slow
def test_seeds_run_on_two_cores_are_reported_in_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--seed", "5", "--runs", "6", "--processes", "2", "--workers", "1", "--minutes", "1") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [f"seed {seed}" for seed in range(5, 11)]


@pytest.mark.slow
def test_a_history_is_dumped_as_json_lines(tmp_path: Path) -> None:
    assert run("--workers", "3", "--minutes", "30", "--dump", str(tmp_path / "history")) == 0
    lines = [json.loads(line) for line in (tmp_path / "history").read_text().splitlines()]
    seqs = [line["seq"] for line in lines if "seq" in line]
    assert seqs == list(range(1, len(seqs) + 1))
    assert any("fault" in line for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ("--workers", "0"),
        ("--minutes", "0"),
        ("--runs", "0"),
        ("--tp", "0"),
        ("--processes", "0"),
        ("--runs", "2", "--dump", "x"),
        ("--scenario", "group-failure", "--live-requests"),
    ],
)
def test_invalid_flags_print_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("holdfast simulate: --") and said.count("\n") == 1


def test_an_unwritable_dump_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--workers", "2", "--minutes", "1", "--dump", str(tmp_path / "no" / "such")) == 1
    assert "cannot write" in capsys.readouterr().err
