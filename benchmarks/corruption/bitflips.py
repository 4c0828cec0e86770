"""Injects harmful bit flips into a live fleet of transformers engines, and measures what users see.

    python -m benchmarks bitflips [--trials 50] [--model DIR]

Three workers with the tiny model, a canary every second, streams all the time. A fault is one bit of one weight of one
worker, drawn at random among those that alter these users' answers (found beforehand, on a copy of the model). Measured for
each: the time until no request is routed to the worker, whether `RequestExposed` names every altered stream, and whether
every stream that began afterwards is right. Prints one JSON object.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import nats
import torch

from benchmarks.corruption.sdc_bench import Asked, Bench
from benchmarks.local_fleet import LocalFleet
from controller.demo.clients import Received, Users
from controller.demo.fleet import NotAsExpected
from controller.runtime.settings import CanarySettings
from controller.trace.replay.endpoint import ReplayTarget
from events import subjects
from events.fact import Recorded
from events.observations import CanaryPassed, RequestExposed
from workers.engines.tiny import build_tiny
from workers.engines.transformers.faults import WeightFaultInjector, bit_flip
from workers.engines.transformers.loading import load_model
from workers.engines.transformers.settings import TransformersSettings
from workers.engines.transformers.stepper import Stepper

WORKERS, STREAMS, TOKENS, VICTIM = 3, 8, 64, "w0"
CANARIES, INTERVAL_S = 4, 1.0
WITHIN_S = CANARIES * INTERVAL_S + 1.5
GIVE_UP_S = 3 * WITHIN_S
SAMPLES, CALIBRATED_WITHIN_S = 2 * CanarySettings().samples_min, 120.0
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(STREAMS)]
FLAGS = ("--engine", "transformers", "--workers", str(WORKERS), "--chaos", "--canary-interval", str(INTERVAL_S),
         "--breaker-wait", "1", "--breaker-backoff", "1")  # fmt: skip


def harmful(folder: Path, first: int) -> Iterator[tuple[int, str]]:
    """Yield the seeds and places of bit flips that alter these users' answers, in order of seeds."""
    torch.set_num_threads(1)
    model = load_model(TransformersSettings(folder=folder, context_tokens=4096))
    bench = Bench(
        Stepper(model, TransformersSettings(folder=folder, prefill_tokens_max=4096)), CanarySettings()
    )
    bench.users = [Asked(one.prompt, one.tokens) for one in bench.ask(PROMPTS, TOKENS)]
    surgeon = WeightFaultInjector(model.parameters())
    for seed in itertools.count(first):
        fault = bit_flip(model.parameters(), seed)
        surgeon.inflict(fault)
        hurts = bench.altered()
        surgeon.heal()
        if hurts:
            yield seed, str(fault)


class Trials:
    """A fleet under load, and its undisturbed answers."""

    def __init__(self, fleet: LocalFleet, users: Users, session: ReplayTarget, broker: str) -> None:
        self._fleet, self._users, self._session, self._broker = fleet, users, session, broker
        self._answers: list[str] = []
        self._names = itertools.count()

    async def begin(self) -> None:
        """Wait until the tolerance has been calibrated, and record the undisturbed answers."""
        async with asyncio.timeout(CALIBRATED_WITHIN_S):
            while await self._passed() < SAMPLES:  # noqa: ASYNC110 (the fleet is another process)
                await asyncio.sleep(1)
        self._answers = ["".join(pieces) for pieces in await self._users.answers(self._session, TOKENS)]

    async def _passed(self) -> int:
        return sum(isinstance(e.fact, CanaryPassed) for e in await self._fleet.events())

    async def run(self, seed: int, where: str) -> dict[str, Any]:
        """Flip one bit, wait for the fence, heal; return what happened."""
        await self._fleet.healthy(WORKERS)
        fence = asyncio.ensure_future(self._fleet.until(_fenced, GIVE_UP_S))
        during: list[Received] = []
        before = len(await self._fleet.events())
        await self._chaos("bitflip", seed)
        began = time.monotonic()
        while not fence.done():
            during += await self._round()
        try:
            fence.result()
            fenced_s = time.monotonic() - began
        except NotAsExpected:
            fenced_s = None
        after = await self._round() if fenced_s is not None else []
        # A breaker may open before the canary fails; the worker's output is exposed once a canary has convicted it.
        with contextlib.suppress(NotAsExpected):
            await self._fleet.until(_convicted, WITHIN_S)
        await self._chaos("heal", 0)
        events = await self._fleet.events()
        named = {e.fact.request for e in events if isinstance(e.fact, RequestExposed)}
        wrong = {one.request for one in during if not self._right(one)}
        if wrong - named:
            _show(events[before:])
        return {
            "seed": seed,
            "where": where,
            "fenced_s": fenced_s,
            "streams": len(during),
            "altered": len(wrong),
            "altered_and_unnamed": len(wrong - named),
            "altered_afterwards": sum(not self._right(one) for one in after),
        }

    def _right(self, one: Received) -> bool:
        return not one.error and "".join(one.pieces) == self._answers[one.prompt]

    async def _round(self) -> Sequence[Received]:
        names = [f"flip-{next(self._names)}" for _ in range(STREAMS)]
        return await asyncio.gather(
            *(self._users.ask(self._session, n, TOKENS, name) for n, name in enumerate(names))
        )

    async def _chaos(self, fault: str, argument: int) -> None:
        client = await nats.connect(self._broker)
        body = json.dumps({"fault": fault, "argument": argument}).encode()
        try:
            await client.request(subjects.command("chaos", VICTIM), body, timeout=5)
        finally:
            await client.close()


def _show(events: Sequence[Recorded]) -> None:
    """Print the events about the victim, to find out why a stream was not named."""
    for event in events:
        if getattr(event.fact, "worker", getattr(event.fact, "source", None)) == VICTIM:
            print(f"  {event.seq} {event.at.time()} {event.fact}", file=sys.stderr)


def _fenced(status: dict[str, Any]) -> bool:
    return all(worker["weight"] == 0 for worker in status["workers"] if worker["id"] == VICTIM)


def _convicted(status: dict[str, Any]) -> bool:
    return all(worker["health"] == "UNHEALTHY" for worker in status["workers"] if worker["id"] == VICTIM)


@contextlib.asynccontextmanager
async def started(folder: Path, scratch: Path) -> AsyncIterator[Trials]:
    """Start the fleet and its users."""
    fleet = LocalFleet.start(scratch / "data", *FLAGS, "--model", str(folder))
    try:
        await fleet.ready()
        status = await fleet.healthy(WORKERS)
        users = Users(fleet.url, status["workers"][0]["model"], PROMPTS)
        broker = next(process["url"] for process in status["processes"] if process["role"] == "nats")
        async with users.session() as session:
            trials = Trials(fleet, users, session, broker)
            await trials.begin()
            yield trials
    finally:
        fleet.stop()


async def measured(folder: Path, scratch: Path, trials: int, first: int) -> dict[str, Any]:
    """Run all trials in one fleet."""
    flips = list(itertools.islice(harmful(folder, first), trials))
    results = []
    async with started(folder, scratch) as fleet:
        for seed, where in flips:
            results.append(await fleet.run(seed, where))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    fenced = [one["fenced_s"] for one in results if one["fenced_s"] is not None]
    totals = {
        name: sum(one[name] for one in results)
        for name in ("streams", "altered", "altered_and_unnamed", "altered_afterwards")
    }
    return {
        "harmful_bit_flips": len(results),
        "fenced": len(fenced),
        "fenced_within": {"limit_s": WITHIN_S, "count": sum(one <= WITHIN_S for one in fenced)},
        "fenced_s": {"median": round(statistics.median(fenced), 2), "max": round(max(fenced), 2)}
        if fenced
        else {},
        **totals,
        "never_noticed": [one["where"] for one in results if one["fenced_s"] is None],
    }


def main() -> None:
    """Run, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=50, help="harmful bit flips (default: 50)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed to try (default: 1)")
    parser.add_argument("--model", type=Path, help="the tiny model's folder (default: built now)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-flips-") as scratch:
        Path(scratch).chmod(0o755)
        folder = args.model or build_tiny(Path(scratch) / "tiny")
        print(json.dumps(asyncio.run(measured(folder, Path(scratch), args.trials, args.seed)), indent=1))


if __name__ == "__main__":
    main()
