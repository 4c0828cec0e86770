"""The index benchmark reports whether its targets were reached."""

import pytest

from benchmarks.router.index import judged, main, straight


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ({"row": "find 1", "lookups_per_s": 200_000, "p99_us": 25.0}, "reached"),
        ({"row": "find 60", "lookups_per_s": 99_999, "p99_us": 5.0}, "missed"),
        ({"row": "find 60", "lookups_per_s": 150_000, "p99_us": 25.1}, "missed"),
        ({"row": "load", "blocks_per_s": 2e6, "mb_per_million": 151}, "missed"),
        ({"row": "hash 64", "prompts_per_s": 80_000}, "reached"),
        ({"row": "hash 16", "prompts_per_s": 1}, None),
    ],
)
def test_each_row_is_compared_with_its_bounds(line: dict[str, object], verdict: str | None) -> None:
    assert judged(line).get("verdict") == verdict


@pytest.mark.parametrize(
    "flags",
    [
        "--runs 0",
        "--workers 0",
        "--depth 0",
        "--blocks 10",
        "--depth 99999 --blocks 999999",
        "--grow -1",
        "--grow nan",
    ],
)
def test_invalid_arguments_of_the_index_benchmark_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags.split())
    assert ended.value.code == 2
    assert "error: --" in capsys.readouterr().err


def test_memory_must_grow_linearly() -> None:
    def points(*mb: float, p99_us: float = 5.0) -> list[dict[str, float]]:
        return [
            {"blocks": million * 1e6, "mb": size, "lookup_p99_us": p99_us}
            for million, size in enumerate(mb, 1)
        ]

    assert straight(points(90, 210, 290, 400))["verdict"] == "reached"
    assert straight(points(20, 60, 160, 400))["verdict"] == "missed"
    assert straight(points(100, 200, 300, 400, p99_us=26.0))["verdict"] == "missed"
