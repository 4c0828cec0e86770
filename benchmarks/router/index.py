"""Measures look-ups, loading and growth of the KV index, and prompt hashing, compared with Dynamo's.

    python -m benchmarks index [--blocks 100000] [--workers 100] [--depth 64] [--runs 3] [--grow 10] [--plot index.svg]

Ours and, if it is installed (`make peer`), the radix tree of Dynamo's Python binding, in turn, each run in its own
process.

    find    look-ups per second of prompts that one worker holds, and that 60 do, and their 99th percentile
    load    blocks per second, from an engine's message (msgpack ours, JSON theirs); MB for a million distinct blocks, with
            their names
    hash    prompts of 1,024 tokens per second, from a list to the look-up key, in blocks of 16 and 64 tokens
    grow    memory, loading and look-ups up to `--grow` million blocks; `--plot` draws it (that needs `.[plots]`)

Prints one JSON object per row. Our rows show the target, and whether it was reached; the last row says whether memory grows
linearly.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.plots import figure, needed, plot_file
from benchmarks.router.index_workload import MILLION, Chain, run
from controller.router.endpoints import WorkerRank
from controller.router.index.index import KvIndex
from events.blocks import local_hashes, sequence_hashes
from events.kv import KvBatch, Stored, batch, encode

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
POINTS = 10
GROWTH_TIMEOUT_S = 1200
AT_LEAST = {
    ("find 1", "lookups_per_s"): 200_000,
    ("find 60", "lookups_per_s"): 100_000,
    ("load", "blocks_per_s"): 1_000_000,
    # the block size of Dynamo's mocker; vLLM's 16 has four times the hashes
    ("hash 64", "prompts_per_s"): 80_000,
}
P99_US = 25.0
AT_MOST = {("find 1", "p99_us"): P99_US, ("find 60", "p99_us"): P99_US, ("load", "mb_per_million"): 150}
DEPTH_MAX = 10_000  # of a prompt, in blocks
MILLIONS_MAX = 1000
BEND_MAX = 0.15  # of the whole: memory grows in steps, whenever a hash map does


class Holdfast:
    """Our index looks up sequence hashes, and stores them as workers send them."""

    def __init__(self) -> None:
        self._index = KvIndex()
        self._holder = cache(lambda worker: WorkerRank(f"w{worker}", "instance"))

    def ready(self, chain: Chain) -> tuple[bytes, Chain]:
        names = sequence_hashes(chain)
        return encode(KvBatch("worker-1", "instance", 0, 0, [Stored(names)])), names

    def store(self, worker: int, announced: bytes) -> None:
        for event in batch(announced).events:
            assert isinstance(event, Stored)
            self._index.store(self._holder(worker), event.parent, event.blocks)

    def find(self, asked: Chain) -> int:
        return len(self._index.find(asked).device)

    def hash(self, tokens: Sequence[int], block_tokens: int) -> Chain:
        return sequence_hashes(local_hashes(tokens, block_tokens))


def measure(side: str, python: Path, what: str, args: argparse.Namespace, sizes: Sequence[int] = ()) -> Any:
    """Run one side in its own process."""
    module = "benchmarks.router.index" if side == "Holdfast" else "benchmarks.peers.peer_index"
    words = ["--one"] if side == "Holdfast" else []
    shape = ["--blocks", str(args.blocks), "--workers", str(args.workers), "--depth", str(args.depth)]
    done = subprocess.run(
        [str(python), "-m", module, *words, what, *shape, "--sizes", *map(str, sizes)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=GROWTH_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout)


def compare(sides: dict[str, Path], args: argparse.Namespace) -> None:
    """Print the median of each figure for each side, with the runs."""
    taken: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in sides}
    for _ in range(args.runs):
        for side, python in sides.items():
            taken[side].append(measure(side, python, "rows", args))
    first = next(iter(sides))
    for row, figures in taken[first][0].items():
        for side in sides:
            line: dict[str, object] = {"row": row, "system": side}
            for name in figures:
                runs = [one[row][name] for one in taken[side]]
                line[name] = _short(statistics.median(runs))
                line[f"{name}_runs"] = [_short(one) for one in runs]
            print(json.dumps(line | (judged(line) if side == first else {})), flush=True)


def judged(line: dict[str, Any]) -> dict[str, object]:
    """Return a row's target, and whether it was reached."""
    row = line["row"]
    least = {name: bound for (of, name), bound in AT_LEAST.items() if of == row}
    most = {name: bound for (of, name), bound in AT_MOST.items() if of == row}
    if not least and not most:
        return {}
    met = [*(line[name] >= least[name] for name in least), *(line[name] <= most[name] for name in most)]
    return {"at_least": least, "at_most": most, "verdict": "reached" if all(met) else "missed"}


def straight(points: list[dict[str, float]]) -> dict[str, object]:
    """Return the deviation of memory from the straight line through zero and the last point, relative to the whole."""
    last = points[-1]
    slope = last["mb"] / last["blocks"]
    bend = max(abs(point["mb"] - slope * point["blocks"]) for point in points) / last["mb"]
    p99_us = max(point["lookup_p99_us"] for point in points)
    found = {"bend": _short(bend), "lookup_p99_us": _short(p99_us), "mb_per_million": _short(slope * 1e6)}
    met = bend <= BEND_MAX and p99_us <= P99_US
    limits = {"bend": BEND_MAX, "lookup_p99_us": P99_US}
    return {"row": "growth"} | found | {"at_most": limits, "verdict": "reached" if met else "missed"}


def growth(sides: dict[str, Path], args: argparse.Namespace) -> None:
    """Print how each side grows, and draw it."""
    sizes = [round(args.grow * MILLION * point / POINTS) for point in range(1, POINTS + 1)]
    grown: dict[str, list[dict[str, float]]] = {}
    for side, python in sides.items():
        grown[side] = measure(side, python, "grow", args, sizes)
        for point in grown[side]:
            shown = {name: _short(value) for name, value in point.items()}
            print(json.dumps({"row": "grow", "system": side} | shown), flush=True)
    print(json.dumps(straight(grown["Holdfast"])), flush=True)
    if args.plot:
        draw(grown, args.plot)


def draw(grown: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Draw memory and look-ups over the number of blocks."""
    with figure(path, 3, "KV index: growth") as axes:
        for side, points in grown.items():
            blocks = [point["blocks"] / 1e6 for point in points]
            for axis, key in zip(axes[0], ("mb", "blocks_per_s", "lookup_p99_us"), strict=True):
                axis.plot(blocks, [point[key] for point in points], marker="o", label=side)
        for axis, label in zip(
            axes[0], ("memory, MB", "blocks taken in a second", "look-up p99, µs"), strict=True
        ):
            axis.set(xlabel="million blocks", ylabel=label, ylim=(0, None))
            axis.legend()


def _short(value: float) -> float:
    return round(value) if value >= 1000 else round(value, 2)


def _invalid(args: argparse.Namespace) -> str:
    """Return why the arguments cannot be measured; empty: they can."""
    if min(args.runs, args.workers, args.depth) < 1:
        return "--runs, --workers and --depth must be 1 or more"
    if args.depth > DEPTH_MAX or args.blocks < args.depth:
        return f"--depth must be at most {DEPTH_MAX}, and --blocks at least those of one prompt"
    return "" if 0 <= args.grow <= MILLIONS_MAX else f"--grow must be from 0 to {MILLIONS_MAX}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything."""
    if sys.argv[1:2] == ["--one"] and argv is None:
        del sys.argv[1]
        return run(Holdfast)
    parser = argparse.ArgumentParser(prog="python -m benchmarks index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    about = "million blocks of `grow`; 0: skip (default: 10)"
    parser.add_argument("--grow", type=float, default=10, metavar="MILLIONS", help=about)
    parser.add_argument("--plot", type=plot_file, help="file for the plot of the growth (.svg or .png)")
    parser.add_argument("--dynamo-python", type=Path, default=PEER_PYTHON)
    args = parser.parse_args(argv)
    if against := _invalid(args):
        parser.error(against)
    if args.plot:
        needed()
    sides = {"Holdfast": Path(sys.executable)}
    if args.dynamo_python.exists():
        sides["Dynamo"] = args.dynamo_python
    else:
        print("# Dynamo is not installed (`make peer`): ours alone", flush=True)
    compare(sides, args)
    if args.grow:
        growth(sides, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
