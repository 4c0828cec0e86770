"""A small model's KV blocks, and a transfer target in a separate process."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec

from events.fleet_key import FleetKey
from workers.kv_transfer.ledger import ReservationPolicy
from workers.kv_transfer.messages import Description, Grant, TransferAddress, Transport
from workers.kv_transfer.nixl import Nixl
from workers.kv_transfer.receiver import Arrived, Receiver, Regions

ROOT = Path(__file__).parents[3]
KV = Description("tiny", "main", "float32", 2, 2, 8, 16, 4096)
BIG = msgspec.structs.replace(KV, block_bytes=1 << 20)
TOKENS = list(range(100, 150))  # 50 tokens: four blocks, the last partly filled
BLOCKS = 4
WAYS = ("shared", "unix", "tcp")


def content(blocks: int, of: Description = KV, seed: int = 1) -> bytes:
    """Return bytes without repetition."""
    return random.Random(seed).randbytes(blocks * of.block_bytes)


def by(way: str, grant: Grant) -> Grant:
    """Return the grant as seen by a source that can only use this way."""
    if way == "tcp":
        grant = msgspec.structs.replace(
            grant, endpoint=TransferAddress(grant.endpoint.host, grant.endpoint.port)
        )
    return grant if way == "shared" else msgspec.structs.replace(grant, region="")


@contextmanager
def receiving(
    root: Path | None,
    of: Description = KV,
    transport: Transport | None = None,
    key: FleetKey | None = None,
    **policy: object,
) -> Iterator[tuple[Receiver, Regions]]:
    """Run a target in this process."""
    regions = Regions(f"target-{os.getpid()}", root)
    receiver = Receiver((of,), regions, ReservationPolicy(**policy), transport=transport, key=key)  # type: ignore[arg-type]
    try:
        yield receiver, regions
    finally:
        receiver.close()


class Target:
    """A target in a separate process, which answers a line with a line."""

    def __init__(self, root: Path, *, nixl: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root), *(["nixl"] if nixl else [])],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *words: object) -> str:
        """Send a line and return the answer."""
        assert self.process.stdin and self.process.stdout
        print(*words, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def grant(self, blocks: int) -> Grant:
        """Reserve blocks of `BIG`."""
        return msgspec.json.decode(self.ask("reserve", blocks), type=Grant)

    def end(self) -> None:
        """Stop the process, or kill it."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


def main(root: Path, nixl: bool) -> None:
    """Serve lines: `reserve BLOCKS`, `arrival TICKET` (then the digest of what arrived)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output printed by libraries is not an answer
    with receiving(root, BIG, Nixl(f"target-{os.getpid()}") if nixl else None) as (receiver, _):
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "reserve":
                print(
                    msgspec.json.encode(receiver.reserve(BIG, int(rest), TOKENS[:10])).decode(),
                    file=answers,
                    flush=True,
                )
            elif word == "arrival":
                got = receiver.arrival(rest).result(10)
                if isinstance(got, Arrived):
                    print(
                        sha256(got.memory).hexdigest(),
                        len(got.tokens),
                        got.state.hex(),
                        file=answers,
                        flush=True,
                    )
                    receiver.release(rest)
                else:
                    print(got.reason, file=answers, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "nixl" in sys.argv[2:])
