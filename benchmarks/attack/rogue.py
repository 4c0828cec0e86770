"""A compromised worker: a real worker of a running fleet under an attacker's control.

    python -m benchmarks.attack.rogue --data DIR --name x0 --flood frames --seconds 5

It joins through the fleet's directory, with its own broker account and the fleet's key, and registers, sends heartbeats and
answers canaries as any worker does. `spoil` changes its output for users' requests, `changed` changes its registration, and
the floods send as much as possible. Tests run it in their own process; benchmarks start one for it.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.adapters.request_plane.connection import WorkerConnection
from controller.adapters.request_plane.hang import HangPolicy
from events import kv, subjects
from events.blocks import local_hashes, sequence_hashes
from events.codec import new_id
from events.fact import Observation
from events.fleet_key import FleetKey
from events.journal.nats import NatsJournal
from events.nats import urls
from events.nats.bus import NatsBus
from events.observations import WorkerJoined, WorkerLeft
from events.versions import Known
from events.wire import Beat, Chunk, Generate
from workers.config.settings import WorkerConfig
from workers.config.settings_check import load_settings, with_broker_user
from workers.engines.engine import Announce, Deliver, discard_events
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.kv_events.publisher import KvPublisher
from workers.worker import InferenceWorker

FRAMES_AT_ONCE = 5_000
FACT_BYTES = 4_000
FLOODS = ("frames", "kv_events", "facts", "beats", "connections")
BROKER_S = 5.0
TURN_S = 0.001  # between two parts of a flood

Spoil = Callable[[Chunk], Chunk]
Change = Callable[[WorkerJoined], WorkerJoined]


class RogueEngine(SimulatedEngine):
    """The simulated engine with spoiled output for users' requests. Canaries get correct answers."""

    spoil: Spoil | None = None

    def __init__(self, itl_s: float) -> None:
        super().__init__(EngineShape(), ConstantTiming(itl_s=itl_s))
        self.canaries: set[int] = set()
        self.asked: list[Generate] = []  # users' requests

    async def start(self, deliver: Deliver, announce: Announce = discard_events) -> None:
        def spoiled(out: list[tuple[int, Chunk]]) -> None:
            deliver([(key, self._spoiled(key, chunk)) for key, chunk in out])

        await super().start(spoiled, announce)

    def submit(self, key: int, request: Generate) -> None:
        if request.canary:
            self.canaries.add(key)
        else:
            self.asked.append(request)
        super().submit(key, request)

    def _spoiled(self, key: int, chunk: Chunk) -> Chunk:
        return chunk if self.spoil is None or key in self.canaries else self.spoil(chunk)


@dataclass
class RogueWorker:
    """One compromised worker. `async with` runs it."""

    data: Path
    name: str = "x0"
    itl_s: float = 0.001  # as fast as its peers, otherwise canaries find it slow
    changed: Change = lambda joined: joined
    instance: str = field(default_factory=new_id)

    async def __aenter__(self) -> "RogueWorker":
        given = {"data": str(self.data), "name": self.name}
        settings = await asyncio.to_thread(lambda: with_broker_user(load_settings(given)))
        source = f"worker:{self.name}:{self.instance}"
        self.url = settings.nats_url
        self.key = FleetKey.read(Path(settings.fleet_key_file)) if settings.fleet_key_file else None
        self.journal = await NatsJournal.connect(
            self.url,
            f"worker:{self.name}",
            self.data / "spool" / f"worker-{self.name}",
            wait_s=BROKER_S,
            make=False,
            known=Known.ours(),
            workers=(self.name,),
        )
        self.bus = await NatsBus.connect(self.url, source, wait_s=BROKER_S, echo=False)
        self.engine = RogueEngine(self.itl_s)
        self.kv = KvPublisher(self.name, self.instance, self.bus.connection)
        config = WorkerConfig(
            name=self.name, instance=self.instance, account=urls.user(self.url), key=self.key
        )
        self.worker = InferenceWorker(config, self.engine, self, self.bus, kv=self.kv)
        self.stop = asyncio.Event()
        self.running = asyncio.ensure_future(self.worker.run(self.stop))
        serving = asyncio.ensure_future(self.worker.serving.wait())
        await asyncio.wait((serving, self.running), return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        if self.running.done():
            self.running.result()
        return self

    async def __aexit__(self, *about: object) -> None:
        self.worker.server.abort()
        self.running.cancel()
        await asyncio.wait((self.running,))
        for close in (self.bus.close, self.journal.close):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(BROKER_S):
                    await close()

    def observe(self, fact: Observation, **about: Any) -> str:
        """Publish a fact; of a registration, the version that `changed` returns."""
        if isinstance(fact, WorkerJoined):
            fact = self.changed(fact)
        return self.journal.observe(fact, **about)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the journal."""
        return getattr(self.__dict__["journal"], name)

    # --- attacks

    def claim(self, *prompts: Sequence[int]) -> None:
        """Claim the KV blocks of these prompts, which it has not computed."""
        size = self.engine.identity.profile.block_tokens
        for prompt in prompts:
            self.kv.announce(0, [kv.Stored(sequence_hashes(local_hashes(prompt, size)))])
        self.kv.flush()

    async def flood(self, kind: str, seconds: float, targets: Sequence[str] = ()) -> int:
        """Send as many messages of one kind as possible; return their number. `targets`: URLs of other workers, for
        connections."""
        sent, until = 0, time.monotonic() + seconds
        one = {
            "frames": self._frames,
            "kv_events": self._kv_events,
            "facts": self._facts,
            "beats": self._beats,
        }
        if kind == "connections":
            while time.monotonic() < until:
                for target in targets:
                    sent += len(await self.connect_to(target, 20))
            return sent
        while time.monotonic() < until:
            sent += one[kind]()
            await asyncio.sleep(TURN_S)
        return sent

    def _frames(self) -> int:
        """Send every frontend thousands of heartbeats in one write."""
        open_now = [one for one in self.worker.server.connections.open if one.frontend]
        for connection in open_now:
            for _ in range(FRAMES_AT_ONCE):
                connection.send(Beat("decode", 0.0))
        return FRAMES_AT_ONCE * len(open_now)

    def _kv_events(self) -> int:
        route = f"{subjects.kv_events(self.name)} ".encode()
        body = kv.encode([self.name, self.instance, 0, 0, [kv.Stored(list(range(100)))]])
        return self._post(route, body, 1_000)

    def _beats(self) -> int:
        return self._post(
            f"{subjects.beat(self.name)} ".encode(), b'{"worker": "%b"}' % self.name.encode(), 1_000
        )

    def _facts(self) -> int:
        left = WorkerLeft(worker=self.name, instance="none", mode="graceful", exit=0)
        subject = subjects.fact_of_worker(urls.user(self.url), subjects.subject(left))
        return self._post(f"{subject} {urls.inbox(self.url)}.x.1 ".encode(), b"\0" * FACT_BYTES, 500)

    def _post(self, route: bytes, body: bytes, times: int) -> int:
        client = self.bus.connection.client
        if client.unsent() > 1 << 24:
            return 0
        for _ in range(times):
            client.post(route, b"", body)
        client.write()
        return times

    async def connect_to(self, url: str, count: int) -> list[WorkerConnection]:
        """Open connections to another worker with the fleet's key, as frontends do. Return those that were welcomed."""
        host, _, port = url.removeprefix("tcp://").rpartition(":")
        loop, made = asyncio.get_running_loop(), list[WorkerConnection]()
        for number in range(count):
            with contextlib.suppress(OSError):
                name = f"frontend:frontend-{number % 2}"
                _, one = await loop.create_connection(
                    lambda name=name: WorkerConnection(name, HangPolicy(), _nothing, key=self.key),  # type: ignore[misc]
                    host,
                    int(port),
                )
                await asyncio.wait((one.greeted, one.ended), return_when=asyncio.FIRST_COMPLETED, timeout=5)
                made.append(one)
        return [one for one in made if one.live]


def _nothing() -> None:
    """Ignore a change."""


def main() -> int:
    """Join a fleet, flood it, and print how much was sent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", default="x0")
    parser.add_argument("--flood", choices=FLOODS, required=True)
    parser.add_argument(
        "--after", type=float, default=2.0, help="seconds from its registration to the flood (default: 2)"
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument(
        "--target", action="append", default=[], help="URL of another worker, for connections"
    )
    args = parser.parse_args()

    async def run() -> int:
        async with RogueWorker(args.data, args.name, itl_s=0.02) as rogue:
            await asyncio.sleep(args.after)
            return await rogue.flood(args.flood, args.seconds, args.target)

    print(asyncio.run(run()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
