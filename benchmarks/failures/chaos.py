"""Checks that no stream loses, doubles or alters a token while its workers fail, drain or are emptied.

    python -m benchmarks chaos [--streams 10000] [--seed 1] [--at-once 64] [--request-plane tcp|nats]

Six simulated workers behind a whole frontend, all in this process (`benchmarks/serving/inside.py`). Every stream's request,
and the times and targets of all faults (counted in streams), follow from the seed; their interleaving is up to the machine.
At most three workers are out at once: with none left, new requests would rightly be refused. Streams of workers that drain or
are emptied move with their KV cache.

Every token is compared with that of an engine without faults, and every text and usage with what follows from it. At the end
no worker, living or dead, may hold a block, and no shared memory may be left. Prints one JSON object; returns 1 if anything
was wrong.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import structlog
import uvloop

from benchmarks.serving.inside import METHODS, Answer, Inside, inside, unsaid
from controller.adapters.embedded.nats import start_nats
from controller.demo.clients import TokenDifference, compare
from controller.frontend.openai.text.tokenizer import BUILTIN, load_tokens
from events.observations import RequestAbandoned, RequestMigrated
from events.wire import Generate, Sampling
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.kv_transfer.receiver import PREFIX, ROOT

Verb = Literal["kill", "hang", "drain", "error", "move"]
WORKERS = 6
STREAMS_A_FAULT = 25  # on average
OUT_MAX = 3  # workers that are killed, hung or drained at once; the next fault waits
SHAPE = EngineShape(context_tokens=1024, kv_blocks=640, batch_max=48)  # so small that requests must wait
STEP_S = 0.002
MOVES_MAX = 1000  # a stream may meet more faults than a fleet's limit of moves allows
QUIET_S = 5.0  # until cancelled streams are gone
FAMILIES = 16  # groups of prompts with a common beginning


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one worker, `after_s` seconds after a number of streams were requested."""

    streams: int
    after_s: float
    verb: Verb
    worker: int
    lasts_s: float


def faults(seed: int, streams: int) -> Iterator[Fault]:
    """Yield the faults of one run, in order."""
    dice, at = Random(f"faults {seed}"), 0
    while (at := at + dice.randint(1, 2 * STREAMS_A_FAULT)) < streams:
        verb: Verb = dice.choice(get_args(Verb))
        lasts_s = dice.uniform(0.5, 1.2) if verb == "hang" else dice.uniform(0.02, 0.5)
        yield Fault(at, dice.uniform(0, 0.1), verb, dice.randrange(WORKERS), lasts_s)


def asked(seed: int, number: int) -> dict[str, Any]:
    """Return the body of one request."""
    dice = Random(f"stream {seed} {number}")
    family = Random(f"family {seed} {dice.randrange(FAMILIES)}")
    prompt = [family.randint(300, 2000) for _ in range(family.randint(1, 120))]
    prompt += [dice.randint(300, 2000) for _ in range(dice.randint(1, 80))]
    body: dict[str, Any] = {"model": "sim", "prompt": prompt, "max_tokens": dice.randint(1, 160)}
    body["temperature"] = dice.choice((0, 0, 0.8))
    body["seed"] = dice.randrange(1 << 32)
    if dice.random() < 0.2:
        body |= {"presence_penalty": 1.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    if dice.random() < 0.2:
        body["min_tokens"] = dice.randint(1, body["max_tokens"])
    body["ignore_eos"] = dice.random() < 0.5
    return body


def undisturbed(body: dict[str, Any]) -> tuple[list[int], str]:
    """Return the tokens of an undisturbed answer, and its finish reason."""
    said = ("max_tokens", "min_tokens", "temperature", "seed", "ignore_eos", "presence_penalty",
            "frequency_penalty", "repetition_penalty")  # fmt: skip
    sampling = Sampling(**{name: body[name] for name in said if name in body})
    scheduler, tokens = Scheduler(SHAPE), []
    prompt = body["prompt"]
    scheduler.submit(1, Generate(1, "r", prompt, len(prompt), sampling))
    while not scheduler.plan().idle:
        for _, chunk in scheduler.step():
            tokens += chunk.tokens
            if chunk.finish:
                return tokens, chunk.finish
    raise AssertionError("the answer has no end")


@dataclass
class Found:
    """The results so far."""

    streams: int = 0
    tokens: int = 0
    lost: int = 0
    doubled: int = 0
    altered: int = 0
    wrong: list[str] = field(default_factory=list)  # requests and what was wrong with them
    faults: Counter[str] = field(default_factory=Counter)
    missed: int = 0  # faults of workers that were already dead

    def check(self, one: Inside, answer: Answer, body: dict[str, Any]) -> None:
        """Compare one answer with the undisturbed one."""
        tokens, finish = undisturbed(body)
        self.streams += 1
        self.tokens += len(tokens)
        got = one.accepted.pop(answer.request, [])
        hidden = finish == "stop"
        text = load_tokens(BUILTIN).decode(tokens[:-1] if hidden else tokens)
        usage = (answer.usage.get("prompt_tokens"), answer.usage.get("completion_tokens"))
        difference = compare([*map(str, got)], [*map(str, tokens)])
        self.lost += difference.lost
        self.doubled += difference.doubled
        self.altered += difference.altered
        if answer.error:
            self.wrong.append(f"{answer.request}: {answer.error}")
        elif difference != TokenDifference() or answer.text != text:
            self.wrong.append(f"{answer.request}: its tokens or its text differ")
        elif usage != (len(body["prompt"]), len(tokens)) or answer.finishes != [finish]:
            self.wrong.append(f"{answer.request}: usage {usage}, finish {answer.finishes}")


class Chaos:
    """One run."""

    def __init__(self, one: Inside, seed: int, streams: int, at_once: int) -> None:
        self.found = Found()
        self._one, self._seed, self._streams = one, seed, streams
        self._places = asyncio.Semaphore(at_once)
        self._out = asyncio.Semaphore(OUT_MAX)

    async def run(self) -> None:
        """Send every request, inject every fault, and wait until all is over."""
        due = faults(self._seed, self._streams)
        fault = next(due, None)
        async with asyncio.TaskGroup() as group:
            for number in range(self._streams):
                while fault is not None and fault.streams <= number:
                    group.create_task(self._inject(fault))
                    fault = next(due, None)
                await self._places.acquire()
                group.create_task(self._stream(number))

    async def _stream(self, number: int) -> None:
        body = asked(self._seed, number)
        try:
            answer = await self._one.ask(f"r{number}", **body)
        finally:
            self._places.release()
        self.found.check(self._one, answer, body)

    async def _inject(self, fault: Fault) -> None:
        await asyncio.sleep(fault.after_s)
        self.found.faults[fault.verb] += 1
        if fault.verb in ("error", "move"):
            self._disturb(fault)
            return
        async with self._out:
            await self._take_out(fault)

    def _disturb(self, fault: Fault) -> None:
        member = self._one.members[fault.worker]
        if member.life is None:
            self.found.missed += 1
        elif fault.verb == "error":
            member.life.engine.chaos("error", 3)
        else:
            self._one.move(member.name)

    async def _take_out(self, fault: Fault) -> None:
        member = self._one.members[fault.worker]
        if (life := member.life) is None:
            self.found.missed += 1
            return
        server, commands = life.worker.server, life.worker.commands
        match fault.verb:
            case "kill":
                await member.kill()
                await asyncio.sleep(fault.lasts_s)
                await member.start()
            case "hang":
                server.connections.blackhole(True)
                await asyncio.sleep(fault.lasts_s)
                if member.life is life:
                    server.connections.blackhole(False)
            case "drain":
                commands.on_drain({"deadline_s": fault.lasts_s / 2})
                await asyncio.sleep(fault.lasts_s)
                if member.life is life:
                    commands.on_resume({})

    def leaks(self) -> list[str]:
        """Return the workers, living or dead, that still hold something after every stream has ended."""

        lives = [(member.name, life) for member in self._one.members for life in member.lives]
        found = [f"{name} {life.instance}: {life.engine.load()}" for name, life in lives if not life.idle]
        endpoints = self._one.director.table.endpoints.values()
        return found + [
            f"{endpoint.worker}: {endpoint.active} in flight" for endpoint in endpoints if endpoint.active
        ]


async def _left_behind(quiet_s: float) -> list[str]:
    """Return the shared memory that workers have left: a thread removes the last of it after a worker has ended."""
    left: list[str] = []
    for _ in range(100):
        left = [path.name for path in ROOT.glob(f"{PREFIX}*-{os.getpid()}-*")]
        if not left:
            break
        await asyncio.sleep(quiet_s / 100)
    return left


def simulated() -> Engine:
    """Return the engine of one life of a worker."""
    return SimulatedEngine(SHAPE, ConstantTiming(itl_s=STEP_S, prefill_tokens_per_s=200_000))


async def run(
    seed: int,
    streams: int,
    at_once: int = 64,
    made: Callable[[], Engine] = simulated,
    broker: str = "",
    quiet_s: float = QUIET_S,
) -> dict[str, Any]:
    """Run once, on ports or behind the broker of this URL, and return the results, after `quiet_s` for cancelled streams to
    end."""
    began = time.monotonic()
    settings = {"migration_limit": MOVES_MAX, "breaker": {"wait_s": 0.5}, "moving": METHODS["transfer"]}
    async with inside([made] * WORKERS, broker=broker, **settings) as one:
        chaos = Chaos(one, seed, streams, at_once)
        await chaos.run()
        with contextlib.suppress(TimeoutError):
            await one.until(lambda: not chaos.leaks(), quiet_s)
        found, leaks = chaos.found, chaos.leaks()
    leaks += await _left_behind(quiet_s)
    moves = one.said(RequestMigrated)
    return {
        "seed": seed,
        "streams": found.streams,
        "tokens": found.tokens,
        "lost": found.lost,
        "doubled": found.doubled,
        "altered": found.altered,
        "wrong": len(found.wrong),
        "leaks": leaks,
        "faults": dict(sorted(found.faults.items())),
        "faults on dead workers": found.missed,
        "moves": dict(sorted(Counter(f"{fact.method} {fact.cause}" for fact in moves).items())),
        "transfers refused": dict(Counter(fact.refused for fact in moves if fact.refused).most_common(5)),
        "streams moved": len({fact.request for fact in moves}),
        "abandoned": dict(Counter(fact.reason for fact in one.said(RequestAbandoned))),
        "seconds": round(time.monotonic() - began, 1),
        "examples": found.wrong[:5],
    }


async def behind_a_broker(seed: int, streams: int, at_once: int) -> dict[str, Any]:
    """Run once with all requests through our own broker."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        broker = await start_nats(Path(folder))
        try:
            return await run(seed, streams, at_once, broker=broker.url)
        finally:
            await broker.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object; return 1 if a token, an answer or a block was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--request-plane", choices=("tcp", "nats"), default="tcp")
    args = parser.parse_args(arguments)
    structlog.configure(processors=[unsaid])
    plane = behind_a_broker if args.request_plane == "nats" else run
    found = uvloop.run(plane(args.seed, args.streams, args.at_once))
    print(json.dumps(found), flush=True)
    return 1 if found["wrong"] or found["leaks"] else 0


if __name__ == "__main__":
    sys.exit(main())
