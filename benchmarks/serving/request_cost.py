"""Measures a frontend's cost per request in machine instructions, independent of machine speed.

    python -m benchmarks request_cost [--requests 256] [--runs 3]      # with valgrind installed: a minute or two per run
    python -m benchmarks request_cost --once 4000 [--profile FILE]     # microseconds of CPU, and a cProfile

A whole static frontend in one process with two workers and 64 users that repeat one request: a chat of 64 tokens,
streamed, greedy. A worker's output arrives in three pieces, as from simulated workers flat out: the first token, and
two batches gathered meanwhile. The figure is the instructions of a process that answers many requests,
minus those of one that answers few, by valgrind's callgrind; it includes the workers' and users' own share, about a tenth.
To compare two trees, run it in each.
"""

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

import uvloop

from controller.adapters.embedded.free_port import free_port
from controller.frontend.settings import FrontendSettings
from controller.processes.frontend import FrontendProcess
from events import wire

USERS, PIECES = 64, (1, 32, 31)
TOKENS = sum(PIECES)
FEW = 64
READY_S = 20.0
END = b"0\r\n\r\n"


class CannedWorker(asyncio.Protocol):
    """Answers every request with predefined tokens."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._split = wire.Splitter()
        self._said: dict[int, int] = {}  # pieces, by stream
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.WriteTransport, transport).write  # uvloop's is not a subclass

    def data_received(self, data: bytes) -> None:
        for body in self._split.feed(data):
            frame = wire.to_worker.decode(body)
            if isinstance(frame, wire.Hello):
                self._write(wire.encode(wire.Welcome("w", f"i{id(self)}", "m")))
            elif isinstance(frame, wire.Generate):
                self._said[frame.stream] = 0
        if self._said and not self._busy:
            self._busy = True
            self._loop.call_soon(self._say)

    def _say(self) -> None:
        self._write(wire.encode(wire.Step(self._step())))
        self._busy = bool(self._said)
        if self._busy:
            self._loop.call_soon(self._say)

    def _step(self) -> list[wire.Chunk]:
        chunks = []
        for stream, said in list(self._said.items()):
            made = sum(PIECES[:said])
            tokens = [300 + (place * 37 + stream) % 1700 for place in range(made, made + PIECES[said])]
            chunk = wire.Chunk(stream, tokens)
            chunk.cached_tokens = 0 if said == 0 else None
            self._said[stream] = said + 1
            if made + len(tokens) == TOKENS:
                chunk.finish = "length"
                del self._said[stream]
            chunks.append(chunk)
        return chunks


class User(asyncio.Protocol):
    """Sends requests, one after another, while some are left."""

    def __init__(self, number: int, port: int, left: list[int], over: "asyncio.Queue[None]") -> None:
        body = json.dumps(
            {
                "model": "m",
                "messages": [{"role": "user", "content": f"hello world {number}"}],
                "max_tokens": TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._left, self._over = left, over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.WriteTransport, transport).write  # uvloop's is not a subclass

    def ask(self) -> None:
        """Send a request, if one is left."""
        if self._left[0]:
            self._left[0] -= 1
            self._write(self._request)

    def data_received(self, data: bytes) -> None:
        if data.endswith(END):
            self._over.put_nowait(None)
            self.ask()


async def answer(requests: int, profile: str) -> float:
    """Let a frontend answer `requests` requests, after a warm-up; return the CPU seconds per request."""
    loop, port, left = asyncio.get_running_loop(), free_port(), [0]
    over: asyncio.Queue[None] = asyncio.Queue()
    servers = [await loop.create_server(CannedWorker, "127.0.0.1", 0) for _ in range(2)]
    static = ",".join(f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers)
    with tempfile.TemporaryDirectory() as data:
        frontend = FrontendProcess(FrontendSettings(static=static, port=port), "f0", Path(data))
        serving = asyncio.create_task(frontend.run_static())
        async with asyncio.timeout(READY_S * 10):  # it is slow under valgrind
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.1)
        users = [
            (await loop.create_connection(lambda n=n: User(n, port, left, over), "127.0.0.1", port))[1]  # type: ignore[misc]
            for n in range(USERS)
        ]

        async def ask(count: int) -> None:
            left[0] = count
            for user in users:
                user.ask()
            for _ in range(count):
                await over.get()

        await ask(FEW)
        profiler = cProfile.Profile()
        if profile:
            profiler.enable()
        began = time.process_time()
        await ask(requests)
        took = time.process_time() - began
        if profile:
            profiler.disable()
            profiler.dump_stats(profile)
        serving.cancel()
        return took / requests


def instructions(requests: int, module: str) -> int:
    """Return the instructions of a process of this module that answers `requests` requests."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        command = [
            "valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", f"--log-file={log}",
            sys.executable, "-m", module, "--once", str(requests),
        ]  # fmt: skip
        fixed = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        subprocess.run(command, env=os.environ | fixed, check=True, stdout=subprocess.DEVNULL)
        found = re.search(r"Collected : (\d+)", log.read_text())
    if found is None:
        raise SystemExit("valgrind does not report its instruction count")
    return int(found.group(1))


def measured(answer: Callable[[int, str], Coroutine[None, None, float]], module: str, says: str) -> None:
    """Measure the cost of this module's `answer` per request, and print one JSON object."""
    p = argparse.ArgumentParser(description=says.splitlines()[0])
    p.add_argument("--requests", type=int, default=256)
    p.add_argument("--runs", type=int, default=3)
    p.add_argument(
        "--once", type=int, default=0, metavar="REQUESTS", help="measure CPU time only, in this process"
    )
    p.add_argument("--profile", default="", metavar="FILE", help="with --once: a cProfile of it")
    a = p.parse_args()
    if a.once:
        print(json.dumps({"cpu_us": round(uvloop.run(answer(a.once, a.profile)) * 1e6, 1)}), flush=True)
        os._exit(0)  # a frontend that is cancelled now would log a lot
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: --once measures CPU time without it")
    few = instructions(FEW, module)
    runs = [round((instructions(FEW + a.requests, module) - few) / a.requests / 1000) for _ in range(a.runs)]
    print(json.dumps({"kiloinstructions": statistics.median(runs), "runs": runs}))


if __name__ == "__main__":
    measured(answer, "benchmarks.serving.request_cost", __doc__ or "")
