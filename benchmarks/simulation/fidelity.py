"""Compares a simulated engine with the engine of its profile, by the same requests to both.

    python -m benchmarks fidelity [--trace FILE] [--requests 200] [--rounds 3] [--report FILE.json] [--plot FILE.svg]

One fleet, one frontend: a transformers engine, and simulated ones of the same shape. A round is

    speed ─▶ holdfast profile ─▶ speed ─▶ requests to the one ─▶ speed ─▶ the same requests to the other ─▶ speed

The profile of the transformers engine is measured with its own prompts, and used by a simulated engine that is new in each
round. The load generator of `holdfast trace replay` sends the requests at the recorded times, accelerated so that one at a
time they would keep the engine busy for `--load` of the time, by its profile. Every round has its own requests, which
share no prefix with another round's, so that both engines' prefix caches see the same. The order of the two engines
alternates.

`speed` is the time of two fixed computations: a loop in Python, and reading as many bytes as the model has weights. If
these differ within a round, the machine's speed changed since the profile was measured, and differences mean little.

Without `--trace` the requests are generated from the demo's profile of chats. Lengths are scaled to the model's context.
Percentiles are of all rounds together; those of each round are shown beside them. A round that takes longer than 8 minutes is
cancelled, and is the last.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from benchmarks.plots import needed
from benchmarks.simulation.fidelity_fleet import SIMULATED, CannotCompare, Engines, alone_ms
from benchmarks.simulation.fidelity_report import ENGINES, Round, draw, report_of, show
from controller.demo.profile import built_in
from controller.trace.replay.driver import Limits, Replay
from controller.trace.replay.endpoint import ReplayTarget
from controller.trace.replay.measures import AnswerSlo, ReplayMeasures
from controller.trace.replay.plan import ReplayShape, plan
from controller.trace.replay.request_bodies import find
from controller.trace.rows import BLOCK_TOKENS, TraceReader, TraceRow
from controller.trace.synthesis import synthesize
from events.errors import HoldfastError

INPUT_TOKENS, OUTPUT_TOKENS = 128, 36  # means, after scaling
INPUT_MAX, OUTPUT_MAX = 768, 192
LOAD = 0.75  # one token in 40 waits for a prompt: with one in 20 that would be the 95th percentile of ITL
LOAD_MAX = 10.0
STARTS_S_MAX, ROUND_S_MAX = 120.0, 480.0
LOOP, WEIGHTS, SPEEDS = 2_000_000, 15_000_000, 5


@dataclass(frozen=True, slots=True)
class Slice:
    """The requests of a round, their scaling, and the blocks that their hash ids name."""

    rows: Sequence[TraceRow]
    shape: ReplayShape
    block_tokens: int


def split(rows: Sequence[TraceRow], rounds: int) -> list[list[TraceRow]]:
    """Split requests into equal rounds that share no block."""
    size = len(rows) // rounds
    return [
        [
            TraceRow(
                row.timestamp, row.input_length, row.output_length, [at * rounds + n for at in row.hash_ids]
            )
            for row in rows[n * size : (n + 1) * size]
        ]
        for n in range(rounds)
    ]


def scaled(rows: Sequence[TraceRow], rate: float) -> ReplayShape:
    """Return the rate and the mean lengths at which to send requests."""
    seconds = (rows[-1].timestamp - rows[0].timestamp) / 1e3
    return ReplayShape(
        speedup_ratio=rate * seconds / (len(rows) - 1),
        scale_input=INPUT_TOKENS * len(rows) / sum(row.input_length for row in rows),
        scale_output=OUTPUT_TOKENS * len(rows) / sum(row.output_length for row in rows),
        max_isl=INPUT_MAX,
        max_osl=OUTPUT_MAX,
    )


async def replayed(url: str, model: str, part: Slice) -> ReplayMeasures:
    """Send the requests of a round to one engine. Raise CannotCompare unless all are answered completely."""
    target, measures = ReplayTarget(url), ReplayMeasures(AnswerSlo())
    try:
        worded = await find(target, model, chat=False)
        planned = plan(part.rows, part.block_tokens, part.shape)
        await Replay(target, worded, planned, measures, Limits()).run(asyncio.Event())
    finally:
        await target.close()
    if measures.whole < len(part.rows) or measures.shorter:
        raise CannotCompare(
            f"{model}: {measures.whole} of {len(part.rows)} answers are whole: {measures.samples}"
        )
    return measures


async def one_round(
    engines: Engines, number: int, part: Sequence[TraceRow], block_tokens: int, args: Any
) -> Round:
    """Measure a profile, and send the same requests to both engines."""
    speeds, measures = [speed()], {}
    profile = args.folder / f"profile-{number}.npz"
    await engines.measure(profile, args.repeats)
    simulated = f"{SIMULATED}-{number}"
    await engines.simulate(simulated, profile)
    alone = alone_ms(profile, INPUT_TOKENS, OUTPUT_TOKENS)
    busy_s = (alone["prefill"] + OUTPUT_TOKENS * alone["decode"]) / 1e3
    sent = Slice(part, scaled(part, args.load / busy_s), block_tokens)
    for name in ENGINES[:: 1 if number % 2 else -1]:
        speeds.append(speed())
        measures[name] = await replayed(engines.url, simulated if name == SIMULATED else name, sent)
    return Round(measures, alone, [*speeds, speed()])


async def all_rounds(
    args: argparse.Namespace,
    told: Console,
    make: Callable[[Path], Engines] = Engines,
    round_s: float = ROUND_S_MAX,
) -> list[Round]:
    """Run all rounds on the engines that `make` creates; return the results of those that ended within `round_s` seconds."""
    rounds: list[Round] = []
    rows, block_tokens = _rows(args)
    parts = split(rows, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        engines = make(args.folder)
        try:
            async with asyncio.timeout(STARTS_S_MAX):
                await engines.start()
            for number, part in enumerate(parts, 1):
                told.print(f"round {number} of {len(parts)}")
                async with asyncio.timeout(round_s):
                    rounds.append(await one_round(engines, number, part, block_tokens, args))
        except (TimeoutError, HoldfastError) as error:
            reason = str(error) or "it took too long"
            told.print(f"round {len(rounds) + 1} and all later ones are left out: {reason}")
        finally:
            await asyncio.to_thread(engines.stop)
    return rounds


def speed() -> dict[str, float]:
    """Return the time of fixed computations, in milliseconds: the median of a few."""
    weights = np.ones(WEIGHTS, np.float32)
    jobs: dict[str, Callable[[], object]] = {"python": lambda: sum(range(LOOP)), "memory": weights.sum}
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(SPEEDS):
        for name, job in jobs.items():
            began = time.perf_counter()
            job()
            found[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def _rows(args: argparse.Namespace) -> tuple[list[TraceRow], int]:
    """Return the requests of all rounds, and the tokens per block."""
    count = args.requests * args.rounds
    if args.trace is None:
        profile = built_in()
        return list(synthesize(profile, count)), profile.block_tokens
    rows = list(islice(TraceReader(args.trace), count))
    if len(rows) < count:
        raise SystemExit(f"{args.trace} has {len(rows)} requests, but {count} are needed")
    return rows, BLOCK_TOKENS


def _from(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least}")
        return int(text)

    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; return 1 if the engines do not agree."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks fidelity", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="recorded requests (default: generated from the demo's profile)",
    )
    add("--requests", type=_from(2), default=200, metavar="N", help="requests per round (default: 200)")
    add("--rounds", type=_from(1), default=3, metavar="N")
    add(
        "--load",
        type=float,
        default=LOAD,
        metavar="X",
        help=f"share of time that the engine is busy (default: {LOAD:g})",
    )
    add(
        "--repeats",
        type=_from(1),
        default=5,
        metavar="N",
        help="measurements per point of the profile (default: 5)",
    )
    add("--report", type=Path, metavar="FILE.json", help="also write the report to this file")
    add("--plot", type=Path, metavar="FILE.svg", help="also draw the distributions (needs the extra `plots`)")
    args = parser.parse_args(argv)
    if not 0 < args.load <= LOAD_MAX:
        parser.error(f"--load {args.load:g}: must be above 0 and at most {LOAD_MAX:g}")
    for path in filter(None, (args.report, args.plot)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    if args.plot:
        needed()
    console = Console(stderr=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            rounds = runner.run(all_rounds(args, console))
        except HoldfastError as error:
            raise SystemExit(str(error)) from None
    if not rounds:
        return 1
    report = report_of(rounds)
    show(report, console)
    print(json.dumps(report))
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        draw(rounds, args.plot)
    return 0 if report["agree"] and len(rounds) == args.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
