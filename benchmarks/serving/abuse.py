"""Measures what other clients notice while strangers send expensive requests.

    python -m benchmarks abuse [--seconds 20] [--connections 50] [--pause 20] [--after 60] [--text-mb 10]

A whole fleet (`holdfast up`, 2 workers). Honest clients request short streams, first alone, then beside `--connections` of
each kind. At the frontend: texts longer than any context, texts that nearly fit, gzip bombs, bodies with a million lists, with
a million unknown names, with 10,000 messages, bodies that trickle, heads that do not end, and silence. At each worker: silence
and half hellos. Each repeats after a pause. Measured: TTFT both ways; the frontend's memory before, its maximum, and
`--after` seconds after the last of it. Exits with 1 if the 99th percentile is more than twice the undisturbed one, memory is not
within a fifth of the earlier one, or an honest request failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.local_fleet import LocalFleet

TTFT_TIMES_MAX, MEMORY_TIMES_MAX = 2.0, 1.2
RATE = 20.0  # honest requests per second
ANSWERS_WITHIN_S = 60.0
HALF_HELLO = struct.pack("<I", 100) + b"\x93"
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")

Address = tuple[str, int]
Abuse = Callable[[Address], Awaitable[str]]


def request(body: bytes, *headers: str) -> bytes:
    """Return a request for a completion."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def prompt(text: str) -> bytes:
    """Return a body with this prompt."""
    return json.dumps({"model": "sim", "prompt": text, "max_tokens": 4}).encode()


async def sent(address: Address, said: bytes) -> str:
    """Send this on a new connection; return the status of the answer."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        line = await reader.readline()
        await reader.read()
        return line.split(b" ")[1].decode() if b" " in line else "closed"
    finally:
        writer.close()


async def trickled(address: Address) -> str:
    """Send a body at one byte per second."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request(b" " * 1_000_000)[:-999_999])
        while not reader.at_eof():
            writer.write(b" ")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    line = await reader.readline()
                    return line.split(b" ")[1].decode() if b" " in line else "closed"
        return "closed"
    finally:
        writer.close()


def abuses(text_mb: int) -> dict[str, Abuse]:
    """Return the abuses of a frontend, by name."""
    squeezed = zlib.compressobj(9, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    bomb = b"".join(squeezed.compress(b" " * 2**20) for _ in range(100)) + squeezed.flush()
    sayings = {
        "long_text": request(prompt("the quick brown fox " * (text_mb * 50_000)), "Connection: close"),
        "nearly_fits": request(prompt("the quick brown fox " * 4_000), "Connection: close"),
        "gzip_bomb": request(bomb, "Content-Encoding: gzip", "Connection: close"),
        "lists": request(b'{"prompt":[' + b"[]," * 1_000_000 + b"0]}", "Connection: close"),
        "names": request(
            b'{"model":"sim"' + b"".join(b',"a%d":1' % n for n in range(1_000_000)) + b"}",
            "Connection: close",
        ),
        "messages": request(
            b'{"model":"sim","messages":[' + b'{"role":"a","content":""},' * 9_999 + b"0]}",
            "Connection: close",
        ),
        "half_head": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        "silence": b"",
    }
    by_name: dict[str, Abuse] = {name: _saying(said) for name, said in sayings.items()}
    return {**by_name, "trickle": trickled}


def _saying(said: bytes) -> Abuse:
    return lambda address: sent(address, said)


async def abuse(
    frontend: Address,
    workers: Sequence[Address],
    seconds: float,
    connections: int,
    pause_s: float,
    text_mb: int,
) -> dict[str, dict[str, int]]:
    """Run all abuses for `seconds`; return how often each kind ended in which way."""
    ends: dict[str, Counter[str]] = {}

    async def again(kind: str, what: Abuse, address: Address) -> None:
        counted = ends.setdefault(kind, Counter())
        await asyncio.sleep(random.uniform(0, pause_s))
        while True:
            try:
                counted[await what(address)] += 1
            except OSError:
                counted["broken"] += 1
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    kinds = [(kind, what, frontend) for kind, what in abuses(text_mb).items()]
    for worker in workers:
        kinds += [("worker_silence", _saying(b""), worker), ("half_hello", _saying(HALF_HELLO), worker)]
    tasks = [asyncio.ensure_future(again(*kind)) for kind in kinds for _ in range(connections)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {kind: dict(counted) for kind, counted in ends.items()}


async def first_token_s(address: Address, dice: random.Random) -> float:
    """Request a short stream; return the seconds until its first token, or infinity if none came."""
    text = " ".join(dice.choices(WORDS, k=60))
    body = {"model": "sim", "prompt": text, "max_tokens": 8, "stream": True}
    began = time.monotonic()
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            reader, writer = await asyncio.open_connection(*address)
            try:
                writer.write(request(json.dumps(body).encode()))
                await reader.readuntil(b"data: ")
                took = time.monotonic() - began
                await reader.readuntil(b"[DONE]")
                return took
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return float("inf")


async def honest(address: Address, seconds: float) -> list[float]:
    """Send requests at a steady rate for `seconds`; return the times to first token, the shortest first."""
    dice, asked = random.Random(1), []
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        asked.append(asyncio.ensure_future(first_token_s(address, dice)))
        await asyncio.sleep(max(0.0, len(asked) / RATE - now))
    return sorted(await asyncio.gather(*asked))


def quantiles_ms(times: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {name: round(times[int(len(times) * q)] * 1000, 1) for name, q in (("p50", 0.5), ("p99", 0.99))}


def resident_mb(frontends: Sequence[psutil.Process]) -> float:
    """Return the memory of a fleet's frontends."""
    return float(sum(process.memory_info().rss for process in frontends)) / 1e6


def cpu_s(frontends: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of a fleet's frontends."""
    return float(sum(sum(process.cpu_times()[:2]) for process in frontends))


def listening(fleet: LocalFleet, role: str) -> list[Address]:
    """Return the addresses of a role's processes, including admin ports."""
    found = set()
    for process in fleet.family():
        with contextlib.suppress(psutil.Error):
            if role in process.cmdline():
                found |= {
                    tuple(c.laddr) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN
                }
    return sorted(found)


async def most_mb(frontends: Sequence[psutil.Process], over: asyncio.Event) -> float:
    """Return the maximum of their memory until the event is set."""
    most = 0.0
    while not over.is_set():
        most = max(most, resident_mb(frontends))
        await asyncio.sleep(0.1)
    return most


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what honest clients saw with and without strangers, and the memory over time."""
    with tempfile.TemporaryDirectory(prefix="holdfast-abuse-") as folder:
        fleet = LocalFleet.start(Path(folder) / "data", "--workers", "2", "--itl-ms", "20")
        try:
            await fleet.ready()
            await fleet.healthy(2)
            return await _measured(fleet, args)
        finally:
            fleet.stop()


async def _measured(fleet: LocalFleet, args: argparse.Namespace) -> dict[str, Any]:
    frontends = [p for p in fleet.family() if "frontend" in p.cmdline()]
    address: Address = ("127.0.0.1", fleet.port)
    workers = listening(fleet, "worker")
    await honest(address, 3.0)
    alone = await honest(address, args.seconds)
    before, over = resident_mb(frontends), asyncio.Event()
    cpu = cpu_s(frontends)
    watching = asyncio.ensure_future(most_mb(frontends, over))
    told = {"frontend": address, "workers": workers, "seconds": args.seconds + 2}
    told |= {"connections": args.connections, "pause_s": args.pause, "text_mb": args.text_mb}
    command = [sys.executable, "-m", "benchmarks.serving.abuse", "--strangers", json.dumps(told)]
    strangers = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    await asyncio.sleep(2.0)
    beside = await honest(address, args.seconds)
    ends, _ = await strangers.communicate()
    over.set()
    most = await watching
    await asyncio.sleep(args.after)
    ttft = {"alone": quantiles_ms(alone), "beside": quantiles_ms(beside)}
    memory = {"before": round(before), "most": round(most), "after": round(resident_mb(frontends))}
    return {
        "ttft_ms": ttft,
        "ttft_p99_times": round(ttft["beside"]["p99"] / ttft["alone"]["p99"], 2),
        "frontend_cores": round((cpu_s(frontends) - cpu) / (args.seconds + 2), 2),
        "failed": sum(time == float("inf") for time in (*alone, *beside)),
        "frontend_mb": memory,
        "memory_times": round(memory["after"] / memory["before"], 2),
        "strangers": json.loads(ends),
        "load": round(os.getloadavg()[0], 1),
    }


def holds(found: Mapping[str, Any]) -> bool:
    """Return whether the bounds hold. If honest requests failed, their times may be NaN, which compares false with everything."""
    slower, larger = float(found["ttft_p99_times"]), float(found["memory_times"])
    return int(found["failed"]) == 0 and slower <= TTFT_TIMES_MAX and larger <= MEMORY_TIMES_MAX


def _strangers(told: Mapping[str, Any]) -> None:
    frontend, *workers = ((str(host), int(port)) for host, port in (told["frontend"], *told["workers"]))
    rest = {name: told[name] for name in ("seconds", "connections", "pause_s", "text_mb")}
    print(json.dumps(asyncio.run(abuse(frontend, workers, **rest))))


def main() -> int:
    """Measure, print one JSON object, and exit with 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=50, help="connections of each kind (default: 50)")
    parser.add_argument("--pause", type=float, default=20.0, help="seconds before each repeats (default: 20)")
    parser.add_argument(
        "--after", type=float, default=60.0, help="seconds until memory is measured (default: 60)"
    )
    parser.add_argument("--text-mb", type=int, default=10)
    parser.add_argument("--strangers", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.strangers:
        _strangers(json.loads(args.strangers))
        return 0
    found = asyncio.run(measure(args))
    print(json.dumps({"benchmark": "abuse", **found}))
    return 0 if holds(found) else 1


if __name__ == "__main__":
    sys.exit(main())
