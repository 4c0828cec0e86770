"""The arithmetic of `fidelity`: requests, merged distributions, and the verdict."""

import asyncio
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.simulation import fidelity
from benchmarks.simulation.fidelity import INPUT_TOKENS, OUTPUT_TOKENS, scaled, split
from benchmarks.simulation.fidelity_fleet import REAL, SIMULATED
from benchmarks.simulation.fidelity_report import Round, agree, compared, merged, report_of, show
from controller.trace.replay.measures import AnswerSlo, DurationHistogram, ReplayMeasures
from controller.trace.replay.plan import plan
from controller.trace.rows import TraceRow


def histogram(*values_ms: float) -> DurationHistogram:
    made = DurationHistogram()
    for ms in values_ms:
        made.add(ms / 1e3)
    return made


def test_percentiles_are_compared_as_shares_of_the_real_ones() -> None:
    found = compared(histogram(*[100.0] * 90, *[400.0] * 10), histogram(*[110.0] * 90, *[300.0] * 10))
    assert found["p50"]["off"] == pytest.approx(0.10, abs=0.015)
    assert found["p95"]["off"] == pytest.approx(-0.25, abs=0.015)
    assert found["p95"]["real_ms"] == pytest.approx(400, rel=0.01)


@pytest.mark.parametrize(
    ("median", "tail", "agrees"), [(112, 400, True), (120, 400, False), (80, 400, False), (100, 520, False)]
)
def test_engines_agree_within_the_limits_of_each_percentile(median: float, tail: float, agrees: bool) -> None:
    real, simulated = histogram(*[100.0] * 90, *[400.0] * 10), histogram(*[median] * 90, *[tail] * 10)
    same = compared(real, real)
    assert agree({"ttft": same, "itl": same})
    assert agree({"ttft": same, "itl": compared(real, simulated)}) == agrees


def test_rounds_are_merged_value_by_value() -> None:
    whole, parts = histogram(1, 2, 3, 50), merged([histogram(50, 2), histogram(3, 1)])
    assert (parts.counts, parts.count) == (whole.counts, whole.count)
    assert parts.percentiles(0.5, 0.95) == whole.percentiles(0.5, 0.95)


def test_rounds_have_disjoint_requests_with_the_requested_rate_and_lengths() -> None:
    rows = [TraceRow(n * 700.0 + n % 3, 600 + n % 7, 96, [0, n]) for n in range(60)]
    parts = split(rows, 3)
    assert [(row.timestamp, row.input_length) for part in parts for row in part] == [
        (row.timestamp, row.input_length) for row in rows
    ]
    names = [{name for row in part for name in row.hash_ids} for part in parts]
    assert not names[0] & names[1] and not names[1] & names[2] and not names[0] & names[2]
    for part in parts:
        assert len({row.hash_ids[0] for row in part}) == 1  # a round's shared prefixes stay shared
        planned = list(plan(part, 512, scaled(part, rate=5.0)))
        assert 19 / planned[-1].at_s == pytest.approx(5.0, rel=0.1)
        assert sum(one.tokens for one in planned) / 20 == pytest.approx(OUTPUT_TOKENS)
        assert sum(one.prompt.length for one in planned) / 20 == pytest.approx(INPUT_TOKENS, rel=0.02)


def made(real_ms: float, simulated_ms: float) -> Round:
    """Return a round of two engines with equal requests, each time of equal length."""
    measures = {}
    for name, ms in ((REAL, real_ms), (SIMULATED, simulated_ms)):
        one = measures[name] = ReplayMeasures(AnswerSlo())
        one.whole, one.tokens.output = 10, 100
        for _ in range(10):
            one.ttft.add(ms / 1e3)
            one.itl.add(ms / 1e3)
    return Round(measures, {"prefill": 1.0, "decode": 1.0}, [{"python": 1.0, "memory": 2.0}] * 4)


@pytest.mark.parametrize(("simulated_ms", "agrees"), [(109.0, True), (130.0, False)])
def test_the_verdict_is_of_all_rounds_together_and_is_shown_beside_each(
    simulated_ms: float, agrees: bool
) -> None:
    report = report_of([made(100, 100), made(100, simulated_ms), made(100, simulated_ms)])
    assert report["agree"] == agrees and report["requests"] == 30
    assert len(report["rounds"]) == 3
    console = Console(record=True, width=200, file=io.StringIO())
    show(report, console)
    said = console.export_text()
    assert said.count("NO ") == (0 if agrees else 4)
    assert "1.0, 2.0" in said


async def test_a_round_that_takes_too_long_is_left_out_and_everything_ends() -> None:
    ended = []

    class Slow:
        url = ""

        def __init__(self, folder: Path) -> None: ...

        async def start(self) -> None: ...

        async def measure(self, profile: Path, repeats: int) -> None:
            await asyncio.Event().wait()

        def stop(self) -> None:
            ended.append(True)

    args = Namespace(rounds=2, requests=3, trace=None, repeats=1, load=0.5)
    made: Any = Slow
    assert await fidelity.all_rounds(args, Console(file=io.StringIO()), made, 0.01) == []
    assert ended == [True]
