"""The workload of an index of KV blocks, the same for ours and for Dynamo's.

Standard library only: Dynamo's side runs in its own environment. A side is a class with the methods of `Side`. `python -m
benchmarks index` starts each in its own process, in turn.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Protocol

LOOKUPS = 20_000
PROMPTS = 2_000
PROMPT_TOKENS = 1024
MILLION = 1_000_000

Chain = list[int]  # local hashes


class Side(Protocol):
    """An index, and the hashing of prompts for it."""

    def ready(self, chain: Chain) -> tuple[object, Any]:
        """Return a prompt's blocks as its engine announces them, and as the router looks them up."""

    def store(self, worker: int, announced: Any) -> None:
        """Store that a worker holds blocks."""

    def find(self, asked: Any) -> int:
        """Return the number of workers that hold the first block of a prompt, after computing their depths."""

    def hash(self, tokens: Sequence[int], block_tokens: int) -> object:
        """Return a prompt's look-up key for the router."""


def chains(blocks: int, depth: int, dice: Random) -> list[Chain]:
    """Return prompts that have nothing in common."""
    return [[dice.getrandbits(64) for _ in range(depth)] for _ in range(blocks // depth)]


def find(make: Callable[[], Side], blocks: int, workers: int, depth: int, holders: int) -> dict[str, float]:
    """Measure look-ups of prompts that `holders` workers hold."""
    dice, side = Random(1), make()
    known = [side.ready(chain) for chain in chains(blocks, depth, dice)]
    for announced, _ in known:
        for worker in dice.sample(range(workers), holders):
            side.store(worker, announced)
    # equal lists, but not the same objects
    asked = [[int(str(block)) for block in dice.choice(known)[1]] for _ in range(LOOKUPS)]
    assert all(side.find(one) == holders for one in asked[:100])
    rate = LOOKUPS / seconds(lambda: [side.find(one) for one in asked])
    took = sorted(seconds(partial(side.find, one)) for one in asked)
    return {"lookups_per_s": rate, "p99_us": took[int(LOOKUPS * 0.99)] * 1e6}


def load(make: Callable[[], Side], workers: int, depth: int) -> dict[str, float]:
    """Measure how fast a million distinct blocks are loaded, as their engines announce them, and their memory."""
    dice, side = Random(2), make()
    before, took = resident(), 0.0
    for number in range(MILLION // depth // 100):
        announced = [side.ready(chain)[0] for chain in chains(100 * depth, depth, dice)]
        took += _store(side, announced, number * 100, workers)
    asked = side.ready(dice.sample(range(1 << 60), depth))[1]
    took += seconds(lambda: side.find(asked))  # queued work has to be done before this returns
    stored = MILLION // depth // 100 * 100 * depth
    return {"blocks_per_s": stored / took, "mb_per_million": (resident() - before) / stored}


def hashing(make: Callable[[], Side], block_tokens: int) -> dict[str, float]:
    """Measure hashing, from a list of tokens to the look-up key."""
    dice, side = Random(3), make()
    prompts = [[dice.randrange(128_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return {"prompts_per_s": PROMPTS / seconds(lambda: [side.hash(one, block_tokens) for one in prompts])}


def grow(make: Callable[[], Side], workers: int, depth: int, sizes: Sequence[int]) -> list[dict[str, float]]:
    """Measure memory and look-ups at more and more blocks, each held by one worker."""
    dice, side, before, stored = Random(4), make(), resident(), 0
    asked: list[object] = []
    points = []
    for size in sizes:
        took = 0.0
        began = stored
        while stored < size:
            known = [side.ready(chain) for chain in chains(100 * depth, depth, dice)]
            took += _store(side, [one for one, _ in known], stored // depth, workers)
            stored += len(known) * depth
            asked.append(list(map(int, known[0][1])))
        some = [dice.choice(asked) for _ in range(2000)]
        spent = sorted(seconds(partial(side.find, one)) for one in some)
        points.append(
            {
                "blocks": stored,
                "mb": (resident() - before) / 1e6,
                "blocks_per_s": (stored - began) / took,
                "lookup_p50_us": spent[1000] * 1e6,
                "lookup_p99_us": spent[1980] * 1e6,
            }
        )
    return points


def _store(side: Side, announced: Sequence[object], first: int, workers: int) -> float:
    began = time.perf_counter()
    for number, one in enumerate(announced, first):
        side.store(number % workers, one)
    return time.perf_counter() - began


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def resident() -> int:
    """Return this process's resident bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(make: Callable[[], Side]) -> int:
    """Measure one side, and print one JSON object; started by `python -m benchmarks index`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["rows", "grow"])
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="*", default=[])
    args = parser.parse_args()
    if args.what == "grow":
        print(json.dumps(grow(make, args.workers, args.depth, args.sizes)))
        return 0
    # `load` is first: memory freed by other measurements would hide its own
    rows = {"load": load(make, args.workers, args.depth)}
    for holders in (1, 60):
        held_by = min(holders, args.workers)
        rows[f"find {holders}"] = find(make, args.blocks, args.workers, args.depth, held_by)
    for block_tokens in (16, 64):
        rows[f"hash {block_tokens}"] = hashing(make, block_tokens)
    print(json.dumps(rows))
    return 0
