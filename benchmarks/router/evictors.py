"""Compares evictors of an engine's KV blocks on the recorded Mooncake conversation trace.

    python -m benchmarks evictors [--trace FILE] [--block-size 512] [--at-once 32] [--requests N]

Each request takes its prompt's blocks, and frees them when `--at-once` others have arrived. One row for each evictor and size
of the cache, in percent of the trace's distinct blocks: the share of all blocks that was found with all blocks before it, the
number of evictions, and microseconds per block. `host`: the same with a tier of that size below, and what was found there as
well. Without the trace beside this clone it uses our own chat traffic. Prints one JSON object per row.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import get_args

from benchmarks.router.virtual.trace import whole
from benchmarks.rows import command_line
from benchmarks.simulation import chat_traffic
from benchmarks.simulation.synthesizer import MOONCAKE
from controller.trace.rows import BLOCK_TOKENS, BadTrace, TraceReader
from controller.trace.synthesis import synthesize
from events.kv import Removed
from workers.engines.simulated.kv_cache import EvictorKind, KvManager

PERCENT = (1, 5, 10, 25, 50)
CHAT_REQUESTS = 5_000


def play(
    prompts: Sequence[list[int]], blocks: int, kind: EvictorKind, at_once: int, host: int
) -> dict[str, object]:
    """Take every prompt's blocks in turn; return hits and evictions, and the time they took."""
    kv = KvManager(blocks, kind, host_blocks=host)
    kv.heard = True
    held: deque[list[int]] = deque()
    found = below = evicted = total = 0
    began = time.perf_counter()
    for prompt in prompts:
        here = kv.cached(prompt)
        there = kv.fetchable(prompt[here:])
        kv.fetch(prompt[here : here + there])
        while len(held) >= at_once or not kv.use(prompt):
            kv.release(held.popleft())
        held.append(prompt)
        found, below, total = found + here, below + there, total + len(prompt)
        events = kv.take_events()
        evicted += sum(len(event.blocks) for event in events if isinstance(event, Removed) and not event.tier)
    lasted = time.perf_counter() - began
    return {
        "found_percent": round(100 * found / total, 2),
        **({"host_percent": round(100 * below / total, 2)} if host else {}),
        "evicted": evicted,
        "us_per_block": round(lasted * 1e6 / total, 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line."""
    parser = command_line("evictors", __doc__)
    parser.add_argument("--trace", type=Path, default=MOONCAKE if MOONCAKE.exists() else None)
    parser.add_argument("--block-size", type=whole, default=BLOCK_TOKENS)
    parser.add_argument("--at-once", type=whole, default=32)
    parser.add_argument("--requests", type=whole)
    args = parser.parse_args(argv)
    requests = args.requests or CHAT_REQUESTS
    rows = (
        TraceReader(args.trace, args.block_size)
        if args.trace
        else synthesize(chat_traffic.learned(), requests)
    )
    try:
        prompts = [row.hash_ids for row in islice(rows, args.requests) if row.hash_ids]
    except BadTrace as error:
        parser.error(str(error))
    if not prompts:
        parser.error(f"{args.trace}: no request in it has a full block")
    different = len({block for prompt in prompts for block in prompt})
    total = sum(map(len, prompts))
    largest = max(map(len, prompts))
    endless = play(prompts, total, "lru", args.at_once, 0)["found_percent"]
    sizes = {"requests": len(prompts), "blocks": total, "different": different}
    print(json.dumps({**sizes, "at_once": args.at_once, "endless_percent": endless}))
    for percent in PERCENT:
        blocks = max(largest, different * percent // 100)
        for host in (0, blocks):
            for kind in get_args(EvictorKind):
                row = {"cache_percent": percent, "blocks": blocks, "host": host, "evictor": kind}
                print(json.dumps(row | play(prompts, blocks, kind, args.at_once, host)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
