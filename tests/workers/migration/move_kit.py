"""Two workers' servers in this process, a plain frontend at each, and planned moves between them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from engine_contract import prompt
from plain_frontend import DEADLINE_S, PlainFrontend
from waits import until

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
from workers.migration.target import KvMoveSettings
from workers.server import WorkerServer

SHAPE = EngineShape(context_tokens=4096, kv_blocks=1024, tp=2)
STEP_S = 0.012
COUNT = 250  # tokens of an answer: it is still running when it moves
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.1}
F = TypeVar("F", bound=ToFrontend)

_undisturbed: dict[str, list[int]] = {}


@dataclass
class End:
    """One worker, as seen by a frontend."""

    server: WorkerServer
    engine: Any
    frontend: PlainFrontend

    def frame_of(self, kind: type[F], stream: int) -> F | None:
        """Return the frame of this type about a stream."""
        return next((frame for frame in self.frontend.of(kind) if frame.stream == stream), None)  # type: ignore[union-attr]

    async def wait_for(self, kind: type[F], stream: int) -> F:
        """Wait for this frame and return it."""
        await self.frontend.until(lambda: self.frame_of(kind, stream))
        found = self.frame_of(kind, stream)
        assert found is not None
        return found

    @property
    def empty(self) -> bool:
        """Whether the worker holds no resources for any stream."""
        load, moves, receiver = self.engine.load(), self.server.moves, self.server.moves.landing.receiver
        reserved = receiver is not None and receiver.live
        return not (load.running or load.kv_used or len(moves.source) or len(moves.target) or reserved)


@dataclass
class Move:
    """One moving stream, as seen by the frontend."""

    tokens: list[int]  # the prompt
    stream: int  # at the source
    sampling: dict[str, Any]
    there: int = 0  # its stream number at the target
    accepted: list[int] = field(default_factory=list)  # tokens known at the reservation
    grants: list[bytes] = field(default_factory=list)


class Road:
    """A source and a target, and a frontend's messages to both."""

    def __init__(self, source: End, target: End, root: Path) -> None:
        self.source, self.target, self.root = source, target, root

    async def begin(self, length: int = 100, salt: int = 0, most: int = COUNT, first: int = 3) -> Move:
        """Send a request to the source, and wait for its first tokens."""
        tokens, sampling = prompt(length, salt), {"max_tokens": most, "ignore_eos": True, **SAMPLING}
        stream = self.source.frontend.ask(tokens, **sampling)
        await self.source.frontend.until(lambda: len(self.source.frontend.tokens(stream)) >= first)
        return Move(tokens, stream, sampling)

    def ask_for_room(self, move: Move, room: int = 0, **changed: Any) -> int:
        """Send Reserve."""
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
        """Reserve room, and return the answer."""
        reserved = await self.target.wait_for(Reserved, self.ask_for_room(move, **changed))
        move.grants = reserved.grants
        return reserved

    def ship(self, move: Move) -> None:
        """Send Ship."""
        self.source.frontend.say(Ship(move.stream, move.grants))

    async def moved(self, move: Move) -> Committed:
        """Reserve, ship, and wait until the stream decodes at the target."""
        await self.reserve(move)
        self.ship(move)
        return await self.target.wait_for(Committed, move.there)

    def set_speed(self, step_s: float = 0.0) -> None:
        """Let both engines run at full speed from now on; or slow down again."""
        for end in (self.source, self.target):
            for rank in end.engine.each:
                rank.timing = ConstantTiming(itl_s=step_s)

    async def switch(self, move: Move) -> list[int]:
        """Cancel the stream at the source, and return the source's tokens."""
        committed = await self.target.wait_for(Committed, move.there)
        tokens = move.accepted + committed.tokens
        await self.source.frontend.until(lambda: len(self.source.frontend.tokens(move.stream)) >= len(tokens))
        assert self.source.frontend.tokens(move.stream) == tokens, "the source sent no further tokens"
        self.source.frontend.say(Cancel(move.stream))
        return tokens

    async def rest(self, move: Move) -> list[int]:
        """Switch to the target, and return the whole answer."""
        tokens = await self.switch(move)
        self.set_speed()
        return tokens + await self.target.frontend.answer(move.there)

    async def undisturbed(self, move: Move) -> list[int]:
        """Return the answer of an undisturbed engine. It is always the same."""
        asked = repr((move.tokens, move.sampling))
        if asked not in _undisturbed:
            _undisturbed[asked] = await alone(move.tokens, **move.sampling)
        return _undisturbed[asked]

    async def stays(self, move: Move) -> None:
        """Check that the stream's answer at the source is the undisturbed one, to its end."""
        self.set_speed()
        assert await self.source.frontend.answer(move.stream) == await self.undisturbed(move)

    async def is_empty(self) -> None:
        """Wait until neither side holds resources, and no file is left except those kept for the next transfer."""
        await until(lambda: self.source.empty and self.target.empty, DEADLINE_S)
        for end in (self.source, self.target):
            receiver = end.server.moves.landing.receiver
            if receiver is not None:
                regions = receiver.regions
                assert regions.folder is not None
                assert {str(path) for path in regions.folder.iterdir()} <= {
                    *(one.path for one in regions.spares),
                    regions.socket,
                }


async def alone(tokens: list[int], **sampling: Any) -> list[int]:
    """Return the answer of an undisturbed engine."""
    over, answer = asyncio.Event(), []

    def deliver(out: list[Any]) -> None:
        for _, chunk in out:
            answer.extend(chunk.tokens)
            if chunk.finish or chunk.error:
                over.set()

    engine = SimulatedEngine(SHAPE)
    await engine.start(deliver)
    engine.submit(1, Generate(1, "alone", list(tokens), len(tokens), Sampling(**sampling)))
    async with asyncio.timeout(DEADLINE_S):
        await over.wait()
    await engine.stop()
    return answer


def simulated(shape: EngineShape = SHAPE, step_s: float = STEP_S) -> SimulatedEngine:
    """Return an engine with slow steps."""
    return SimulatedEngine(shape, ConstantTiming(itl_s=step_s))


@asynccontextmanager
async def end(name: str, engine: Engine, root: Path, **settings: Any) -> AsyncIterator[End]:
    """Run one worker's server, and connect to it. `settings`: of its KV moves."""
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
    """Run a source and a target. `settings`: of both workers' KV moves."""
    async with (
        end("source", source(), root, **settings) as one,
        end("target", target(), root, **settings) as other,
    ):
        yield Road(one, other, root)


__all__ = ["COUNT", "SHAPE", "Cancel", "Committed", "Declined", "End", "Grant", "Move", "Road", "Stay"]
