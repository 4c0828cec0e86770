"""The table of recovery: its figures and its format. `make recovery-table` measures it."""

from pathlib import Path

import pytest

from benchmarks.failures import recovery
from benchmarks.failures.recovery import FAILURES, Failure, Recovery, longest_gap_s, table
from controller.demo.clients import Received


def received(*times: float) -> Received:
    return Received("r", 0, len(times), sent=0.0, times=list(times))


def test_the_worst_gap_goes_from_the_last_token_before_the_failure_to_the_first_from_elsewhere() -> None:
    stream = received(0.1, 5.0, 5.1, 5.6, 5.7, 6.7)
    assert longest_gap_s(stream, 5.2, 5.6) == pytest.approx(0.5), "later pauses are normal on the new worker"
    assert longest_gap_s(stream, 5.65, 5.69) == pytest.approx(0.1), "pauses before the failure do not count"
    assert longest_gap_s(stream, 5.2, 6.0) == pytest.approx(1.0)
    assert longest_gap_s(received(1.0), 2.0, 3.0) == 0.0


def test_the_table_shows_what_did_not_happen() -> None:
    rows = table(
        [
            Recovery("hard crash", 8, {"reprefill": 8}, 0, 3, 2.0, 73.0, 74.6, 1117.0),
            Recovery("throttled", 0, {}, 1, 0, None, None, None, None),
        ]
    ).splitlines()
    assert rows[0].split()[:3] == ["failure", "moved", "by"]
    assert "8 reprefill" in rows[1] and rows[1].endswith("1.12 s") and "75 ms" in rows[1]
    assert rows[2].split() == ["throttled", "0", "-", "1", "0", "-", "-", "-", "-"]


def test_an_unknown_failure_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        recovery.main(["flood"])
    assert ended.value.code == 2
    assert f"unknown failure 'flood'; choose from {', '.join(FAILURES)}" in capsys.readouterr().err


def ms(number: str, unit: str) -> float:
    return float(number) * {"ms": 1, "s": 1000}[unit]


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_n16_the_page_has_the_detection_and_migration_times_of_each_failure(
    failure: Failure,
) -> None:
    page = (Path(recovery.__file__).parents[1] / "README.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(failure.says))
    times = row.removeprefix(failure.says).split()[-8:]
    detection, migration, total, worst = (ms(*pair) for pair in zip(times[::2], times[1::2], strict=True))
    assert total == pytest.approx(detection + migration, abs=10), (
        "as the page explains them; it rounds to 10 ms"
    )
    assert worst < total + 20, "no client waits longer than the recovery, and one token"
