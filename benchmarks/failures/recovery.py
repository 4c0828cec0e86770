"""Measures a fleet's recovery times, by kind of failure: the first document's table.

    make recovery-table                    or: python -m benchmarks recovery [-o json] [FAILURE …]

A whole fleet (`holdfast up`, two simulated workers of 5,000 prompt tokens/s, 20 ms per token, a canary every second). For each
failure a third worker with two GPUs joins, with the tests' driver stand-in, and fails while it serves its share of
24 streams.

    detection   the failure → the first fact on the journal about it, or a frontend's first move of a stream, whichever is first
    migration   from there until the last stream of that worker has continued elsewhere
    total       the failure → the same
    worst gap   the longest pause of a client of that worker, from its last token before the failure until the
                first from elsewhere

Note: silent corruption and throttling are only detected by checking. Their detection time is a
setting: the canaries' interval (30 s by default, 1 s here), and the 10 s for which clocks must be reduced.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.failures.xid import SHIM
from benchmarks.local_fleet import LocalFleet
from controller.demo.clients import Received, Users
from events.fact import Recorded
from events.observations import RequestExposed, RequestMigrated

STREAMS, STRUCK_AFTER, WITHIN_S = 24, 10, 60.0  # tokens of every stream before the failure; seconds
PREFILL = {"HOLDFAST_WORKER_PREFILL_TOKENS_PER_S": "5000"}  # a 70B model at TP 8
FLAGS = (
    "--workers",
    "2",
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
ABOUT = {
    "canary_failed",
    "device_faulted",
    "engine_faulted",
    "health_changed",
    "request_failed",
    "worker_left",
}
LEGEND = """\
moved      streams of the failed worker that continued elsewhere, with their KV cache (transfer) or computed again (reprefill)
lost       streams that ended with an error
exposed    streams that may have received wrong tokens; each is named on the journal
detection  until the first fact about the failure, or the first move; migration: from there until the last stream continued
worst gap  the longest pause of one of these streams, from its last token before the failure to the first from elsewhere"""
MOVES = ("group_placed", "moves_wanted")  # lines in a frontend's log
HOT = {"reasons": 0x20, "clock": 600}  # thermal slowdown


@dataclass(frozen=True, slots=True)
class Failure:
    """One kind of failure, and how many tokens streams need so that it strikes them."""

    says: str
    tokens: int = 400


FAILURES = {
    "crash": Failure("hard crash (SIGKILL)"),
    "xid": Failure("GPU dies (Xid 48)"),
    "ecc": Failure("uncorrectable ECC error (read every second)"),
    "sdc": Failure("silent corruption, 1 token in 8 (canary every 1 s)"),
    "nvlink": Failure("NVLink failure (Xid 74)"),
    "throttle": Failure("thermal throttling to 33 % of the peers' clock", 1100),
}


# Other prompts for each failure: with a warm prefix cache the survivors would have less work.
PROMPTS = [
    [300 + (7 * n + 13 * k + n * k) % 1500 for k in range(512)] for n in range(len(FAILURES) * STREAMS)
]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The cost of one failure. Milliseconds; None: it did not happen."""

    failure: str
    moved: int  # streams of the worker; a throttled worker may keep some
    methods: Mapping[str, int]  # number of streams by method of the move
    lost: int  # streams that ended with an error, of all
    exposed: int  # streams that may have received wrong tokens: each is named on the journal
    detection_ms: float | None
    migration_ms: float | None
    total_ms: float | None
    worst_gap_ms: float | None


class Bench:
    """One fleet with its driver stand-in."""

    def __init__(self, fleet: LocalFleet, users: Users, folder: Path, gpus: Any) -> None:
        self.fleet, self.users, self.gpus = fleet, users, gpus
        self._driver = {"LD_LIBRARY_PATH": str(folder), "NVML_SHIM_STATE": str(folder / "gpus")}

    async def measure(self, name: str) -> Recovery:
        """Let a worker join, break it, and measure what happens to its streams."""
        failure, worker = FAILURES[name], f"g-{name}"
        own = list(FAILURES).index(name) * STREAMS  # its first prompt
        for gpu in self.gpus.gpu:
            gpu.set(reasons=0, clock=1800, ecc=0)
        process = self._start(worker)
        try:
            await self.fleet.healthy(3)
            after = (await self.fleet.status())["journal"]["last_seq"] or 0
            before = len(self.users.streams)
            async with self.users.session() as session, asyncio.TaskGroup() as group:
                for n in range(STREAMS):
                    group.create_task(self.users.ask(session, own + n, failure.tokens, f"{name}-{n}"))
                await self._flowing(before)
                wall, monotonic = time.time(), time.monotonic()
                await self._strike(name, worker, process)
            streams = self.users.streams[before:]
            return self._recovery(name, worker, streams, await self.fleet.events(after), wall, monotonic)
        finally:
            process.kill()
            process.wait()

    async def _flowing(self, first: int) -> None:
        """Wait until every stream has some tokens."""
        async with asyncio.timeout(WITHIN_S):
            while sum(len(s.pieces) >= STRUCK_AFTER for s in self.users.streams[first:]) < STREAMS:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def _start(self, worker: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "controller.cli",
            "worker",
            "--data",
            str(self.fleet.data),
            "--name",
            worker,
        ]
        command += ["--gpus", "0,1", "--itl-ms", "20", "--die-with-parent"]
        with (self.fleet.data / f"{worker}.log").open("ab") as log:
            return subprocess.Popen(
                command, env={**os.environ, **PREFILL, **self._driver}, stdout=log, stderr=log
            )

    async def _strike(self, name: str, worker: str, process: subprocess.Popen[bytes]) -> None:
        gpu = self.gpus.gpu[0]
        match name:
            case "crash":
                os.kill(process.pid, signal.SIGKILL)
            case "xid":
                gpu.raise_xid(48)
            case "ecc":
                gpu.set(ecc=1)
            case "sdc":
                await self.fleet.act("corrupt", worker, 8)
            case "nvlink":
                gpu.raise_xid(74)
            case "throttle":
                gpu.set(**HOT)

    def _recovery(
        self,
        name: str,
        worker: str,
        streams: Sequence[Received],
        events: Sequence[Recorded],
        wall: float,
        monotonic: float,
    ) -> Recovery:
        moves = [e for e in events if isinstance(e.fact, RequestMigrated) and e.fact.source == worker]
        methods: dict[str, int] = {}
        for event in moves:
            assert isinstance(event.fact, RequestMigrated)
            methods[event.fact.method] = methods.get(event.fact.method, 0) + 1
        facts = [e.at.timestamp() for e in events if e.fact.kind() in ABOUT and _worker(e) == worker]
        known = [at - wall for at in (*facts, *self._moves()) if at >= wall]
        total = max((e.at.timestamp() - wall for e in moves), default=None)
        detection = min(known, default=None)
        gone_on = {
            e.fact.request: e.at.timestamp() - wall for e in moves if isinstance(e.fact, RequestMigrated)
        }
        gaps = [
            longest_gap_s(s, monotonic, monotonic + gone_on[s.request])
            for s in streams
            if s.request in gone_on
        ]
        return Recovery(
            failure=FAILURES[name].says,
            moved=len(gone_on),
            methods=methods,
            lost=sum(bool(s.error) for s in streams),
            exposed=len(
                {
                    e.fact.request
                    for e in events
                    if isinstance(e.fact, RequestExposed) and e.fact.worker == worker
                }
            ),
            detection_ms=_ms(detection),
            migration_ms=_ms(max(0.0, total - detection))
            if total is not None and detection is not None
            else None,
            total_ms=_ms(total),
            worst_gap_ms=_ms(max(gaps, default=None)),
        )

    def _moves(self) -> list[float]:
        """Return when frontends began to move streams, from their own logs."""
        logs = (self.fleet.data / "logs").glob("frontend*.log")
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        moves = [json.loads(line)["timestamp"] for line in lines if any(word in line for word in MOVES)]
        return [datetime.fromisoformat(at).timestamp() for at in moves]


def _worker(event: Recorded) -> str:
    return str(getattr(event.fact, "worker", ""))


def longest_gap_s(stream: Received, since: float, until: float) -> float:
    """Return the longest pause from the last token before `since` that had begun by `until`. Later pauses are normal on the new
    worker, where a canary's prompt delays all streams by a tenth of a second."""
    first = max((n for n, at in enumerate(stream.times) if at <= since), default=0)
    silences = pairwise(stream.times[first:])
    return max((later - earlier for earlier, later in silences if earlier <= until), default=0.0)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    """Start a fleet, its users, and GPUs that can be broken. Raise FileNotFoundError without a C compiler."""
    sys.path.insert(0, str(SHIM))
    shim: Any = __import__("shim")
    with tempfile.TemporaryDirectory(prefix="holdfast-recovery-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        shim.build(folder)
        gpus = shim.gpus(folder / "gpus", 4)
        fleet = LocalFleet.start(folder / "data", *FLAGS, environment=PREFILL)
        try:
            await fleet.ready()
            status = await fleet.healthy(2)
            yield Bench(fleet, Users(fleet.url, status["workers"][0]["model"], PROMPTS), folder, gpus)
        finally:
            fleet.stop()


async def measure(names: Sequence[str], say: Callable[[str], None]) -> list[Recovery]:
    """Inject each kind of failure once."""
    found = []
    say("starting a fleet")
    async with bench() as one:
        for number, name in enumerate(names, 1):
            say(f"{number} of {len(names)}: {FAILURES[name].says}")
            found.append(await one.measure(name))
    return found


def table(recoveries: Sequence[Recovery]) -> str:
    """Return the table in readable form."""
    head = (
        "failure",
        "moved",
        "by",
        "lost",
        "exposed",
        "detection",
        "migration",
        "total",
        "worst client gap",
    )
    rows: list[tuple[str, ...]] = [head]
    for r in recoveries:
        by = ", ".join(f"{count} {method}" for method, count in sorted(r.methods.items())) or "-"
        times = (r.detection_ms, r.migration_ms, r.total_ms, r.worst_gap_ms)
        rows.append((r.failure, str(r.moved), by, str(r.lost), str(r.exposed), *map(_span, times)))
    widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _span(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, and the progress on stderr. `argv`: command line arguments (default: this process's)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "failures", nargs="*", metavar="FAILURE", help=f"one of {', '.join(FAILURES)} (default: all)"
    )
    parser.add_argument(
        "-o", dest="output", choices=("text", "json"), default="text", help="output format (default: text)"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.failures if name not in FAILURES]:
        parser.error(f"unknown failure {unknown[0]!r}; choose from {', '.join(FAILURES)}")
    began = time.monotonic()
    found = asyncio.run(
        measure(args.failures or list(FAILURES), lambda text: print(f"# {text}", file=sys.stderr, flush=True))
    )
    if args.output == "json":
        print(
            json.dumps(
                {"seconds": round(time.monotonic() - began), "recoveries": [asdict(r) for r in found]},
                indent=1,
            )
        )
    else:
        print(f"{table(found)}\n\n{LEGEND}")
    return 1 if any(r.lost or not r.moved for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
