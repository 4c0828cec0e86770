"""`holdfast plan`: the rehearsal of a recorded day, and errors about bad input."""

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
    """A trace of forty minutes in which the load doubles and then falls again."""
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
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.slow
def test_a_day_is_rehearsed_with_the_planner_a_fixed_fleet_and_perfect_knowledge(
    wave: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(capsys, "--trace", str(wave), *FAST, "--gpus", "4", "-o", "json")
    report: dict[str, Any] = json.loads(out)
    assert code == 0
    assert report["fixed"]["workers"] == report["most_needed"]
    planner, fixed, perfect = report["planner"], report["fixed"], report["perfect"]
    assert perfect["gpu_hours"] < planner["gpu_hours"] < fixed["gpu_hours"] * 1.05
    assert planner["late_share"] <= 0.02 and perfect["late_share"] <= 0.01
    assert planner["changes"] == len(planner["changes_made"]) <= 12
    assert fixed["gpu_hours"] == pytest.approx(4 * fixed["workers"] * report["minutes"] / 60, rel=0.03)


@pytest.mark.slow
def test_the_rehearsal_is_printed_as_a_table(wave: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.slow
def test_a_limit_below_the_need_causes_late_answers_and_no_traceback(
    wave: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ran(
        capsys, "--trace", str(wave), *FAST, "--workers-max", "2", "--scale", "2", "-o", "json"
    )
    report = json.loads(out)
    assert code == 0 and report["most_needed"] > 4
    assert report["planner"]["late_share"] > 0.1


@pytest.mark.slow
def test_scale_fit_adapts_the_requests_to_the_fleet(wave: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ran(capsys, "--trace", str(wave), *FAST, "--fleet", "5", "--scale", "fit", "-o", "json")
    assert json.loads(out)["most_needed"] == pytest.approx(5, abs=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--scale", "fit"], "--scale fit needs --fleet"),
        (["--scale", "0"], "'0' is not a number above 0"),
        (["--tpot-curve", "32=40,1=25"], "is not a rising list of sequences=milliseconds"),
        (["--tpot-curve", "fast"], "is not a rising list of sequences=milliseconds"),
        (["--scale", "1000000"], "exceed the limit of 5000000"),
        (["--missed", "2"], "between 0 and 1"),
        (["--step-max", "0"], "step_max is 0: it must be at least 1"),
        (["--changes-per-hour", "-3"], "changes_per_hour is -3: it must be at least 1"),
        (["--workers-max", "0"], "workers_max is 0, which is less than workers_min 1"),
        (
            ["--profile", "none.npz", "--tpot-curve", "1=2"],
            "omit --prefill-tokens-per-s and --tpot-curve",
        ),
    ],
)
def test_invalid_arguments_are_rejected_in_one_sentence(
    wave: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code, _, err = ran(capsys, "--trace", str(wave), *arguments)
    except SystemExit as end:
        code, err = int(str(end.code)), capsys.readouterr().err
    assert code == 2 and says in err and "Traceback" not in err


def test_a_file_that_is_not_a_trace_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
            " (the planner runs in mode propose, which changes nothing: `up --planner-mode act` applies it)",
        ),
    ],
)
def test_scale_warns_if_no_planner_applies_the_setting(tmp_path: Path, mode: str, hint: str) -> None:
    class Planner(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"mode": mode}).encode())

        def log_message(self, format: str, *args: Any) -> None: ...

    assert "so nothing changes: start one with `holdfast planner --mode act`" in scale.why_no_effect(tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), Planner) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = presence.announce(tmp_path, "planner", "planner", f"http://127.0.0.1:{server.server_port}")
        assert scale.why_no_effect(tmp_path) == hint
        presence.withdraw(shown)
        server.shutdown()
