"""Sends odd requests to a fleet and checks that none of them breaks it.

    python -m benchmarks fuzz [--requests 1000] [--seed 1] [--at-once 16]
    python -m benchmarks fuzz --seed 1 --only 417              that one alone

A whole fleet (`holdfast up`, 2 simulated workers, flat out) receives odd requests (`odd_requests.py`): malformed heads, bodies
with bytes changed, every field of the API with values that are wrong, of another type or at an edge, clients that disconnect.
Meanwhile an honest client sends requests without a pause. Each odd request must be answered, or closed if it is no HTTP, within
30 s, and with no 5xx but 503. Every honest answer must equal the undisturbed one. Afterwards every process must be the same as
before, and all workers HEALTHY, with full weight and nothing in flight. Prints one JSON object; returns 1 if anything was wrong.
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.attack.odd_requests import Odd, odd_request, posted
from benchmarks.local_fleet import LocalFleet
from controller.demo.fleet import NotAsExpected
from events.observations import RequestFailed, RequestSuspected

WORKERS = 2
FLAGS = ("--workers", str(WORKERS), "--itl-ms", "0", "--canary-interval", "1")
SHORT = {  # so that requests without an end time out before ANSWERS_WITHIN_S
    "HOLDFAST_FRONTEND__CONNECTIONS__HEAD_S": "2",
    "HOLDFAST_FRONTEND__CONNECTIONS__IDLE_S": "2",
    "HOLDFAST_FRONTEND__ADMISSION__BODY_S": "3",
    "HOLDFAST_WORKER_CONTEXT_TOKENS": "4096",
}
ANSWERS_WITHIN_S = 30.0
WELL_WITHIN_S = 30.0
HONEST_PAUSE_S = 0.05
ANSWER_BYTES_MAX = 64 * 2**20
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
CODE = re.compile(rb'"code": ?"(\w+)')
# Error types that only a fault of ours or of an engine can cause; as status, or in a stream that has begun
BROKEN = {"internal", "engine_error", "non_finite", "disconnected", "stream_incomplete", "corrupt_output"}
BROKEN |= {"upstream_lost", "stalled", "request_poisonous"}
HONEST = {"model": "sim", "prompt": [300, 301, 302], "max_tokens": 16, "temperature": 0, "ignore_eos": True}

Address = tuple[str, int]


@dataclass
class Told:
    """The outcome of the requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    about: set[str] = field(default_factory=set)  # single fields of the API
    wrong: list[str] = field(default_factory=list)
    honest: int = 0
    honest_wrong: list[str] = field(default_factory=list)


async def exchanged(
    address: Address, said: bytes, leaves_after: int | None = None, within_s: float = ANSWERS_WITHIN_S
) -> bytes:
    """Send this on a new connection; return what arrives until the server closes, or the client disconnects. Raise
    TimeoutError."""
    async with asyncio.timeout(within_s):
        reader, writer = await asyncio.open_connection(*address)
        got = bytearray()
        try:
            with contextlib.suppress(
                ConnectionError
            ):  # an answer may arrive before all is sent, and then the connection closes
                writer.write(said)
                await writer.drain()
            with contextlib.suppress(ConnectionError):
                while leaves_after is None or len(got) < leaves_after:
                    if not (more := await reader.read(65_536)) or len(got) > ANSWER_BYTES_MAX:
                        break
                    got += more
            return bytes(got)
        finally:
            writer.transport.abort()


def judged(odd: Odd, got: bytes, told: Told) -> str:
    """Count an answer; return what is wrong with it, or an empty string."""
    statuses = [status.decode() for status in STATUS.findall(got)]
    codes = [code.decode() for code in CODE.findall(got)]
    told.statuses.update(statuses[-1:] or ["left" if odd.leaves_after is not None else "closed"])
    told.codes.update(codes)
    if bad := [s for s in statuses if s >= "500" and s != "503"] + [c for c in codes if c in BROKEN]:
        return f"answered with {bad[0]}: {got[-200:]!r}"
    if odd.whole and not statuses:
        return f"closed without an answer: {got[:100]!r}"
    return ""


async def tell(address: Address, odd: Odd, told: Told, within_s: float = ANSWERS_WITHIN_S) -> None:
    """Send one request and judge its answer."""
    told.kinds[odd.kind] += 1
    if odd.kind == "value":
        told.about.add(odd.about)
    try:
        wrong = judged(odd, await exchanged(address, odd.said, odd.leaves_after, within_s), told)
    except TimeoutError:
        wrong = f"no end within {within_s:g} s"
    except OSError as error:
        wrong = f"no connection: {error}"
    if wrong:
        told.wrong.append(f"{odd.number} ({odd.kind}, {odd.about}) {wrong}")


async def honest_text(address: Address) -> str:
    """Send a normal request; return the answer's text. Raise NotAsExpected if there is none."""
    try:
        got = await exchanged(address, posted("/v1/completions", json.dumps(HONEST).encode()))
        return str(json.loads(got.partition(b"\r\n\r\n")[2])["choices"][0]["text"])
    except (OSError, TimeoutError, ValueError, KeyError) as error:
        raise NotAsExpected(f"an honest request was not answered: {error!r}") from error


async def ask_on(address: Address, undisturbed: str, told: Told, over: asyncio.Event) -> None:
    """Send honest requests until the event is set, and once more afterwards."""
    last = False
    while not last:
        last = over.is_set()
        told.honest += 1
        try:
            text = await honest_text(address)
        except NotAsExpected as failed:
            text = str(failed)
        if text != undisturbed:
            told.honest_wrong.append(text[:200])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(over.wait(), HONEST_PAUSE_S)


async def tell_all(address: Address, requests: Sequence[Odd], at_once: int) -> Told:
    """Send all of them, `at_once` at a time, beside an honest client. Raise NotAsExpected if that gets no answer before."""
    told, over, waiting = Told(), asyncio.Event(), iter(requests)
    undisturbed = await honest_text(address)

    async def speaker() -> None:
        for odd in waiting:
            await tell(address, odd, told)

    async with asyncio.TaskGroup() as group:
        honest = group.create_task(ask_on(address, undisturbed, told, over))
        try:
            await asyncio.gather(*(speaker() for _ in range(at_once)))
        finally:
            over.set()
        await honest
    return told


def lives(fleet: LocalFleet) -> dict[int, tuple[float, str]]:
    """Return the processes that `up` has started, by pid, with start time and name. A database's own processes vary."""
    found = {}
    for process in psutil.Process(fleet.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[process.pid] = (process.create_time(), " ".join(process.cmdline()[:6]))
    return found


def well(status: dict[str, Any]) -> bool:
    """Return whether all workers are in full service and idle."""
    return len(status["workers"]) == WORKERS and all(
        (w["health"], w["weight"], w["breaker"], w["in_flight"]) == ("HEALTHY", 1, "closed", 0)
        for w in status["workers"]
    )


async def fuzzed(fleet: LocalFleet, requests: Sequence[Odd], at_once: int) -> dict[str, Any]:
    """Send the requests to a fleet that is ready; return the result."""
    await fleet.until(
        lambda status: well(status) and status["projector"]["lag"] == 0
    )  # the migrations are over
    before, after = lives(fleet), (await fleet.events())[-1].seq
    told = await tell_all(("127.0.0.1", fleet.port), requests, at_once)
    all_well = True
    try:
        await fleet.until(well, WELL_WITHIN_S)
    except NotAsExpected:
        all_well = False
    now = lives(fleet)
    facts = [event.fact for event in await fleet.events(after)]
    blamed = [f.reason for f in facts if isinstance(f, RequestFailed) and f.reason == "engine_error"]
    return {
        "requests": len(requests),
        "kinds": dict(told.kinds),
        "fields": len(told.about),
        "statuses": dict(sorted(told.statuses.items())),
        "codes": dict(told.codes.most_common()),
        "wrong": told.wrong,
        "honest": told.honest,
        "honest_wrong": told.honest_wrong,
        "processes": len(before),
        "restarted": sorted(before[pid][1] for pid in before if now.get(pid) != before[pid]),
        "blamed_on_workers": len(blamed) + sum(isinstance(fact, RequestSuspected) for fact in facts),
        "well_afterwards": all_well,
    }


def came_through(found: dict[str, Any]) -> bool:
    """Return whether nothing was wrong."""
    bad = found["wrong"] or found["honest_wrong"] or found["restarted"] or found["blamed_on_workers"]
    return not bad and found["well_afterwards"] and found["honest"] > 0


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start a fleet, send the requests, and return the result."""
    numbers = range(args.requests) if args.only is None else [args.only]
    with tempfile.TemporaryDirectory(prefix="holdfast-fuzz-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", *FLAGS, environment=SHORT)
        try:
            await fleet.ready()
            began = time.monotonic()
            found = await fuzzed(fleet, [odd_request(args.seed, n) for n in numbers], args.at_once)
            return {**found, "seed": args.seed, "seconds": round(time.monotonic() - began, 1)}
        finally:
            fleet.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16, help="requests in flight at once (default: 16)")
    parser.add_argument("--only", type=int, metavar="N", help="send only the request with this number")
    args = parser.parse_args(arguments)
    found = asyncio.run(measure(args))
    print(json.dumps({"benchmark": "fuzz", **found}), flush=True)
    for one in found["wrong"]:
        number = one.partition(" ")[0]
        print(f"again: python -m benchmarks fuzz --seed {args.seed} --only {number}", file=sys.stderr)
    return int(not came_through(found))


if __name__ == "__main__":
    sys.exit(main())
