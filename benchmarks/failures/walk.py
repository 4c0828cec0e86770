"""Runs a fleet through a random walk of faults, and checks that every 503 was necessary.

    python -m benchmarks walk [--seconds 90] [--every 0.8] [--workers 4] [--users 24] [--seed 1]
    python -m benchmarks walk --faults hang --endless 1 --every 9 --seconds 150      every hang ends by a death

A whole fleet (`holdfast up`, simulated workers, 20 ms per token, a canary every second). Every 0.8 s one random worker
is killed, hung, made to raise, disconnected, slowed down, drained, emptied or restarted, in any state. Meanwhile
`--users` users send requests without a pause and compare each answer with the undisturbed one. One hang in six is endless:
such workers recover because the fleet declares them dead. There is no intervention: faults with a duration end by themselves,
and drained workers resume.

A 503, or any other error, is necessary if at one moment of the last 0.1 s before it no worker could serve, by the journal.
A worker can serve while the fold of the journal gives it a weight and no fault that keeps it from answering is in force.
Such a fault is in force from `chaos_injected` until its duration is over and broken connections are re-established (0.2 s), it
has failed as many requests as it was told to, or the worker's successor has joined. A worker that shuts down cannot serve from
`shutdown_began` on. Prints one JSON object; returns 1 if an answer was altered, an error was not necessary, or not all workers
were HEALTHY with full weight within 20 s after the last fault.
"""

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.local_fleet import LocalFleet
from controller.commands.operator_commands import event_line
from controller.deciders.fleet import Fleet, evolve
from controller.demo.clients import Received, Users
from controller.demo.fleet import NotAsExpected
from controller.processes.operator_client import Operator, OperatorRefused, operator_name
from controller.trace.replay.endpoint import ReplayTarget
from events.errors import HoldfastError
from events.fact import Recorded
from events.observations import (
    CanaryFailed,
    ChaosInjected,
    RequestAbandoned,
    RequestFailed,
    ShutdownBegan,
    WorkerJoined,
)
from events.order import Order

VERBS = ("kill", "hang", "error", "blackhole", "slow", "drain", "move", "restart")
DISABLES = ("kill", "hang", "error", "blackhole")  # faults that keep a worker from answering
CUTS = ("hang", "blackhole")  # at its end, connections that have lost something by it break
CONNECTS_S = 0.2  # until they are re-established
FLAGS = (
    "--chaos",
    "--itl-ms",
    "20",
    "--canary-interval",
    "1",
    "--breaker-wait",
    "1",
    "--breaker-backoff",
    "1",
)
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(24)]
TOKENS = 100
LASTS_S = (0.5, 4.0)  # of a fault that ends by itself
BACK_WITHIN_S = 20.0  # after the last fault
FOREVER_BEFORE_S = (
    50.0  # before the last fault: until an endless hang is detected, its instance dead, its successor healthy
)
BEFORE_S = 0.1  # before a 503: how long the fleet's state may have been unknown to the frontend
ASK_S = 10.0

Spans = list[tuple[float, float]]  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Turned:
    """A request that was answered with an error."""

    request: str
    status: str
    at: float  # seconds since 1970
    says: str


@dataclass
class Found:
    """The results so far."""

    faults: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    endless: int = 0  # hangs without a duration
    streams: int = 0
    exact: int = 0
    altered: list[str] = field(default_factory=list)
    turned: list[Turned] = field(default_factory=list)


class Walk:
    """One run."""

    def __init__(self, fleet: LocalFleet, users: Users, args: argparse.Namespace) -> None:
        self.found = Found()
        self._fleet, self._users, self._args = fleet, users, args
        self._dice = random.Random(args.seed)
        self._answers: list[list[str]] = []
        self._over = False

    async def run(self) -> float | None:
        """Run the walk; return the seconds from the last fault until all workers had recovered; None: too long."""
        async with self._users.session() as session:
            self._answers = await self._users.answers(session, TOKENS)
            async with asyncio.TaskGroup() as group:
                for number in range(self._args.users):
                    group.create_task(self._user(session, number))
                try:
                    await self._break()
                    return await self._back()
                finally:
                    self._over = True

    async def _user(self, session: ReplayTarget, number: int) -> None:
        dice, count = random.Random(f"{self._args.seed} {number}"), 0
        while not self._over:
            count += 1
            prompt, tokens = dice.randrange(len(PROMPTS)), dice.randint(20, TOKENS)
            got = await self._users.ask(session, prompt, tokens, f"user-{number}-{count}")
            self._users.streams.remove(got)
            self._judge(got)
            if got.error:
                await asyncio.sleep(0.2)

    def _judge(self, got: Received) -> None:
        self.found.streams += 1
        if got.error:
            status = got.error.partition(" ")[0]
            self.found.turned.append(
                Turned(got.request, status if status.isdecimal() else "cut", time.time(), got.error)
            )
        elif got.pieces == self._answers[got.prompt][: got.wanted]:
            self.found.exact += 1
        else:
            self.found.altered.append(got.request)

    async def _break(self) -> None:
        """Inject one fault after another."""
        names = [f"w{n}" for n in range(self._args.workers)]
        operator = await Operator.connect(self._fleet.data)
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as resuming:
                for number in range(int(self._args.seconds / self._args.every)):
                    await asyncio.sleep(max(0.0, began + number * self._args.every - time.monotonic()))
                    left_s = self._args.seconds - (time.monotonic() - began)
                    await self._strike(
                        operator,
                        resuming,
                        self._dice.choice(self._args.faults),
                        self._dice.choice(names),
                        left_s,
                    )
        finally:
            await operator.close()

    async def _strike(
        self, operator: Operator, resuming: asyncio.TaskGroup, verb: str, worker: str, left_s: float
    ) -> None:
        dice = self._dice
        lasts_s, argument, endless = (
            dice.uniform(*LASTS_S),
            dice.randint(2, 6),
            dice.random() < self._args.endless,
        )
        self.found.faults[verb] += 1
        match verb:
            case "drain":
                if await self._ask(operator, verb, {"worker": worker, "deadline_s": 600}):
                    resuming.create_task(self._resume(operator, worker, min(lasts_s, max(0.1, left_s - 0.1))))
            case "move" | "restart":
                await self._ask(operator, verb, {"worker": worker} | ({"to": ""} if verb == "move" else {}))
            case _:
                body: dict[str, Any] = {"worker": worker, "fault": verb}
                if verb in ("error", "slow"):
                    body["argument"] = argument
                if verb == "hang" and endless and left_s > FOREVER_BEFORE_S:
                    self.found.endless += 1
                elif verb != "kill":
                    body["duration_s"] = lasts_s
                await self._ask(operator, "chaos", body)

    async def _resume(self, operator: Operator, worker: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._ask(operator, "resume", {"worker": worker})

    async def _ask(self, operator: Operator, verb: str, body: dict[str, Any]) -> bool:
        try:
            await operator.ask(verb, body | {"by": operator_name()}, ASK_S)
        except HoldfastError as error:
            what = verb if verb != "chaos" else str(body["fault"])
            kind = "refused" if isinstance(error, OperatorRefused) else "no answer"
            words = str(error).replace(body["worker"], "W")
            self.found.refused[f"{what} {kind}: {words[:70]}"] += 1
            return False
        return True

    async def _back(self) -> float | None:
        began = time.monotonic()

        def well(status: dict[str, Any]) -> bool:
            return all(
                w["health"] == "HEALTHY" and w["weight"] == 1 and w["breaker"] == "closed"
                for w in status["workers"]
            )

        await asyncio.sleep(LASTS_S[1])  # a worker that was just struck may still look healthy
        with contextlib.suppress(NotAsExpected):
            await self._fleet.until(well, BACK_WITHIN_S - LASTS_S[1])
            return time.monotonic() - began
        return None


def able(events: Sequence[Recorded]) -> Mapping[str, Spans]:
    """Return when each worker could serve, by the journal."""
    order, since = Order(evolve, Fleet()), dict[str, float]()
    spans: dict[str, Spans] = defaultdict(list)
    for event in events:
        order.take(event)
        at = event.at.timestamp()
        for name, worker in order.shown.workers.items():
            if worker.routable and name not in since:
                since[name] = at
            elif not worker.routable and name in since:
                spans[name].append((since.pop(name), at))
    for name, at in since.items():
        spans[name].append((at, float("inf")))
    broken = struck(events)
    return {name: without(spans[name], broken.get(name, [])) for name in spans}


def struck(events: Sequence[Recorded]) -> Mapping[str, Spans]:
    """Return when a fault kept each worker from answering: until its time is over, it has failed all the requests that it was to
    fail, or its successor has joined. A worker that shuts down has notified frontends before the fold shows it."""
    joins: dict[str, list[float]] = defaultdict(list)
    raised: dict[str, list[float]] = defaultdict(list)
    for event in events:
        fact, at = event.fact, event.at.timestamp()
        if isinstance(fact, WorkerJoined):
            joins[fact.worker].append(at)
        elif isinstance(fact, RequestFailed | CanaryFailed) and fact.reason in ("engine_error", "exception"):
            raised[fact.worker].append(at)
    found: dict[str, Spans] = defaultdict(list)
    for event in events:
        fact, at = event.fact, event.at.timestamp()
        if isinstance(fact, ShutdownBegan) or (isinstance(fact, ChaosInjected) and fact.fault in DISABLES):
            ends = [float("inf"), *(join for join in joins[fact.worker] if join > at)]
            if isinstance(fact, ChaosInjected) and fact.duration_s is not None:
                ends.append(at + fact.duration_s + (CONNECTS_S if fact.fault in CUTS else 0.0))
            if isinstance(fact, ChaosInjected) and fact.fault == "error":
                requests = int(fact.detail.removeprefix("argument="))
                ends += sorted(then for then in raised[fact.worker] if then >= at)[requests - 1 :]
            found[fact.worker].append((at, min(ends)))
    return found


def without(spans: Spans, gaps: Spans) -> Spans:
    """Return what remains of spans of time without these gaps."""
    for begin, end in gaps:
        parts = [((a, min(b, begin)), (max(a, end), b)) for a, b in spans]
        spans = [part for pair in parts for part in pair if part[0] < part[1]]
    return sorted(spans)


def without_worker(able: Mapping[str, Spans], begin: float, end: float) -> Spans:
    """Return when, between two moments, no worker could serve."""
    spans: Spans = [(begin, end)]
    for each in able.values():
        spans = without(spans, each)
    return spans


def report(
    walk: Walk, events: Sequence[Recorded], began: float, ended: float, back_s: float | None
) -> dict[str, Any]:
    """Return the report to print."""
    found, can = walk.found, able(events)
    needless = [one for one in found.turned if not without_worker(can, one.at - BEFORE_S, one.at)]
    refusals = [one for one in found.turned if one.status == "503"]
    reasons = {
        event.fact.request: event.fact.reason for event in events if isinstance(event.fact, RequestAbandoned)
    }
    return {
        "seconds": round(ended - began, 1),
        "faults": dict(sorted(found.faults.items())),
        "hangs without an end": found.endless,
        "refused": dict(found.refused.most_common(12)),
        "lives": sum(isinstance(event.fact, WorkerJoined) for event in events),
        "streams": found.streams,
        "exact": found.exact,
        "altered": found.altered[:5],
        "503": len(refusals),
        "503 not needed": sum(one.status == "503" for one in needless),
        "other errors": dict(Counter(one.status for one in found.turned if one.status != "503")),
        "other errors not needed": sum(one.status != "503" for one in needless),
        "no worker could serve, s": round(sum(b - a for a, b in without_worker(can, began, ended)), 2),
        "all well again after, s": None if back_s is None else round(back_s, 1),
        "examples": [
            f"{one.request}: {one.says} ({reasons.get(one.request, 'no reason in the journal')})"
            for one in needless[:5]
        ],
    }


def came_through(found: Mapping[str, Any]) -> bool:
    """Return whether the bounds hold. A walk without answers shows nothing."""
    bad = found["altered"] or found["503 not needed"] or found["other errors not needed"]
    return not bad and found["all well again after, s"] is not None and found["exact"] > 0


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run once and return what was found."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", *FLAGS, "--workers", str(args.workers))
        try:
            await fleet.ready()
            status = await fleet.healthy(args.workers)
            walk = Walk(fleet, Users(fleet.url, status["workers"][0]["model"], PROMPTS), args)
            began = time.time()
            back_s = await walk.run()
            ended = time.time()
            events = await fleet.events()
            found = report(walk, events, began, ended, back_s)
            said = fleet.log.read_text(errors="replace")
            found["ended by sentence"] = said.count(" was declared dead (")
            if args.keep:
                keep(args.keep, fleet, found, walk, events)
            return found
        finally:
            fleet.stop()


def keep(
    folder: Path, fleet: LocalFleet, found: dict[str, Any], walk: Walk, events: Sequence[Recorded]
) -> None:
    """Keep the logs, the journal and the users' answers for later inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text("".join(event_line(event, "json") + "\n" for event in events))
    shutil.copytree(fleet.data / "logs", folder / "logs", dirs_exist_ok=True)
    shutil.copy(fleet.log, folder / "up.log")
    turned = [[one.at, one.status, one.request, one.says] for one in walk.found.turned]
    (folder / "found.json").write_text(json.dumps({**found, "turned": turned}, indent=1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object; return 1 if the fleet did not come through."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=90.0, help="seconds of faults (default: 90)")
    parser.add_argument("--every", type=float, default=0.8, help="seconds between two faults (default: 0.8)")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--users", type=int, default=24)
    parser.add_argument(
        "--faults", nargs="+", choices=VERBS, default=VERBS, help="kinds of faults (default: all)"
    )
    parser.add_argument(
        "--endless", type=float, default=1 / 6, help="share of hangs without an end (default: 1/6)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs in this folder")
    args = parser.parse_args(arguments)
    found = asyncio.run(run(args))
    print(json.dumps(found), flush=True)
    return 0 if came_through(found) else 1


if __name__ == "__main__":
    sys.exit(main())
