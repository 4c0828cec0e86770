"""Counts false alarms of canaries: thousands of probes of a healthy engine, under load."""

import asyncio
import itertools
import random
import time
from pathlib import Path

from benchmarks.corruption.sdc_bench import Bench
from controller.runtime.canary import goldens
from events.wire import Chunk, Generate, Sampling
from workers.engines.transformers.engine import TransformersEngine
from workers.engines.transformers.settings import TransformersSettings

PROBES_AT_ONCE = 8
STREAMS = 8  # of users, besides the probes, all the time


class Asker:
    """Plays the worker around the engine."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._keys = itertools.count(1)
        self._chunks: dict[int, list[Chunk]] = {}
        self._over: dict[int, asyncio.Future[None]] = {}
        self._loop = asyncio.get_running_loop()

    def deliver(self, out: list[tuple[int, Chunk]]) -> None:
        """Receive a step's output, from the engine's thread."""
        self._loop.call_soon_threadsafe(self._take, out)

    def _take(self, out: list[tuple[int, Chunk]]) -> None:
        for key, chunk in out:
            self._chunks[key].append(chunk)
            if chunk.finish or chunk.error:
                self._over.pop(key).set_result(None)

    async def ask(self, prompt: list[int], sampling: Sampling, *, canary: bool = False) -> list[Chunk]:
        """Return all chunks of one answer."""
        key = next(self._keys)
        self._chunks[key] = []
        self._over[key] = self._loop.create_future()
        over = self._over[key]
        self._engine.submit(key, Generate(key, f"r{key}", prompt, len(prompt), sampling, canary))
        await asyncio.wait_for(over, 60)
        return self._chunks.pop(key)


async def false_alarms(folder: Path, bench: Bench, probes: int, threads: int) -> dict[str, float]:
    """Probe a healthy engine, `PROBES_AT_ONCE` at a time beside `STREAMS` users of all kinds; count alarms."""
    engine = TransformersEngine(TransformersSettings(folder=folder, threads=threads))
    asker = Asker(engine)
    await engine.start(asker.deliver)
    numbers, canaries = iter(range(probes)), [*bench.plain, *(one.golden for one in bench.covering)]
    worst, alarms, user_tokens = 0.0, 0, 0
    sampling = Sampling(max_tokens=bench.settings.tokens, ignore_eos=True, logprobs=bench.settings.top_k)
    began, done = time.monotonic(), asyncio.Event()

    async def probe() -> None:
        nonlocal worst, alarms
        for number in numbers:
            canary = canaries[number % len(canaries)]
            answer = goldens.read(await asker.ask(list(canary.prompt), sampling, canary=True))
            found = goldens.compare(
                answer, tokens=canary.tokens, top_k=canary.top_k, tolerance=bench.tolerance
            )
            alarms += found.reason is not None
            worst = max(worst, found.distance or 0.0)

    async def user(seed: int) -> None:
        nonlocal user_tokens
        draw = random.Random(seed)
        while not done.is_set():
            prompt = [draw.randrange(3, 2048) for _ in range(draw.choice((5, 40, 90, 300)))]
            chance = draw.choice((0.0, 0.8))
            said = await asker.ask(prompt, Sampling(max_tokens=draw.randrange(8, 96), temperature=chance))
            user_tokens += len(said)

    async with asyncio.TaskGroup() as group:
        for seed in range(STREAMS):
            group.create_task(user(seed))
        async with asyncio.TaskGroup() as probing:
            for _ in range(PROBES_AT_ONCE):
                probing.create_task(probe())
        done.set()
    await engine.stop()
    return {
        "probes": probes,
        "false_alarms": alarms,
        "largest_distance": worst,
        "user_tokens_beside": user_tokens,
        "seconds": round(time.monotonic() - began, 1),
    }
