"""Compares synthetic requests with the recorded ones, and measures how fast they are generated.

    python -m benchmarks synthesizer [--trace FILE] [--block-size 512] [--requests 1000000] [--seeds 3]

`like`: the largest deviation of each validated figure in percent, over the seeds, all knobs at 1, as many requests as recorded.
`rounds`: the same with twice and ten times as many. `cache`: the hits of caches of several sizes, in percent of all blocks (least
recently used), recorded and synthetic. `speed`: `holdfast trace synthesize` from a profile, to a file, in its own process.
Without the trace beside this clone it measures our own chat traffic. Prints one JSON object each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.simulation import chat_traffic
from controller.trace.analysis import Analysis, analyze
from controller.trace.profile import TraceProfile, learn, save
from controller.trace.rows import BLOCK_TOKENS, TraceReader, TraceRow
from controller.trace.synthesis import synthesize

MOONCAKE = Path(__file__).parents[3] / "shared" / "data" / "mooncake_conversation.jsonl"
FIGURES = ("input_length", "output_length", "context_length", "hit_rate")
CACHES = (1, 5, 10, 25, 50, 100)  # percent of the distinct blocks


def like(recorded: Sequence[TraceRow], profile: TraceProfile, times: int, seeds: int) -> dict[str, Any]:
    """Compare, over `seeds` seeds, the figures of `times` as many requests."""
    theirs = analyze(recorded, profile.block_tokens)
    worst: dict[str, float] = {}
    for seed in range(seeds):
        made = synthesize(profile, times * len(recorded), seed=seed)
        for name, value in off(analyze(made, profile.block_tokens), theirs).items():
            worst[name] = max(worst.get(name, 0.0), value, key=abs)
    return {"requests": times * len(recorded), "seeds": seeds, "off_percent": worst}


def off(ours: Analysis, theirs: Analysis) -> dict[str, float]:
    """Return the deviation of each figure in percent."""
    return {
        f"{name} {statistic}": round(
            100 * (getattr(getattr(ours, name), statistic) / getattr(getattr(theirs, name), statistic) - 1), 2
        )
        for name in FIGURES
        for statistic in ("mean", "p95")
        if getattr(theirs, name) is not None
    }


def found(rows: Iterable[TraceRow], blocks: int) -> float:
    """Return the share of all blocks that a cache of `blocks` finds, each with all before it in its prompt."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for row in rows:
        whole = True
        total += len(row.hash_ids)
        for block in row.hash_ids:
            if block in cache:
                hits += whole
            else:
                whole = False
                cache[block] = None
            cache.move_to_end(block)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return round(hits / total, 3)


def speed(profile: TraceProfile, requests: int) -> dict[str, Any]:
    """Measure the command."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json.gz"
        path.write_bytes(save(profile))
        command = [sys.executable, "-m", "controller.cli", "trace", "synthesize", str(path)]
        began = time.perf_counter()
        process = subprocess.Popen([*command, "--requests", str(requests), "-o", f"{folder}/made.jsonl"])
        peak = 0  # not its rusage, which begins with the memory of the forking process
        while process.poll() is None:
            peak = max(peak, _peak_kb(process.pid))
            time.sleep(0.02)
        assert process.returncode == 0
        return {
            "requests": requests,
            "seconds": round(time.perf_counter() - began, 1),
            "peak_mb": round(peak / 1e3),
            "file_mb": round(Path(folder, "made.jsonl").stat().st_size / 1e6),
        }


def _peak_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks synthesizer", description=__doc__)
    parser.add_argument("--trace", type=Path, default=MOONCAKE)
    parser.add_argument("--block-size", type=int, default=BLOCK_TOKENS)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(argv)
    if args.trace.exists():
        name, block = args.trace.name, args.block_size
        recorded = list(TraceReader(args.trace, block))
    else:
        name, block, recorded = (
            "our own chat traffic",
            chat_traffic.BLOCK_TOKENS,
            list(chat_traffic.requests()),
        )
    profile = learn(recorded, block)
    size = analyze(recorded, block).blocks
    made = list(synthesize(profile, len(recorded)))
    rows: list[dict[str, Any]] = [{"row": "like", "trace": name, **like(recorded, profile, 1, args.seeds)}]
    rows += [{"row": "rounds", **like(recorded, profile, times, 1)} for times in (2, 10)]
    if size:
        rows += [
            {
                "row": "cache",
                "percent_of_blocks": percent,
                "recorded": found(recorded, size * percent // 100),
                "synthetic": found(made, size * percent // 100),
            }
            for percent in CACHES
        ]
    for row in rows:
        print(json.dumps(row), flush=True)
    print(json.dumps({"row": "speed", **speed(profile, args.requests)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
