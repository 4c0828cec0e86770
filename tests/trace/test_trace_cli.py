"""`holdfast trace`: its output, its files, and its error messages."""

import gzip
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.simulation import chat_traffic
from controller import cli
from controller.trace.rows import TraceReader, encode

LINES = [encode(row) for row in chat_traffic.requests(seed=1, seconds=200)]
BLOCKS = ["--block-size", str(chat_traffic.BLOCK_TOKENS)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(LINES))
    return path


def holdfast(*arguments: object) -> int:
    return cli.main(["trace", *map(str, arguments)])


def test_analyze_prints_a_table_or_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert holdfast("analyze", trace, *BLOCKS) == 0
    told = capsys.readouterr().out
    assert f"{len(LINES)} requests in" in told and "Theoretical hit rate" in told
    assert holdfast("analyze", trace, *BLOCKS, "-o", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == len(LINES) and found["skipped_lines"] == 0
    assert 0 < found["hit_rate"]["mean"] < found["hit_rate"]["max"] <= 1


def test_a_trace_and_its_profile_generate_the_same_requests(
    trace: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    profile, made = tmp_path / "profile.json.gz", tmp_path / "made.jsonl.gz"
    assert holdfast("fit", trace, *BLOCKS, "-o", profile) == 0
    assert f"learned from {len(LINES)} requests" in capsysbinary.readouterr().out.decode()
    assert holdfast("synthesize", trace, *BLOCKS, "--requests", 50, "--seed", 4) == 0
    printed = capsysbinary.readouterr().out
    assert printed.count(b"\n") == 50
    assert holdfast("synthesize", profile, "--requests", 50, "--seed", 4, "-o", made) == 0
    assert gzip.decompress(made.read_bytes()) == printed
    assert len(list(TraceReader(made, chat_traffic.BLOCK_TOKENS))) == 50


def test_every_knob_is_a_flag(trace: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    def made(*flags: object) -> bytes:
        assert holdfast("synthesize", trace, *BLOCKS, "--requests", 40, *flags) == 0
        return capsysbinary.readouterr().out

    plain = made()
    for flag, value in {
        "--prefix-len-multiplier": 2, "--prefix-root-multiplier": 3, "--prompt-len-multiplier": 2,
        "--osl-multiplier": 2, "--speedup-ratio": 2, "--max-isl": 900, "--max-osl": 20, "--seed": 9,
    }.items():  # fmt: skip
        assert made(flag, value) != plain, flag


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"timestamp": 1', "line 2: Input data was truncated"),
        (LINES[0].replace(b"input_length", b"output", 1), "line 2: Object missing required field"),
        (
            b'{"timestamp":0,"input_length":16,"output_length":1,"hash_ids":[123456789]}\n'
            b'{"timestamp":0,"input_length":32,"output_length":1,"hash_ids":[1,123456789]}',
            "line 3: the prefixes do not form a tree: hash id 123456789 comes after nothing in one prompt and after 1",
        ),
    ],
)
@pytest.mark.parametrize("command", ["analyze", "fit", "synthesize"])
def test_a_bad_trace_is_one_sentence_or_is_skipped(
    command: str, bad: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(LINES[0] + bad + b"\n" + b"".join(LINES[1:]))
    flags = {"analyze": [], "fit": ["-o", tmp_path / "p"], "synthesize": ["--requests", 2]}[command]
    assert holdfast(command, path, *BLOCKS, *flags) == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith(f"holdfast: {path}, {says}")
    assert holdfast(command, path, *BLOCKS, *flags, "--skip-bad") == 0
    assert capsys.readouterr().err.startswith(f"1 line was skipped; the first: {path}, {says}")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["analyze", "none.jsonl"], 1, "none.jsonl cannot be read: No such file or directory"),
        (["analyze", "FILE", "--block-size", 0], 2, "--block-size 0: expected a number of at least 1"),
        (["analyze", "FILE"], 1, "that is"),
        (
            ["analyze", "FILE", *BLOCKS, "--plot", "x.gif"],
            2,
            "--plot x.gif: the name must end in .png or .svg",
        ),
        (["fit", "FILE", *BLOCKS, "-o", "none/p"], 1, "none/p cannot be written: No such file or directory"),
        (["synthesize", "FILE", *BLOCKS, "--requests", 1, "-o", "none/m"], 1, "none/m cannot be written"),
        (["synthesize", "FILE", *BLOCKS, "--requests", 0], 2, "--requests 0: expected a number from 1 to"),
        (
            ["synthesize", "FILE", *BLOCKS, "--requests", 1, "--osl-multiplier", 0],
            2,
            "--osl-multiplier must be a number",
        ),
        (["synthesize", "FILE", *BLOCKS, "--requests", 1, "--max-isl", 1], 1, "longer than --max-isl 1"),
    ],
)
def test_invalid_arguments_are_named(
    arguments: list[object], code: int, says: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert holdfast(*(trace if one == "FILE" else one for one in arguments)) == code
    told = capsys.readouterr()
    assert says in told.err and told.err.count("\n") == 1 and told.err.startswith("holdfast: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["analyze"], "the following arguments are required: FILE"),
        (["synthesize", "x"], "the following arguments are required: --requests"),
        (["synthesize", "x", "--requests", "many"], "invalid int value: 'many'"),
        (["bogus"], "invalid choice: 'bogus'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_a_usage_error_is_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        holdfast(*arguments)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert says in told and told.count("\n") == 1


def test_a_pipe_can_be_analyzed_but_not_synthesized_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Detecting a profile reads its beginning, which a pipe cannot return."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"".join(LINES),))
    writer.start()
    assert holdfast("analyze", pipe, *BLOCKS) == 0
    writer.join()
    assert f"{len(LINES)} requests in" in capsys.readouterr().out
    assert holdfast("synthesize", pipe, *BLOCKS, "--requests", 1) == 1
    assert "pipe is a pipe, which can only be read once: write it to a file first" in capsys.readouterr().err


def test_a_profile_keeps_its_block_size(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "p"
    assert holdfast("fit", trace, *BLOCKS, "-o", profile) == 0
    assert holdfast("synthesize", profile, "--requests", 1, "--block-size", 512) == 2
    assert "was learned in blocks of 16 tokens" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_before_the_work(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert holdfast("analyze", trace, *BLOCKS, "--plot", tmp_path / "x.png") == 1
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert "need matplotlib" in told.err and "[plots]" in told.err


@pytest.mark.parametrize(("name", "begins"), [("known.svg", b"<?xml"), ("unknown.png", b"\x89PNG")])
def test_a_plot_is_drawn_with_or_without_known_prefixes(
    name: str, begins: bytes, trace: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    if name == "unknown.png":
        trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,0\n")
    assert holdfast("analyze", trace, *BLOCKS, "--plot", tmp_path / name) == 0
    assert (tmp_path / name).read_bytes().startswith(begins)
