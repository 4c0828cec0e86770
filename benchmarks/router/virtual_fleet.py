"""Simulates ten thousand engines behind one KV-aware router, in virtual time, on one core.

    python -m benchmarks virtual_fleet [--engines 10000] [--copies 270] [--seconds 60] [--mode kv] [--trace FILE] [--seed 1]

Several copies of the trace run at once, each with its own prefixes and another starting point. Prints one JSON object:
virtual seconds per second of wall time and of this process's CPU time; `utilisation`: the average share of the time that engines
are in a step, after the first 10 s in which the fleet fills; the average number of requests on a busy engine; memory.
"""

import resource
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from benchmarks.router.routing import FIRST, SPEEDS, TRACE, shape
from benchmarks.router.virtual import trace
from benchmarks.router.virtual.fleet import WINDOW_S, Fleet, mean
from benchmarks.router.virtual.router import Router, workers
from benchmarks.rows import command_line, show
from controller.processes.flag_types import positive
from controller.router.selection.score import USUAL
from controller.router.selection.selector import Mode


def main(argv: Sequence[str] | None = None) -> int:
    """Run the fleet."""
    parser = command_line("virtual_fleet", __doc__)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--engines", type=trace.whole, default=10_000)
    parser.add_argument("--copies", type=trace.whole, default=270)
    parser.add_argument("--seconds", type=positive, default=60.0)
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="kv")
    parser.add_argument("--speed", choices=list(SPEEDS), default=FIRST)
    parser.add_argument("--block-tokens", type=int, choices=[64, 128, 256, 512], default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    recorded = trace.recorded(parser, args.trace)
    timing, engine = SPEEDS[args.speed], shape(args.block_tokens)
    router = Router(workers(args.engines, timing.profile(engine)), Mode(args.mode), USUAL, args.seed)
    fleet = Fleet(engine, timing, args.engines, [router])
    rows = trace.copies(recorded, args.copies, args.seed)
    coming = takewhile(lambda one: one.at_s < args.seconds, trace.requests(rows, args.block_tokens))
    began, cpu = time.perf_counter(), time.process_time()
    outcome = fleet.run(coming, args.seconds)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    full = range(1, int(args.seconds / WINDOW_S))
    busy = [sum(outcome.busy[window].values()) / WINDOW_S / args.engines for window in full]
    row = {
        "row": "virtual",
        "engines": args.engines,
        "mode": args.mode,
        "virtual_s": args.seconds,
        "virtual_s_per_wall_s": args.seconds / wall,
        "virtual_s_per_cpu_s": args.seconds / cpu,
        "utilisation": mean(busy),
        "requests": len(outcome.arrived),
        "requests_per_s": len(outcome.arrived) / args.seconds,
        "steps_per_wall_s": outcome.steps / wall,
        "running_per_busy_engine": mean([float(one.plan.decodes) for one in fleet.engines if one.ahead]),
        "hit_rate": outcome.cached_tokens / max(1, outcome.prompt_tokens),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "seed": args.seed,
    }
    show(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
