"""Measures routing of a chat trace in all five modes, in virtual time: hits, latency, balance.

    python -m benchmarks routing [--trace FILE] [--workers 8 64] [--loads 0.3 0.5 0.7 0.9 1.1] [--modes kv round-robin …]
                                 [--speed polynomial] [--seed 1] [--plot routing.svg] [--dynamo]

The router's own index, active sequences and selector, and the simulated engine's own scheduler, in one process, without clocks
and sockets. The trace (Mooncake's format, 512 tokens per block) is accelerated or slowed down; a load is a share of
round-robin's throughput when all requests arrive at once. Prints one JSON object per row:

    bound    blocks, and the hit rate of one cache with the whole fleet's blocks, read in the order of the trace
    run      one mode at one load (see `virtual.figures` for the columns)
    best     the best balance at that load (`virtual.fleet.Ideal`), with all possible hits, 90 % of them or none
    result   the targets: hits against the bound, mean TTFT against round-robin's at a load of 0.7, balance
    hour     the trace at its own speed, and how long that took

Balance: the tokens that a worker computes in a window of 10 s, of prompts and answers, over the mean of all workers in that
window; the 99th percentile over all pairs of a window and a worker. The first window and the last are left out. `hottest`: the
99th percentile over the windows of each worker by itself, the largest of them over their mean.

`--dynamo` also runs Dynamo's router modes on its own mocker in its offline replay (`make peer`), with the same trace, blocks
and polynomial (the second one, the only one that it has). Loads are the same shares of its own round-robin's throughput. Our
modes run with that polynomial beside it.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any  # of matplotlib

from benchmarks.plots import figure, needed, plot_file
from benchmarks.router.virtual import trace
from benchmarks.router.virtual.fleet import Fleet, Ideal, figures, shortened
from benchmarks.router.virtual.router import Router, workers
from benchmarks.rows import Row, command_line, show
from controller.processes.flag_types import positive
from controller.router.selection.score import USUAL, Pricing
from controller.router.selection.selector import Mode
from controller.trace.rows import TraceRow as Recorded
from controller.trace.rows import encode
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import POLYNOMIALS, ModelTiming

ROOT = Path(__file__).parents[2]
TRACE = ROOT.parent / "shared" / "data" / "mooncake_conversation.jsonl"
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
ALL_AT_ONCE = 1000.0  # acceleration of the trace
KV_TOKENS = 16_384 * 64  # of one engine: what Dynamo's mocker has
RESULT_LOAD = 0.7
ALL_HITS = 1.0  # of the possible ones
HITS = (ALL_HITS, 0.9, 0.0)
SPEEDS: dict[str, ModelTiming] = {name: ModelTiming(model) for name, model in POLYNOMIALS.items()}
FIRST, SECOND = SPEEDS
PANELS = {
    "ttft_mean": "mean TTFT, s",
    "hit_rate": "prefix hit rate",
    "balance": "balance: p99 of tokens / mean",
}


def shape(block_tokens: int) -> EngineShape:
    """Return an engine with the defaults of Dynamo's mocker, and room for every prompt of the trace."""
    blocks = KV_TOKENS // block_tokens
    return EngineShape(
        context_tokens=262_144,
        block_tokens=block_tokens,
        kv_blocks=blocks,
        batch_max=256,
        prefill_tokens_max=8192,
        waiting_max=1_000_000,
    )


class Trial:
    """A trace on a fleet of `count` workers."""

    def __init__(self, rows: Sequence[Recorded], count: int, args: argparse.Namespace, speed: str) -> None:
        self.count, self.speed = count, speed
        self._rows, self._args = rows, args
        self._shape, self._timing = shape(args.block_tokens), SPEEDS[speed]
        self._blocks = count * self._shape.kv_blocks
        self._found = list(trace.found(self._requests(1.0), args.block_tokens, self._blocks))
        self._span_s = rows[-1].timestamp / 1e3
        self.offered = len(rows) / self._span_s  # requests/s at the trace's own speed

    def _requests(self, factor: float) -> Iterator[trace.Request]:
        return trace.requests(self._rows, self._args.block_tokens, factor)

    def bound(self) -> Row:
        """Return the hits of one cache with the whole fleet's blocks."""
        return {
            "row": "bound",
            "workers": self.count,
            "kv_blocks": self._blocks,
            "block_tokens": self._args.block_tokens,
            "hit_rate": sum(self._found) / sum(max(1, row.input_length) for row in self._rows),
        }

    def best(self, factor: float) -> Row:
        """Return the best balance for several shares of the possible hits, and with all of them dealt out."""
        requests, ideals = list(self._requests(factor)), {}
        for share in HITS:
            shorter = shortened(requests, [int(share * tokens) for tokens in self._found])
            ideals[share] = Ideal(shorter, self._shape, self._timing, self.count)
        return {
            "workers": self.count,
            "speed": self.speed,
            "least": {share: ideal.least_balance() for share, ideal in ideals.items()},
            "dealt": ideals[ALL_HITS].dealt_balance(),
        }

    def run(self, mode: Mode, factor: float, pricing: Pricing = USUAL) -> Row:
        """Run the accelerated trace, and return the figures."""
        began, args = time.perf_counter(), self._args
        fleet_workers = workers(self.count, self._timing.profile(self._shape))
        router = Router(fleet_workers, mode, pricing, args.seed, paced=args.paced)
        fleet = Fleet(self._shape, self._timing, self.count, [router])
        outcome = fleet.run(self._requests(factor))
        found = figures(outcome, self.count, self._span_s / factor)
        return {
            "workers": self.count,
            "mode": mode.value,
            "speed": self.speed,
            "offered_per_s": self.offered * factor,
            **found,
            "seed": args.seed,
            "wall_s": time.perf_counter() - began,
        }


def sweep(trial: Trial, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the results of one fleet at each load in each mode, and whether the targets were reached."""
    bound = trial.bound()
    yield bound
    most = trial.run(Mode.ROUND_ROBIN, ALL_AT_ONCE)["completed_per_s"]
    runs: dict[tuple[str, float], Row] = {}
    for load in args.loads:
        for mode in args.modes:
            run = trial.run(Mode(mode), load * most / trial.offered)
            runs[mode, load] = run
            yield {"row": "run", "system": "Holdfast", "load": load, **run}
        yield {"row": "best", "load": load, **trial.best(load * most / trial.offered)}
    kv, turns = (runs.get((mode, RESULT_LOAD)) for mode in ("kv", "round-robin"))
    if kv and turns:
        yield {
            "row": "result",
            "workers": trial.count,
            "speed": trial.speed,
            "round_robin_per_s": most,
            "hits_of_bound": kv["hit_rate"] / bound["hit_rate"] if bound["hit_rate"] else math.nan,
            "ttft_better": turns["ttft_mean"] / kv["ttft_mean"],
            **{
                key: {mode: runs[mode, RESULT_LOAD][key] for mode in args.modes}
                for key in ("balance", "hottest")
            },
        }


def hour(trial: Trial) -> Row:
    """Run the trace at its own speed."""
    run = trial.run(Mode.KV, 1.0)
    return {"row": "hour", **run, "virtual_s_per_s": run["virtual_s"] / run["wall_s"]}


def dynamo(rows: Sequence[Recorded], count: int, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the results of Dynamo's router modes on its own mocker, with the same requests."""
    with NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(map(encode, rows))
        file.flush()
        words = ["--workers", str(count), "--loads", *map(str, args.loads)]
        words += ["--block-tokens", str(args.block_tokens)]
        with subprocess.Popen(
            [str(args.dynamo_python), "-m", "benchmarks.peers.peer_routing", file.name, *words],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        ) as process:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
    if process.returncode:
        raise SystemExit(f"Dynamo's replay ended with {process.returncode}")


def draw(found: Sequence[Row], path: Path, args: argparse.Namespace) -> None:
    """Draw each mode's results over the load, a row of panels per fleet."""
    fleets: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in found:
        if row["row"] in ("run", "best"):
            fleets[row["workers"], row["speed"]].append(row)
    with figure(path, len(PANELS), f"{args.trace.name}, seed {args.seed}", lines=len(fleets)) as axes:
        for line, ((count, speed), rows) in zip(axes, sorted(fleets.items()), strict=True):
            for axis, key in zip(line, PANELS, strict=True):
                _draw_modes(axis, key, [row for row in rows if row["row"] == "run" and key in row])
                axis.set(xlabel=f"load, {count} workers, {speed}", ylabel=PANELS[key])
            ideal = [row for row in rows if row["row"] == "best"]
            least, dealt = [row["least"][ALL_HITS] for row in ideal], [row["dealt"] for row in ideal]
            for name, points, style in (("least", least, ":"), ("dealt", dealt, "-.")):
                line[2].plot([row["load"] for row in ideal], points, style, color="grey", label=name)
            line[2].legend(fontsize=6)
            line[0].set_yscale("log")
            line[0].legend(fontsize=6)


def _draw_modes(axis: Any, key: str, rows: Sequence[Row]) -> None:
    """Draw one column over the load, a line per system and mode."""
    for system, mode in sorted({(row["system"], row["mode"]) for row in rows}):
        points = [row for row in rows if (row["system"], row["mode"]) == (system, mode)]
        style, label = "-" if system == "Holdfast" else "--", f"{system} {mode}"
        axis.plot([p["load"] for p in points], [p[key] for p in points], style, marker=".", label=label)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything."""
    modes = [mode.value for mode in Mode]
    parser = command_line("routing", __doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=trace.whole, help="number of requests to use (default: all)")
    parser.add_argument("--workers", type=trace.whole, nargs="+", default=[8, 64])
    parser.add_argument("--loads", type=positive, nargs="+", default=[0.3, 0.5, 0.7, 0.9, 1.1])
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes)
    parser.add_argument("--speed", choices=list(SPEEDS), default=FIRST, help="the engines' polynomial")
    parser.add_argument("--block-tokens", type=int, choices=[16, 32, 64, 128, 256, 512], default=512)
    parser.add_argument("--paced", action="store_true", help="as with --router-prefill-load-model profile")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=plot_file, help="file for the plot of the sweep (.svg or .png)")
    parser.add_argument("--dynamo", action="store_true", help="Dynamo's router on its mocker, too")
    parser.add_argument("--dynamo-python", type=Path, default=PEER_PYTHON)
    args = parser.parse_args(argv)
    if args.plot:
        needed()
    if args.dynamo and not args.dynamo_python.exists():
        parser.error("Dynamo is not installed: run `make peer` to install it into .venv-peer")
    rows = trace.recorded(parser, args.trace, args.requests)
    runs: list[Row] = []
    for count in args.workers:
        runs += [show(row) for row in sweep(Trial(rows, count, args, args.speed), args)]
        if args.dynamo:
            if args.speed != SECOND:
                runs += [show(row) for row in sweep(Trial(rows, count, args, SECOND), args)]
            runs += [show(row) for row in dynamo(rows, count, args)]
    show(hour(Trial(rows, max(args.workers), args, args.speed)))
    if args.plot:
        draw(runs, args.plot, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
