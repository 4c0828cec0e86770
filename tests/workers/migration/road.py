"""Two workers' servers in this process, a frontend of few words at each, and planned moves between them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from engine_contract import prompt
from plain_frontend import DEADLINE_S, PlainFrontend

from events.wire import (
    Cancel,
    Committed,
    Declined,
    Generate,
    Reserve,
    Reserved,
    Sampling,
    Ship,
    Stay,
    ToFrontend,
)
from workers.engines.engine import Engine
from workers.engines.simulated.engine import SimulatedEngine
from workers.engines.simulated.sequence import EngineShape
from workers.engines.simulated.timing import ConstantTiming
from workers.kv_transfer.messages import Grant
from workers.migration.settings import KvMoveSettings
from workers.server import WorkerServer

SHAPE = EngineShape(context_tokens=4096, kv_blocks=1024, tp=2)
STEP_S = 0.012
COUNT = 250  # tokens of an answer: it is not over before it has moved
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
F = TypeVar("F", bound=ToFrontend)

_undisturbed: dict[str, list[int]] = {}


@dataclass
class End:
    """One worker, as a frontend has it."""

    server: WorkerServer
    engine: Any
    frontend: PlainFrontend

    def said(self, kind: type[F], stream: int) -> F | None:
        """Return the frame of this kind that came about a stream."""
        return next((frame for frame in self.frontend.of(kind) if frame.stream == stream), None)  # type: ignore[union-attr]

    async def heard(self, kind: type[F], stream: int) -> F:
        """Wait for it."""
        await self.frontend.until(lambda: self.said(kind, stream))
        found = self.said(kind, stream)
        assert found is not None
        return found

    @property
    def empty(self) -> bool:
        """Whether nothing is held here for anybody."""
        load, moves, receiver = self.engine.load(), self.server.moves, self.server.moves.landing.receiver
        reserved = receiver is not None and receiver.live
        return not (load.running or load.kv_used or len(moves.source) or len(moves.target) or reserved)


@dataclass
class Move:
    """One stream on its way, as the frontend sees it."""

    tokens: list[int]  # the prompt
    stream: int  # at the source
    sampling: dict[str, Any]
    there: int = 0  # its stream at the target
    accepted: list[int] = field(default_factory=list)  # when it was reserved
    grants: list[bytes] = field(default_factory=list)


class Road:
    """A source and a target, and what a frontend says to both."""

    def __init__(self, source: End, target: End, root: Path) -> None:
        self.source, self.target, self.root = source, target, root

    async def begin(self, length: int = 100, salt: int = 0, most: int = COUNT, said: int = 3) -> Move:
        """Ask the source, and wait until it has said something."""
        tokens, sampling = prompt(length, salt), {"max_tokens": most, "ignore_eos": True, **SAMPLING}
        stream = self.source.frontend.ask(tokens, **sampling)
        await self.source.frontend.until(lambda: len(self.source.frontend.tokens(stream)) >= said)
        return Move(tokens, stream, sampling)

    def ask_for_room(self, move: Move, room: int = 0, **changed: Any) -> int:
        """Say Reserve."""
        frontend = self.target.frontend
        move.there = frontend.number()
        move.accepted = self.source.frontend.tokens(move.stream)
        left = {**move.sampling, "max_tokens": move.sampling["max_tokens"] - len(move.accepted)}
        tokens = move.tokens + move.accepted
        request = Generate(0, f"r{move.stream}", tokens, len(move.tokens), Sampling(**left))
        request = msgspec.structs.replace(request, **changed)
        frontend.say(Reserve(move.there, request, room or len(tokens) + 200))
        return move.there

    async def reserve(self, move: Move, **changed: Any) -> Reserved:
        """Have room reserved."""
        reserved = await self.target.heard(Reserved, self.ask_for_room(move, **changed))
        move.grants = reserved.grants
        return reserved

    def ship(self, move: Move) -> None:
        """Say Ship."""
        self.source.frontend.say(Ship(move.stream, move.grants))

    async def moved(self, move: Move) -> Committed:
        """Reserve, ship, and wait until it decodes at the target."""
        await self.reserve(move)
        self.ship(move)
        return await self.target.heard(Committed, move.there)

    def hurry(self, step_s: float = 0.0) -> None:
        """Let both engines go flat out from now on, as what was to be seen has been; or slowly again."""
        for end in (self.source, self.target):
            for rank in end.engine.each:
                rank.timing = ConstantTiming(itl_s=step_s)

    async def switch(self, move: Move) -> list[int]:
        """Let the source go, and return what it has said."""
        committed = await self.target.heard(Committed, move.there)
        said = move.accepted + committed.tokens
        await self.source.frontend.until(lambda: len(self.source.frontend.tokens(move.stream)) >= len(said))
        assert self.source.frontend.tokens(move.stream) == said, "the source said nothing more"
        self.source.frontend.say(Cancel(move.stream))
        return said

    async def rest(self, move: Move) -> list[int]:
        """Switch, and return the whole answer."""
        said = await self.switch(move)
        self.hurry()
        return said + await self.target.frontend.answer(move.there)

    async def undisturbed(self, move: Move) -> list[int]:
        """Return the answer of an engine that nothing happens to. It is always the same."""
        asked = repr((move.tokens, move.sampling))
        if asked not in _undisturbed:
            _undisturbed[asked] = await alone(move.tokens, **move.sampling)
        return _undisturbed[asked]

    async def stays(self, move: Move) -> None:
        """The stream says at the source, to its end, what the undisturbed one says."""
        self.hurry()
        assert await self.source.frontend.answer(move.stream) == await self.undisturbed(move)

    async def is_empty(self) -> None:
        """Wait until neither side holds anything, and no file is left but those kept for the next transfer."""
        async with asyncio.timeout(DEADLINE_S):
            while not (self.source.empty and self.target.empty):  # noqa: ASYNC110 (an engine has no flags)
                await asyncio.sleep(0.002)
        for end in (self.source, self.target):
            receiver = end.server.moves.landing.receiver
            if receiver is not None:
                regions = receiver.regions
                assert regions.folder is not None
                assert {str(path) for path in regions.folder.iterdir()} <= {*regions.kept, regions.socket}


async def alone(tokens: list[int], **sampling: Any) -> list[int]:
    """Return what an engine says that nothing happens to."""
    over, said = asyncio.Event(), []

    def deliver(out: list[Any]) -> None:
        for _, chunk in out:
            said.extend(chunk.tokens)
            if chunk.finish or chunk.error:
                over.set()

    engine = SimulatedEngine(SHAPE)
    await engine.start(deliver)
    engine.submit(1, Generate(1, "alone", list(tokens), len(tokens), Sampling(**sampling)))
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    await engine.stop()
    return said


def simulated(shape: EngineShape = SHAPE, step_s: float = STEP_S) -> SimulatedEngine:
    """Return an engine that takes its time."""
    return SimulatedEngine(shape, ConstantTiming(itl_s=step_s))


@asynccontextmanager
async def end(name: str, engine: Engine, root: Path, **settings: Any) -> AsyncIterator[End]:
    """Run one worker's server, and connect to it. `settings`: how it moves KV caches."""
    moves = KvMoveSettings(root=root, **settings)
    server = WorkerServer(worker=name, instance=f"{name}-1", engine=engine, kv_moves=moves)
    await engine.start(server.deliver)
    await server.moves.start()
    _, port = await server.start("127.0.0.1", 0)
    frontend = await PlainFrontend.connect(port)
    try:
        await frontend.until(lambda: frontend.welcome)
        yield End(server, engine, frontend)
    finally:
        frontend.transport.abort()
        await frontend.lost()
        await server.close()
        await engine.stop()


@asynccontextmanager
async def road(
    root: Path,
    source: Callable[[], Engine] = simulated,
    target: Callable[[], Engine] = simulated,
    **settings: Any,
) -> AsyncIterator[Road]:
    """Run a source and a target. `settings`: how both move KV caches."""
    async with (
        end("source", source(), root, **settings) as one,
        end("target", target(), root, **settings) as other,
    ):
        yield Road(one, other, root)


__all__ = ["COUNT", "SHAPE", "Cancel", "Committed", "Declined", "End", "Grant", "Move", "Road", "Stay"]
