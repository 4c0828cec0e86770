"""The delay of events by stage: which events form a stall, and which stage caused it."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.store import stalls


def test_events_that_wait_together_are_one_stall_and_it_belongs_to_the_stage_that_was_longest() -> None:
    calm = [(float(n), 0.3, 0.6, 0.7) for n in range(1000)]
    delivered_late = [(1000.0 + n, 0.3, 80.0 - n, 0.7) for n in range(70)]  # the last of them within 20 ms
    committed_late = [(2000.0, 5.0, 6.0, 30.0)]
    found = stalls.told([*calm, *delivered_late, *committed_late])
    assert found["stalls"] == {"count": 2, "events": 62, "by_stage": {"delivery": 1, "commit": 1}}
    assert found["p50_ms"] == 1.6
    assert found["max_ms"] == 81.0
    assert found["stages_p99_ms"]["publishing"] == 0.3
    assert found["stages_p99_ms"]["delivery"] > 50


def test_a_disk_is_probed_until_stdin_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.store.stalls", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        while not (tmp_path / "probe").exists() or not (tmp_path / "probe").stat().st_size:
            assert asking.poll() is None
        said, _ = asking.communicate(timeout=30)
    found = json.loads(said)
    assert 0 < found["fdatasync"]["p50_ms"] <= found["fdatasync"]["max_ms"]
    assert found["woken_late"]["max_ms"] >= 0
