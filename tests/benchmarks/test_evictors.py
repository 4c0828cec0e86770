"""The comparison of evictors: every kind with every cache size, and clear errors for wrong input."""

import json
from pathlib import Path

import pytest

from benchmarks.router import evictors


def test_each_evictor_runs_with_each_cache_and_finds_no_more_than_an_unlimited_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    # Three conversations in turn, each of which grows by a block per question.
    rows = [
        {"timestamp": 1000 * n, "input_length": 512 * (n // 3 + 1), "output_length": 1,
         "hash_ids": [100 * (n % 3) + block for block in range(n // 3 + 1)]}
        for n in range(30)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evictors.main(["--trace", str(trace), "--at-once", "1"]) == 0
    first, *played = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["requests"], first["different"], first["endless_percent"]) == (30, 30, 81.82)
    assert len(played) == 5 * 2 * 3
    assert max(row["found_percent"] + row.get("host_percent", 0) for row in played) <= 81.82
    half = [row for row in played if row["cache_percent"] == 50 and not row["host"]]
    assert min(row["found_percent"] for row in half) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at-once", "0"], "argument --at-once: "),
        (["--requests", "-5"], "argument --requests: "),
        (["--trace", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--trace", __file__], "line 1: "),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        evictors.main(arguments)
    assert message in capsys.readouterr().err
