"""`holdfast plan`: a recorded day rehearsed, and what is said of bad input."""

import csv
import json
import math
import random
import threading
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from controller import cli
from controller.commands import scale
from events.process import presence

FAST = [
    "--prefill-tokens-per-s",
    "4000",
    "--tpot-curve",
    "1=25,32=40",
    "--slo-ttft-ms",
    "1500",
    "--slo-tpot-ms",
    "80",
]


@pytest.fixture(scope="module")
def wave(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty minutes, in which twice as much comes as at first, and then less again."""
    path, dice, at = tmp_path_factory.mktemp("trace") / "wave.csv", random.Random(3), 0.0
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        while at < 2400:
            at += dice.expovariate(6 + 4 * math.sin(at / 2400 * math.pi))
            when = datetime(2026, 1, 1) + timedelta(seconds=at)
            lines.writerow(
                [f"{when:%Y-%m-%d %H:%M:%S.%f}0", 1 + int(dice.expovariate(0.001)), 1 + dice.randrange(400)]
            )
    return path


def ran(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_day_is_rehearsed_with_the_planner_a_fixed_fleet_and_perfect_knowledge(
    wave: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(capsys, "--trace", str(wave), *FAST, "--gpus", "4", "-o", "json")
    told: dict[str, Any] = json.loads(out)
    assert code == 0
    assert told["fixed"]["workers"] == told["most_needed"]
    planner, fixed, perfect = told["planner"], told["fixed"], told["perfect"]
    assert perfect["gpu_hours"] < planner["gpu_hours"] < fixed["gpu_hours"] * 1.05
    assert planner["late_share"] <= 0.02 and perfect["late_share"] <= 0.01
    assert planner["changes"] == len(planner["changes_made"]) <= 12
    assert fixed["gpu_hours"] == pytest.approx(4 * fixed["workers"] * told["minutes"] / 60, rel=0.03)


def test_it_is_told_as_a_table(wave: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ran(capsys, "--trace", str(wave), *FAST, "--fleet", "20", "--scale", "0.5")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "the busiest minute needs" in lines[0]
    assert [line.split("  ")[0] for line in lines[3:6]] == [
        "planner",
        "20 workers all day",
        "perfect knowledge",
    ]
    assert "1.00" in lines[5]


def test_a_bound_below_what_is_needed_costs_late_answers_and_no_traceback(
    wave: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(
        capsys, "--trace", str(wave), *FAST, "--workers-max", "2", "--scale", "2", "-o", "json"
    )
    told = json.loads(out)
    assert code == 0 and told["most_needed"] > 4
    assert told["planner"]["late_share"] > 0.1


def test_as_many_requests_as_a_fleet_serves(wave: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ran(capsys, "--trace", str(wave), *FAST, "--fleet", "5", "--scale", "fit", "-o", "json")
    assert json.loads(out)["most_needed"] == pytest.approx(5, abs=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scale", "fit"], "--scale fit needs --fleet"),
        (["--scale", "0"], "'0' is no number above 0"),
        (["--tpot-curve", "32=40,1=25"], "sequences=milliseconds,… is wanted, rising"),
        (["--tpot-curve", "fast"], "sequences=milliseconds,… is wanted"),
        (["--scale", "1000000"], "are more than 5000000"),
        (["--missed", "2"], "between 0 and 1"),
        (["--step-max", "0"], "step_max is 0: it must be at least 1"),
        (["--changes-per-hour", "-3"], "changes_per_hour is -3: it must be at least 1"),
        (["--workers-max", "0"], "workers_max is 0, which is less than workers_min 1"),
        (
            ["--profile", "none.npz", "--tpot-curve", "1=2"],
            "leave --prefill-tokens-per-s and --tpot-curve out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    wave: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code, _, err = ran(capsys, "--trace", str(wave), *arguments)
    except SystemExit as end:
        code, err = int(str(end.code)), capsys.readouterr().err
    assert code == 2 and says in err and "Traceback" not in err


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(capsys, "--trace", str(tmp_path / "none.csv"))[0] in (1, 2)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    code, _, err = ran(capsys, "--trace", str(empty))
    assert code in (1, 2) and "Traceback" not in err and str(empty) in err


@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("act", ""),
        (
            "propose",
            " (the planner's mode is propose, so it changes nothing: `up --planner-mode act` carries it out)",
        ),
    ],
)
def test_scale_says_where_no_planner_carries_it_out(tmp_path: Path, mode: str, hint: str) -> None:
    class Planner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"mode": mode}).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    assert "so nothing changes: start one with `holdfast planner --mode act`" in scale.unheeded(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Planner) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = presence.announce(tmp_path, "planner", "planner", f"http://127.0.0.1:{server.server_port}")
        assert scale.unheeded(tmp_path) == hint
        presence.withdraw(shown)
        server.shutdown()
