"""A real worker in this process, with the interface of a scripted one for a `Kit`.

After the number of tokens given by `cut_after`, each engine step takes at least `SLOW_S`. So the test's action happens at that
position of the answer, or at most a token or two later.
"""

import asyncio
import threading
import time
from dataclasses import dataclass, field, fields, replace
from typing import Any
from uuid import uuid4

from events.fact import Fact
from events.nats.channels import Channels
from events.observations import DrainFinished, WorkerJoined
from events.wire import Chunk, Generate, Reserve
from workers.config.settings import WorkerConfig
from workers.engines.engine import Engine, EngineDead
from workers.engines.simulated.timing import SLOWED_STEP_S
from workers.frontends import FrontendConnection
from workers.server import WorkerServer
from workers.worker import InferenceWorker

START_S = 120.0  # for a real model on a busy machine
SLOW_S = 0.04
NAMES = ("worker", "instance", "url", "model")


@dataclass
class RealWorker:
    """One life of a worker, and the journal for its facts."""

    name: str
    engine: Engine
    instance: str = field(default_factory=lambda: f"test-{uuid4().hex}")  # also the name of its KV regions
    model: str = "m"
    source: str = "worker"
    requests: list[Generate] = field(default_factory=list)  # computed from a prompt, and moved in
    cut_after: int | None = None
    channels: Channels | None = None  # through the broker, instead of a port
    due: asyncio.Event = field(default_factory=asyncio.Event)  # set when the position of the cut is reached
    drained: list[Fact] = field(default_factory=list)  # its facts about drains

    def __post_init__(self) -> None:
        self._said, self._slow_s = 0, SLOW_S
        self._joined: WorkerJoined | None = None
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    @property
    def started(self) -> bool:
        return self._joined is not None

    @property
    def url(self) -> str:
        return self._joined.url if self._joined is not None else ""

    @property
    def server(self) -> WorkerServer:
        """The server that frontends connect to."""
        return self._worker.server

    @property
    def facts(self) -> dict[str, Any]:
        """Its registration, without names. Its prefill counts as slow, so that a move with the KV cache is faster."""
        assert self._joined is not None
        found = {f.name: getattr(self._joined, f.name) for f in fields(self._joined) if f.name not in NAMES}
        return found | {"profile": replace(self._joined.profile, prefill_tokens_per_s=1.0)}

    async def start(self) -> "RealWorker":
        config = WorkerConfig(name=self.name, instance=self.instance)
        self._worker = InferenceWorker(config, self.engine, self, None, channels=self.channels)  # type: ignore[arg-type]
        server = self._worker.server
        self._deliver, server.deliver = server.deliver, self._watch
        self._generate, server.generate = server.generate, self._asked  # type: ignore[method-assign]
        self._reserve, server.reserve = server.reserve, self._reserved  # type: ignore[method-assign]
        self._running = asyncio.ensure_future(self._worker.run(asyncio.Event()))
        async with asyncio.timeout(START_S):
            await self._worker.serving.wait()
        return self

    async def stop(self) -> None:
        await self._worker.server.close(0.0)
        self._worker.fail(EngineDead("the test is over"))
        await asyncio.wait([self._running])
        if (
            not self._running.cancelled()
        ):  # otherwise the test has failed, and the other workers must be stopped too
            self._running.result()

    def observe(self, fact: Fact, **_: Any) -> str:
        if isinstance(fact, WorkerJoined):
            self._joined = fact
        if isinstance(fact, DrainFinished):
            self.drained.append(fact)
        return ""

    def drain(self) -> None:
        """Drain it, as the controller does."""
        self._worker.commands.on_drain({"instance": self.instance})

    def cut(self, after: int, slow_s: float = SLOW_S) -> None:
        """Slow down after this many tokens from now on."""
        self._said, self._slow_s, self.cut_after = 0, slow_s, after
        self.due.clear()

    def heal(self) -> None:
        """Run at normal speed again."""
        self.cut_after = None
        self.engine.chaos("heal", 0.0)

    @property
    def empty(self) -> bool:
        """Whether it holds no request, reservation or transfer."""
        load, moves = self.engine.load(), self._worker.server.moves
        return not (load.running or load.waiting or load.kv_used or len(moves.source) or len(moves.target))

    def _watch(self, out: list[tuple[int, Chunk]]) -> None:
        self._deliver(out)
        self._said += sum(len(chunk.tokens) for _, chunk in out)
        if self.cut_after is None or self._said < self.cut_after:
            return
        self._loop.call_soon_threadsafe(self.due.set)
        if threading.get_ident() == self._thread:
            self.engine.chaos("slow", self._slow_s / SLOWED_STEP_S)
        else:  # on its own thread; a slowdown by a factor would look like a hang on a busy machine
            time.sleep(self._slow_s)  # the slowdown itself

    def _asked(self, connection: FrontendConnection, request: Generate) -> None:
        self.requests.append(request)
        self._generate(connection, request)

    def _reserved(self, connection: FrontendConnection, frame: Reserve) -> None:
        self.requests.append(frame.request)
        self._reserve(connection, frame)
