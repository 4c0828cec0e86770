"""Measures a graceful shutdown: how long a worker still gets requests, and what its users notice.

    python -m benchmarks leaving [--trials 10]

A whole fleet (`holdfast up`, 4 workers) and a second frontend beside it; 64 streams, half of them at each frontend, and short
requests all the time. One worker gets SIGTERM. Measured at each frontend: from SIGTERM to the last request that
it sends to the worker, served or returned. Every stream is compared with the undisturbed answer.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.failures.faults import spread
from benchmarks.local_fleet import LocalFleet
from controller.adapters.embedded.free_port import free_port
from controller.demo.clients import Received, Users
from controller.processes.fleet_dir import FleetDir
from controller.processes.operator_client import http_ok
from controller.trace.replay.endpoint import ReplayTarget
from events import fleet_key
from events.fact import Recorded
from events.observations import DrainFinished, RequestMigrated, WorkerLeft

WORKERS, STREAMS, TOKENS, ASKERS = 4, 64, 250, 8
FLAGS = ("--workers", str(WORKERS), "--itl-ms", "10", "--canary-interval", "0.5")
PROMPTS = [[300 + (7 * i + 13 * k) % 1500 for k in range(40)] for i in range(8)]
STARTS_WITHIN_S, LEAVES_WITHIN_S = 30.0, 60.0


@dataclass(frozen=True, slots=True)
class Short:
    """A short request: its frontend, when it was sent, and which worker answered."""

    frontend: str
    at: float
    worker: str


@dataclass
class Departure:
    """The observations while one worker left."""

    last_ms: dict[str, float] = field(
        default_factory=dict
    )  # by frontend; below zero: nothing after the signal
    left_s: float = 0.0  # from the signal to the end of the process
    streams: list[Received] = field(default_factory=list)
    wrong: int = 0  # streams that differ from the undisturbed answer
    failed: list[str] = field(default_factory=list)  # why streams and short requests failed
    short: list[Short] = field(default_factory=list)
    facts: list[Any] = field(default_factory=list)  # about this worker's shutdown


@dataclass
class TwoFrontends:
    """A fleet with two frontends, each on its own port."""

    fleet: LocalFleet
    urls: dict[str, str]
    model: str
    answers: list[list[str]]
    pause_s: float  # between two short requests of one client

    async def leave(self, worker: str) -> Departure:
        """Stop a worker under load."""
        seen, over = Departure(), asyncio.Event()
        (before,) = (w for w in (await self.fleet.status())["workers"] if w["id"] == worker)
        read = len(await self.fleet.events())
        async with contextlib.AsyncExitStack() as stack:
            users = [Users(url, self.model, PROMPTS) for url in self.urls.values()]
            sessions = [await stack.enter_async_context(each.session()) for each in users]
            asks = [
                users[n % 2].ask(sessions[n % 2], n % len(PROMPTS), TOKENS, f"{worker}-{read}-{n}")
                for n in range(STREAMS)
            ]
            streams = asyncio.ensure_future(asyncio.gather(*asks))
            askers = [
                asyncio.ensure_future(self._ask(name, session, seen, over))
                for name, session in zip(self.urls, sessions, strict=True)
                for _ in range(ASKERS)
            ]
            async with asyncio.timeout(STARTS_WITHIN_S):
                while not (_all_run(users) and self._asked(seen, worker)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            began, began_at = time.monotonic(), datetime.now(UTC)
            os.kill(before["pid"], signal.SIGTERM)
            await _gone(before["pid"])
            seen.left_s = time.monotonic() - began
            seen.streams = list(await streams)
            over.set()
            await asyncio.gather(*askers)
        events = (await self.fleet.events())[read:]
        for name in self.urls:
            served = [  # later answers are from the worker's next life
                sent.at - began
                for sent in seen.short
                if (sent.frontend, sent.worker) == (name, worker) and sent.at - began < seen.left_s
            ]
            seen.last_ms[name] = 1000 * max(
                [*served, *_sent_back(events, name, before["instance"], began_at)]
            )
        seen.facts = [e.fact for e in events if before["instance"] in _instances(e)]
        seen.wrong = sum(s.pieces != self.answers[s.prompt] for s in seen.streams)
        seen.failed += [s.error for s in seen.streams if s.error]
        return seen

    def _asked(self, seen: Departure, worker: str) -> bool:
        """Return whether a short request of each frontend has been answered by this worker."""
        return {short.frontend for short in seen.short if short.worker == worker} == set(self.urls)

    async def _ask(self, frontend: str, session: ReplayTarget, seen: Departure, over: asyncio.Event) -> None:
        """Send one short request after another, until the event is set."""
        body = {"model": self.model, "prompt": PROMPTS[0], "max_tokens": 1, "temperature": 0}
        while not over.is_set():
            at = time.monotonic()
            answer = await session.ask("POST", "/v1/completions", json.dumps(body).encode())
            if answer.status != 200:
                seen.failed.append(answer.fault or answer.body.decode())
            seen.short.append(Short(frontend, at, answer.headers.get("X-Holdfast-Worker", "")))
            await asyncio.sleep(self.pause_s)


async def _gone(pid: int) -> None:
    """Wait for the end of a process by its pid, because the fleet may report it only after its successor has begun."""
    async with asyncio.timeout(LEAVES_WITHIN_S):
        while psutil.pid_exists(pid):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)


def _all_run(users: Sequence[Users]) -> bool:
    return sum(bool(stream.pieces) for each in users for stream in each.streams) == STREAMS


def _instances(event: Recorded) -> tuple[str, str]:
    """Return the instance that a fact is about, and the one that a request left."""
    return getattr(event.fact, "instance", ""), getattr(event.fact, "source_instance", "")


def _sent_back(events: Sequence[Recorded], frontend: str, instance: str, began: datetime) -> list[float]:
    """Return when, in seconds after `began`, requests moved elsewhere that this instance had not begun."""
    return [
        (event.said_at - began).total_seconds()
        for event in events
        if isinstance(event.fact, RequestMigrated)
        and event.said_at is not None
        and (event.fact.frontend, event.fact.source_instance, event.fact.tokens) == (frontend, instance, 0)
    ]


@contextlib.asynccontextmanager
async def two_frontends(folder: Path, pause_s: float = 0.0) -> AsyncIterator[TwoFrontends]:
    """Start a fleet with two frontends. Without a pause, clients of short requests fill a small machine."""
    fleet, second, port = LocalFleet.start(folder / "data", *FLAGS), None, free_port()
    try:
        await fleet.ready()
        model = (await fleet.healthy(WORKERS))["workers"][0]["model"]
        second = _frontend(fleet, port, folder / "second.log")
        urls = {"frontend-0": fleet.url, "second": f"http://127.0.0.1:{port}"}
        async with asyncio.timeout(STARTS_WITHIN_S):
            while not await http_ok(f"{urls['second']}/health"):  # noqa: ASYNC110 (another process)
                await asyncio.sleep(0.05)
        users = Users(fleet.url, model, PROMPTS)
        async with users.session() as session:
            answers = await users.answers(session, TOKENS)
        yield TwoFrontends(fleet, urls, model, answers, pause_s)
    finally:
        if second is not None:
            second.terminate()
            second.wait(30)
        fleet.stop()


def _frontend(fleet: LocalFleet, port: int, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "controller.cli", "frontend", "--data", str(fleet.data)]
    own = {"HOLDFAST_NATS_URL": fleet.nats_url(""), fleet_key.VARIABLE: str(FleetDir(fleet.data).key)}
    with log.open("wb") as said:
        return subprocess.Popen(
            [*command, "--name", "second", "--port", str(port)],
            stdout=said,
            stderr=said,
            env={**os.environ, **own},
        )


async def measure(trials: int) -> dict[str, Any]:
    """Stop workers, one after another; each has recovered before the next one stops."""
    with tempfile.TemporaryDirectory(prefix="holdfast-leaving-") as name:
        async with two_frontends(Path(name)) as both:
            seen = []
            for n in range(trials):
                await both.fleet.healthy(WORKERS)
                seen.append(await both.leave(f"w{n % WORKERS}"))
    return {
        "benchmark": "leaving",
        "workers": WORKERS,
        "frontends": 2,
        "streams": sum(len(one.streams) for one in seen),
        "short_requests": sum(len(one.short) for one in seen),
        "failed": sum(len(one.failed) for one in seen),
        "altered": sum(one.wrong for one in seen),
        "last_new_request_ms": {f: spread([one.last_ms[f] for one in seen]) for f in seen[0].last_ms},
        "left_s": spread([one.left_s for one in seen]),
        "drained": {
            how: sum(getattr(f, how) for one in seen for f in one.facts if isinstance(f, DrainFinished))
            for how in ("completed", "migrated", "cancelled", "failed")
        },
        "in_good_order": sum(f.mode == "graceful" for one in seen for f in one.facts if isinstance(f, WorkerLeft)),
    }  # fmt: skip


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=10)
    print(json.dumps(asyncio.run(measure(parser.parse_args().trials))))


if __name__ == "__main__":
    main()
