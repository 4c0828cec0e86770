"""Dynamo's side of `benchmarks.router.routing`: its router modes on its mocker, replayed offline.

Run by Dynamo's Python.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

ALL_AT_ONCE = 1000.0
TUNED = {"overlap_score_credit": 5.0, "prefill_load_scale": 20.0}  # our prices, by Dynamo's names


def replay(
    args: argparse.Namespace, mode: str, factor: float, config: dict[str, float] | None
) -> dict[str, Any]:
    """Return the figures of one replay, with the trace accelerated by `factor`."""
    from dynamo.llm import KvRouterConfig
    from dynamo.replay import run_trace_replay

    began = time.perf_counter()
    engine = {
        "num_gpu_blocks": 16_384 * 64 // args.block_tokens,
        "block_size": args.block_tokens,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
    }
    report = run_trace_replay(
        args.trace,
        extra_engine_args={"engine": engine},
        router_config=KvRouterConfig(**config) if config is not None else None,
        num_workers=args.workers,
        router_mode=mode,
        trace_block_size=512,
        arrival_speedup_ratio=factor,
        capture_per_request=True,
    )
    requests = report.per_request
    ends = sorted(one["terminal_time_ms"] / 1e3 for one in requests)
    first, last = ends[len(ends) // 10], ends[len(ends) * 9 // 10]
    ttft = sorted(one["ttft_ms"] / 1e3 for one in requests)
    prompts = sum(one["input_length"] for one in requests)
    return {
        "workers": args.workers,
        "speed": "polynomial-v2",
        "requests": len(requests),
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p50": ttft[len(ttft) // 2],
        "ttft_p99": ttft[int(len(ttft) * 0.99)],
        "itl_mean": report.summary["mean_tpot_ms"] / 1e3,
        "hit_rate": sum(one["reused_input_tokens"] for one in requests) / prompts,
        "completed_per_s": len(ends) * 0.8 / (last - first),
        "virtual_s": report.summary["duration_ms"] / 1e3,
        "wall_s": time.perf_counter() - began,
    }


def main() -> int:
    """Replay every mode at every load."""
    parser = argparse.ArgumentParser()
    parser.add_argument("trace")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--loads", type=float, nargs="+", required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    args = parser.parse_args()
    os.environ.setdefault("DYN_LOG", "error")  # its log per request costs time, and goes to stdout
    offered = _offered(args.trace)
    most = replay(args, "round_robin", ALL_AT_ONCE, None)["completed_per_s"]
    for load in args.loads:
        for name, mode, config in (
            ("round-robin", "round_robin", None),
            ("kv", "kv_router", {}),
            ("kv, our prices", "kv_router", TUNED),
        ):
            run = replay(args, mode, load * most / offered, config)
            row = {"row": "run", "system": "Dynamo", "load": load, "mode": name, "offered_per_s": load * most}
            print(json.dumps(row | run), flush=True)
    return 0


def _offered(path: str) -> float:
    """Return the requests per second of a trace."""
    with open(path) as lines:
        stamps = [float(json.loads(line)["timestamp"]) for line in lines]
    return len(stamps) / stamps[-1] * 1e3


if __name__ == "__main__":
    sys.exit(main())
