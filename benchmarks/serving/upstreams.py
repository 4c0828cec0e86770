"""Measures one worker process in front of many upstreams.

    python -m benchmarks upstreams [--count 50] [--seconds 20] [--streams 100]

The servers are stand-ins in a separate process (`benchmarks/serving/stand_ins.py`). `holdfast up --upstreams FILE` starts the
fleet. Measured:

- the time until all workers are healthy; memory, threads and idle load of the worker process;
- the time from an added entry of the file until the frontend may send requests to its worker;
- the longest pause between two tokens of a stream, first undisturbed, then while two servers are broken. One of these floods
  its streams with comments, the other hangs. Streams at these two servers move, and are counted.
"""

import asyncio
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import psutil

from benchmarks.rows import Row, command_line, show
from benchmarks.serving.many import served
from benchmarks.serving.relay import HOLDFAST
from controller.adapters.embedded.free_port import free_port
from events.process.presence import present
from events.token_bytes import BUILTIN_FILE

READY_S = 120.0
GOALS = {"rss_mb": "<= 400", "idle_cores": "<= 0.15"}
TOKENS = 200


@contextlib.contextmanager
def stand_ins(count: int) -> Iterator[list[str]]:
    """Run the servers; yield their URLs."""
    command = [sys.executable, "-m", "benchmarks.serving.stand_ins", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield [process.stdout.readline().strip() for _ in range(count)]
        finally:
            process.kill()


@contextlib.contextmanager
def fleet(data: Path, file: Path, port: int) -> Iterator[None]:
    """Run a fleet in front of the file's upstreams."""
    flags = ["--upstreams", str(file), "--model", str(data), "--port", str(port), "--planner-mode", "off"]
    with (data / "up.log").open("wb") as log:
        command = [HOLDFAST, "up", "--engine", "openai", *flags, "--data", str(data / "fleet")]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(90)


def entry(number: int, url: str) -> str:
    return f"  - {{name: g{number}, url: '{url}'}}\n"


async def until_served(port: int, count: int) -> float:
    """Wait until the frontend may send requests to `count` workers; return the seconds it took."""
    began = time.perf_counter()
    while await asyncio.to_thread(served, f"http://127.0.0.1:{port}") < count:
        if time.perf_counter() - began > READY_S:
            sys.exit(f"not {count} healthy workers within {READY_S:g} s")
        await asyncio.sleep(0.1)
    return time.perf_counter() - began


async def longest_pauses(port: int, streams: int) -> list[float]:
    """Run streams through the API at the same time; return the longest pause between two tokens of each, in milliseconds."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(_pause(session, port, number) for number in range(streams))))


async def _pause(session: aiohttp.ClientSession, port: int, number: int) -> float:
    prompt = [300 + (7 * number + 13 * k) % 1500 for k in range(20 + number)]
    body = {"model": "stand-in", "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        response.raise_for_status()
        longest, last = 0.0, 0.0
        async for moment in _tokens(response):
            longest, last = max(longest, moment - last if last else 0.0), moment
    return longest * 1e3


async def _tokens(response: aiohttp.ClientResponse) -> AsyncIterator[float]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield time.perf_counter()


def summary(name: str, pauses: list[float], moved_ms: float = 1000.0) -> Row:
    """Return the row of one run. A stream with a pause of more than `moved_ms` has moved from a broken server."""
    stayed = [pause for pause in pauses if pause < moved_ms]
    return {
        "measure": name,
        "streams": len(pauses),
        "moved": len(pauses) - len(stayed),
        "longest_pause_ms_p50": statistics.median(stayed),
        "longest_pause_ms_max": max(stayed),
    }


def fault(url: str, kind: str) -> None:
    urllib.request.urlopen(urllib.request.Request(f"{url}/fault/{kind}", method="POST"), timeout=5).close()


async def measure(count: int, seconds: float, streams: int) -> None:
    """Run all measurements, and print their rows."""
    with tempfile.TemporaryDirectory(prefix="upstreams-") as folder, stand_ins(count + 1) as urls:
        data, file, port = Path(folder), Path(folder) / "up.yaml", free_port()
        shutil.copy(BUILTIN_FILE, data / "tokenizer.json")
        listed = "upstreams:\n" + "".join(entry(number, url) for number, url in enumerate(urls[:count]))
        file.write_text(listed)
        with fleet(data, file, port):
            ready_s = await until_served(port, count)
            (pid,) = {one.pid for one in present(data / "fleet") if one.role == "worker"}
            worker = psutil.Process(pid)
            await asyncio.sleep(5.0)
            before, began = sum(worker.cpu_times()[:2]), time.perf_counter()
            await asyncio.sleep(seconds)
            idle = (sum(worker.cpu_times()[:2]) - before) / (time.perf_counter() - began)
            show(
                {
                    "measure": f"{count} upstreams in one process",
                    "ready_s": ready_s,
                    "rss_mb": worker.memory_info().rss / 1e6,
                    "threads": worker.num_threads(),
                    "idle_cores": idle,
                    "goals": json.dumps(GOALS),
                }
            )
            file.write_text(listed + entry(count, urls[count]))
            show(
                {
                    "measure": "an entry added to the file until its worker gets requests",
                    "s": await until_served(port, count + 1),
                }
            )
            show(summary("undisturbed", await longest_pauses(port, streams)))
            running = asyncio.ensure_future(longest_pauses(port, streams))
            await asyncio.sleep(1.0)
            for url, kind in zip(urls, ("flood", "hang"), strict=False):
                await asyncio.to_thread(fault, url, kind)
            show(summary("one server floods, one hangs", await running))
            for url in urls[:2]:
                await asyncio.to_thread(fault, url, "none")


def main() -> None:
    """Run the benchmark."""
    parser = command_line("upstreams", __doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=20.0, help="time of the idle measurement")
    parser.add_argument("--streams", type=int, default=100)
    args = parser.parse_args()
    asyncio.run(measure(args.count, args.seconds, args.streams))


if __name__ == "__main__":
    main()
