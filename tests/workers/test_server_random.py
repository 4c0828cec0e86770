"""Random frontend actions on one worker: no frontend gets a wrong, duplicate or late token.

A stream may be cancelled, refused, failed or cut by the end of its connection. Its output until then is always a prefix of
the undisturbed answer, and an end occurs at most once, as the last chunk.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import astuple

import pytest
from frontend_routes import FrontendRoute, narrow
from plain_frontend import PlainFrontend

from events.wire import Generate, Load, Sampling
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.scheduler import Scheduler
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.frontends import BufferLimits
from workers.server import WorkerServer
from workers.shutdown import DRAINING

Eventually = Callable[..., Awaitable[None]]
SHAPE = EngineShape(
    context_tokens=512, kv_blocks=60, batch_max=12, waiting_max=20
)  # tight, so that it preempts
ROOMY = EngineShape(context_tokens=512, kv_blocks=4096)
STEPS = 120
WHYS = ("gone", "elsewhere", "drained", "complete", "a reason of tomorrow")


def undisturbed(tokens: list[int], most: int) -> list[int]:
    """Return the answer of an engine with enough room for everything."""
    scheduler = Scheduler(ROOMY)
    scheduler.submit(1, Generate(1, "r", tokens, len(tokens), Sampling(max_tokens=most, ignore_eos=True)))
    answer: list[int] = []
    while not scheduler.plan().idle:
        answer += [token for _, chunk in scheduler.step() for token in chunk.tokens]
    return answer


class Life:
    """One random sequence of events."""

    def __init__(
        self, seed: int, route: FrontendRoute, server: WorkerServer, engine: SimulatedEngine
    ) -> None:
        self.dice = random.Random(seed)
        self.route = route
        self.server, self.engine = server, engine
        self.frontends: list[PlainFrontend] = []
        self.cancelled: set[tuple[PlainFrontend, int]] = set()
        self.asked: list[tuple[PlainFrontend, int, list[int], int]] = []

    async def step(self) -> None:
        roll = self.dice.random()
        if roll < 0.05 or not self.frontends:
            self.frontends.append(await self.route.connect(self.server, narrow=True))
            narrow(self.server)
        elif roll < 0.60:
            self.ask(self.dice.choice(self.frontends))
        elif roll < 0.75 and self.asked:
            frontend, stream, _, _ = self.dice.choice(self.asked)
            if not frontend.closed.is_set():
                frontend.cancel(stream, self.dice.choice(WHYS))
                self.cancelled.add((frontend, stream))
        elif roll < 0.78:
            self.dice.choice(self.frontends).transport.abort()
        elif roll < 0.83:
            self.server.refuse(self.dice.choice([None, DRAINING]))
        elif roll < 0.87:
            self.engine.chaos(*self.dice.choice([("error", 2.0), ("slow", 3.0), ("heal", 0.0)]))
        elif roll < 0.95:
            self.pause(self.dice.choice(self.frontends))
        else:
            await asyncio.sleep(self.dice.random() * 0.01)  # real sockets and threads run on
        self.frontends = [frontend for frontend in self.frontends if not frontend.closed.is_set()]

    def ask(self, frontend: PlainFrontend) -> None:
        if frontend.transport.is_closing():
            return
        tokens = [self.dice.randrange(259, 2048) for _ in range(self.dice.randrange(1, 90))]
        most = self.dice.randrange(1, 200)
        self.asked.append((frontend, frontend.ask(tokens, max_tokens=most), tokens, most))

    def pause(self, frontend: PlainFrontend) -> None:
        if not frontend.transport.is_closing():
            frontend.transport.pause_reading()
            asyncio.get_running_loop().call_later(0.03, self.go_on, frontend)

    @staticmethod
    def go_on(frontend: PlainFrontend) -> None:
        if not frontend.transport.is_closing():
            frontend.transport.resume_reading()

    async def settle(self) -> None:
        """Let all streams end."""
        self.server.refuse(None)
        self.engine.chaos("heal", 0.0)
        for frontend in self.frontends:
            self.go_on(frontend)
        for frontend, stream, _, _ in self.asked:
            if not frontend.transport.is_closing() and (frontend, stream) not in self.cancelled:
                await frontend.answer(stream)
        for frontend in self.frontends:
            frontend.transport.close()
            await frontend.lost()

    def faults(self) -> Iterator[str]:
        """Yield every violated guarantee."""
        for frontend, stream, tokens, most in self.asked:
            chunks = frontend.chunks(stream)
            answer = frontend.tokens(stream)
            right = undisturbed(tokens, most)
            if answer != right[: len(answer)]:
                yield f"stream {stream} got a wrong token"
            if any(chunk.finish or chunk.error for chunk in chunks[:-1]):
                yield f"stream {stream} continues after its end"
            if chunks and chunks[-1].finish == "length" and answer != right:
                yield f"stream {stream} ends too early"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
async def test_no_sequence_of_events_violates_a_guarantee(
    route: FrontendRoute, seed: int, eventually: Eventually
) -> None:
    engine = SimulatedEngine(SHAPE, ConstantTiming(itl_s=0.0 if seed % 2 else 0.001))
    server = WorkerServer(worker="w0", instance="i1", engine=engine, patience=BufferLimits(buffer_bytes=512))
    await engine.start(server.deliver)
    await route.open(server)
    life = Life(seed, route, server, engine)
    try:
        for _ in range(STEPS):
            await life.step()
        await life.settle()
        await eventually(lambda: engine.load() == Load(kv_total=SHAPE.kv_blocks))
        assert list(life.faults()) == []
        assert sum(astuple(server.counters.ends)) == server.counters.requests, (
            "each has ended in exactly one way"
        )
    finally:
        await server.close()
        await engine.stop()
