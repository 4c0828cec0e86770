"""Measures the transfer rate of KV blocks between two processes, compared with plain shared memory.

    python -m benchmarks kv [--mb 64 1024] [--runs 7]

`plain`: one copy into a file in /dev/shm that both processes have mapped and used before. `shared`, `unix`, `tcp`: a
whole transfer, from connecting until the target has verified and committed it. All in turn in each run; GB/s, medians.
`first`: into memory that neither process has used, where the kernel creates the pages; including the reservation.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import Description, Grant, TransferAddress
from workers.kv_transfer.receiver import ROOT, Arrived, Receiver, Regions
from workers.kv_transfer.sender import Mappings, Sender

BLOCK_BYTES = 1 << 20
KV = Description("model", "main", "float16", 32, 8, 128, 16, BLOCK_BYTES)
SPARE_BYTES_MAX = 4 << 30  # so that the largest is reused, too
WAYS = ("shared", "unix", "tcp")


def target() -> None:
    """Answer each number of blocks on stdin with a grant, and then with whether they arrived."""
    regions = Regions(f"bench-{os.getpid()}", spare_bytes_max=SPARE_BYTES_MAX)
    receiver = Receiver((KV,), regions, ReservationPolicy(bytes_max=8 << 30))
    try:
        for line in sys.stdin:
            grant = receiver.reserve(KV, int(line))
            print(msgspec.json.encode(grant).decode(), flush=True)
            arrived = receiver.arrival(grant.ticket).result(60)
            assert isinstance(arrived, Arrived), arrived
            receiver.release(grant.ticket)
            print("ok", flush=True)
    finally:
        receiver.close()


class Target:
    """A process that receives transfers."""

    def __init__(self) -> None:
        """Start it."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.failures.kv", "--target"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.mappings = Mappings(SPARE_BYTES_MAX)

    def move(self, source: memoryview, way: str) -> tuple[float, float]:
        """Return the seconds of a transfer, without its reservation and with it."""
        assert self.process.stdin and self.process.stdout
        asked = time.perf_counter()
        print(len(source) // BLOCK_BYTES, file=self.process.stdin, flush=True)
        grant = msgspec.json.decode(self.process.stdout.readline(), type=Grant)
        if way != "shared":
            grant = msgspec.structs.replace(grant, region="")
        if way == "tcp":
            endpoint = TransferAddress(grant.endpoint.host, grant.endpoint.port)
            grant = msgspec.structs.replace(grant, endpoint=endpoint)
        began = time.perf_counter()
        sender = Sender(grant, self.mappings)
        sender.open()
        assert sender.shared == (way == "shared")
        sender.send(source)
        sender.finish(b"", range(len(source) // BLOCK_BYTES * KV.block_size), len(source) // BLOCK_BYTES * 16)
        ended = time.perf_counter()
        assert self.process.stdout.readline() == "ok\n"
        return ended - began, ended - asked


class Plain:
    """Memory of /dev/shm that stays mapped."""

    def __init__(self, size: int) -> None:
        """Create it; the first copy touches its pages."""
        path = ROOT / f"holdfast-bench-{os.getpid()}"
        with path.open("xb+") as file:
            path.unlink()
            file.truncate(size)
            self.memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)

    def copy(self, source: memoryview) -> float:
        """Return the seconds that one copy took."""
        began = time.perf_counter()
        self.memory[:] = np.frombuffer(source, np.uint8)
        return time.perf_counter() - began


def measure(mb: int, runs: int) -> dict[str, Any]:
    """Move `mb` megabytes by every method."""
    size = mb << 20
    source = memoryview(bytearray(os.urandom(BLOCK_BYTES)) * mb)
    there = Target()
    plain = Plain(size)
    try:
        first_plain = plain.copy(source)
        first = there.move(source, "shared")[1]
        took: dict[str, list[float]] = {name: [] for name in ("plain", *WAYS)}
        for _ in range(runs):
            took["plain"].append(plain.copy(source))
            for way in WAYS:
                took[way].append(there.move(source, way)[0])
    finally:
        assert there.process.stdin
        there.process.stdin.close()
        there.process.wait(30)
    speeds = {name: [round(size / one / 1e9, 2) for one in each] for name, each in took.items()}
    medians = {name: statistics.median(each) for name, each in speeds.items()}
    return {
        "kv": f"{mb} MB",
        "load": round(os.getloadavg()[0], 1),
        **medians,
        "shared over plain": round(medians["shared"] / medians["plain"], 2),
        "first": {"plain": round(size / first_plain / 1e9, 2), "shared": round(size / first / 1e9, 2)},
        "runs": speeds,
    }


def main() -> None:
    """Print one JSON object per size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mb", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        return target()
    for mb in args.mb:
        print(json.dumps(measure(mb, args.runs)), flush=True)


if __name__ == "__main__":
    main()
