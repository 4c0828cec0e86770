"""Measures two KV transfers that share one link, compared with one alone and with the prediction.

    python -m benchmarks contention [--mb 64] [--mb-per-s 200] [--runs 5]

Two sources and two targets, each a process. All KV passes one more process with a limited rate in bytes per second for
all of them together: a bottleneck, as a network is and a loopback is not. The prediction is that of
`controller/migration/cost.py` with this link's rate in its table, made before anything is measured. `loopback` is the same
without that process, for comparison: there the transfers share processors and memory. Prints one JSON object; returns 1
if a prediction is off by more than 30 %, or less than 1.9 times as long for two.
"""

import argparse
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec

from controller.migration.cost import KvShape, MigrationTarget, MovingPolicy, estimate
from controller.migration.links import Lane, LinkSpec, LinkTable
from events.observations import Profile
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import Description, Grant, TransferAddress
from workers.kv_transfer.receiver import Arrived, Receiver, Regions
from workers.kv_transfer.sender import Sender

BLOCK_TOKENS = 16
SHAPE = KvShape(layers=32, kv_heads=8, head_size=128, bytes_per_element=2)
BLOCK_BYTES = SHAPE.shard_bytes_per_block(BLOCK_TOKENS)
KV = Description("model", "main", "float16", 32, 8, 128, BLOCK_TOKENS, BLOCK_BYTES)
PIECE = 1 << 16
ANSWER_S = 60.0
OFF_MAX = 0.3
TIMES_MIN = 1.9


def target() -> None:
    """Answer each number of blocks on stdin with a grant over TCP, and then with whether they arrived."""
    regions = Regions(f"contention-{os.getpid()}", spare_bytes_max=1 << 30)
    with closing(Receiver((KV,), regions, ReservationPolicy(bytes_max=1 << 30))) as receiver:
        for line in sys.stdin:
            grant = receiver.reserve(KV, int(line))
            endpoint = TransferAddress(grant.endpoint.host, grant.endpoint.port)
            print(
                msgspec.json.encode(msgspec.structs.replace(grant, endpoint=endpoint, region="")).decode(),
                flush=True,
            )
            assert isinstance(receiver.arrival(grant.ticket).result(ANSWER_S), Arrived)
            receiver.release(grant.ticket)
            print("ok", flush=True)


def source(blocks: int) -> None:
    """Answer each grant on stdin with the seconds from connecting until the target had verified and committed."""
    memory = memoryview(bytearray(os.urandom(BLOCK_BYTES)) * blocks)
    print("ready", flush=True)
    for line in sys.stdin:
        sender = Sender(msgspec.json.decode(line, type=Grant))
        began = time.perf_counter()
        sender.open()
        sender.send(memory)
        sender.finish(b"", range(blocks * BLOCK_TOKENS), blocks * BLOCK_TOKENS)
        print(time.perf_counter() - began, flush=True)


class Bucket:
    """A rate limit on the bytes of all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        """Wait until `size` bytes may pass."""
        with self._lock:
            begins = max(self._free_at, time.perf_counter())
            self._free_at = begins + size / self._rate
        time.sleep(max(0.0, begins - time.perf_counter()))


def link(bytes_per_s: float) -> None:
    """Answer each port on stdin with a port that forwards to it, with one rate limit for all of them together."""
    bucket = Bucket(bytes_per_s)
    for line in sys.stdin:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=_carry, args=(listener, int(line), bucket), daemon=True).start()
        print(listener.getsockname()[1], flush=True)


def _carry(listener: socket.socket, port: int, bucket: Bucket) -> None:
    """Forward one connection; the target's replies return without a limit."""
    with listener, listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ways = selectors.DefaultSelector()
        ways.register(near, selectors.EVENT_READ, far)
        ways.register(far, selectors.EVENT_READ, near)
        while True:
            for key, _ in ways.select():
                got = key.fileobj.recv(PIECE)  # type: ignore[union-attr]
                if not got:
                    return
                if key.fileobj is near:
                    bucket.wait(len(got))
                key.data.sendall(got)


class Child:
    """One of these processes, which answers each line with a line."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.failures.contention", *flags],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: object) -> None:
        """Write a line."""
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        """Read a line."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(ANSWER_S)
        self.process.stdout.close()


class Bench:
    """The five processes."""

    def __init__(self, stack: ExitStack, blocks: int, bytes_per_s: float) -> None:
        def child(*flags: str) -> Child:
            return stack.enter_context(closing(Child(*flags)))

        self.blocks = blocks
        self.targets = [child("--target") for _ in range(2)]
        self.sources = [child("--source", str(blocks)) for _ in range(2)]
        self.link = child("--link", str(bytes_per_s))
        for one in self.sources:
            assert one.hear() == "ready"

    def move(self, at_once: int, *, shared: bool) -> float:
        """Return the mean seconds of `at_once` concurrent transfers."""
        grants = []
        for one in self.targets[:at_once]:
            one.say(self.blocks)
            grants.append(msgspec.json.decode(one.hear(), type=Grant))
        if shared:
            for place, grant in enumerate(grants):
                self.link.say(grant.endpoint.port)
                endpoint = TransferAddress("127.0.0.1", int(self.link.hear()))
                grants[place] = msgspec.structs.replace(grant, endpoint=endpoint)
        for one, grant in zip(self.sources, grants, strict=False):
            one.say(msgspec.json.encode(grant).decode())
        took = [float(one.hear()) for one in self.sources[:at_once]]
        for one in self.targets[:at_once]:
            assert one.hear() == "ok"
        return statistics.mean(took)


def predicted_s(blocks: int, bytes_per_s: float, at_once: int) -> float:
    """Return the cost model's prediction for one of `at_once` concurrent transfers."""
    policy = MovingPolicy(links=LinkTable(tcp=LinkSpec(bytes_per_s=bytes_per_s, latency_s=0.0001)))
    profile = Profile(
        kv_blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        max_batch=1,
        prefill_tokens_per_s=5000.0,
        tpot_ms=((1, 1.0),),
    )
    there = MigrationTarget(name="there", profile=profile, free_blocks=blocks, lanes=(Lane("tcp"),))
    return estimate(policy, SHAPE, there, blocks * BLOCK_TOKENS, at_once=at_once).transfer_time_ms / 1000


def measure(mb: int, bytes_per_s: float, runs: int) -> dict[str, Any]:
    """Predict, then measure one and two transfers in turn."""
    blocks = mb * (1 << 20) // BLOCK_BYTES
    predicted = {at_once: predicted_s(blocks, bytes_per_s, at_once) for at_once in (1, 2)}
    took: dict[tuple[str, int], list[float]] = {(way, n): [] for way in ("link", "loopback") for n in (1, 2)}
    with ExitStack() as stack:
        bench = Bench(stack, blocks, bytes_per_s)
        for _ in range(runs):
            for (way, at_once), each in took.items():
                each.append(bench.move(at_once, shared=way == "link"))
    medians = {key: statistics.median(each) for key, each in took.items()}
    measured = {at_once: medians["link", at_once] for at_once in (1, 2)}
    return {
        "mb": mb,
        "mb_per_s": bytes_per_s / 1e6,
        "load": round(os.getloadavg()[0], 1),
        "predicted_ms": {n: round(s * 1000, 1) for n, s in predicted.items()},
        "measured_ms": {n: round(s * 1000, 1) for n, s in measured.items()},
        "predicted times": round(predicted[2] / predicted[1], 2),
        "measured times": round(measured[2] / measured[1], 2),
        "measured over predicted": {n: round(measured[n] / predicted[n], 2) for n in (1, 2)},
        "loopback_ms": {n: round(medians["loopback", n] * 1000, 1) for n in (1, 2)},
        "loopback times": round(medians["loopback", 2] / medians["loopback", 1], 2),
        "runs_ms": {f"{way} {n}": [round(s * 1000, 1) for s in each] for (way, n), each in took.items()},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object; return 1 if the prediction is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--target", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--link", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.target:
        target()
    elif args.source:
        source(args.source)
    elif args.link:
        link(args.link)
    else:
        found = measure(args.mb, args.mb_per_s * 1e6, args.runs)
        print(json.dumps(found), flush=True)
        off = max(abs(1 - ratio) for ratio in found["measured over predicted"].values())
        return 1 if off > OFF_MAX or found["predicted times"] < TIMES_MIN else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
