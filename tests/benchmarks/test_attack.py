"""`make attack`: deadlines, verdicts and repeat commands of its parts, and no leftovers."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.attack import compromised
from benchmarks.attack.attack import main
from benchmarks.attack.parts import IN_ALL_S_MAX, PARTS, Part, Seen
from benchmarks.failures.walk import came_through
from benchmarks.serving.abuse import holds
from controller.terminal_text import USUAL

LATE_S = 120  # reached only on a fault
STAYS = "import subprocess, sys; subprocess.Popen(['sleep', '600'], start_new_session=True)"


def played(script: str, within_s: int = LATE_S) -> Part:
    """A part that runs this script and returns its output."""

    def command(folder: Path, seed: int, cores: int) -> Sequence[str]:
        return (sys.executable, "-c", script)

    def seen(printed: str, folder: Path) -> Seen:
        found = json.loads(printed)
        return Seen(f"{found['times']} times", "nothing", found.get("again", ()))

    return Part("a script", "0", within_s, command, lambda seed: f"script --seed {seed}", seen)


WELL = played("print('{\"times\": 3}')")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary folders; empty again afterwards, otherwise something was left behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def reported(
    parts: Mapping[str, Part], capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, dict[str, object]]]:
    """Return the exit code and what each part came to."""
    status = main([*flags, "-o", "json"], parts)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return status, {line["part"]: line for line in lines}


def test_all_of_it_ends_within_18_minutes() -> None:
    assert sum(part.within_s for part in PARTS.values()) <= IN_ALL_S_MAX == 1080


def test_a_part_that_holds_is_reported_and_leaves_nothing(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = reported({"a": WELL, "b": WELL}, capsys)
    assert status == 0
    assert [(one["verdict"], one["times"], one["again"]) for one in told.values()] == [
        ("holds", "3 times", [])
    ] * 2
    assert list(temporary.iterdir()) == []


def test_only_the_parts_that_are_named_run(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, told = reported({"a": WELL, "b": WELL, "c": WELL}, capsys, "c", "a")
    assert list(told) == ["c", "a"]
    with pytest.raises(SystemExit) as refused:
        main(["d"], {"a": WELL})
    assert refused.value.code == 2 and "unknown part 'd'; choose from a" in capsys.readouterr().err


def test_a_failed_part_is_shown_with_its_repeat_command_and_the_others_run(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'print(\'{"times": 1, "again": ["this --only 7"]}\'); raise SystemExit(3)'
    parts = {
        "one": played(script),
        "silent": played("pass"),
        "exit": played("raise SystemExit(1)"),
        "well": WELL,
    }
    status, told = reported(parts, capsys, "--seed", "5")
    assert status == 1
    assert [one["verdict"] for one in told.values()] == [
        "failed (exit 3)",
        "printed no readable result",
        "failed (exit 1)",
        "holds",
    ]
    again = [one["again"] for one in told.values()]
    assert again == [["this --only 7"], ["script --seed 5"], ["script --seed 5"], []]


@pytest.mark.slow
def test_a_part_that_does_not_end_is_ended_with_all_its_processes(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"{STAYS}; import signal; print('{{\"times\": 1}}', flush=True); signal.pause()"
    status, told = reported({"a": played(script, within_s=2)}, capsys)
    assert (status, told["a"]["verdict"]) == (1, "had not ended after 2 s")
    assert _sleepers(temporary) == [] and list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_process_left_behind_is_ended_and_counts_against_its_part(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = reported({"a": played(f"{STAYS}; print('{{\"times\": 1}}')")}, capsys)
    assert (status, told["a"]["verdict"]) == (1, "left sleep behind")
    assert _sleepers(temporary) == []


def _sleepers(below: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if process.name() == "sleep" and str(below) in process.environ().get("TMPDIR", ""):
                found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_running_part_and_shows_the_results_so_far(
    number: signal.Signals, tmp_path: Path
) -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parents[1])])
    script = "import sys, test_attack as t; sys.exit(t.main([], {'a': t.WELL, 'b': t.played('import signal; signal.pause()')}))"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "[2/2] b" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(number)  # whatever it is doing
    out, err = process.communicate(timeout=LATE_S)
    assert process.returncode == 130, err
    assert "holds" in out and "b, repeat it alone: script --seed 1" in out and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_table_fits_80_columns_and_cuts_nothing(
    temporary: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(USUAL))
    long = replace(
        WELL,
        tries=PARTS["tests"].tries,
        bound=PARTS["walk"].bound,
        seen=lambda printed, folder: Seen(
            "375 faults, 12345 streams",
            "0 altered, 0 needless errors (1234 needed), all recovered after 12.3 s",
        ),
    )
    assert main([], {"simulation": long, "b": played("raise SystemExit(1)")}) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= USUAL
    assert "b, repeat it alone: script --seed 1" in out
    words = {word for line in out.splitlines() for word in line.split()}
    assert {*PARTS["tests"].tries.split(), "altered,", "needless", "(1234", "needed),", "holds"} <= words


def test_the_output_is_kept_in_the_given_folder(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = tmp_path_factory.mktemp("kept") / "there"
    assert main(["a", "--keep", str(kept)], {"a": WELL}) == 0
    assert json.loads((kept / "a.out").read_text()) == {"times": 3}


# --- the texts and bounds of the parts

WALK = {
    "faults": {"kill": 3, "hang": 4}, "streams": 10, "exact": 8, "altered": [], "503": 2, "503 not needed": 0, "other errors": {},
    "other errors not needed": 0, "all well again after, s": 3.1,
}  # fmt: skip
ABUSE = {"ttft_p99_times": 1.5, "memory_times": 1.1, "failed": 0, "strangers": {"silence": {"closed": 7}}}


def test_a_walk_comes_through_only_within_its_bounds() -> None:
    assert came_through(WALK)
    for worse in (
        {"altered": ["r"]},
        {"503 not needed": 1},
        {"other errors not needed": 1},
        {"all well again after, s": None},
        {"exact": 0},
    ):
        assert not came_through(WALK | worse), worse


def test_abuse_holds_only_within_its_bounds_also_without_any_answer() -> None:
    assert holds(ABUSE)
    nan = float("nan")
    for worse in ({"ttft_p99_times": 2.1}, {"memory_times": 1.3}, {"failed": 1}, {"ttft_p99_times": nan}):
        assert not holds(ABUSE | worse), worse


FLOOD = {"ttft_ms": {"p50": 20.0, "p99": 60.0}, "failed": 0, "broker_mb": 40, "reported": 3, "ejected": True}
COMPROMISED = {
    "alone_ms": {"p50": 20.0, "p99": 30.0},
    "failed": 0,
    "floods": {"frames": FLOOD},
    "others_live_on": True,
}


def test_a_flood_holds_only_within_its_bounds() -> None:
    assert compromised.holds(COMPROMISED)
    assert compromised.holds(COMPROMISED | {"floods": {"connections": FLOOD | {"ejected": False}}})
    for worse in (
        {"failed": 1}, {"ttft_ms": {"p99": 301.0}}, {"ttft_ms": {"p99": float("nan")}}, {"broker_mb": 301}, {"ejected": False},
    ):  # fmt: skip
        assert not compromised.holds(COMPROMISED | {"floods": {"frames": FLOOD | worse}}), worse
    assert not compromised.holds(COMPROMISED | {"others_live_on": False})


def test_each_part_reads_what_its_command_prints(tmp_path: Path) -> None:
    xml = """<testsuites><testsuite><testcase classname="tests.attacks.test_a" name="test_b"/>
        <testcase classname="tests.attacks.test_a" name="test_c"><failure/></testcase></testsuite></testsuites>"""
    (tmp_path / "tests.xml").write_text(xml)
    again = (".venv/bin/python -m pytest tests/attacks/test_a.py::test_c",)
    seen = PARTS["tests"].seen("", tmp_path)
    assert (seen.times, seen.found, tuple(seen.again)) == ("2 tests", "1 failed, 0 skipped", again)

    seen = PARTS["walk"].seen("noise\n" + json.dumps(WALK), tmp_path)
    assert seen.times == "7 faults, 10 streams"
    assert seen.found == "0 altered, 0 needless errors (2 needed), all recovered after 3.1 s"

    seen = PARTS["abuse"].seen(json.dumps(ABUSE), tmp_path)
    assert (seen.times, seen.found) == (
        "7 abuses of 1 kinds",
        "TTFT p99 1.5 times, memory 1.1 times, 0 failed",
    )

    seen = PARTS["compromised"].seen(json.dumps(COMPROMISED), tmp_path)
    assert (seen.times, seen.found) == (
        "1 floods",
        "others' TTFT p99 30 ms alone, 60 ms at most (frames), broker 40 MB, 0 failed, 1 ejected",
    )

    fuzz = {"requests": 9, "fields": 4, "wrong": ["417 (head) no end"], "honest": 5, "honest_wrong": [], "restarted": [],
            "well_afterwards": True, "seed": 3}  # fmt: skip
    seen = PARTS["fuzz"].seen(json.dumps(fuzz), tmp_path)
    assert seen.found == "1 wrong, 0 of 5 honest ones wrong, 0 restarted"
    assert list(seen.again) == ["python -m benchmarks fuzz --seed 3 --only 417"]

    good = {
        "minutes": 60.0,
        "violation": None,
        "faults": {"hang": 4},
        "checks": {"a": 9, "b": 1},
        "command": "x",
    }
    bad = good | {"violation": {"invariant": "a"}, "command": "holdfast simulate --seed 7"}
    seen = PARTS["simulation"].seen("\n".join(map(json.dumps, (good, bad))), tmp_path)
    assert (seen.times, seen.found) == (
        "2 seeds, 2 virtual hours, 8 faults",
        "1 of 2 seeds broke one of 2 invariants",
    )
    assert list(seen.again) == ["holdfast simulate --seed 7"]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_without_output_has_no_result(name: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        PARTS[name].seen("", tmp_path)
