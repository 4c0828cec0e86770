"""The benchmark of synthetic traces compares its figures correctly."""

import json
from pathlib import Path

import pytest

from benchmarks.simulation import synthesizer
from controller.trace.rows import TraceRow, encode


def test_a_cache_finds_only_blocks_with_all_blocks_before_them() -> None:
    rows = [TraceRow(0, 1, 1, [1, 2]), TraceRow(0, 1, 1, [3]), TraceRow(0, 1, 1, [1, 2])]
    assert synthesizer.found(rows, 3) == 0.4
    assert synthesizer.found(rows, 2) == 0  # 1 is gone, and 2 alone is no prefix


def test_it_prints_every_row_of_a_small_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.jsonl"
    path.write_bytes(b"".join(encode(TraceRow(n, 100, 5, [n % 3, 100 + n])) for n in range(60)))
    argv = ["--trace", str(path), "--block-size", "50", "--requests", "30", "--seeds", "1"]
    assert synthesizer.main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["row"] for row in rows] == ["like", *["rounds"] * 2, *["cache"] * 6, "speed"]
    assert rows[0]["off_percent"]["hit_rate mean"] == 0
    assert rows[-2] == {"row": "cache", "percent_of_blocks": 100, "recorded": 0.475, "synthetic": 0.475}
    assert rows[-1]["requests"] == 30 and 10 < rows[-1]["peak_mb"] < 500
