"""Measures a long stream's pause when it moves: with its KV cache, and by re-prefill.

    python -m benchmarks moves [--models tiny medium] [--lengths 1024 4096] [--runs 5]

A fleet of two transformers workers on this host (`holdfast up`), one stream at a time, which is moved at each of `--lengths`
tokens, about: by `holdfast move` (with its KV cache), and by an engine that raises (another worker computes it again). Both in
turn, in one run; medians, without the first of each, which is shown beside them: it uses memory that is not mapped yet.

`pause_ms` is the client's pause between the last token of one worker and the first of the other. `frontend_ms` is the pause that
the frontend saw, `usual_ms` the median time between tokens before it. `meanwhile_ms` is that median from the operator's
request to the pause, while blocks were in flight and the source continued decoding; `meanwhile_ms_max` is the longest of them. A
pause includes one step of the target, which takes longer the longer the stream is; the excess over it is `over_usual_ms`.
`tiny` has 4 KB of KV per token, `medium` 16 KB and 27 million parameters. Prints one JSON object for each model and length.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.local_fleet import LocalFleet
from controller.demo.clients import Received, Users
from controller.processes.operator_client import Operator
from controller.trace.replay.endpoint import ReplayTarget
from events.observations import CanaryPassed, RequestMigrated
from workers.engines import tiny

CONTEXT = 8192
TOKENS = 400  # of an answer: the move happens early in it
BEFORE = 64  # tokens of the answer before the move
CALM_S = 5.0  # without a canary
STREAM_S = 120.0  # until a stream has tokens
METHODS = ("transfer", "reprefill")
MEDIUM = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
FLAGS = ("--engine", "transformers", "--workers", "2", "--chaos", "--canary-interval", "3600",
         "--breaker-wait", "1", "--breaker-backoff", "1")  # fmt: skip
ENVIRONMENT = {"HOLDFAST_WORKER_CONTEXT_TOKENS": str(CONTEXT)}


def build(folder: Path, kind: str) -> Path:
    """Write a model with room for long streams, and return its folder."""
    tiny.CONFIG.update({"max_position_embeddings": CONTEXT} | (MEDIUM if kind == "medium" else {}))
    return tiny.build_tiny(folder)


@dataclass(frozen=True, slots=True)
class Move:
    """The result of one move. Times are in ms."""

    pause: float
    usual: float
    meanwhile: list[float]
    fact: RequestMigrated


class Bench:
    """A fleet and its one user."""

    def __init__(self, fleet: LocalFleet, operator: Operator, users: Users, session: ReplayTarget) -> None:
        self._fleet, self._operator, self._users, self._session = fleet, operator, users, session
        self._names = itertools.count()

    async def calm(self) -> None:
        """Wait until the fleet's goldens are agreed: until then canaries would interfere, and hit the faults."""
        async with asyncio.timeout(STREAM_S):
            before, seen = -1, 0
            while seen != before:
                await asyncio.sleep(CALM_S)
                facts = [event.fact for event in await self._fleet.events()]
                before, seen = seen, sum(isinstance(fact, CanaryPassed) for fact in facts)

    async def move(self, place: int, method: str) -> Move:
        """Request a stream, and move it."""
        name = f"{method}-{next(self._names)}"
        await self._busy(0)
        task = asyncio.ensure_future(self._users.ask(self._session, place, TOKENS, name))
        async with asyncio.timeout(STREAM_S):
            while not (stream := self._stream(name)) or len(stream.pieces) < BEFORE:  # noqa: ASYNC110 (nothing signals it)
                await asyncio.sleep(0.001)
        (worker,) = await self._busy(1)
        asked = time.monotonic()
        if method == "transfer":
            await self._operator.act("move", worker)
        else:
            await self._operator.act("error", worker, 1)
        got = await task
        assert not got.error and got.done and len(got.times) == TOKENS, got.error or len(got.times)
        facts = [event.fact for event in await self._fleet.events()]
        moves = [fact for fact in facts if isinstance(fact, RequestMigrated) and fact.request == name]
        assert [(fact.method, fact.exact) for fact in moves] == [(method, True)], moves
        return measured(got.times, asked, moves[0])

    def _stream(self, name: str) -> Received | None:
        return next((stream for stream in self._users.streams if stream.request == name), None)

    async def _busy(self, workers: int) -> list[str]:
        """Wait until this number of workers have blocks in use, by the frontend's metrics, and return them."""
        async with asyncio.timeout(STREAM_S):
            while True:
                text = (await self._session.ask("GET", "/metrics")).body.decode()
                found = re.findall(
                    r'worker_active_decode_blocks{[^}]*worker_id="(\w+)"[^}]*} ([0-9.]+)', text
                )
                busy = [worker for worker, blocks in found if float(blocks)]
                if len(busy) == workers:
                    return busy
                await asyncio.sleep(0.02)


def measured(times: Sequence[float], asked: float, fact: RequestMigrated) -> Move:
    """Return a move as the client saw it: `times` are the arrival times of its tokens."""
    gaps = [(late - early) * 1000 for early, late in itertools.pairwise(times)]
    before = [gap for late, gap in zip(times[1:], gaps, strict=True) if late <= asked]
    last = fact.tokens - 1  # of the source
    return Move(gaps[last], statistics.median(before), gaps[len(before) : last], fact)


@contextlib.asynccontextmanager
async def bench(model: Path, prompts: Sequence[Sequence[int]]) -> AsyncIterator[Bench]:
    """Start a fleet."""
    with tempfile.TemporaryDirectory(prefix="holdfast-moves-") as folder:
        fleet = LocalFleet.start(
            Path(folder) / "data", *FLAGS, "--model", str(model), environment=ENVIRONMENT
        )
        try:
            await fleet.ready()
            status = await fleet.healthy(2)
            users = Users(fleet.url, status["workers"][0]["model"], prompts, every_token=True)
            operator = await Operator.connect(fleet.data)
            async with users.session() as session:
                yield Bench(fleet, operator, users, session)
            await operator.close()
        finally:
            fleet.stop()


async def measure(model: Path, lengths: Sequence[int], runs: int) -> list[dict[str, Any]]:
    """Move streams of each length by each method, in turn."""
    dice = Random(1)
    cases = list(itertools.product(range(runs + 1), lengths, METHODS))
    prompts = [[dice.randint(300, 2000) for _ in range(length - BEFORE)] for _, length, _ in cases]
    found: dict[tuple[int, str], list[Move]] = {(length, method): [] for _, length, method in cases}
    async with bench(model, prompts) as one:
        await one.calm()
        for place, (_, length, method) in enumerate(cases):
            found[length, method].append(await one.move(place, method))
    return [_row(length, {m: found[length, m] for m in METHODS}) for length in lengths]


def _row(length: int, found: dict[str, list[Move]]) -> dict[str, Any]:
    row: dict[str, Any] = {"tokens": length, "load": round(os.getloadavg()[0], 1)}
    for method, all_moves in found.items():
        first, *moves = all_moves
        pauses = [round(move.pause, 1) for move in moves]
        usual = round(statistics.median(move.usual for move in moves), 2)
        told = round(statistics.median(move.fact.gap_ms for move in moves), 1)
        row[method] = {
            "pause_ms": statistics.median(pauses), "frontend_ms": told, "usual_ms": usual,
            "over_usual_ms": round(statistics.median(move.pause - move.usual for move in moves), 1),
            "runs_ms": pauses, "first_ms": round(first.pause, 1),
        }  # fmt: skip
    meanwhile = [gap for move in found["transfer"][1:] for gap in move.meanwhile]
    row["transfer"] |= {
        "meanwhile_ms": round(statistics.median(meanwhile), 2) if meanwhile else None,
        "meanwhile_ms_max": round(max(meanwhile), 1) if meanwhile else None,
        "bytes": max(move.fact.bytes for move in found["transfer"]),
        "link": found["transfer"][0].fact.link,
        "predicted_ms": found["transfer"][0].fact.predicted_ms,
    }
    row["transfer over reprefill"] = round(row["transfer"]["pause_ms"] / row["reprefill"]["pause_ms"], 3)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object per model and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="+", choices=("tiny", "medium"), default=["tiny", "medium"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    for kind in args.models:
        with tempfile.TemporaryDirectory() as folder:
            model = build(Path(folder) / kind, kind)
            for row in asyncio.run(measure(model, args.lengths, args.runs)):
                print(json.dumps({"model": kind, **row}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
