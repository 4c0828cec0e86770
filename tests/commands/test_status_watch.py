"""`holdfast status --watch` repeats, even while no controller answers; and shell completion scripts."""

import argparse
import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from reference_docs import completion_script

from controller.cli import COMMANDS, main, parser_for
from controller.commands import status
from controller.processes.fleet_dir import NoFleet
from events.errors import HoldfastError

WORKER = {"id": "w0", "health": "HEALTHY", "weight": 1.0, "breaker": "closed", "in_flight": 3, "model": "m"}


class Answers:
    """Scripted answers of a controller; the watch ends after the last one."""

    def __init__(self, *answers: dict[str, Any] | HoldfastError) -> None:
        self._answers = [*answers]

    async def __call__(self, args: argparse.Namespace) -> dict[str, Any]:
        if not self._answers:
            raise asyncio.CancelledError
        answer = self._answers.pop(0)
        if isinstance(answer, HoldfastError):
            raise answer
        return answer


def shown(*workers: dict[str, Any]) -> dict[str, Any]:
    return {"workers": [*workers], "processes": [], "levels": {}, "number": 1, "leader": "c"}


async def watched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: dict[str, Any] | HoldfastError, output: str
) -> None:
    monkeypatch.setattr(status, "fetch_status", Answers(*answers))
    monkeypatch.setattr(status, "find", lambda data: {})
    parser = parser_for({"status"})
    args = parser.parse_args(["status", "--data", str(tmp_path), "--watch", "0.001", "-o", output])
    with pytest.raises(asyncio.CancelledError):
        await status.run(args)


def test_the_default_interval_is_two_seconds() -> None:
    parser = parser_for({"status"})
    assert parser.parse_args(["status"]).watch is None
    assert parser.parse_args(["status", "-w"]).watch == 2
    assert parser.parse_args(["status", "--watch", "0.5"]).watch == 0.5


async def test_a_folder_that_never_had_a_fleet_is_reported_once(tmp_path: Path) -> None:
    args = parser_for({"status"}).parse_args(["status", "--data", str(tmp_path), "--watch", "0.001"])
    with pytest.raises(NoFleet):
        await status.run(args)


async def test_each_status_and_each_error_is_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = WORKER | {"in_flight": 4}
    unavailable = HoldfastError("no controller answers")
    await watched(monkeypatch, tmp_path, shown(WORKER), unavailable, shown(busy), output="json")
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["workers"], third["workers"]) == ([WORKER], [busy])
    assert second == {"error": "no controller answers"}


async def test_text_output_continues_when_a_controller_answers_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(status, "print_status", lambda status: print(status["workers"][0]["in_flight"]))
    unavailable = HoldfastError("no controller answers")
    await watched(monkeypatch, tmp_path, shown(WORKER), unavailable, shown(WORKER), output="text")
    assert capsys.readouterr().out == "3\nholdfast: no controller answers\n3\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_contain_every_command_and_are_valid(
    shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text == completion_script(shell), "python tests/fixtures/reference_docs.py renews it"
    assert all(command in text for command in COMMANDS)
    if shutil.which(shell) is not None:
        (script := tmp_path / "completion").write_text(text)
        assert subprocess.run([shell, "-n", script], check=False).returncode == 0
