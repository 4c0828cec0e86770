"""Measures one worker's speed and cost: the direct path with which the frontend is compared.

    python -m benchmarks worker [flat itl start thousand transformers] [--runs 3]

`flat`: simulated, flat out, 64 and 256 streams of 64 tokens and 64 of 2,000 over one connection; tokens per second and
per worker-CPU-second. `itl`: 64 streams at 20 ms per token; the time between a stream's tokens. `start`: from the
command to the first answer to a hello, without a broker. `thousand`: 1,000 simulated workers in one process.
`transformers`: the tiny model, one stream of 128 tokens at a time and eight; omitted if torch is not installed. One
JSON object per row: the median of the runs, and the runs.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import uvloop

from events import wire
from events.wire import Generate, Hello, Sampling, Step, Welcome

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Reader(asyncio.Protocol):
    """Keeps `at_once` streams open until `asked` were answered, and counts what arrives."""

    def __init__(self, at_once: int, asked: int, tokens: int) -> None:
        self.at_once, self.left, self.wanted = at_once, asked, tokens
        self.tokens = self.open = self.next = 0
        self.began = 0.0
        self.gaps: list[float] = []
        self.last: dict[int, float] = {}
        self.over: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._splitter = wire.Splitter()
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(wire.encode(Hello("benchmark")))

    def ask(self) -> None:
        self.next += 1
        self.left -= 1
        self.open += 1
        prompt = [300 + self.next % 1000, 400, 500] * 11
        sampling = Sampling(max_tokens=self.wanted, ignore_eos=True)
        self._transport.write(wire.encode(Generate(self.next, f"r{self.next}", prompt, 33, sampling)))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for body in self._splitter.feed(data):
            frame = wire.to_frontend.decode(body)
            if type(frame) is Step:
                self._take(frame, now)
            elif type(frame) is Welcome:
                self.began = now
                for _ in range(min(self.at_once, self.left)):
                    self.ask()
        if self.next and not self.open and not self.over.done():
            self.over.set_result(now - self.began)

    def _take(self, frame: Step, now: float) -> None:
        for chunk in frame.chunks:
            self.tokens += len(chunk.tokens)
            if chunk.stream in self.last:
                self.gaps.append(now - self.last[chunk.stream])
            self.last[chunk.stream] = now
            if chunk.finish or chunk.error:
                self.open -= 1
                if self.left:
                    self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(ConnectionError("the worker broke the connection"))


async def read(port: int, at_once: int, asked: int, tokens: int) -> tuple[Reader, float]:
    """Load one worker; return the reader and the seconds."""
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(
        lambda: Reader(at_once, asked, tokens), "127.0.0.1", port
    )
    async with asyncio.timeout(120):
        lasted = await reader.over
    transport.close()
    return reader, lasted


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def rss_mb(pid: int) -> float:
    """Return a process's resident memory."""
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return round(int(line.split()[1]) / 1024, 1)


@contextlib.contextmanager
def worker(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int, float]]:
    """Run a worker process; yield it, the port of its first worker, and the time from its start until it logged ready."""
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, "-m", "workers", "--data", data, *flags]
        began = time.perf_counter()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stderr is not None
        try:
            ready = json.loads(process.stderr.readline())
            yield process, int(ready["url"].rpartition(":")[2]), time.perf_counter() - began
        finally:
            process.terminate()
            process.communicate(timeout=30)


def flat() -> dict[str, float]:
    """Measure one run flat out."""
    found: dict[str, float] = {}
    with worker() as (process, port, _):
        time.sleep(1.0)  # for its admin port's imports
        for at_once, asked, tokens in ((64, 64 * 60, 64), (256, 256 * 20, 64), (64, 192, 2000)):
            before = cpu_s(process.pid)
            reader, lasted = uvloop.run(read(port, at_once, asked, tokens))
            spent = cpu_s(process.pid) - before
            row = f"c{at_once}_n{tokens}"
            found[f"{row}_tokens_per_s"] = round(reader.tokens / lasted)
            found[f"{row}_tokens_per_cpu_s"] = round(reader.tokens / max(spent, 0.01))
        found["rss_mb"] = rss_mb(process.pid)
    return found


def itl() -> dict[str, float]:
    """Measure the time between tokens at 20 ms a step."""
    with worker("--itl-ms", "20") as (_, port, _):
        reader, _ = uvloop.run(read(port, 64, 256, 64))
    gaps = sorted(reader.gaps)
    return {
        "itl_p50_ms": round(gaps[len(gaps) // 2] * 1e3, 2),
        "itl_p99_ms": round(gaps[len(gaps) * 99 // 100] * 1e3, 2),
        "itl_max_ms": round(gaps[-1] * 1e3, 2),
    }


def start() -> dict[str, float]:
    """Measure a start, to the first token."""
    with worker() as (_, port, ready_s):
        began = time.perf_counter()
        uvloop.run(read(port, 1, 1, 1))
        return {"ready_s": round(ready_s, 3), "first_token_ms": round((time.perf_counter() - began) * 1e3, 2)}


def thousand() -> dict[str, float]:
    """Measure 1,000 workers in one process."""
    began = time.perf_counter()
    with worker("--count", "1000") as (process, _, _):
        assert process.stderr is not None
        for _ in range(999):
            process.stderr.readline()
        ready_s = time.perf_counter() - began
        time.sleep(2.0)
        before = cpu_s(process.pid)
        time.sleep(3.0)
        idle = (cpu_s(process.pid) - before) / 3
        return {"ready_s": round(ready_s, 2), "rss_mb": rss_mb(process.pid), "idle_cpu_share": round(idle, 3)}


def transformers() -> dict[str, float]:
    """Measure the transformers engine, one stream at a time and eight."""
    from workers.engines.tiny import build_tiny

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(Path(folder) / "tiny")
        with worker("--engine", "transformers", "--model", f"{folder}/tiny") as (_, port, _):
            uvloop.run(read(port, 8, 8, 32))  # warm
            for at_once in (1, 8):
                reader, lasted = uvloop.run(read(port, at_once, at_once * 8, 128))
                found[f"c{at_once}_tokens_per_s"] = round(reader.tokens / lasted)
    return {**found, "eight_over_one": round(found["c8_tokens_per_s"] / found["c1_tokens_per_s"], 2)}


ROWS = {"flat": flat, "itl": itl, "start": start, "thousand": thousand, "transformers": transformers}


def main() -> None:
    """Print one line of JSON for each requested row."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)} (default: all)")
    flags.add_argument("--runs", type=int, default=3)
    args = flags.parse_args()
    everything = [row for row in ROWS if row != "transformers" or find_spec("torch")]
    for row in args.rows or everything:
        runs = [ROWS[row]() for _ in range(args.runs)]
        medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(json.dumps({"row": row, **medians, "runs": runs}), flush=True)


if __name__ == "__main__":
    main()
