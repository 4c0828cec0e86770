"""Prometheus discovery of a fleet: `holdfast scrape-config`, and the targets that a controller serves."""

import json
import os
import re
from pathlib import Path

import pytest

from controller.cli import main
from controller.processes.observability.scrape_targets import target_groups
from events.process import presence


def fleet(data: Path) -> Path:
    """Announce processes of every role, all with the pid of this one."""
    for role, name, url in (
        ("frontend", "frontend-0", "http://127.0.0.1:4001"),
        ("controller", "c1", "http://127.0.0.1:4000"),
        ("worker", "w0", "http://127.0.0.1:4002"),
        ("nats", "nats", "nats://127.0.0.1:4222"),
        ("postgres", "postgres", "postgresql://127.0.0.1:5432"),
        ("watch", "w0-watch", ""),
    ):
        presence.announce(data, role, name, url, os.getpid())
    return data


def run(data: Path, *words: str) -> int:
    return main(["scrape-config", "--data", str(data), *words])


def test_targets_are_the_processes_with_metrics(tmp_path: Path) -> None:
    found = target_groups(presence.present(fleet(tmp_path)))
    assert [(one["labels"]["role"], one["labels"]["process"], *one["targets"]) for one in found] == [
        ("controller", "c1", "127.0.0.1:4000"),
        ("frontend", "frontend-0", "127.0.0.1:4001"),
        ("worker", "w0", "127.0.0.1:4002"),
    ]


def test_the_configuration_discovers_targets_from_the_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fleet(tmp_path)) == 0
    output = capsys.readouterr().out
    assert 'http_sd_configs:\n      - url: "http://127.0.0.1:4000/sd"\n' in output


def test_the_configuration_lists_all_controllers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    presence.announce(fleet(tmp_path), "controller", "c2", "http://127.0.0.1:4009", os.getpid())
    assert run(tmp_path) == 0
    assert re.findall(r'url: "(.*)"', capsys.readouterr().out) == [
        "http://127.0.0.1:4000/sd",
        "http://127.0.0.1:4009/sd",
    ]


def test_the_configuration_reads_the_written_target_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "the targets, all.json"
    assert run(fleet(tmp_path / "fleet"), "--file-sd", str(written)) == 0
    assert f'- files: ["{written}"]' in capsys.readouterr().out
    assert [one["targets"] for one in json.loads(written.read_text())] == [
        ["127.0.0.1:4000"], ["127.0.0.1:4001"], ["127.0.0.1:4002"],
    ]  # fmt: skip
    assert run(tmp_path / "fleet", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(written.read_text())


def test_a_missing_fleet_controller_or_folder_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 1
    assert "no fleet is running in" in capsys.readouterr().err
    presence.announce(tmp_path, "worker", "w0", "http://127.0.0.1:4002", os.getpid())
    assert run(tmp_path) == 1
    assert "use --file-sd FILE" in capsys.readouterr().err
    assert run(tmp_path, "--file-sd", str(tmp_path / "no" / "such")) == 1
    assert "such: No such file or directory" in capsys.readouterr().err
