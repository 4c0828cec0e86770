"""The benchmark of choices measures every mode."""

from benchmarks.router.choice import choice
from controller.router.selection.selector import Mode


def test_every_mode_is_measured() -> None:
    rows = choice(workers=3, tokens=240, block_tokens=16, rounds=3)
    assert [row.get("mode", "kv") for row in rows] == [mode.value for mode in Mode]
    kv = rows[0]
    assert kv["median_us"] >= kv["hash"] > 0
    assert all(row["choose_us"] > 0 for row in rows[1:])
