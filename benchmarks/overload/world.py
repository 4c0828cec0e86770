"""A whole frontend with simulated engines, in virtual time.

The code is the product's own, from the parsed head to the client's bytes.

    request ─▶ admission ─▶ router ─▶ plane ─▶ engines ─▶ plane ─▶ generation ─▶ the client's transport

Only the request plane is not the product's: it delivers frames without sockets, half a
millisecond later, and reports the engines' load every 100 ms, as workers' heartbeats do.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

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
from workers.engines.admission import AdaptiveEngine
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import Timing

NETWORK_S = 0.0005
REPORTS_S = 0.1
TICK_S = 0.1
LIFE = "1"


class LoopClock:
    """The time of the running loop. Implements `controller.ports.Clock`."""

    def now(self) -> datetime:
        """Return the instant."""
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.monotonic())

    def monotonic(self) -> float:
        """Return the loop's seconds."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


@dataclass
class Machines:
    """The workers, for all frontends."""

    shape: EngineShape
    timing: Timing
    count: int
    adaptive: bool = False  # they run fewer requests at once while their steps are late
    engines: dict[str, Engine] = field(default_factory=dict)
    sinks: dict[int, tuple[str, "Plane", Sink]] = field(default_factory=dict)  # by stream
    dead: set[str] = field(default_factory=set)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    async def start(self) -> None:
        """Start the engines."""
        for number in range(self.count):
            name = f"w{number}"
            engine: Engine = SimulatedEngine(self.shape, self.timing)
            if self.adaptive:
                engine = AdaptiveEngine(engine)
            self.engines[name] = engine
            await engine.start(self._said)

    def joined(self) -> list[WorkerJoined]:
        """Return the workers' registrations."""
        return [
            registration(WorkerConfig(name=name, instance=LIFE), engine, "virtual:", (), kv_events=False)
            for name, engine in self.engines.items()
        ]

    def kill(self, name: str) -> None:
        """Kill a worker with all its requests."""
        self.dead.add(name)
        lost = [stream for stream, (worker, _, _) in self.sinks.items() if worker == name]
        for stream in lost:
            self.engines[name].cancel(stream)
            _, plane, sink = self.sinks.pop(stream)
            plane.own[name] -= 1
            sink.lost("disconnected", "the worker was killed")
            sink.flush()

    def _said(self, out: list[tuple[int, Chunk]]) -> None:
        """Deliver the output of an engine's step a moment later."""
        asyncio.get_running_loop().call_later(NETWORK_S, self._heard, out)

    def _heard(self, out: list[tuple[int, Chunk]]) -> None:
        flushed: dict[Sink, None] = {}
        for stream, chunk in out:
            found = self.sinks.get(stream)
            if found is None:
                continue
            worker, plane, sink = found
            if chunk.finish is not None or chunk.error is not None:
                del self.sinks[stream]
                plane.own[worker] -= 1
            chunk.stream = stream
            sink.take(chunk)
            flushed[sink] = None
        for sink in flushed:
            sink.flush()


class Plane(ConnectedWorkers):
    """One frontend's request plane. Implements `controller.ports.RequestPlane`; nothing moves with its KV cache."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.own = dict.fromkeys(machines.engines, 0)
        self._loads: dict[str, Load] = {}
        self._external: dict[str, Load] = {}

    def report(self) -> None:
        """Receive the load of all workers."""
        for name, engine in self._machines.engines.items():
            load = self._loads[name] = engine.load()
            others = max(0, load.running + load.waiting - self.own[name])
            self._external[name] = Load(running=others)

    def reachable(self, worker: str, instance: str) -> bool:
        return worker not in self._machines.dead

    recently_heard = reachable

    def load(self, worker: str) -> Load | None:
        return self._loads.get(worker)

    def others_work(self, worker: str, own_tokens: int, *, begun: bool) -> OthersWork:
        return ""

    def load_by_rank(self, worker: str) -> Sequence[Load]:
        load = self._loads.get(worker)
        return () if load is None else (load,)

    def external_load(self, worker: str) -> Load | None:
        return self._external.get(worker)

    def open(self, worker: str, instance: str, request: Generate, sink: Sink) -> int:
        machines = self._machines
        if worker in machines.dead:
            raise WorkerUnreachable(worker)
        stream = request.stream = next(machines.numbers)
        machines.sinks[stream] = worker, self, sink
        self.own[worker] += 1
        asyncio.get_running_loop().call_later(NETWORK_S, self._submit, worker, stream, request)
        return stream

    def _submit(self, worker: str, stream: int, request: Generate) -> None:
        if stream in self._machines.sinks:
            self._machines.engines[worker].submit(stream, request)

    def cancel(self, worker: str, stream: int, why: Why = "gone") -> None:
        if self._machines.sinks.pop(stream, None) is not None:
            self.own[worker] -= 1
            self._machines.engines[worker].cancel(stream)

    def draining(self, worker: str, instance: str) -> bool:
        return False

    def reserve(self, worker: str, instance: str, request: Generate, room: int, carrier: TransferSink) -> int:
        raise WorkerUnreachable(worker)

    def ship(self, source: TrustedSource, stream: int, offer: Reserved, carrier: TransferSink) -> None:
        raise WorkerUnreachable(source.worker)

    def stay(self, worker: str, stream: int) -> None:
        """Do nothing: nothing moves."""

    def adopt(self, worker: str, stream: int, sink: Sink) -> None:
        if (found := self._machines.sinks.get(stream)) is not None:
            self._machines.sinks[stream] = (found[0], found[1], sink)


@dataclass
class VirtualFrontend:
    """One frontend, and the facts that it has published."""

    name: str
    director: Director
    endpoints: OpenAiEndpoints
    plane: Plane
    facts: list[Observation] = field(default_factory=list)

    def waiting(self) -> int:
        """Return the number of queued requests."""
        return sum(self.director.admission.waiting().values())


def _frontend(name: str, machines: Machines, settings: FrontendSettings) -> VirtualFrontend:
    facts: list[Observation] = []
    plane = Plane(machines)

    def observe(fact: Observation, *, traceparent: str = "") -> None:
        facts.append(fact)

    dice = itertools.cycle((0.1, 0.3, 0.5, 0.7, 0.9))
    director = Director(World(name, plane, observe, LoopClock(), lambda: next(dice)), settings)
    director.go_live()
    director.set_static(machines.joined())
    endpoints = OpenAiEndpoints(director)
    endpoints.tokens = _tokens
    return VirtualFrontend(name, director, endpoints, plane, facts)


async def _tokens(name: str) -> Tokens:
    return load_tokens(BUILTIN)


@asynccontextmanager
async def world(
    machines: Machines, settings: FrontendSettings, frontends: int = 1
) -> AsyncIterator[list[VirtualFrontend]]:
    """Start the workers, and this number of frontends for them."""
    await machines.start()
    made = [_frontend(f"f{number}", machines, settings) for number in range(frontends)]

    async def beat() -> None:
        turn = 0
        while True:
            for one in made:
                one.plane.report()
                if turn % 10 == 0:
                    for other in made:
                        one.director.peers.on_links(
                            "", {"frontend": other.name, "waiting": other.director.admission.waiting()}
                        )
                one.director.tick()
            turn += 1
            await asyncio.sleep(TICK_S)

    for one in made:
        one.plane.report()
    beating = asyncio.create_task(beat())
    try:
        yield made
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        for engine in machines.engines.values():
            await engine.stop()
