"""Terminal output fits into 80 columns, however long the names are, and is never truncated."""

import argparse
import io
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from any_fact import facts
from hypothesis import given
from hypothesis import strategies as st
from memory_journal import MemoryJournal, MemoryStream
from rich.console import Console
from typed_commands import run_command

from controller.commands.operator_commands import event_line
from controller.commands.status import print_processes, print_status
from controller.demo import cli, report
from controller.demo.clients import TokenDifference
from controller.replay import cli as replay
from controller.replay.flags import add_arguments
from controller.terminal_text import USUAL, fitted
from events.fact import Fact, Recorded
from events.observations import CommandRefused, DrainRequested
from events.process.presence import Presence

WIDTH = 80
LONG = "worker-17-in-rack-3-of-row-12-in-the-second-hall"
WHY = " and ".join(["its key was refused", "no one knows"] * 8)


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def holdfast(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_command(arguments, os.environ)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def squeezed(text: str) -> str:
    """Return the text without white space, which undoes wrapping."""
    return "".join(text.split())


def status(name: str, model: str = "sim") -> dict[str, Any]:
    worker = {
        "id": name, "health": "SUSPICIOUS", "weight": 0.25, "breaker": "half_open", "in_flight": 128, "model": model,
        "last_canary": {"outcome": "failed", "reason": "token_mismatch", "latency_ms": 12345.6},
        "reasons": ["health SUSPICIOUS: timeout", "breaker half_open: trial", WHY],
    }  # fmt: skip
    process = {"name": name, "role": "frontend", "pid": 123456, "url": f"http://{name}.example.org:41234"}
    return {
        "workers": [worker], "processes": [process], "levels": {f"{model}-{n}": n for n in range(5)}, "leader": None,
        "journal": {"last_seq": 123456789}, "projector": {"position": 123456000, "lag": 789},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["w1", LONG])
def test_the_status_fits_without_truncation(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = "a-model-with-a-name-that-is-long-enough"
    shown = status(name, model)
    print_status(shown)
    text = capsys.readouterr().out
    assert widest(text) <= WIDTH
    lines = text.splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith("──"))
    head, below = lines[rule - 1], lines[rule + 1 :]
    rows = below[: next(n for n, line in enumerate(below) if "is not at full" in line)]

    def column(heading: str) -> str:
        start = head.index(heading)
        return squeezed("".join(row[start:].partition("  ")[0] for row in rows))

    assert (column("worker"), column("model")) == (name, model)
    assert column("last canary" if "last canary" in head else "canary") == "token_mismatch,12346ms"
    for expected in (
        *shown["workers"][0]["reasons"],
        "no decisions and no commands",
        "123456789 events",
        name,
    ):
        assert squeezed(expected) in squeezed(text)


def test_a_narrower_terminal_still_shows_the_whole_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_status(status("w-in-rack-17"))
    text = capsys.readouterr().out
    assert all(word in squeezed(text) for word in ("w-in-rack-17", "SUSPICIOUS", "half_open", squeezed(WHY)))


@pytest.mark.parametrize("console", ["", "http://127.0.0.1:41234/console"])
def test_the_status_shows_the_url_of_the_console_if_there_is_one(
    console: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = status("w0")
    shown["processes"][0] |= {"console": console} if console else {}
    print_status(shown)
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("console ")]
    assert named == ([f"console      {console}"] if console else [])


def test_spares_are_shown_and_not_reported_as_unhealthy_workers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = status("w0")
    (about,) = shown["workers"]
    waits = {**about, "weight": 0.0, "health": "HEALTHY", "spare": True, "place": None}
    shown["workers"] = [
        {**waits, "weight": 1.0, "id": "s0", "reasons": [], "spare": False, "place": "w0"},
        {**waits, "id": "s1", "reasons": ["spare"]},
        {**waits, "id": "w0", "health": "DEAD", "reasons": ["health DEAD: silent", "spare"]},
    ]
    print_status(shown)
    output = capsys.readouterr().out
    assert "s0 replaces w0" in output and "1 of 2 ready for sim" in output
    assert "w0 is a spare that is not ready: health DEAD: silent" in output
    assert "s1 is not at" not in output and "s1 is a spare" not in output


def test_the_list_of_processes_fits(capsys: pytest.CaptureFixture[str]) -> None:
    print_processes([Presence("frontend", LONG, 123456, f"http://{LONG}:41234")], "text")
    text = capsys.readouterr().out
    assert widest(text) <= WIDTH and squeezed(text).count(LONG) == 2


def recorded(fact: Fact, seq: int = 1234567) -> Recorded:
    return Recorded(seq, datetime(2026, 3, 1, 12, 0, 3, 4567, tzinfo=UTC), fact, f"id-{seq}")


@given(facts())
def test_every_event_fits_as_text_and_is_one_line_as_json(fact: Fact) -> None:
    text = event_line(recorded(fact), "text")
    assert widest(text) <= WIDTH
    assert text.startswith("1234567 2026-03-01T12:00:03.004567Z ")
    assert len(event_line(recorded(fact), "json").splitlines()) == 1


def test_a_long_event_wraps_below_its_kind() -> None:
    fact = CommandRefused(worker=LONG, verb="drain", command="c" * 36, why=WHY, late=True, by="ada")
    first, *rest = event_line(recorded(fact), "text").splitlines()
    assert first.endswith("Z command_refused")
    assert rest and all(re.match(r" {8}\S", line) for line in rest)
    assert event_line(recorded(DrainRequested(worker="w1", instance="i1")), "text").count("\n") == 0


@pytest.mark.parametrize("words", [["timeline"], ["timeline", "--all"], ["why", "2"], ["at", "2"]])
async def test_the_output_of_replay_fits(words: list[str]) -> None:
    stream = MemoryStream()
    journal = MemoryJournal(stream, "controller:one")
    for verb in ("drain", "restart"):
        journal.observe(CommandRefused(worker=LONG, verb=verb, command="c" * 36, why=WHY, by="ada"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    output: list[str] = []
    assert await replay.execute(parser.parse_args(words), journal, None, output.append) == 0
    assert widest("\n".join(output)) <= WIDTH
    if words[0] != "at":
        assert squeezed(WHY) in squeezed("".join(output))


@pytest.mark.parametrize("name", ["w1", LONG])
def test_the_tables_of_the_demo_fit(name: str) -> None:
    worst = TokenDifference(lost=12345, doubled=12345, altered=12345)
    row = report.ReportRow("corruption", name, 12345, 12345, worst, 12345.6, 12345.6)
    whole = report.DemoReport(12345, 1234567, [], [row] * 3, worst, 12345, [], 12345)
    events = [f"12.3 s  corrupt {name}: {WHY}"]
    for shown in (
        report.table(whole),
        cli.render(status(name), events, 12, 60, "12345 requests, 128 in the air"),
    ):
        console = Console(file=io.StringIO(), width=WIDTH)
        console.print(shown)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert widest(text) <= WIDTH and "…" not in text
        assert (name[:8] in text and text.count("12345") >= 6) or "half_open" in text


@given(st.text(alphabet=st.sampled_from("ab-, "), max_size=400), st.integers(10, 120))
def test_a_wrapped_line_keeps_its_text(line: str, width: int) -> None:
    text = fitted(line, width)
    assert squeezed(text) == squeezed(line)
    assert all(len(part) <= width for part in text.split("\n"))


def test_the_width_without_a_terminal_is_80_columns() -> None:
    done = run_command(["events", "--help"], {k: v for k, v in os.environ.items() if k != "COLUMNS"})
    assert USUAL == WIDTH and done.returncode == 0 and widest(done.stdout) <= WIDTH


def test_the_version_is_printed() -> None:
    done = holdfast("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"holdfast \d+\.\d+\.\d+( \([0-9a-f]{7,}\))?\n", done.stdout)


COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2)); COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
_shtab_holdfast
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = holdfast("completion", "bash")
    assert done.returncode == 0, done.stderr
    file = tmp_path_factory.mktemp("completion") / "holdfast.bash"
    file.write_text(done.stdout)
    return file


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["holdfast", "dra"], {"drain"}),
        (["holdfast", "drain", "--de"], {"--deadline"}),
        (["holdfast", "chaos", "bl"], {"blackhole"}),
        (["holdfast", "replay", "ti"], {"timeline"}),
        (["holdfast", "--ver"], {"--version"}),
    ],
)
def test_bash_completes_commands_flags_and_choices(script: Path, typed: list[str], found: set[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "_", str(script), *typed], capture_output=True, text=True, timeout=60
    )
    assert set(done.stdout.split()) == found, done.stderr


def test_zsh_gets_its_own_completion_script() -> None:
    done = holdfast("completion", "zsh")
    assert done.returncode == 0 and done.stdout.startswith("#compdef holdfast")
