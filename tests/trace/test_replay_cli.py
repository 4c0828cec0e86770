"""`holdfast trace replay`: its output, its exit code, and its error messages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, serving
from waits import block_until

from benchmarks.simulation import chat_traffic
from controller import cli
from controller.trace.rows import encode

LINES = [
    b'{"timestamp":%d,"input_length":40,"output_length":4,"hash_ids":[0,1,%d]}\n' % (20 * n, 10 + n)
    for n in range(10)
]
BLOCKS = ["--block-size", "16"]
ENDS_S = 30.0
FLOOD_ENDS_S = 15.0  # it takes a second; it once took more than a minute
FLOODED = 20 << 20  # bytes, part of which the sockets hold


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with serving(cached=16) as one:
        yield one


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


def replay(*arguments: object) -> int:
    return cli.main(["trace", "replay", *map(str, arguments)])


def test_it_prints_a_table_or_json_and_writes_a_report(
    server: Scripted, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", server.url, *BLOCKS, "--slo-ttft-ms", 60_000, "--slo-itl-ms", 60_000]
    assert replay(trace, *flags, "--report", tmp_path / "report.json") == 0
    told = capsys.readouterr().out
    for part in ("10 requests sent", "10 answered", "TTFT", "ITL", "TPOT", "Generator: late by"):
        assert part in told
    assert "Prefix cache: 40.0% of 400 prompt tokens were cached" in told
    assert "Goodput: 10 requests (100.0%) within TTFT 60000 ms, ITL 60000 ms" in told
    assert replay(trace, *flags, "-o", "json") == 0
    printed, written = json.loads(capsys.readouterr().out), json.loads((tmp_path / "report.json").read_text())
    assert set(printed) == set(written)
    assert printed["requests"] == {"sent": 10, "whole": 10, "failed": 0, "cut": 0, "shorter": 0}
    assert printed["tokens"] == {"input": 400, "output": 40, "events": 40}
    assert (printed["model"], printed["prompts"], printed["errors"]) == ("m", "token ids", {})
    assert printed["goodput"]["share"] == 1 and printed["prefix_cache"]["share"] == 0.4
    assert set(printed["ttft_ms"]) == {"mean", "min", "p50", "p90", "p95", "p99", "max"}


def test_a_profile_is_replayed_for_any_length(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, profile = tmp_path / "recorded.jsonl", tmp_path / "profile.json.gz"
    recorded.write_bytes(b"".join(map(encode, chat_traffic.requests(seed=1, seconds=200))))
    assert cli.main(["trace", "fit", str(recorded), *BLOCKS, "-o", str(profile)]) == 0
    assert replay(profile, "--url", server.url) == 2
    assert "which has no end: set --max-requests or --seconds" in capsys.readouterr().err
    assert replay(profile, "--url", server.url, "--block-size", 512, "--seconds", 1) == 2
    assert "was learned in blocks of 16 tokens" in capsys.readouterr().err
    prompts = []
    for seed in (1, 1, 2):
        server.asked.clear()
        flags = ["--max-requests", 12, "--speedup-ratio", 1000, "--max-osl", 3, "--seed", seed]
        assert replay(profile, "--url", server.url, *flags, "-o", "json") == 0
        assert json.loads(capsys.readouterr().out)["requests"]["whole"] == 12
        prompts.append(sorted(asked.body["prompt"] for asked in server.asked))
    assert prompts[0] == prompts[1] != prompts[2]


def test_azure_traces_and_limits(
    server: Scripted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "azure.csv"
    lines = (f"2023-11-16 18:15:{46 + n}.0,{100 + n},9\n" for n in range(5))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    flags = ["--url", server.url, "--speedup-ratio", 100, "-o", "json"]
    assert replay(path, *flags, "--max-requests", 3, "--scale-input", 0.1, "--max-osl", 5) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"]["sent"] == 3 and found["tokens"] == {"input": 30, "output": 15, "events": 15}
    assert replay(path, *flags, "--seconds", 0.025, "--max-osl", 3) == 0
    assert json.loads(capsys.readouterr().out)["requests"]["sent"] == 3


def test_it_fails_if_no_request_was_answered(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(faults=dict.fromkeys(range(1, 11), "503")) as refusing:
        assert replay(trace, *BLOCKS, "--url", refusing.url) == 1
    assert "Failed: 10 × HTTP 503 queue_full: too many wait" in capsys.readouterr().out
    with serving(faults={1: "503"}) as refusing:
        assert replay(trace, *BLOCKS, "--url", refusing.url) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ["FILE", "--url", "localhost"],
            2,
            "--url 'localhost' is not the URL of a server, such as http://127.0.0.1:8000",
        ),
        (
            ["FILE", "--url", "http://127.0.0.1:1"],
            1,
            "http://127.0.0.1:1 cannot be reached: Connection refused",
        ),
        (["FILE", "--url", "URL", "--model", "gpt"], 1, "serves m, not gpt"),
        (["none.jsonl", "--url", "URL"], 1, "none.jsonl cannot be read: No such file or directory"),
        (["FILE", "--url", "URL", "--block-size", 512], 1, "that is"),
        (["FILE", "--url", "URL", "--seconds", 0], 2, "--seconds 0: expected a number of seconds above 0"),
        (
            ["FILE", "--url", "URL", "--timeout", "nan"],
            2,
            "--timeout nan: expected a number of seconds above 0",
        ),
        (
            ["FILE", "--url", "URL", "--max-requests", 0],
            2,
            "--max-requests 0: expected a number of at least 1",
        ),
        (["FILE", "--url", "URL", "--concurrency", 0], 2, "--concurrency 0: expected a number of at least 1"),
        (["FILE", "--url", "URL", "--concurrency", 10**12], 2, "open files (ulimit -Hn)"),
        (["FILE", "--url", "URL", "--speedup-ratio", 0], 2, "--speedup-ratio must be a number from"),
        (
            ["FILE", "--url", "URL", "--slo-itl-ms", -1],
            2,
            "--slo-itl-ms -1: expected a number of milliseconds above 0",
        ),
        (
            ["FILE", "--url", "URL", "--plot", "x.gif"],
            2,
            "--plot x.gif: the name must end in .png or .svg",
        ),
        (["FILE", "--url", "URL", "--report", "none/r"], 2, "--report none/r: the folder "),
        (["FILE", "--url", "URL", "--report", "."], 1, ". cannot be written: Is a directory"),
        (["FILE", "--url", "URL", "--key", "a\nb"], 2, "the API key has characters"),
    ],
)
def test_an_error_is_one_sentence(
    arguments: list[object],
    code: int,
    says: str,
    server: Scripted,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [{"FILE": trace, "URL": server.url}.get(str(one), one) for one in arguments]
    if "--block-size" not in given:
        given += BLOCKS
    assert replay(*given) == code
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1 and told.startswith("holdfast: ")


def test_a_bad_line_is_found_before_anything_is_sent(
    server: Scripted, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_bytes(b"".join(LINES) + b"{\n")
    server.asked.clear()
    assert replay(trace, *BLOCKS, "--url", server.url) == 1
    assert f"{trace}, line 11: " in capsys.readouterr().err and not server.asked
    assert replay(trace, *BLOCKS, "--url", server.url, "--skip-bad") == 0
    assert f"1 line was skipped; the first: {trace}, line 11: " in capsys.readouterr().err
    assert len(server.asked) == 10


@pytest.mark.parametrize(
    ("models", "flags", "says"),
    [((), [], "serves no model"), (("a", "b"), [], "serves several models: choose one with --model (a, b)")],
)
def test_the_model_must_be_clear(
    models: tuple[str, ...], flags: list[str], says: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(models=models) as several:
        assert replay(trace, *BLOCKS, "--url", several.url, *flags) == 1
        assert says in capsys.readouterr().err
        if models:
            assert replay(trace, *BLOCKS, "--url", several.url, "--model", "b") == 0
            assert {asked.body["model"] for asked in several.asked} == {"b"}


def started(trace: Path, server: Scripted, *flags: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "controller.cli", "trace", "replay", str(trace), *BLOCKS]
    return subprocess.Popen([*command, "--url", server.url, *flags], **streams, text=True)


def begins_and_lasts(folder: Path) -> Path:
    path = folder / "lasting.jsonl"
    path.write_bytes(LINES[0] + b'{"timestamp":999000,"input_length":1,"output_length":1}\n')
    return path


def test_sigterm_gives_the_report_so_far(server: Scripted, tmp_path: Path) -> None:
    server.asked.clear()
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = started(begins_and_lasts(tmp_path), server, "-o", "json", **both)
    try:
        block_until(lambda: server.asked, ENDS_S)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"] and found["requests"]["sent"] == 1
    assert "Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_ends_it_in_seconds_even_if_a_server_floods(tmp_path: Path) -> None:
    trace, streams = tmp_path / "burst.jsonl", 60
    trace.write_bytes(LINES[0] * streams)
    with serving(faults=dict.fromkeys(range(streams + 1), "flood")) as server:
        process = started(trace, server, "-o", "json", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            block_until(lambda: server.in_flight >= streams and server.flooded >= FLOODED, ENDS_S)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=FLOOD_ENDS_S)
        finally:
            process.kill()
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"] and found["requests"]["sent"] == streams
    assert found["requests"]["failed"] == 0  # they were cancelled


def test_on_a_terminal_it_shows_its_progress_and_ctrl_c_gives_the_report_so_far(
    server: Scripted, tmp_path: Path
) -> None:
    mine, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "60", "LINES": "24"}
    process = started(begins_and_lasts(tmp_path), server, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    raw, shown, told = b"", "", 0
    deadline = time.monotonic() + ENDS_S
    try:
        while time.monotonic() < deadline:
            raw += os.read(mine, 1 << 16)
            shown = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", raw).decode(errors="ignore")
            if not told and all(part in shown for part in ("1 answered, 0 failed", "whole answer", "50%")):
                told = len(shown)
                process.send_signal(signal.SIGINT)
    except OSError:
        assert process.wait(ENDS_S) == 130  # it has closed its end
    finally:
        os.close(mine)
        process.kill()
    assert "TTFT" in shown[:told] and "1 requests sent" in shown[told:]
    table = re.findall(r"[┏┃┡│└][^\r\n]*", shown)
    assert len(table) > 8 and max(map(len, table)) <= 60


def test_a_chart_is_drawn(server: Scripted, trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    assert replay(trace, *BLOCKS, "--url", server.url, "--plot", tmp_path / "x.png") == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
