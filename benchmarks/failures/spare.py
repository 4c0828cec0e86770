"""Measures how long after a worker's failure a spare serves its first request.

    python -m benchmarks spare [kill hang xid] [--trials N] [--tp 8]

A fleet of real processes (`holdfast up`, two simulated workers of eight ranks each, and one spare), with a new short request
every 10 ms. A serving worker is killed (SIGKILL), stopped (SIGSTOP), or raises a fatal Xid, at which it ends itself.
Measured: the time until the first byte of the first answer by the spare. The next trial begins once the failed worker has
recovered, and the spare. Every answer must be complete. Prints one JSON line per fault. For a trial of more than a second the
journal's lines are shown as well (on stderr).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.local_fleet import LocalFleet
from controller.demo.fleet import NotAsExpected
from controller.replay.sentences import line

FAULTS = ("kill", "hang", "xid")
EVERY_S = 0.01
SETTLES_S = 3.0  # for which a fleet's supervisor is busy after its start
SLOW_MS = 1000.0  # a trial that takes longer is reported in detail
WITHIN_S = 60.0  # of one trial, until the failed worker is healthy again
FLAGS = ("--workers", "2", "--spares", "1", "--itl-ms", "5", "--canary-interval", "1", "--chaos", "--planner-mode", "off",
         "--breaker-wait", "1", "--breaker-backoff", "1")  # fmt: skip


class Clients:
    """Requests two tokens repeatedly, and records each worker's first answer."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/completions"
        self.began: dict[str, float] = {}  # by worker: the time of its first answer since the last clear
        self.answers = self.failed = 0
        self._number = 0

    async def run(self) -> None:
        """Ask until cancelled."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._ask(session))
                await asyncio.sleep(EVERY_S)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        self._number += 1
        body = {"model": "sim", "prompt": [300 + self._number % 1000] * 8, "max_tokens": 2, "stream": True}
        async with session.post(self._url, json=body, timeout=aiohttp.ClientTimeout(30)) as answer:
            worker = answer.headers.get("X-Holdfast-Worker", "")
            text = b""
            async for part in answer.content.iter_any():
                self.began.setdefault(worker, time.monotonic())
                text += part
        self.answers += 1
        self.failed += answer.status != 200 or b"data: [DONE]" not in text or b'"error"' in text


def _spares(status: dict[str, Any]) -> list[str]:
    """Return the spares that are ready, if all other workers serve."""
    well = [w for w in status["workers"] if w["health"] == "HEALTHY" and w["breaker"] == "closed"]
    ready = [w["id"] for w in well if w["spare"] and w["reasons"] == ["spare"]]
    return ready if len(well) == 3 and sum(w["weight"] == 1 for w in well) == 2 else []


async def trial(fleet: LocalFleet, clients: Clients, fault: str, number: int) -> float:
    """Break a serving worker; return the milliseconds until the spare's first answer. Raise NotAsExpected."""
    status = await fleet.until(lambda one: bool(_spares(one)), WITHIN_S)
    (spare,) = _spares(status)
    serving = sorted((w for w in status["workers"] if w["id"] != spare), key=lambda w: str(w["id"]))
    lost = serving[number % 2]
    clients.began.clear()
    began = time.monotonic()
    if fault == "xid":
        await fleet.act("xid", lost["id"], 48)
    else:
        os.kill(lost["pid"], signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    while spare not in clients.began:
        if time.monotonic() - began > WITHIN_S:
            raise NotAsExpected(f"{spare} has served no request within {WITHIN_S:g} s")
        await asyncio.sleep(0.002)
    if fault == "hang":
        os.kill(lost["pid"], signal.SIGCONT)
    return (clients.began[spare] - began) * 1000


async def told(fleet: LocalFleet, clients: Clients, fault: str, number: int) -> float:
    """Return the result of `trial`, and print the events of a slow one."""
    before = (await fleet.events())[-1].seq
    took_ms = await trial(fleet, clients, fault, number)
    if took_ms > SLOW_MS:
        print(f"{fault}, trial {number}: {took_ms:.0f} ms", file=sys.stderr)
        for event in await fleet.events(before):
            print(f"  {line(event)}", file=sys.stderr)
    return took_ms


async def measured(fault: str, trials: int, tp: int) -> dict[str, Any]:
    """Return the figures of one fault."""
    with tempfile.TemporaryDirectory(prefix="holdfast-spare-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", *FLAGS, environment={"HOLDFAST_WORKER_TP": str(tp)})
        try:
            await fleet.ready()
            await asyncio.sleep(SETTLES_S)
            clients = Clients(fleet.url)
            asking = asyncio.create_task(clients.run())
            took = sorted([await told(fleet, clients, fault, n) for n in range(trials)])
            asking.cancel()
            await asyncio.wait({asking})
        finally:
            fleet.stop()
    return {
        "fault": fault,
        "trials": trials,
        "tp": tp,
        "p50_ms": round(took[trials // 2], 1),
        "p99_ms": round(took[min(trials - 1, round(0.99 * (trials - 1)))], 1),
        "max_ms": round(took[-1], 1),
        "answers": clients.answers,
        "failed": clients.failed,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of each fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks spare", description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"{', '.join(FAULTS)} (default: all)")
    parser.add_argument("--trials", type=int, default=30, metavar="N", help="trials per fault (default: 30)")
    parser.add_argument("--tp", type=int, default=8, metavar="T", help="ranks of a worker (default: 8)")
    args = parser.parse_args(argv)
    if unknown := [fault for fault in args.faults if fault not in FAULTS]:
        parser.error(f"unknown fault {unknown[0]!r}; choose from {', '.join(FAULTS)}")
    for fault in args.faults or FAULTS:
        print(json.dumps(asyncio.run(measured(fault, args.trials, args.tp))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
