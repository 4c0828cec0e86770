"""Computes the planner's cost on recorded hours, and how many answers would have been late.

    python -m benchmarks planner [--workers 64]

It is compared with a fixed fleet, and with perfect knowledge. Azure's hour has workers that read 4,000 prompt tokens per second
and take 25 to 40 ms per token, 32 at once; the objectives are 1.5 s and 80 ms. Mooncake's has workers that read 20,000 and take 8
to 18 ms, 64 at once; 2 s and 40 ms. The requests of each are multiplied so that the busiest minute needs `--workers`. `holdfast
plan --trace FILE` does the same for any trace and any worker. One JSON line each.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router.virtual.trace import whole
from controller.commands.plan import rehearse
from controller.planner.plan import PlannerPolicy
from controller.planner.rehearsal import RehearsedFleet, scale_for, scaled
from controller.planner.sizing import Objectives
from controller.trace.rows import TraceReader
from events.observations import Profile

DATA = Path(__file__).parents[3] / "shared" / "data"
TO_REACH = {"late_share": 0.01, "of_perfect": 1.15, "changes_per_hour": 12}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded hour, and suitable workers."""

    file: str
    profile: Profile
    objectives: Objectives


HOURS = (
    Recorded(
        "azure_llm_conv.csv",
        Profile(
            kv_blocks=40_000,
            block_tokens=16,
            max_batch=32,
            prefill_tokens_per_s=4000.0,
            tpot_ms=((1, 25.0), (32, 40.0)),
        ),
        Objectives(ttft_ms=1500.0, tpot_ms=80.0),
    ),
    Recorded(
        "mooncake_conversation.jsonl",
        Profile(
            kv_blocks=40_000,
            block_tokens=16,
            max_batch=64,
            prefill_tokens_per_s=20_000.0,
            tpot_ms=((1, 8.0), (64, 18.0)),
        ),
        Objectives(ttft_ms=2000.0, tpot_ms=40.0),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate both hours; return 1 if one of them missed a target."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument(
        "--workers", type=whole, default=64, help="workers that the busiest minute needs (default: 64)"
    )
    args = parser.parse_args(argv)
    missed = False
    for hour in HOURS:
        fleet = RehearsedFleet(
            profile=hour.profile,
            objectives=hour.objectives,
            policy=PlannerPolicy(workers_max=2 * args.workers),
        )
        rows = list(TraceReader(args.data / hour.file))
        factor = scale_for(fleet, rows, args.workers)
        told = rehearse(fleet, scaled(rows, factor), args.workers, 1, lambda what: None)
        print(json.dumps({"trace": hour.file, "times": round(factor, 2)} | told), flush=True)
        missed = missed or any(told["planner"][name] > most for name, most in TO_REACH.items())
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
