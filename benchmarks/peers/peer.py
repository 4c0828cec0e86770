"""Compares Holdfast with NVIDIA Dynamo, side by side on the same machine in one run.

    python -m benchmarks peer [--dynamo-python PATH] [--runs 3] [--seconds 3]

Both are started in turn (Dynamo, Holdfast, Dynamo, …), loaded by the same client with the same requests, and broken
in the same way. Prints a table: medians of the runs, with faults counted and pauses pooled over all runs; then one JSON
object with everything. Dynamo has its own environment: `make peer` installs it and runs this.

Each run measures a system twice. Flat out: two engines without delays. At 20 ms per token: three engines, first
undisturbed, then with faults. A stream is lost if it ended with an error or before its end, and altered if it differs from the
undisturbed answer. Its pause is the longest gap after the fault, where a token is due every 20 ms.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.peer_systems import PROMPTS, Dynamo, Holdfast, System
from controller.demo.clients import Received, Users
from controller.trace.replay.endpoint import ReplayTarget
from events.errors import HoldfastError

PYTHON = Path(__file__).parents[2] / ".venv-peer" / "bin" / "python"
TOKENS, SPOKEN = 100, 10
KILLS = 2  # in each run
PATIENCE_S = 20.0  # for streams of a worker that hangs
MISSING = "Dynamo is not installed: run `make peer` to install it into .venv-peer, or set its Python with --dynamo-python."

Results = dict[str, dict[str, list[Any]]]  # row, system → results of each run


async def load(system: System, seconds: float, concurrency: int, *flags: str) -> dict[str, Any]:
    """Return the load client's results."""
    frontends = "+".join(map(str, await system.frontends()))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.serving.load", "--url", system.url, "--model", await system.model(), *flags,
        "--concurrency", str(concurrency), "--duration", str(seconds), "--pids", f"frontend={frontends}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(seconds + 60):
        output, _ = await process.communicate()
    got: dict[str, Any] = json.loads(output)
    if got["bad"] or got["stuck"]:
        print(f"{system.name}, c={concurrency}: {got['bad']}, {got['stuck']} stuck", file=sys.stderr)
    return got


async def flat(system: System, seconds: float, note: Callable[[str, Any], None]) -> None:
    """Measure relaying, flat out."""
    many = await load(system, seconds, 64, "--procs", "2")
    note("tokens per frontend-CPU-second, c=64", many["frontend"]["tok_per_cpu_s"])
    note("tokens/s, c=64", many["tok_s"])
    note("tokens/s, c=256", (await load(system, seconds, 256, "--procs", "2"))["tok_s"])
    note("TTFT p50, c=1, ms", (await load(system, seconds, 1))["ttft_ms"]["p50"])


async def steady(system: System, seconds: float, note: Callable[[str, Any], None]) -> None:
    """Measure latency at 20 ms per token."""
    ttft = (await load(system, seconds, 16))["ttft_ms"]
    note("TTFT p50, c=16, 20 ms/token, ms", ttft["p50"])
    note("TTFT p99, c=16, 20 ms/token, ms", ttft["p99"])
    itl = (await load(system, seconds, 64, "--itl"))["itl_ms"]
    note("ITL p99, c=64, 20 ms/token, ms", itl["p99"])


class Struck:
    """The streams of one system, during which one worker is broken."""

    def __init__(self, system: System, users: Users, session: ReplayTarget) -> None:
        self._system, self._users, self._session = system, users, session
        self._answers: list[list[str]] = []
        self._rounds = 0

    async def learn(self) -> None:
        """Record the undisturbed answers."""
        await self._system.workers()
        self._answers = await self._users.answers(self._session, TOKENS)

    async def under(self, strike: Callable[[int], Awaitable[None]]) -> dict[str, Any]:
        """Break one worker while all streams run, and return what their users received."""
        victim = (await self._system.workers())[0]
        streams, tasks = await self._begin(TOKENS)
        async with asyncio.timeout(PATIENCE_S):
            while any(len(s.pieces) < SPOKEN for s in streams):
                await asyncio.sleep(0.005)
                if all(task.done() for task in tasks):  # all failed at once
                    break
        at = time.monotonic()
        await strike(victim)
        _, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S)
        for task in waiting:
            task.cancel()
        names = await self._system.struck(victim, streams)
        pauses = [
            round(1000 * pause(s, at), 1) for s in streams if s.request in names and s.done and not s.error
        ]
        return self._got(streams) | {"struck": len(names), "pauses_ms": pauses}

    async def ask(self) -> dict[str, Any]:
        """Send new requests, and return what their users received."""
        streams, tasks = await self._begin(SPOKEN)
        _, waiting = await asyncio.wait(tasks, timeout=PATIENCE_S)
        for task in waiting:
            task.cancel()
        return self._got(streams)

    async def _begin(self, tokens: int) -> tuple[list[Received], list[asyncio.Task[Received]]]:
        self._rounds += 1
        before = len(self._users.streams)
        tasks = [
            asyncio.create_task(self._users.ask(self._session, n, tokens, f"round-{self._rounds}-{n}"))
            for n in range(len(PROMPTS))
        ]
        await asyncio.sleep(0)  # each task registers its stream before it waits
        return self._users.streams[before:], tasks

    def _got(self, streams: Sequence[Received]) -> dict[str, Any]:
        whole = [s for s in streams if s.done and not s.error]
        altered = sum(s.pieces != self._answers[s.prompt][: s.wanted] for s in whole)
        why = sorted({s.error or "silent" for s in streams if s not in whole})
        return {
            "streams": len(streams),
            "lost": len(streams) - len(whole),
            "altered": altered,
            "why_lost": why,
        }


def pause(stream: Received, at: float) -> float:
    """Return a user's longest pause after an instant, in seconds. (The next token may be in flight.)"""
    times = [at, *(t for t in stream.times if t > at)]
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


async def faults(system: System, note: Callable[[str, Any], None]) -> None:
    """Measure streams with a worker that is killed, raises at every step, or hangs."""
    users = Users(system.url, await system.model(), PROMPTS)
    async with users.session() as session:
        streams = Struck(system, users, session)
        await streams.learn()
        for _ in range(KILLS):
            note("kill", await streams.under(lambda worker: _signal(worker, signal.SIGKILL)))
        victim = (await system.workers())[0]
        note("error", await streams.under(lambda worker: system.fail(worker, True)))
        note("error, new requests", await streams.ask())
        await system.fail(victim, False)
        victim = (await system.workers())[0]
        note("hang", await streams.under(lambda worker: _signal(worker, signal.SIGSTOP)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGCONT)


async def _signal(worker: int, number: signal.Signals) -> None:
    os.kill(worker, number)


@contextlib.asynccontextmanager
async def running(name: str, python: Path, *, flat: bool) -> AsyncIterator[System]:
    """Start one of the two systems, and end it."""
    with tempfile.TemporaryDirectory(prefix="holdfast-peer-", ignore_cleanup_errors=True) as folder:
        place = Path(folder) / "run"
        system: System = (
            Holdfast(place, flat=flat) if name == "Holdfast" else Dynamo(place, python, flat=flat)
        )
        try:
            await system.start()
            yield system
        finally:
            await system.stop()


async def measure(python: Path, runs: int, seconds: float) -> Results:
    """Measure both systems in turn, `runs` times."""
    results: Results = defaultdict(lambda: defaultdict(list))
    for run in range(runs):
        for name in ("Dynamo", "Holdfast"):
            began = time.monotonic()

            def note(row: str, value: Any, name: str = name) -> None:
                results[row][name].append(value)

            async with running(name, python, flat=True) as system:
                await flat(system, seconds, note)
            async with running(name, python, flat=False) as system:
                await steady(system, seconds, note)
                await faults(system, note)
            print(f"run {run + 1} of {runs}, {name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    return results


def table(results: Results) -> str:
    """Return the results as a Markdown table."""
    lines = ["| | Dynamo | Holdfast |", "|---|---|---|"]
    for row, of in results.items():
        if not isinstance(of["Dynamo"][0], dict):
            lines.append(f"| {row} | {_median(of['Dynamo'])} | {_median(of['Holdfast'])} |")
            continue
        counts = [_counts(of[name]) for name in ("Dynamo", "Holdfast")]
        lines.append(
            f"| {row}: streams lost, altered, of all (of those struck) | {counts[0]} | {counts[1]} |"
        )
        if "pauses_ms" in of["Dynamo"][0]:
            pauses = [_pauses(of[name]) for name in ("Dynamo", "Holdfast")]
            lines.append(f"| {row}: pause p50 / p99, ms | {pauses[0]} | {pauses[1]} |")
    return "\n".join(lines)


def _median(values: Sequence[float]) -> str:
    return f"{_short(statistics.median(values))} ({_short(min(values))}–{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _counts(rounds: Sequence[dict[str, Any]]) -> str:
    lost, altered, streams = (sum(r[key] for r in rounds) for key in ("lost", "altered", "streams"))
    struck = f" ({sum(r['struck'] for r in rounds)})" if "struck" in rounds[0] else ""
    return f"{lost}, {altered}, of {streams}{struck}"


def _pauses(rounds: Sequence[dict[str, Any]]) -> str:
    pauses = sorted(ms for r in rounds for ms in r["pauses_ms"])
    if not pauses:
        return "none continued"
    return f"{statistics.median(pauses):.1f} / {pauses[min(len(pauses) - 1, int(0.99 * len(pauses)))]:.1f}"


def installed(python: Path) -> bool:
    """Return whether Dynamo is installed."""
    looks = (str(python), "-c", "from importlib.util import find_spec as f; exit(not f('dynamo.frontend'))")
    try:
        return subprocess.run(looks, capture_output=True, timeout=60, check=False).returncode == 0
    except OSError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print. `argv`: command line arguments (default: this process's)."""
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--dynamo-python", type=Path, default=Path(os.environ.get("DYNAMO_PYTHON", PYTHON)))
    p.add_argument("--runs", type=int, default=3)
    p.add_argument(
        "--seconds", type=float, default=3.0, help="seconds of each measurement under load (default: 3)"
    )
    a = p.parse_args(argv)
    if not installed(a.dynamo_python):
        print(MISSING, file=sys.stderr)
        return 2
    before = os.getloadavg()[0]
    try:
        results = asyncio.run(measure(a.dynamo_python.absolute(), a.runs, a.seconds))
    except (HoldfastError, TimeoutError) as error:
        print(f"the comparison failed: {error or 'no progress for too long'}", file=sys.stderr)
        return 1
    print(table(results))
    print(json.dumps({"cores": os.cpu_count(), "load_before": round(before, 2), **results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
