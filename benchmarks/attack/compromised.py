"""Measures what other clients notice while a compromised worker floods the fleet.

    python -m benchmarks compromised [--seconds 5]

A whole fleet (`holdfast up`, 2 workers) and honest clients that request short streams, first alone. Then one rogue worker after
another joins (`rogue.py`), each in its own process and with its own account, and floods the fleet in one way: frames to the
frontend, KV events, facts, heartbeats, connections to the other workers. Measured: time to first token, the broker's memory, and
whether the attempt was reported and its sender ejected. Exits with 1 if the 99th percentile under a flood is more than
`TIMES_MAX` times the undisturbed one (or `FLOOR_MS`), an honest request failed, the broker uses more than `BROKER_MB_MAX`, or a
sender was not ejected.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.attack.rogue import FLOODS
from benchmarks.local_fleet import LocalFleet
from benchmarks.serving.abuse import Address, honest, quantiles_ms
from events.observations import IntrusionRefused, WorkerJoined

TIMES_MAX = 3.0
FLOOR_MS = 300.0  # a p99 below it is acceptable, whatever its ratio to the undisturbed one
BROKER_MB_MAX = 300.0
UNREPORTED = ("connections",)  # the other workers count these: a worker reports no intrusions
AFTER_S = 2.0  # from a rogue worker's registration to its flood
REPORTED_S = 20.0


def memory_mb(pid: int) -> float:
    """Return a process's resident memory."""
    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(pid).memory_info().rss) / 1e6
    return 0.0


async def most_mb(pid: int, over: asyncio.Event) -> float:
    """Return the maximum resident memory of a process until the event is set."""
    most = 0.0
    while not over.is_set():
        most = max(most, memory_mb(pid))
        await asyncio.sleep(0.05)
    return most


async def flood(
    fleet: LocalFleet, kind: str, name: str, seconds: float, targets: Sequence[str]
) -> dict[str, Any]:
    """Let one rogue worker join and flood; return what the other clients saw."""
    (broker,) = (p["pid"] for p in (await fleet.status())["processes"] if p["role"] == "nats")
    command = [sys.executable, "-m", "benchmarks.attack.rogue", "--data", str(fleet.data), "--name", name]
    command += ["--flood", kind, "--seconds", str(seconds), "--after", str(AFTER_S)]
    command += [part for target in targets for part in ("--target", target)]
    rogue = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    over = asyncio.Event()
    watching = asyncio.ensure_future(most_mb(broker, over))
    try:
        await fleet.until(lambda s: name in {w["id"] for w in s["workers"]})
        await asyncio.sleep(AFTER_S)
        times = await honest(("127.0.0.1", fleet.port), seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + REPORTED_S):
                await rogue.wait()
        reports = await reported(fleet, name, kind)
    finally:
        over.set()
        if rogue.returncode is None:
            rogue.kill()
        said, _ = await rogue.communicate()
    return {
        "ttft_ms": quantiles_ms(times),
        "failed": sum(time == float("inf") for time in times),
        "broker_mb": round(await watching),
        "sent": int(said.split()[-1])
        if said.split()
        else None,  # None: it was disconnected before it could report
        "reported": sum(fact.times for fact in reports),
        "ejected": any(fact.eject for fact in reports),
    }


async def reported(fleet: LocalFleet, name: str, kind: str) -> list[IntrusionRefused]:
    """Return the reports about one worker, once there is one."""
    found: list[IntrusionRefused] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.0 if kind in UNREPORTED else REPORTED_S):
            while not any(fact.eject for fact in found):
                events = await fleet.events()
                facts = [event.fact for event in events if isinstance(event.fact, IntrusionRefused)]
                found = [fact for fact in facts if fact.worker == name]
                await asyncio.sleep(0.2)
    return found


async def measure(seconds: float) -> dict[str, Any]:
    """Return what honest clients saw alone and under each flood."""
    with tempfile.TemporaryDirectory(prefix="holdfast-compromised-") as folder:
        fleet = LocalFleet.start(
            Path(folder) / "data", "--workers", "2", "--itl-ms", "20", "--planner-mode", "off"
        )
        try:
            await fleet.ready()
            workers = (await fleet.healthy(2))["workers"]
            address: Address = ("127.0.0.1", fleet.port)
            await honest(address, 2.0)
            alone = await honest(address, 2 * seconds)
            before = {worker["id"]: worker["instance"] for worker in workers}
            facts = [event.fact for event in await fleet.events()]
            targets = [fact.url for fact in facts if isinstance(fact, WorkerJoined)]
            floods = {
                kind: await flood(fleet, kind, f"x{number}", seconds, targets)
                for number, kind in enumerate(FLOODS)
            }
            status = await fleet.status()
            lives = {worker["id"]: worker["instance"] for worker in status["workers"]}
            return {
                "alone_ms": quantiles_ms(alone),
                "failed": sum(time == float("inf") for time in alone),
                "floods": floods,
                "others_live_on": all(lives.get(name) == life for name, life in before.items()),
                "load": round(os.getloadavg()[0], 1),
            }
        finally:
            fleet.stop()


def holds(found: Mapping[str, Any]) -> bool:
    """Return whether the bounds hold."""
    most_ms = max(TIMES_MAX * found["alone_ms"]["p99"], FLOOR_MS)
    floods: Mapping[str, Mapping[str, Any]] = found["floods"]
    return (
        found["failed"] == 0
        and bool(found["others_live_on"])
        and all(one["failed"] == 0 and one["ttft_ms"]["p99"] <= most_ms for one in floods.values())
        and all(one["broker_mb"] <= BROKER_MB_MAX for one in floods.values())
        and all(one["ejected"] for kind, one in floods.items() if kind not in UNREPORTED)
    )


def main() -> int:
    """Measure, print one JSON object, and exit with 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds of each flood (default: 5)")
    args = parser.parse_args()
    found = asyncio.run(measure(args.seconds))
    print(json.dumps({"benchmark": "compromised", **found}))
    return 0 if holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
