"""Measures how long a frontend takes to choose a worker for one request, including hashing its prompt.

    python -m benchmarks choice [--workers 100 1000] [--tokens 12000] [--rounds 300]

`choice`: microseconds from a list of token ids to the worker, and its parts: hashing, looking up the cached prefix, and choosing.
Choosing computes the cost of every candidate, with others' load, and applies this frontend's own
breakers and caps.
Prompts begin with a system prompt that every worker has cached, continue as one of 1,000 conversations that few have, and end
new. Each worker has four such requests in flight. `sent` is the update of the tracker afterwards, before a request is sent.
`modes`: the same for the other modes, without hashing. Prints one JSON object each.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from typing import Any, TypeVar

from benchmarks.registration import played_worker
from controller.frontend.health.local_breakers import LocalBreakers
from controller.frontend.settings import FactSettings, LocalBreakerSettings
from controller.router.endpoints import ConnectedWorkers, Endpoint, EndpointTable, WorkerRank
from controller.router.index.index import KvIndex
from controller.router.load.active_sequences import ActiveSequences
from controller.router.load.monitor import LoadLimits, LoadMonitor
from controller.router.selection.filter import Filter, Rules
from controller.router.selection.score import ScoredPrompt
from controller.router.selection.selector import Chooser, Mode, Selection
from events.blocks import local_hashes, sequence_hashes
from events.decisions import HealthStatus
from events.observations import Profile
from events.wire import Load

T = TypeVar("T")

IN_FLIGHT = 4  # per worker
CONVERSATIONS = 1000
HAVE_IT = 3  # workers with a conversation cached
VOCABULARY = 128_000
EVERY_S = 0.001  # between requests, on a clock that stands still otherwise


@dataclass
class Parts:
    """Seconds of each part of the choices."""

    hash: list[float] = field(default_factory=list)
    find: list[float] = field(default_factory=list)
    choose: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return the median of each part, and of their sum without `sent`, in microseconds."""
        whole = [sum(parts) for parts in zip(self.hash, self.find, self.choose, strict=True)]
        shown = {name: _us(median(getattr(self, name))) for name in ("hash", "find", "choose", "sent")}
        return {"median_us": _us(median(whole)), "p99_us": _us(sorted(whole)[len(whole) * 99 // 100])} | shown


class Links(ConnectedWorkers):
    """The connections of a frontend: all workers are connected, and have requests of other frontends."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._instances = {endpoint.worker: endpoint.instance for endpoint in endpoints}
        self._load = {endpoint.worker: Load(running=2, active_tokens=5000) for endpoint in endpoints}

    def reachable(self, worker: str, instance: str) -> bool:
        """Return whether this instance is connected."""
        return self._instances.get(worker) == instance

    recently_heard = reachable

    def external_load(self, worker: str) -> Load | None:
        """Return the load by other frontends."""
        return self._load.get(worker)


class Fleet:
    """A fleet of unreachable workers, as one frontend knows it."""

    def __init__(self, workers: int, tokens: int, block_tokens: int) -> None:
        self.dice = Random(1)
        self.block_tokens = block_tokens
        self.now = 1.0
        self.endpoints = tuple(_endpoint(number, block_tokens) for number in range(workers))
        self.index = KvIndex()
        self.slots = ActiveSequences()
        self.chooser = Chooser(self.slots)
        links = Links(self.endpoints)
        outcomes = LocalBreakers(
            "f1", LocalBreakerSettings(), FactSettings(), lambda fact: None, time.perf_counter, links
        )
        for endpoint in self.endpoints:
            outcomes.outcomes(endpoint.key)
        load = LoadMonitor(LoadLimits(), EndpointTable(), links, self.slots, time.perf_counter)
        self.rules = Rules(links, load, outcomes.open, frontends=2)
        system = self._tokens(tokens // 6)
        self._begun = [system + self._tokens(tokens // 2) for _ in range(CONVERSATIONS)]
        self._size = tokens
        self._warm()

    def _tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(VOCABULARY) for _ in range(count)]

    def prompt(self) -> list[int]:
        """Return the next request's tokens."""
        begun = self.dice.choice(self._begun)
        return begun + self._tokens(self._size - len(begun))

    def _warm(self) -> None:
        """Give workers cached conversations and requests in flight."""
        for begun in self._begun:
            for endpoint in self.dice.sample(self.endpoints, min(HAVE_IT, len(self.endpoints))):
                self.index.store(WorkerRank(*endpoint.key), None, self._names(begun))
        system = self._names(self._begun[0])[: self._size // 6 // self.block_tokens]
        for number, endpoint in enumerate(self.endpoints * IN_FLIGHT):
            self.index.store(WorkerRank(*endpoint.key), None, system)
            names = self._names(self.dice.choice(self._begun))
            self.slots.add(number, WorkerRank(*endpoint.key), names, now=0.0, prefill_tokens=self._size // 3)
            endpoint.begin()

    def _names(self, tokens: list[int]) -> list[int]:
        return sequence_hashes(local_hashes(tokens, self.block_tokens))

    def route(self, tokens: list[int], mode: Mode, parts: Parts) -> Selection:
        """Choose a worker for one prompt, and record the time of each part."""
        self.now += EVERY_S
        names = _timed(lambda: self._names(tokens), parts.hash)
        matches = _timed(lambda: self.index.find(names), parts.find)
        prompt, draw = ScoredPrompt(len(tokens), self.block_tokens, names, matches), self.dice.random()
        choose, others = self.chooser.choose, self.rules.plane
        choice = _timed(
            lambda: choose(
                Filter(self.endpoints, self.rules), prompt, mode=mode, now=self.now, draw=draw, others=others
            ),
            parts.choose,
        )
        _timed(lambda: self._send(choice), parts.sent)
        self.slots.free("measured", now=self.now)
        return choice

    def _send(self, choice: Selection) -> None:
        names, tokens = choice.request.prompt.blocks, choice.prefill_tokens
        self.slots.add("measured", choice.holder, names, now=self.now, prefill_tokens=tokens)


def _endpoint(number: int, block_tokens: int) -> Endpoint:
    profile = Profile(
        kv_blocks=10_000,
        block_tokens=block_tokens,
        max_batch=64,
        prefill_tokens_per_s=1e5,
        tpot_ms=((1, 1.0),),
    )
    joined = played_worker(f"w{number}", profile, instance="i1", model="m")
    return Endpoint(joined, weight=1.0, status=HealthStatus.HEALTHY)


def _timed(call: Callable[[], T], into: list[float]) -> T:
    began = time.perf_counter()
    result = call()
    into.append(time.perf_counter() - began)
    return result


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def choice(workers: int, tokens: int, block_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Measure choices among this number of workers, in each mode."""
    fleet, rows = Fleet(workers, tokens, block_tokens), []
    prompts = [fleet.prompt() for _ in range(rounds)]
    for mode in Mode:
        parts = Parts()
        for prompt in prompts:
            fleet.route(prompt, mode, parts)
        head = {"workers": workers, "tokens": tokens, "block_tokens": block_tokens}
        if mode is Mode.KV:
            rows.append({"row": "choice", **head, **parts.row()})
        else:
            rows.append({"row": "modes", "mode": mode.value, **head, "choose_us": _us(median(parts.choose))})
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks choice", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--tokens", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args(argv)
    for workers in args.workers:
        for block_tokens in (16, 64):
            for row in choice(workers, args.tokens, block_tokens, args.rounds):
                print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
