"""A whole frontend with simulated engines, in virtual time.

From the parsed head to the client's bytes, all code is the product's own, except for the request plane:

    request ─▶ admission ─▶ router ─▶ plane ─▶ engines ─▶ plane ─▶ driver ─▶ the client's transport

The simulated request plane (`Plane`) uses no sockets. It delivers each frame after half a millisecond, and reports the
engines' load every 100 ms.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from controller.adapters.clock import SystemClock
from controller.frontend.director import Director, World
from controller.frontend.http.openai_endpoints import OpenAiEndpoints
from controller.frontend.openai.text.tokenizer import BUILTIN, Tokens, load_tokens
from controller.frontend.settings import FrontendSettings
from controller.ports import OthersWork, Sink, TransferSink, WorkerUnreachable
from controller.router.endpoints import ConnectedWorkers
from controller.router.trust import TrustedSource
from events.fact import Observation
from events.observations import WorkerJoined
from events.wire import Chunk, Generate, Load, Reserved, Why
from workers.config.settings import WorkerConfig
from workers.control.membership import registration
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import Timing

NETWORK_S = 0.0005
TICK_S = 0.1
LIFE = "1"


class LoopClock(SystemClock):
    """The time of the running loop. Implements `controller.ports.Clock`."""

    def now(self) -> datetime:
        """Return the loop's time as a datetime."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        """Return the loop's time in seconds."""
        return asyncio.get_running_loop().time()


@dataclass
class Machines:
    """The simulated workers, shared by all frontends."""

    shape: EngineShape
    timing: Timing
    count: int
    engines: dict[str, Engine] = field(default_factory=dict)
    sinks: dict[int, tuple[str, "Plane", Sink]] = field(default_factory=dict)  # by stream
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def start(self) -> None:
        """Start the engines."""
        for number in range(self.count):
            engine = self.engines[f"w{number}"] = self.engine()
            await engine.start(self._said)

    def engine(self) -> Engine:
        """Create the engine of one worker."""
        return SimulatedEngine(self.shape, self.timing)

    def joined(self) -> list[WorkerJoined]:
        """Return the registration of each worker."""
        return [
            registration(WorkerConfig(name=name, instance=LIFE), engine, "virtual:", (), kv_events=False)
            for name, engine in self.engines.items()
        ]

    def _said(self, out: list[tuple[int, Chunk]]) -> None:
        """Deliver the output of an engine step after NETWORK_S."""
        asyncio.get_running_loop().call_later(NETWORK_S, self._heard, out)

    def _heard(self, out: list[tuple[int, Chunk]]) -> None:
        flushed: dict[Sink, None] = {}
        for stream, chunk in out:
            found = self.sinks.get(stream)
            if found is None:
                continue
            _, _, sink = found
            if chunk.finish is not None or chunk.error is not None:
                del self.sinks[stream]
            chunk.stream = stream
            sink.take(chunk)
            flushed[sink] = None
        for sink in flushed:
            sink.flush()


class Plane(ConnectedWorkers):
    """One frontend's request plane. Implements `controller.ports.RequestPlane`, but transfers no KV caches."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.reported: dict[str, Load] = {}  # by worker
        self._external: dict[str, Load] = {}

    @property
    def own(self) -> Counter[str]:
        """Number of this frontend's requests at each worker."""
        return Counter(worker for worker, plane, _ in self._machines.sinks.values() if plane is self)

    def report(self) -> None:
        """Record the current load of each worker, in total and without this frontend's requests."""
        own = self.own
        for name, engine in self._machines.engines.items():
            load = self.reported[name] = engine.load()
            self._external[name] = Load(running=max(0, load.running + load.waiting - own[name]))

    def reachable(self, worker: str, instance: str) -> bool:
        return worker in self._machines.engines

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        return self.reported.get(worker)

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        return ""

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        load = self.reported.get(worker)
        return () if load is None else (load,)

    def external_load(self, worker: str) -> Load | None:
        return self._external.get(worker)

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        machines = self._machines
        stream = request.stream = next(machines.numbers)
        machines.sinks[stream] = worker, self, sink
        asyncio.get_running_loop().call_later(NETWORK_S, self._submit, worker, stream, request)
        return stream

    def _submit(self, worker: str, stream: int, request: Generate) -> None:
        if stream in self._machines.sinks:
            self._machines.engines[worker].submit(stream, request)

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        if self._machines.sinks.pop(stream, None) is not None:
            self._machines.engines[worker].cancel(stream)

    def draining(self, worker: str, instance: str) -> bool:
        return False

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        raise WorkerUnreachable(worker)

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        raise WorkerUnreachable(source.worker)

    def stay(self, worker: str, stream: int) -> None:
        """Do nothing, because no KV transfer is ever under way."""

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        if stream in self._machines.sinks:
            self._machines.sinks[stream] = worker, self, sink


class VirtualFrontend:
    """One frontend, and the facts that it has published."""

    def __init__(self, name: str, machines: Machines, settings: FrontendSettings) -> None:
        self.name, self.plane, self.facts = name, Plane(machines), list[Observation]()
        dice = itertools.cycle((0.1, 0.3, 0.5, 0.7, 0.9))
        self.director = Director(
            World(name, self.plane, self._observe, LoopClock(), lambda: next(dice)), settings
        )
        self.director.go_live()
        self.director.set_static(machines.joined())
        self.endpoints = OpenAiEndpoints(self.director)
        self.endpoints.tokens = _tokens
        self.plane.report()

    def _observe(self, fact: Observation, *, traceparent: str = "") -> None:
        self.facts.append(fact)

    def waiting(self) -> int:
        """Return the number of queued requests."""
        return sum(self.director.admission.waiting().values())

    def report_to(self, other: "VirtualFrontend") -> None:
        """Report this frontend's queued requests to another frontend, as each frontend does every second."""
        body = {"frontend": self.name, "waiting": self.director.admission.waiting()}
        other.director.peers.on_links("", body)


async def _tokens(name: str) -> Tokens:
    return load_tokens(BUILTIN)


@asynccontextmanager
async def world(
    machines: Machines, settings: FrontendSettings, frontends: int = 1
) -> AsyncIterator[list[VirtualFrontend]]:
    """Run the workers with this number of frontends. Yield the frontends."""
    await machines.start()
    made = [VirtualFrontend(f"f{number}", machines, settings) for number in range(frontends)]

    async def beat() -> None:
        for turn in itertools.count():
            for one in made:
                one.plane.report()
                for other in made if turn % 10 == 0 else ():
                    other.report_to(one)
                one.director.tick()
            await asyncio.sleep(TICK_S)

    beating = asyncio.create_task(beat())
    try:
        yield made
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        for engine in machines.engines.values():
            await engine.stop()
