"""A whole frontend and whole workers in one process, without a journal: facts are folded at once.

The code is that of the processes (API, router, generations, request plane, worker, engine), with sockets between them. Only
the process boundary is missing: a killed worker's connections break and it publishes nothing more, but its
memory is freed by its own code. `benchmarks/failures/faults.py` kills processes.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import structlog

from benchmarks.serving.load import Stream, text_of
from controller.adapters.clock import SystemClock
from controller.adapters.request_plane.client import RequestPlaneClient
from controller.adapters.request_plane.dialers import Dialer
from controller.adapters.request_plane.nats_dialer import NatsDialer
from controller.adapters.request_plane.worker_links import Address
from controller.deciders.fleet import Fleet, evolve
from controller.frontend.director import Director, World
from controller.frontend.dispatch.live_request import LiveRequest
from controller.frontend.http.api import Api
from controller.frontend.http.listeners import Listeners
from controller.frontend.openai.choice import Choice
from controller.frontend.openai.completion import Completion
from controller.frontend.settings import FrontendSettings
from controller.router.endpoints import Endpoint
from controller.trace.replay.endpoint import ReplayTarget
from events.decisions import HealthChanged, HealthStatus
from events.fact import Decision, Fact, Recorded
from events.nats.channels import Channels
from events.observations import MoveRequested, WorkerJoined, WorkerLeft
from events.subjects import PLANE_SCHEME
from workers.config.settings import WorkerConfig
from workers.engines.engine import Engine, EngineDead
from workers.worker import InferenceWorker

TICK_S = 0.05
ANSWER_S = 60.0
KILLED = 137
METHODS: dict[str, dict[str, Any]] = {  # frontend settings that select the method of a planned move
    "transfer": {"setup_s": 0.0, "max_migration_time_ms": 10_000.0, "transfers_at_once": 16},
    "reprefill": {"max_migration_time_ms": 1e-6},
}


class Member:
    """A worker by its name, over all its lives."""

    def __init__(self, inside: "Inside", name: str, made: Callable[[], Engine]) -> None:
        self.name = name
        self.life: Life | None = None
        self.lives: list[Life] = []
        self._inside, self._made = inside, made

    async def start(self) -> None:
        """Begin a new life, and wait until the frontend is connected to it, or until it has ended already."""
        engine = self._made()
        instance = f"{self.name}-{os.getpid()}-{len(self.lives) + 1}"  # also the name of its KV regions
        life = Life(self._inside, instance, self.name, engine)
        self.lives.append(life)
        async with asyncio.timeout(ANSWER_S):
            await life.worker.serving.wait()
        self.life = life
        plane = self._inside.plane
        await self._inside.until(
            lambda: plane.connected.get(self.name) == life.instance or self.life is not life
        )

    async def kill(self) -> None:
        """End this life: every connection breaks in the same turn of the loop."""
        life, self.life = self.life, None
        if life is not None:
            await life.end()
            self._inside.tell(
                WorkerLeft(worker=self.name, instance=life.instance, mode="immediate", exit=KILLED)
            )

    @property
    def endpoint(self) -> Endpoint | None:
        """Its entry in the frontend's table."""
        return (
            self._inside.director.table.endpoints.get((self.name, self.life.instance)) if self.life else None
        )


class Life:
    """One life of a worker. It is also the journal of that worker."""

    def __init__(self, inside: "Inside", instance: str, name: str, engine: Engine) -> None:
        self.instance, self.engine = instance, engine
        self.source = f"worker:{name}"
        self._inside: Inside | None = inside
        config = WorkerConfig(name=name, instance=instance)
        self.worker = InferenceWorker(config, engine, self, None, channels=inside.behind)  # type: ignore[arg-type]
        self._running = asyncio.ensure_future(self.worker.run(asyncio.Event()))

    def observe(self, fact: Fact, **_: str) -> str:
        """Publish a fact to the fleet, unless this life has ended."""
        if self._inside is not None:
            self._inside.tell(fact)
        return ""

    async def end(self) -> None:
        """Publish nothing more, then free everything."""
        self._inside = None
        self.worker.server.connections.blackhole(True)
        await self.worker.server.close(0.0)
        self.worker.fail(EngineDead("killed"))
        await self._running

    @property
    def idle(self) -> bool:
        """Whether it holds no request, no block and no move."""
        load, server = self.engine.load(), self.worker.server
        held = load.running or load.waiting or load.kv_used
        return not (held or server.in_flight or len(server.moves.source) or len(server.moves.target))


class RunningCompletions(dict[Completion, None]):
    """The requests in progress of a frontend. Passes the answers of each request that ends to `ended`."""

    def __init__(self, ended: Callable[[Choice], object]) -> None:
        super().__init__()
        self._ended = ended

    def __delitem__(self, completion: Completion) -> None:
        super().__delitem__(completion)
        for answer in completion.answers:
            self._ended(answer)


class Inside:
    """The frontend, its members, and all observed facts."""

    def __init__(
        self, settings: FrontendSettings, dialers: Mapping[str, Dialer], behind: Channels | None
    ) -> None:
        self.plane = RequestPlaneClient("f1", dialers=dialers)
        self.behind = behind  # the workers' connection to the broker of the request plane
        world = World("f1", self.plane, self._observe, SystemClock())
        self.director = Director(world, settings)
        self.director.go_live()
        self.api = Api(self.director)
        self.api.openai.completions = RunningCompletions(self._ended)
        self.listeners = Listeners(self.api, settings)
        self.facts: list[Fact] = []
        self.members: list[Member] = []
        self.accepted: dict[str, list[int]] = {}  # accepted tokens of completed answers, by request
        self._fleet = Fleet()
        self._seq = 0
        self.plane.listen(self.director.changed)

    def _ended(self, answer: Choice) -> None:
        """Record the accepted tokens of a completed answer."""
        if answer.error is None and answer.finish != "cancelled":
            self.accepted[answer.request.id] = answer.accepted

    def running(self, request: str) -> LiveRequest | None:
        """Return the running answer of this request; None: there is none."""
        return next((live for live in self.director.driver.live.values() if live.request.id == request), None)

    def move(self, worker: str) -> None:
        """Request that all streams of a worker move, as an operator does."""
        live = self._fleet.workers.get(worker)
        if live is not None and live.alive:
            self.tell(MoveRequested(worker=worker, instance=live.joined.instance, by="benchmark"))

    def _observe(self, fact: Fact, **_: str) -> None:
        self.facts.append(fact)

    def said(self, kind: type[Fact]) -> list[Any]:
        """Return the facts of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def tell(self, fact: Fact) -> None:
        """Fold a fact. A worker that joins is healthy at once, and counts as so slow at prefill that any KV cache may move."""
        if isinstance(fact, WorkerJoined):
            fact = replace(fact, profile=replace(fact.profile, prefill_tokens_per_s=1.0))
        self.facts.append(fact)
        self._fold(fact)
        if isinstance(fact, WorkerJoined):
            self._fold(
                HealthChanged(
                    worker=fact.worker,
                    instance=fact.instance,
                    before=HealthStatus.SUSPICIOUS,
                    after=HealthStatus.HEALTHY,
                    reason="it has joined",
                    weight=1.0,
                    decided_at=datetime.now(UTC),
                )
            )

    def _fold(self, fact: Fact) -> None:
        if isinstance(fact, Decision):
            fact = replace(fact, number=self._fleet.number + 1)
        self._seq += 1
        recorded = Recorded(self._seq, datetime.now(UTC), fact, f"e{self._seq}")
        self._fleet = evolve(self._fleet, recorded)
        alive = [w.joined for w in self._fleet.workers.values() if w.alive]
        self.plane.set_workers({joined.worker: Address(joined.instance, joined.url) for joined in alive})
        self.director.absorb(self._fleet, [recorded])

    async def until(self, condition: Callable[[], object], seconds: float = ANSWER_S) -> None:
        """Wait for a condition. Raise TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 (nothing signals it)
                await asyncio.sleep(0.005)

    async def ask(self, request: str, **body: Any) -> "Answer":
        """Request one stream over HTTP, and read it to its end."""
        whole = {"stream": True, "stream_options": {"include_usage": True}} | body
        stream = Stream(keep=True)
        async with ReplayTarget(self.listeners.url) as target:
            reply = await target.ask(
                "POST",
                "/v1/completions",
                json.dumps(whole).encode(),
                take=stream.take,
                deadline_s=ANSWER_S,
                headers={"X-Request-Id": request},
            )
        if reply.fault == "timeout":
            return Answer(request, stream, "it did not end")
        if reply.status != 200 or stream.failed or not stream.done:
            last = stream.events[-1] if stream.events else reply.body
            return Answer(request, stream, f"{reply.status} {last[:200].decode('utf-8', 'replace')}")
        return Answer(request, stream)


def unsaid(*_: Any) -> Any:
    """Log nothing, as a structlog processor: killed workers log a lot."""
    raise structlog.DropEvent


class Answer:
    """A client's answer."""

    def __init__(self, request: str, stream: Stream, error: str = "") -> None:
        self.request, self.error = request, error
        self.text = text_of(stream.events)
        self.usage: dict[str, Any] = {}
        self.finishes: list[str] = []
        self.gaps = stream.gaps  # seconds between events
        for event in map(json.loads, stream.events):
            self.usage = event.get("usage") or self.usage
            self.finishes += [c["finish_reason"] for c in event.get("choices", ()) if c.get("finish_reason")]


@asynccontextmanager
async def inside(
    made: list[Callable[[], Engine]], *, broker: str = "", **settings: Any
) -> AsyncIterator[Inside]:
    """Run a frontend with one worker per engine: on ports, or behind the broker of this URL."""
    dialer = await NatsDialer.open(broker, "f1") if broker else None
    behind = await Channels.open(broker, "workers") if broker else None
    dialers = {PLANE_SCHEME: dialer} if dialer is not None else {}
    own = {"port": 0, "model_folders": "/"}  # the engines are in this process: it trusts their folders
    one = Inside(FrontendSettings(**{**own, **settings}), dialers, behind)
    await one.listeners.open()
    await one.listeners.accept()

    async def ticks() -> None:
        while True:
            await asyncio.sleep(TICK_S)
            one.director.tick()

    running = [asyncio.ensure_future(one.plane.run()), asyncio.ensure_future(ticks())]
    try:
        one.members = [Member(one, f"w{n}", engine) for n, engine in enumerate(made)]
        for member in one.members:
            await member.start()
        yield one
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await one.listeners.close()
        for member in one.members:
            if member.life is not None:
                await member.life.end()
        for link in (dialer, behind):
            if link is not None:
                await link.close()
