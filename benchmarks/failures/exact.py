"""Checks that an answer continues exactly after it has moved.

    python -m benchmarks exact [sampling continuation] [--engines simulated transformers] [--methods transfer reprefill]
                               [--streams 200] [--cuts 3] [--seed 1]

`sampling`: streams at temperature 0.8 behind a whole frontend. Their workers are emptied (`holdfast move`) when a stream has as
many tokens as the seed says, twice each. Tokens, texts and usages are compared with the same streams undisturbed. `continuation`:
the engine alone, with each prompt's answer cut in several places. With `reprefill` another engine gets prompt and tokens, with
`transfer` it gets the KV cache. Tokens are compared with an uncut answer, and for the transformers engine also the bits of
the logits of every position. Prints one JSON object each; returns 1 if any differed or could not be moved.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import structlog
import uvloop
import xxhash

from benchmarks.serving.inside import METHODS, Inside, inside, unsaid
from events.observations import Profile, RequestMigrated
from events.wire import Chunk, Generate, Sampling
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming

ENGINES = ("simulated", "transformers")
ROWS = ("sampling", "continuation")
TOKENS = 64
AT_ONCE = 16
ANSWER_S = 120.0
KNOWN = Profile(kv_blocks=1, block_tokens=32, max_batch=1, prefill_tokens_per_s=1e4, tpot_ms=((1, 1.0),))
Made = Callable[[], Engine]


def simulated() -> Engine:
    """Return a simulated engine."""
    return SimulatedEngine(EngineShape(), ConstantTiming(itl_s=0.006, prefill_tokens_per_s=200_000))


def transformers(folder: Path) -> Engine:
    """Return an engine around the model in a folder."""
    from workers.engines.transformers.engine import TransformersEngine
    from workers.engines.transformers.settings import TransformersSettings

    return TransformersEngine(
        TransformersSettings(folder=folder, context_tokens=1024, kv_tokens=32_768, profile=KNOWN)
    )


@contextmanager
def engines(kind: str) -> Iterator[Made]:
    """Yield a factory of engines of one kind; those of the tiny model all serve the same folder."""
    if kind == "simulated":
        yield simulated
        return
    from workers.engines.tiny import build_tiny

    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny(Path(folder) / "tiny")
        yield lambda: transformers(model)


def prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts of 10 to 300 tokens."""
    dice = Random(f"prompts {seed}")
    return [[dice.randint(300, 2000) for _ in range(dice.randint(10, 300))] for _ in range(count)]


# --- through the frontend -------------------------------------------------------------------------------------------


async def sampling(made: Made, method: str, streams: int, seed: int) -> dict[str, Any]:
    """Send every request twice: undisturbed, and moved at two places."""
    import_module("numpy")  # a source's first move imports it, and the first streams would end before that
    dice, asked = Random(f"cuts {seed}"), prompts(seed, streams)
    model = made().identity.model
    bodies = [
        {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.8, "seed": seed + number, "ignore_eos": True}
        for number, prompt in enumerate(asked)
    ]  # fmt: skip
    cuts = [sorted(dice.sample(range(1, TOKENS - 8), 2)) for _ in asked]
    async with inside([made] * 3, migration_limit=1000, moving=METHODS[method]) as one:
        places = asyncio.Semaphore(AT_ONCE)

        async def ask(number: int, at: Sequence[int]) -> tuple[Any, ...]:
            name = f"{'moved' if at else 'plain'}-{number}"
            async with places:
                moving = asyncio.ensure_future(_move(one, name, at))
                answer = await one.ask(name, **bodies[number])
                moving.cancel()
                await asyncio.wait([moving])
            counts = [answer.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
            return one.accepted.pop(name, None), answer.text, counts, answer.finishes, answer.error

        plain = await asyncio.gather(*(ask(number, ()) for number in range(streams)))
        moved = await asyncio.gather(*(ask(number, cuts[number]) for number in range(streams)))
        facts = one.said(RequestMigrated)
    exact = sum(before == after and not before[-1] for before, after in zip(plain, moved, strict=True))
    by_request = {fact.request for fact in facts if fact.method == method and fact.exact}
    return {
        "streams": streams,
        "identical": exact,
        "moved": len(by_request),
        "moves": dict(Counter(fact.method for fact in facts)),
        "wrong": streams - exact + streams - len(by_request),
    }


async def _move(one: Inside, request: str, cuts: Sequence[int]) -> None:
    for cut in cuts:
        await one.until(lambda cut=cut: (made := one.running(request)) and len(made.accepted) >= cut)  # type: ignore[misc]
        running = one.running(request)
        if running is not None and running.endpoint is not None:
            one.move(running.endpoint.worker)


# --- engines alone --------------------------------------------------------------------------------------------------


@dataclass
class Said:
    """An engine's output for one key."""

    tokens: list[int] = field(default_factory=list)
    error: str = ""
    more: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Rig:
    """An engine, its output, and the digests of its logits, if it has any."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: dict[int, Said] = {}
        self.logits: dict[int, dict[int, int]] = {}  # by key, and by the number of tokens before
        self._keys = itertools.count(1)

    async def start(self) -> None:
        """Start the engine."""
        loop = asyncio.get_running_loop()

        def deliver(out: list[tuple[int, Chunk]]) -> None:
            loop.call_soon_threadsafe(self._take, out)

        await self.engine.start(deliver)
        if stepper := getattr(self.engine, "stepper", None):  # of engines that run a model
            self._watch(stepper.model)

    def _watch(self, model: Any) -> None:
        compute = model.forward

        def forward(works: Sequence[Any], pool: Any, **more: Any) -> Any:
            logits = compute(works, pool, **more)
            due = [work.sequence for work in works if work.samples]
            for sequence, row in zip(due, logits.cpu().numpy(), strict=True):
                of = self.logits.setdefault(sequence.key, {})
                of[len(sequence.tokens)] = xxhash.xxh3_64_intdigest(row.tobytes())
            return logits

        model.forward = forward

    def _take(self, out: list[tuple[int, Chunk]]) -> None:
        for key, chunk in out:
            if (said := self.said.get(key)) is None:
                continue
            said.tokens += chunk.tokens
            said.error = chunk.error or said.error
            said.more.set()
            if chunk.finish or chunk.error:
                said.over.set()

    def listen(self) -> int:
        """Return a new key, and record its answer from now on."""
        key = next(self._keys)
        self.said[key] = Said()
        return key

    def submit(self, request: Generate) -> int:
        """Submit a request to the engine, and return its key."""
        key = self.listen()
        self.engine.submit(key, request)
        return key

    async def until(self, key: int, count: int) -> None:
        """Wait until an answer has `count` tokens. Raise TimeoutError."""
        said = self.said[key]
        async with asyncio.timeout(ANSWER_S):
            while len(said.tokens) < count:
                said.more.clear()
                await said.more.wait()

    async def answer(self, key: int) -> Said:
        """Wait for an answer's end. Raise TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            await self.said[key].over.wait()
        return self.said[key]


def continued(request: Generate, tokens: Sequence[int]) -> Generate:
    """Return the request for another engine after these tokens of the answer."""
    left = msgspec.structs.replace(request.sampling, max_tokens=request.sampling.max_tokens - len(tokens))
    return msgspec.structs.replace(request, tokens=[*request.tokens, *tokens], sampling=left)


async def transfer(source: Rig, target: Rig, key: int, request: Generate) -> tuple[int, list[int]] | str:
    """Move a decoding request with its KV cache. Return its key at the target and the source's tokens, or why it
    could not be moved."""
    begun = continued(request, source.said[key].tokens)
    export, to = source.engine.export(key), target.listen()
    if export is None:
        return "the source exports nothing"
    shards, size = range(len(source.engine.kv)), source.engine.kv[0].block_size
    room = target.engine.reserve(to, begun, len(request.tokens) + request.sampling.max_tokens)
    if isinstance(room, str):
        return room
    sent = room.cached_tokens // size
    full = export.full_blocks()
    for shard in shards:
        if full > sent:
            await room.take(shard, sent, await export.blocks(shard, sent, full - sent))
    sent = max(sent, full)
    stopped = await export.stop()
    last = -(-stopped.computed // size)
    for shard in shards:
        if last > sent:
            await room.take(shard, sent, await export.blocks(shard, sent, last - sent))
    await room.commit(stopped.tokens, stopped.computed)
    export.close()
    source.engine.cancel(key)
    return to, list(stopped.tokens[len(request.tokens) :])


async def continuation(made: Made, method: str, count: int, cuts: int, seed: int) -> dict[str, Any]:
    """Cut the answer to each prompt in several places, and continue at another engine."""
    source, target = Rig(made()), Rig(made())
    await source.start()
    await target.start()
    dice, wrong, checked, logits = Random(f"cuts {seed}"), [], 0, 0
    greedy = Sampling(TOKENS, ignore_eos=True)
    chance = msgspec.structs.replace(greedy, temperature=0.8, seed=seed)

    async def one(number: int, prompt: list[int], places: list[int]) -> None:
        nonlocal checked, logits
        request = Generate(0, f"r{number}", prompt, len(prompt), chance if number % 2 else greedy)
        whole = source.submit(request)
        plain = list((await source.answer(whole)).tokens)
        for cut in places:
            if method == "reprefill":
                moved: Any = target.submit(continued(request, plain[:cut])), plain[:cut]
            else:
                key = source.submit(request)
                await source.until(key, cut)
                moved = await transfer(source, target, key, request)
            if isinstance(moved, str):
                wrong.append(f"prompt {number} after {cut}: {moved}")
                continue
            to, before = moved
            after = await target.answer(to)
            found, wanted = target.logits.get(to, {}), source.logits.get(whole, {})
            checked += 1
            logits += len(found)
            if before + after.tokens != plain or any(wanted[place] != found[place] for place in found):
                wrong.append(f"prompt {number} after {cut}: another answer {after.error}")

    try:
        if method == "transfer" and not source.engine.kv:
            return {"prompts": 0, "wrong": 0, "why": "this engine's requests do not move with their KV cache"}
        asked = prompts(seed, count)
        work = [(n, p, sorted(dice.sample(range(1, TOKENS - 8), cuts))) for n, p in enumerate(asked)]
        for first in range(0, count, AT_ONCE):
            await asyncio.gather(*(one(*each) for each in work[first : first + AT_ONCE]))
    finally:
        held = [rig.engine.load() for rig in (source, target)]
        await source.engine.stop()
        await target.engine.stop()
    return {
        "prompts": count,
        "cuts": checked,
        "logits compared": logits,
        "wrong": len(wrong) + sum(load.kv_used for load in held),
        "blocks kept": sum(load.kv_used for load in held),
        "examples": wrong[:5],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object for each engine and method; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("rows", nargs="*", metavar="ROW", help="sampling, continuation (default: both)")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=ENGINES[: 2 if find_spec("torch") else 1]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--cuts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    structlog.configure(processors=[unsaid])
    wrong = 0
    for kind, row, method in itertools.product(args.engines, args.rows or ROWS, args.methods):
        with engines(kind) as made:
            if row == "sampling":
                found = uvloop.run(sampling(made, method, args.streams, args.seed))
            else:
                found = uvloop.run(continuation(made, method, args.streams, args.cuts, args.seed))
        print(json.dumps({"row": row, "engine": kind, "method": method, **found}), flush=True)
        wrong += found["wrong"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
